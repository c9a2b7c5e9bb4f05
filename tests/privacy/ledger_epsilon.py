"""Epsilon recomputed from ledger.jsonl alone, with dp-accounting and nothing of this project."""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import SelfComposedDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant


def recompute(path):
    """(charged, epsilon): every intent, and every torn line that stands where the next step's intent could."""
    lines = Path(path).read_bytes().split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    sigmas, plan, between_steps = Counter(), json.loads(lines[0])["plan"], False
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError:
            sigmas[plan["noise_multiplier"]] += between_steps
            between_steps = False  # until a new session
            continue
        assert record["previous"] == (hashlib.sha256(lines[number - 1]).hexdigest() if number else "0" * 64)
        between_steps = record["type"] in ("session", "done") or (between_steps and record["type"] == "checkpoint")
        if record["type"] == "intent":
            sigmas[round(sum((r["std"] / r["sensitivity"]) ** -2 for r in record["releases"]) ** -0.5, 9)] += 1
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    for sigma, count in sigmas.items():
        event = TruncatedSubsampledGaussianDpEvent(
            plan["num_examples"], plan["sample_rate"], plan["cap"], sigma / (1 + plan["sensitivity_slack"])
        )
        accountant.compose(SelfComposedDpEvent(event, count), 1) if count else None
    return sum(sigmas.values()), accountant.get_epsilon(plan["target_delta"])


if __name__ == "__main__":
    print(recompute(sys.argv[1]))
