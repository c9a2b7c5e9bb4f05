"""The claim of released weights: a run's own charges and those of the private runs behind them.

A run that starts from the weights of private runs keeps a copy of each of their ledgers in
`behind/`, the newest first, and names the copies in its own first line. All charges compose,
except of runs whose data are declared disjoint, at the smallest delta of all runs.
docs/ledger.md gives the reasons.
"""

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


class ParentLedger(NamedTuple):
    """The ledger of a private run behind weights.

    Attributes:
        run: name of the run.
        copy: bytes of the ledger.
        num_lines: the least number of lines that hold the charges of those weights.
    """

    run: str
    copy: bytes
    num_lines: int


def ledgers_of_run(
    run_dir: Path, run: str | None = None, num_lines: int | None = None
) -> list[ParentLedger]:
    """Returns the ledger of a run with a guarantee and those behind it, the newest first.

    Args:
        run: its name; that of the folder by default.
        num_lines: number of lines that hold the charges; by default all lines.

    Raises:
        PrivacyConfigError: the run claims nothing.
        PrivacyStateRefused: a ledger is broken.
    """
    content = (run_dir / "ledger.jsonl").read_bytes()
    # A write under way, or a crash: the line is charged as its repair would charge it.
    if not content.endswith(b"\n"):
        content += TORN_MARK + b"\n"
    state = read_state(content, str(run_dir / "ledger.jsonl"))
    if not state.plan.formal_guarantee:
        raise PrivacyConfigError(
            f"{run_dir}: has no guarantee, so nothing can be claimed of its weights"
        )
    name = run or run_dir.resolve().name
    if num_lines is None:
        num_lines = content.count(b"\n")
    ledgers = [ParentLedger(name, content, num_lines)]
    for parent_name, copy in read_copies(run_dir, state.opened):
        ledgers.append(ParentLedger(parent_name, copy, copy.count(b"\n")))
    return ledgers


def keep_copies(run_dir: Path, ledgers: Sequence[ParentLedger]) -> list[dict[str, Any]]:
    """Writes the copies, durably, and returns the field `behind` of the `open` record.

    A crash before that record is written changes nothing: the next start writes the copies again.
    """
    if not ledgers:
        return []
    durable.make_directory(run_dir / FOLDER)
    records: list[dict[str, Any]] = []
    for number, ledger in enumerate(ledgers, start=1):
        name = copy_name(number)
        durable.replace_file(run_dir / name, ledger.copy)
        # A copy ends with a whole line, so that nothing follows its last newline.
        *lines, _ = ledger.copy.split(b"\n")
        last_hash = hash_line(lines[-1])
        records.append({"file": name, "run": ledger.run, "lines": len(lines), "hash": last_hash})
    return records


def require_kept(run_dir: Path, opened: Mapping[str, Any], ledgers: Sequence[ParentLedger]) -> None:
    """Refuses a second start at step 0 from weights whose charges the run's ledger does not name.

    Raises:
        PrivacyConfigError: from other weights, or from the same run's after more attempts.
        PrivacyStateRefused: a copy is missing, or is not the one that the ledger names.
    """
    copies = read_copies(run_dir, opened)
    for number, ledger in enumerate(ledgers):
        needed_lines = ledger.copy.split(b"\n")[: ledger.num_lines]
        copied_lines = copies[number][1].split(b"\n") if number < len(copies) else []
        # The last part of a copy follows its last newline; it is not a line.
        if len(copied_lines) > len(needed_lines):
            copied_hash = hash_line(copied_lines[len(needed_lines) - 1])
            if copied_hash == hash_line(needed_lines[-1]):
                continue
        raise PrivacyConfigError(
            f"{run_dir}: its ledger was opened before the run {ledger.run} behind its weights made "
            "its latest charges; start another folder"
        )


def copy_name(number: int) -> str:
    """Returns the name, relative to the run folder, of the ledger `number` starts back, from 1."""
    return f"{FOLDER}/ledger-{number}.jsonl"


def read_copies(run_dir: Path, opened: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Returns (run, bytes) of the copies that a run's `open` record names, the newest first.

    Raises:
        PrivacyStateRefused: a copy is missing, or is not the one that the ledger names.
    """
    copies = []
    for place in opened.get("behind", ()):
        file = str(place["file"])
        if not re.fullmatch(rf"{FOLDER}/ledger-[0-9]{{1,3}}\.jsonl", file):
            raise PrivacyStateRefused(
                f"{run_dir}: the ledger names {file[:80]!r}, which is not a copy of a ledger"
            )
        path = run_dir / file
        with refusing(f"{path}: the ledger behind the initial weights cannot be read"):
            if path.is_symlink() or path.parent.is_symlink():
                raise OSError("it is a symbolic link, and none is followed")
            content = path.read_bytes()
        *lines, tail = content.split(b"\n")
        is_named = lines and len(lines) == place["lines"] and hash_line(lines[-1]) == place["hash"]
        if tail or not is_named:
            raise PrivacyStateRefused(
                f"{path}: is not the ledger that the run's own ledger names; restore it from a copy"
            )
        copies.append((str(place["run"]), content))
    return copies


def parent_states(run_dir: Path, opened: Mapping[str, Any]) -> list[LedgerState]:
    """Returns the states of the verified copies, the newest first.

    Raises:
        PrivacyStateRefused: a copy is missing, broken, of a run without a guarantee, or another
            than the ledgers name.
    """
    states = []
    for number, (_, content) in enumerate(read_copies(run_dir, opened), start=1):
        path = run_dir / copy_name(number)
        state = read_state(content, str(path))
        if not state.plan.formal_guarantee:
            raise PrivacyStateRefused(f"{path}: is of a run without a guarantee")
        states.append(state)
    for number, state in enumerate(states, start=1):
        for place in state.opened.get("behind", ()):
            # Not the last line alone: the copy here is longer where its run charged more after
            # `state` had started from it.
            last_line = slice(place["lines"] - 1, place["lines"])
            parents = states[number:]
            if not any(place["hash"] in parent.hashes[last_line] for parent in parents):
                raise PrivacyStateRefused(
                    f"{run_dir / copy_name(number)}: started from other runs than this ledger names"
                )
    return states


def claim_of(run_dir: Path, state: LedgerState) -> tuple[float, float] | None:
    """Returns (epsilon, delta) of a run's releases, earlier private runs included.

    None without a guarantee.

    Args:
        run_dir: holds the copies.
        state: of the run's own ledger.

    Raises:
        PrivacyStateRefused: a copy is missing, broken, or makes no claim.
    """
    if not state.plan.formal_guarantee:
        return None
    states = [state, *parent_states(run_dir, state.opened)]
    delta = min(run.plan.target_delta for run in states)
    return composed_epsilon(states, delta), delta


def composed_epsilon(
    states: Sequence[LedgerState], delta: float, newest_groups: Sequence[ReleaseGroup] | None = None
) -> float:
    """Returns the epsilon at `delta` that any example bears of a chain of runs, the newest first.

    Args:
        newest_groups: releases of the newest run; by default the charges of its ledger.
    """
    # The sets of runs that one example can be in, as far as declarations say.
    alternatives: list[list[LedgerState]] = []
    for state in reversed(states):
        if alternatives and state.opened.get("disjoint_from_start") is not True:
            alternatives = [[state, *runs] for runs in alternatives]
        else:
            alternatives = [[state], *alternatives]
    epsilons = []
    for runs in alternatives:
        groups: list[ReleaseGroup] = []
        for run in runs:
            if run is states[0] and newest_groups is not None:
                groups += newest_groups
            else:
                groups += run.charged_groups()
        tail_delta = math.fsum(run.plan.noise_tail_delta for run in runs)
        accounted_delta = delta - tail_delta
        if accounted_delta > 0:
            epsilons.append(claimed_epsilon(groups, accounted_delta)[0])
        else:
            epsilons.append(math.inf)
    return max(epsilons)
