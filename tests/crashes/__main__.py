"""`python -m tests.crashes KIND PART...`: explores whole parts of two crashes in one process, a line of JSON for each.

KIND is crash or kill, and PART a number from 0 to 15, for a sixteenth of what `make test-all`
explores. A state that an earlier part of the same call has opened is not opened again.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.crashes.conftest import MEMORY
from tests.crashes.exploration import two_crashes
from tests.crashes.remembered import Remembered

OF = 16


def main(kind: str, *parts: str) -> int:
    """Exit code 1 when there is a problem."""
    remembered, problems = Remembered(), 0
    for part in parts:
        began = time.monotonic(), time.process_time()
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            found = two_crashes(Path(folder), kind, (int(part), OF), remembered)
        line = {
            "kind": kind, "part": int(part), "crash_points": found.points, "raw": found.raw,
            "cut": found.cut, "opened": found.states, "seconds": round(time.monotonic() - began[0], 1),
            "processor_seconds": round(time.process_time() - began[1], 1), "problems": found.problems,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        problems += len(found.problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
