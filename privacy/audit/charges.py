"""Charges seen from outside of the code that makes them: the ledger's raw lines against what a sandbox was seen to do.

Read here without the ledger's own reader, so that a mistake in it shows as a difference.
"""

import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .report import Check, fact
from .sandbox_record import SandboxEvents
from .second_sampler import Attempt


def read_lines(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    """(number of bytes up to its end, record) of every whole line that is a JSON object."""
    found, end = [], 0
    for line in data.split(b"\n")[:-1]:
        end += len(line) + 1
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append((end, record))
    return found


def made_attempts(events: SandboxEvents, session_starts: Sequence[int]) -> list[Attempt]:
    """The attempts that the sandbox made, counted by what it did and not by what its ledger says."""
    nonces = [bytes.fromhex(record["nonce"]) for _, record in read_lines(events.ledger) if record["type"] == "session"]
    before: Counter[int] = Counter()
    made = []
    for index, step in enumerate(events.steps):
        made.append(Attempt(nonces[bisect_right(session_starts, index) - 1], step, before[step], index))
        before[step] += 1
    return made


def charge_checks(events: SandboxEvents) -> list[Check]:
    """Every attempt is charged once, durably before anything of it is released, and its noise has fresh entropy."""
    lines = read_lines(events.ledger)
    ends: defaultdict[int, list[int]] = defaultdict(list)  # of the intents of a step, in order
    for end, record in lines:
        if record["type"] == "intent":
            ends[record["step"]].append(end)
    made, charged = Counter(events.steps), Counter({step: len(of_step) for step, of_step in ends.items()})
    missing, differing = sum((made - charged).values()), sum((charged - made).values())
    counted = (
        f"{missing} of {made.total()} attempts were made without a charge, and {differing} of {charged.total()} charges are of "
        "no attempt that was made"
    )
    late = 0
    for step, released_at in zip(events.steps, events.first_release.tolist(), strict=True):
        if ends[step]:
            durable = events.ledger_durable[events.ledger_durable[:, 1] >= ends[step].pop(0), 0]
            late += not (durable.size and durable.min() < released_at)
        else:
            late += 1  # never charged
    order = (
        f"in {late} of {made.total()} attempts noise was drawn, or a sum left a process, before an fsync of the intent had "
        "returned"
    )
    first = events.ledger_durable[:, 0].min(initial=2**62)
    named = bool(((events.folder_durable > first) & (events.folder_durable < events.first_release.min())).any())
    name = "the ledger's name is durable" if named else "no fsync made the ledger's name durable before the first noise"
    least = int(events.least_entropy.min())
    entropy = f"every draw of noise took at least {least} bytes from the entropy of the operating system, 16 are needed"
    return [
        fact("charged_attempts", not missing and not differing, counted, statistic=missing, threshold=0),
        fact("charge_before_release", late == 0, order, statistic=late, threshold=0),
        fact("ledger_name_durable", named, name),
        fact("fresh_entropy", least >= 16, entropy, statistic=least, threshold=16),
    ]


def stated_noise_check(plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Check:
    """Each release of each intent states the plan's noise: sigma C for the sum, and for a count what is left of sigma.

    With a noised count of standard deviation s and sensitivity 1/2, the sum has sigma' with 1/sigma'^2 = 1/sigma^2 - 1/(2 s)^2
    (Andrew et al. 2021, arXiv 1905.03871, Theorem 1). A private head's statistics have sensitivities of their own; together they
    are worth sigma.

    Args:
        plan: the frozen fields.
        records: of one ledger.
    """
    sigma, adaptive = plan["noise_multiplier"], plan["adaptive_clipping"]
    is_head = any("head" in record for record in records if record["type"] == "open")
    expected = [sigma]
    if adaptive is not None:
        count = 2 * adaptive["unclipped_num_std"]
        expected = [1 / math.sqrt(sigma**-2 - count**-2) if sigma else 0.0, count]
    sensitivities = [plan["max_grad_norm"], 0.5]
    wrong, intents = 0, [record for record in records if record["type"] == "intent"]
    for intent in intents:
        releases = intent["releases"]
        ratios = [release["std"] / release["sensitivity"] for release in releases]
        if is_head:
            ratios = [1 / math.sqrt(sum(ratio**-2 for ratio in ratios))] if all(ratios) else [0.0]
        good = len(ratios) == len(expected)
        good = good and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(ratios, expected, strict=True))
        for number, release in enumerate([] if is_head else releases):
            moves = number == 0 and adaptive is not None  # C moves; the audit of the ledger follows it
            good = good and (moves or math.isclose(release["sensitivity"], sensitivities[number], rel_tol=1e-9))
        wrong += not good
    sentence = f"{wrong} of {len(intents)} intents state a standard deviation or sensitivity that is not the plan's"
    return fact("stated_noise", wrong == 0, sentence, statistic=wrong, threshold=0)
