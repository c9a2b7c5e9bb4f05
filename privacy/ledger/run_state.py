"""Ledger and sampling key of a run folder, opened together: each is refused without the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.accounting.accountants import accountant_version
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.membership import Membership
from privacy.ledger.shared import SharedLedger
from privacy.plan import PrivacyPlan
from privacy.sampling.keys import SamplingKey


@dataclass(frozen=True)
class SharedTerms:
    """A run's part in a shared ledger (privacy/ledger/shared.py)."""

    path: Path | str
    name: str
    fixed_in_advance: bool = False


def open_run_state(
    ledger_path: Path | str,
    key_path: Path | str,
    plan: PrivacyPlan,
    *,
    data_manifest: bytes,
    open_fields: Mapping[str, Any] | None = None,
    mirror: Path | str | None = None,
    has_checkpoint: bool = False,
    shared: SharedTerms | None = None,
) -> tuple[Ledger, SamplingKey]:
    """Opens the privacy state of a run folder, or creates it for a new one. The caller holds the run's lock.

    Args:
        plan: must equal the frozen one of an existing ledger.
        data_manifest: what identifies the data exactly (shard sizes and hashes); enters the ledger as HMAC only.
        open_fields: further fields of a new `open` record (code commit, ...); no private data.
        shared: the data owner's ledger, where the run's whole budget is reserved before this returns; a run without a
            guarantee is counted there, if the owner permits such runs.
        has_checkpoint: whether the folder holds a checkpoint, which is refused without its ledger.

    Raises:
        PrivacyStateRefused: ledger, key, mirror and checkpoints do not fit together (exit 4).
        PrivacyConfigError: the plan, the data or the shared ledger differ from the frozen ones (exit 2).
        BudgetSpent: the shared ledger has no room for the run (exit 3).

    A crash at any point of the creation leaves a folder that the next call accepts: the key is staged first, the
    ledger commits to it, then the key gets its name. A run without a ledger has drawn no coin.
    """
    ledger_path, key_path = Path(ledger_path), Path(key_path)
    owner = None if shared is None else SharedLedger(shared.path)
    identity = None if owner is None else owner.read().identity
    if not ledger_path.exists():
        if has_checkpoint:
            raise PrivacyStateRefused(f"{ledger_path}: a checkpoint without its ledger; what it spent is unknown")
        key = SamplingKey.stage(key_path)
        fields = {
            "plan": plan.frozen_fields(),
            "key_commitment": key.commitment(),
            "data_hmac": key.hmac(data_manifest),
            "accountant": accountant_version(),
            "shared_ledger": identity,
            **(open_fields or {}),
        }
        ledger = Ledger.create(ledger_path, fields, mirror)
        SamplingKey.publish(key_path)
    else:
        ledger = Ledger.open(ledger_path, mirror)
    try:
        ledger.require_plan(plan)
        key = SamplingKey.load(key_path, ledger.key_commitment)
        if ledger.state.opened.get("data_hmac") != key.hmac(data_manifest):
            raise PrivacyConfigError(f"{ledger_path}: the data are not those that the run was opened with")
        if ledger.state.opened.get("shared_ledger") != identity:
            raise PrivacyConfigError(f"{ledger_path}: not the shared ledger (privacy.shared_ledger) it was opened with")
        if owner is not None and shared is not None:
            fixed = shared.fixed_in_advance
            owner.join(key.commitment(), shared.name, plan, ledger.state, fixed_in_advance=fixed)
            ledger.witness = Membership(owner, key.commitment(), ledger)
        return ledger, key
    except BaseException:
        ledger.release()
        raise
