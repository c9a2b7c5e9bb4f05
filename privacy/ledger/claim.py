"""The claim of released weights: a run's own charges, composed with those of the private runs whose weights it started from.

A run that starts from such weights keeps a copy of each ledger behind them in `behind/`, the newest first, and names the copies
in its own first line (`behind`: file, run, lines, hash of the last line). A loop of one's own may name several runs, and those
behind each of them. An example may have been in all of these runs, so by
default all charges compose: the composition of their privacy loss distributions is that of the union of their releases, for
one and the same neighbouring relation (one example, zeroed out in all of them). Where the recipe declares that a run's data hold
no example of those behind its start (`disjoint_from_start`), no example bears both, and the larger of the two counts.

Epsilon is stated at the smallest delta of all runs. That is a valid and the strictest choice: no delta has to be added, since
nothing but releases is composed, and it protects the examples of the largest data set as its own run promised.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..accounting.accountants import ReleaseGroup, claimed_epsilon
from ..errors import PrivacyConfigError, PrivacyStateRefused, refusing
from ..files import durable
from .chain import TORN_MARK, hash_line
from .records import LedgerState, read_state

FOLDER = "behind"


class LedgerBehind(NamedTuple):
    """A private run behind weights.

    Attributes:
        needed: how many lines the charges of those weights take at least.
    """

    run: str
    copy: bytes
    needed: int


def ledgers_of_run(
    run_dir: Path, run: str | None = None, needed: int | None = None
) -> list[LedgerBehind]:
    """The ledger of a run with a guarantee and those behind it, the newest first.

    Args:
        run: its name; that of the folder by default.
        needed: by default all lines.

    Raises:
        PrivacyConfigError: the run claims nothing.
        PrivacyStateRefused: a ledger is broken.
    """
    data = (run_dir / "ledger.jsonl").read_bytes()
    if not data.endswith(
        b"\n"
    ):  # a write under way, or a crash: charged as its repair would charge it
        data += TORN_MARK + b"\n"
    state = read_state(data, str(run_dir / "ledger.jsonl"))
    if not state.plan.formal_guarantee:
        raise PrivacyConfigError(
            f"{run_dir}: has no guarantee, so nothing can be claimed of its weights"
        )
    found = [(run or run_dir.resolve().name, data), *read_copies(run_dir, state.opened)]
    own, *before = (LedgerBehind(name, copy, copy.count(b"\n")) for name, copy in found)
    return [own if needed is None else own._replace(needed=needed), *before]


def keep_copies(run_dir: Path, behind: Sequence[LedgerBehind]) -> list[dict[str, Any]]:
    """Writes the copies, durably, and returns what the `open` record says of them; a crash before that record changes nothing."""
    if not behind:
        return []
    durable.make_directory(run_dir / FOLDER)
    records = []
    for number, ledger in enumerate(behind, start=1):
        durable.replace_file(run_dir / copy_name(number), ledger.copy)
        *lines, _ = ledger.copy.split(b"\n")  # which ends with a whole line
        records.append(
            {
                "file": copy_name(number),
                "run": ledger.run,
                "lines": len(lines),
                "hash": hash_line(lines[-1]),
            }
        )
    return records


def require_kept(run_dir: Path, opened: Mapping[str, Any], behind: Sequence[LedgerBehind]) -> None:
    """A run that begins again at step 0 starts from weights whose charges its ledger names already.

    Raises:
        PrivacyConfigError: from other weights, or from the same run's after more attempts.
        PrivacyStateRefused: a copy is missing, or is not the one that the ledger names.
    """
    kept = read_copies(run_dir, opened)
    for number, ledger in enumerate(behind):
        lines = ledger.copy.split(b"\n")[: ledger.needed]
        known = kept[number][1].split(b"\n") if number < len(kept) else []
        if len(known) <= len(lines) or hash_line(known[len(lines) - 1]) != hash_line(lines[-1]):
            raise PrivacyConfigError(
                f"{run_dir}: its ledger was opened before the run {ledger.run} behind its weights had spent what it has spent "
                "now; start another folder"
            )


def copy_name(number: int) -> str:
    """Name of the copy of the ledger that is `number` starts back, from 1, relative to the run folder."""
    return f"{FOLDER}/ledger-{number}.jsonl"


def read_copies(run_dir: Path, opened: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """(run, bytes) of the copies that a run's `open` record names, the newest first.

    Raises:
        PrivacyStateRefused: a copy is missing, or is not the one that the ledger names.
    """
    copies = []
    for place in opened.get("behind", ()):
        if not re.fullmatch(rf"{FOLDER}/ledger-[0-9]{{1,3}}\.jsonl", str(place["file"])):
            raise PrivacyStateRefused(
                f"{run_dir}: the ledger names {str(place['file'])[:80]!r}, which is no copy of a ledger"
            )
        path = run_dir / place["file"]
        with refusing(f"{path}: the ledger behind the initial weights cannot be read"):
            if path.is_symlink() or path.parent.is_symlink():
                raise OSError("it is a symbolic link, and none is followed")
            data = path.read_bytes()
        lines = data.split(b"\n")
        if lines[-1] or len(lines) - 1 != place["lines"] or hash_line(lines[-2]) != place["hash"]:
            raise PrivacyStateRefused(
                f"{path}: is not the ledger that the run's own ledger names; restore it from a copy"
            )
        copies.append((str(place["run"]), data))
    return copies


def states_behind(run_dir: Path, opened: Mapping[str, Any]) -> list[LedgerState]:
    """The verified copies, the newest first.

    Raises:
        PrivacyStateRefused: a copy is missing, broken, of a run without a guarantee, or another than the ledgers name.
    """
    states = []
    for number, (_, data) in enumerate(read_copies(run_dir, opened), start=1):
        state = read_state(data, str(run_dir / copy_name(number)))
        if not state.plan.formal_guarantee:
            raise PrivacyStateRefused(
                f"{run_dir / copy_name(number)}: is of a run without a guarantee"
            )
        states.append(state)
    for number, state in enumerate(states, start=1):
        for place in state.opened.get("behind", ()):  # another run may have charged more since
            if not any(
                place["hash"] in other.hashes[place["lines"] - 1 : place["lines"]]
                for other in states[number:]
            ):
                raise PrivacyStateRefused(
                    f"{run_dir / copy_name(number)}: started from other runs than this ledger names"
                )
    return states


def claim_of(run_dir: Path, state: LedgerState) -> tuple[float, float] | None:
    """(epsilon, delta) that what a run released carries, earlier private runs included; None without a guarantee.

    Args:
        run_dir: holds the copies.
        state: of the run's own ledger.

    Raises:
        PrivacyStateRefused: a copy is missing, broken, or makes no claim.
    """
    if not state.plan.formal_guarantee:
        return None
    states = [state, *states_behind(run_dir, state.opened)]
    delta = min(before.plan.target_delta for before in states)
    return composed_epsilon(states, delta), delta


def composed_epsilon(
    states: Sequence[LedgerState], delta: float, own: Sequence[ReleaseGroup] | None = None
) -> float:
    """The epsilon at `delta` that any example bears of a chain of runs, the newest first.

    Args:
        own: releases of the newest run; by default what its ledger charges.
    """
    alternatives: list[
        list[LedgerState]
    ] = []  # the sets of runs that one example can be in, as far as declarations say
    for state in reversed(states):
        may_overlap = alternatives and state.opened.get("disjoint_from_start") is not True
        alternatives = (
            [[state, *runs] for runs in alternatives] if may_overlap else [[state], *alternatives]
        )
    values = []
    for runs in alternatives:
        spent = (
            state.charged_groups() if own is None or state is not states[0] else own
            for state in runs
        )
        groups = list(itertools.chain.from_iterable(spent))
        left = delta - math.fsum(state.plan.noise_tail_delta for state in runs)
        values.append(claimed_epsilon(groups, left)[0] if left > 0 else math.inf)
    return max(values)
