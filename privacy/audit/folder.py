"""Audits of a run folder's records.

What the ledger alone decides is judged by privacy/verify.py, as anybody can judge it. Here stands what only the holder of
`private/` can check: the sampling key, the mirror, and the private record of attempts, which is the ledger's second witness.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import verify
from ..card.folder import read_recipe
from ..card.report import read_snapshot
from ..errors import ConfigError, PrivacyStateRefused
from ..ledger.members import LedgerMark, attempts_by_name, not_in_ledger, not_recorded, read_lines
from ..ledger.records import LedgerState
from ..sampling.keys import SamplingKey
from ..step.folder import RunFolder
from .report import AuditReport, Check, fact, undecided
from .schedule import MAX_COINS, audit_schedule
from .second_sampler import read_attempts


def ledger_audit(run_dir: Path, data_manifest: bytes | None = None) -> AuditReport:
    """`audit.py ledger`: verify.py's judgement, and the private part of the folder where it is there.

    Args:
        data_manifest: what identifies the data, of which the ledger holds an HMAC; None where nothing is there to compare.

    Raises:
        ConfigError: no ledger there, or a folder that cannot be judged.
    """
    ledger, before = _ledger(run_dir), recorded_attempts(run_dir)
    # The record of attempts is read before the ledger and again after it, since a run in progress writes both.
    try:
        _, found = verify.verify(run_dir, None)
    except verify.BadInput as error:
        raise ConfigError(str(error)) from error
    checks = [Check(one["name"], one["outcome"], one["sentence"]) for one in found["checks"]]
    # The trainer's own reader judges too: a ledger that one of the two readers refuses is refused.
    try:
        snapshot = read_snapshot(ledger)
    except PrivacyStateRefused as error:
        return AuditReport.of("ledger", [*checks, fact("legal_order", False, str(error))])
    state = snapshot.state
    checks += [
        fact("legal_order", True, f"{state.num_lines} lines are in legal order, as the trainer reads them"),
        _key_check(run_dir, state, data_manifest),
        attempts_check(run_dir, state, before),
        _mirror_check(run_dir, ledger, state),
    ]
    claim = {name: found.get(name) for name in ("formal_guarantee", "epsilon", "delta")}
    return AuditReport.of("ledger", checks, attempts_charged=state.num_charged, **claim)


def schedule_audit(run_dir: Path, max_coins: int = MAX_COINS) -> AuditReport:
    """`audit.py schedule`: reads private/sampling.key, so it runs inside the trust boundary.

    Raises:
        ConfigError: no ledger there.
        PrivacyStateRefused: a broken ledger, or no key that fits it.
    """
    before = recorded_attempts(run_dir)
    # The key must be the one to which the ledger was committed before the first coin: another one would make other coins.
    folder, snapshot = RunFolder(run_dir), read_snapshot(_ledger(run_dir))
    key = SamplingKey.load(folder.key, snapshot.state.opened["key_commitment"])
    after, recorded = recorded_attempts(run_dir), None
    if after is not None:  # without what a run in progress added after the ledger was read
        recorded = attempts_by_name(line for line in after if line.seq < snapshot.state.num_lines)
    report = audit_schedule(
        snapshot.state.plan, read_attempts(snapshot.records), key, folder.key.read_bytes(), recorded, max_coins
    )
    return replace(report, checks=(*report.checks, attempts_check(run_dir, snapshot.state, before)))


def recorded_attempts(run_dir: Path) -> list[LedgerMark] | None:
    """The private record of attempts as it is now; None where there is none."""
    path = RunFolder(run_dir).members
    return list(read_lines(path)) if path.exists() else None


def attempts_check(run_dir: Path, state: LedgerState, before: Sequence[LedgerMark] | None) -> Check:
    """Recorded attempts and charges are the same, but for the last of a session, which may have ended before its charge.

    A run in progress writes while it is audited: what was recorded before the ledger was read must be in it, and what it charges
    must be recorded now.
    """
    folder, after = RunFolder(run_dir), recorded_attempts(run_dir)
    if before is not None and after is not None:
        wrong = not_in_ledger(before, state) or not_recorded(state, after)
        return fact(
            "attempts", wrong is None, wrong or f"{len(state.intents)} charges are those of the attempts in private/"
        )
    if folder.private.is_dir() and "head" not in state.opened:  # a private head samples nobody
        gone = f"{folder.members} is gone: it records every attempt, and is made before the ledger"
        return fact("attempts", False, gone)
    return fact("attempts", True, "there is no private/ here, so charges are not compared with the record of attempts")


def _key_check(run_dir: Path, state: LedgerState, data_manifest: bytes | None) -> Check:
    """The sampling key is the one to which the ledger was committed before the first coin, and the data are those it names."""
    path = RunFolder(run_dir).key
    if not path.exists():
        return fact("sampling_key", True, "there is no sampling key here to compare with the ledger's commitment")
    try:
        key = SamplingKey.load(path, state.opened["key_commitment"])
    except PrivacyStateRefused as error:
        return fact("sampling_key", False, str(error))
    if data_manifest is not None and key.hmac(data_manifest) != state.opened.get("data_hmac"):
        return fact("sampling_key", False, "the index in private/ is of other data than the ledger was opened with")
    return fact("sampling_key", True, "private/sampling.key is the key that the ledger is committed to")


def _mirror_check(run_dir: Path, ledger: Path, state: LedgerState) -> Check:
    """Ledger first, then mirror: between the two writes the mirror is a prefix, and never more."""
    if not state.mirrored:
        sentence = "the ledger has no mirror: a rollback of the whole run folder cannot be detected"
        return fact("mirror", True, sentence)
    # The recipe in the folder says where it is; an auditor on another machine may not reach it.
    name, mirror = read_recipe(run_dir).get("privacy", {}).get("ledger_mirror"), None
    if isinstance(name, str) and name:
        with contextlib.suppress(OSError):
            mirror = Path(name).read_bytes()
    if mirror is None:
        return undecided("mirror", "the ledger has a mirror, which could not be read")
    is_prefix = ledger.read_bytes().startswith(mirror)
    relation = "a prefix of the ledger" if is_prefix else "longer or different: a rollback"
    return fact("mirror", is_prefix, f"the mirror is {relation}")


def _ledger(run_dir: Path) -> Path:
    path = RunFolder(run_dir).ledger
    if not path.is_file():
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: nothing was trained here")
    return path
