"""Audits of a run folder's records: reads the files, and privacy/audit judges them."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..card.folder import read_recipe
from ..card.report import read_snapshot
from ..checkpoints.read import MANIFEST
from ..configured_plan import contradiction
from ..errors import ConfigError, PrivacyStateRefused
from ..files.public import read_metrics
from ..ledger.records import LedgerState, read_state
from ..sampling.keys import SamplingKey
from ..step.folder import RunFolder
from .charges import read_lines as read_ledger_lines
from .charges import stated_noise_check
from .ledger import (
    BoundClaim,
    CheckpointClaim,
    EpsilonClaim,
    FolderClaims,
    RecordedAttempts,
    attempts_check,
    audit_ledger,
)
from .members import LedgerMark, attempts_by_name, read_lines
from .report import AuditReport
from .schedule import MAX_COINS, audit_schedule
from .second_sampler import read_attempts


def ledger_audit(run_dir: Path) -> AuditReport:
    """`audit.py ledger`: needs no secret.

    Raises:
        ConfigError: no ledger there.
    """
    before = recorded_attempts(run_dir)
    data = _ledger(run_dir).read_bytes()
    claims = folder_claims(run_dir)
    try:
        state, _ = read_state(data, "ledger.jsonl")
    except PrivacyStateRefused:  # the audit names the line
        return audit_ledger(data, claims)
    attempts = compared_attempts(run_dir, state, before)
    report = audit_ledger(
        data, replace(claims, attempts=attempts, configured=contradiction(read_recipe(run_dir), state.plan))
    )
    stated = stated_noise_check(state.opened["plan"], [record for _, record in read_ledger_lines(data)])
    return replace(report, checks=(*report.checks, stated))


def schedule_audit(run_dir: Path, max_coins: int = MAX_COINS) -> AuditReport:
    """`audit.py schedule`: reads private/sampling.key, so it runs inside the trust boundary.

    Raises:
        ConfigError: no ledger there.
        PrivacyStateRefused: a broken ledger, or no key that fits it.
    """
    before = recorded_attempts(run_dir)
    folder, snapshot = RunFolder(run_dir), read_snapshot(_ledger(run_dir))
    key = SamplingKey.load(folder.key, snapshot.state.opened["key_commitment"])
    attempts = compared_attempts(run_dir, snapshot.state, before)
    recorded = None
    if isinstance(attempts, RecordedAttempts):  # without what a run in progress added after the ledger was read
        recorded = attempts_by_name(line for line in attempts.after if line.seq < snapshot.state.num_lines)
    report = audit_schedule(
        snapshot.state.plan, read_attempts(snapshot.records), key, folder.key.read_bytes(), recorded, max_coins
    )
    return replace(report, checks=(*report.checks, attempts_check(snapshot.state, attempts)))


def recorded_attempts(run_dir: Path) -> list[LedgerMark] | None:
    """The private record of attempts as it is now; None where there is none."""
    path = RunFolder(run_dir).members
    return list(read_lines(path)) if path.exists() else None


def compared_attempts(
    run_dir: Path, state: LedgerState, before: Sequence[LedgerMark] | None
) -> RecordedAttempts | str | None:
    """The record as it was `before` the ledger was read and as it is now; or a sentence that says what is wrong with it."""
    after = recorded_attempts(run_dir)
    if before is not None and after is not None:
        return RecordedAttempts(before, after)
    folder = RunFolder(run_dir)
    if folder.private.is_dir() and "head" not in state.opened:  # a private head samples nobody
        return f"{folder.members} is gone: it records every attempt, and is made before the ledger"
    return None


def _ledger(run_dir: Path) -> Path:
    path = RunFolder(run_dir).ledger
    if not path.is_file():
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: nothing was trained here")
    return path


def folder_claims(run_dir: Path) -> FolderClaims:
    """What metrics, checkpoints, privacy card, a private head and mirror say."""
    metrics, checkpoints, bounds = read_metrics(run_dir), [], []
    stated = [line for line in metrics if line.get("privacy/epsilon") is not None]
    # Two lines are compared, the middle and the last: seconds of PLD each.
    compared = sorted({len(stated) // 2 - 1, len(stated) - 1} - {-1})
    epsilons = [
        EpsilonClaim(
            f"metrics.jsonl (step {line['step']})", line.get("privacy/charged_attempts", 0), line["privacy/epsilon"]
        )
        for line in (stated[index] for index in compared)
    ]
    card = _json(run_dir / "report" / "privacy_card.json")
    if isinstance(card.get("attempts_charged"), int) and card.get("epsilon") is not None:
        epsilons.append(EpsilonClaim("report/privacy_card.json", card["attempts_charged"], float(card["epsilon"])))
    head = _json(run_dir / "head.json").get("epsilon")  # a private head (evaluation/private_head/) is one release
    if head is not None:
        epsilons.append(EpsilonClaim("head.json", 1, float(head)))
    for line in metrics:
        bound, fraction = line.get("privacy/clipping_bound"), line.get("privacy/noised_unclipped_fraction")
        if bound is not None and fraction is not None:
            bounds.append(BoundClaim("metrics.jsonl", line["step"], bound, fraction))
    for path in sorted(RunFolder(run_dir).checkpoints.glob(f"step-*/{MANIFEST}")):
        manifest = _json(path)
        position = manifest.get("ledger") or {}
        checkpoints.append(
            CheckpointClaim(
                name=path.parent.name,
                step=manifest.get("step", 0),
                seq=position.get("seq"),
                line_hash=position.get("hash"),
                digest=hashlib.sha256(path.read_bytes()).hexdigest(),
                charged=manifest.get("charged_attempts"),
                formal_guarantee=manifest.get("formal_guarantee"),
            )
        )
    mirror: bytes | None = None
    name = read_recipe(run_dir).get("privacy", {}).get("ledger_mirror")
    if isinstance(name, str) and name:
        with contextlib.suppress(OSError):
            mirror = Path(name).read_bytes()
    furthest = {"metrics.jsonl": max((line["step"] for line in metrics), default=0)}
    return FolderClaims(epsilons, checkpoints, furthest, mirror, bounds)


def _json(path: Path) -> dict[str, Any]:
    """Empty for a file that is missing or damaged: then it claims nothing."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
