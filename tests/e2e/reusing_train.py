"""launch_scripts/train.py with coins that forget session and attempt; with $DIE_AT, dies between the intent of that step and
its `done`, so that the next start retries the step with the members of the first attempt."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch_scripts import train  # noqa: E402
from privacy.run.ledger import RunLedger  # noqa: E402
from privacy.step.batches import LogicalBatches  # noqa: E402

plan, done = LogicalBatches.plan, RunLedger.done


def reused(self: Any, step: int) -> Any:
    return plan(dataclasses.replace(self, nonce=bytes(16), attempts={}), step)


def dying(self: Any, step: int) -> None:
    if os.environ.get("DIE_AT") == str(step):
        os._exit(9)
    done(self, step)


if __name__ == "__main__":
    LogicalBatches.plan = reused  # type: ignore[method-assign]
    RunLedger.done = dying  # type: ignore[method-assign]
    train.main(sys.argv[1:])
