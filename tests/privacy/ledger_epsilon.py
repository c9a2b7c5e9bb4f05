"""Epsilon recomputed from ledger.jsonl alone, with dp-accounting and nothing of this project."""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import SelfComposedDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant


def recompute(*paths, delta=None):
    """(charged, epsilon) of a ledger, or of several that compose, at the first one's delta by default.

    Charged are every intent, and every torn line that stands where the next step's intent could.
    """
    accountant, charged = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL), 0
    for lines in (Path(path).read_bytes().split(b"\n") for path in paths):
        sigmas, plan, between_steps = Counter(), json.loads(lines[0])["plan"], False
        for number, line in enumerate(lines if lines[-1] else lines[:-1]):
            try:
                record = json.loads(line)
            except ValueError:
                sigmas[plan["noise_multiplier"]] += between_steps
                between_steps = False  # until a new session
                continue
            assert record["previous"] == (
                hashlib.sha256(lines[number - 1]).hexdigest() if number else "0" * 64
            )
            between_steps = record["type"] in ("session", "done") or (
                between_steps and record["type"] == "checkpoint"
            )
            if record["type"] == "intent":
                sigmas[
                    round(
                        sum((r["std"] / r["sensitivity"]) ** -2 for r in record["releases"])
                        ** -0.5,
                        9,
                    )
                ] += 1
        for sigma, count in sigmas.items():
            event = TruncatedSubsampledGaussianDpEvent(
                plan["num_examples"],
                plan["sample_rate"],
                plan["cap"],
                sigma / (1 + plan["sensitivity_slack"]),
            )
            accountant.compose(SelfComposedDpEvent(event, count), 1) if count else None
        delta, charged = delta or plan["target_delta"], charged + sum(sigmas.values())
    return charged, accountant.get_epsilon(delta)


if __name__ == "__main__":
    print(recompute(sys.argv[1]))
