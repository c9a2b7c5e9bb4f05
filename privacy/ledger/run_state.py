"""Ledger and sampling key of a run folder, opened together: each is refused without the other."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..accounting.accountants import accountant_version
from ..errors import PrivacyConfigError, PrivacyStateRefused, refusing
from ..files import durable
from ..plan.numbers import PrivacyPlan, require_equal, with_constant_bound
from ..sampling.keys import SamplingKey
from .attempts import ledger_gap, read_lines, record_gap
from .ledger import PROGRAM_START, Ledger
from .records import read_ledger
from .shared import Membership, SharedLedger


@dataclass(frozen=True)
class SharedTerms:
    """A run's part in a shared ledger (privacy/ledger/shared.py).

    Attributes:
        name: of the run, for the list of siblings.
        fixed_in_advance: whether the owner declares that the run's parameters were fixed before any
            output of the other runs was seen.
    """

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
    members: Path | None = None,
    shared: SharedTerms | None = None,
    mend_at_once: bool = True,
) -> tuple[Ledger, SamplingKey]:
    """Opens the privacy state of a run folder, or creates it for a new run.

    The caller holds the run's lock. A new run that is refused, also by the shared ledger, leaves no
    ledger. A crash at any point of the creation leaves a folder that the next call accepts
    (docs/ledger.md).

    Args:
        plan: must equal the frozen one of an existing ledger.
        data_manifest: identifies the data exactly (shard sizes and hashes); enters the ledger as
            HMAC only.
        open_fields: further fields of a new `open` record (code commit, ...); no private data.
        shared: the data owner's ledger, where the run's whole budget is reserved before this
            returns; a run without a guarantee is counted there, if the owner permits such runs.
        has_checkpoint: whether the folder holds a checkpoint, which is refused without its ledger.
        members: the private record of attempts (privacy/ledger/attempts.py), made here for a new
            ledger and compared with an existing one; None for a program that keeps none.
        mend_at_once: whether an existing ledger is mended at once; otherwise the caller calls
            `Ledger.mend` after its own checks.

    Raises:
        PrivacyStateRefused: ledger, key, mirror, checkpoints and record of attempts do not fit
            together (exit 4).
        PrivacyConfigError: the plan, the data or the shared ledger differ from the frozen ones
            (exit 2).
        BudgetSpent: the shared ledger has no room for the run (exit 3).
    """
    ledger_path = Path(ledger_path)
    key_path = Path(key_path)
    owner = None if shared is None else SharedLedger(shared.path)
    identity = None if owner is None else owner.read().identity
    is_new = not ledger_path.exists()
    if is_new:
        if has_checkpoint:
            raise PrivacyStateRefused(
                f"{ledger_path}: a checkpoint without its ledger; what it spent is unknown"
            )
        state = None
        key = SamplingKey.stage(key_path)
        if members is not None:
            # An empty record, durable before the ledger, so that no honest crash leaves a ledger
            # without it.
            with refusing(f"{members}: cannot create the record of attempts"):
                if members.exists() and members.stat().st_size:
                    raise PrivacyStateRefused(
                        f"{members}: attempts were recorded, and the ledger that charged them is "
                        "gone"
                    )
                durable.unlink(members)
                durable.write_new(members, b"", 0o600)
    else:
        # All comparisons come before the first write: a refused start leaves all files unchanged.
        state = read_ledger(ledger_path)
        require_equal(
            with_constant_bound(state.opened["plan"]),
            plan.frozen_fields(),
            f"{ledger_path}: privacy fields are frozen, so give the old value or another run "
            "folder",
        )
        key = SamplingKey.load(key_path, state.opened["key_commitment"])
        if state.opened.get("data_hmac") != key.hmac(data_manifest):
            raise PrivacyConfigError(
                f"{ledger_path}: the data are not those that the run was opened with: give those, "
                "or another run folder"
            )
        if state.opened.get("shared_ledger") != identity:
            raise PrivacyConfigError(
                f"{ledger_path}: not the shared ledger (privacy.shared_ledger) it was opened with"
            )
        if members is not None:
            contradiction = ledger_gap(read_lines(members), state)
            if contradiction is None:
                contradiction = record_gap(state, read_lines(members))
            if contradiction is not None:
                raise PrivacyStateRefused(
                    f"{ledger_path} and {members} contradict each other: {contradiction}; restore "
                    "both from one backup"
                )
    run = key.commitment()
    with contextlib.ExitStack() as cleanup:
        with contextlib.ExitStack() as reservation:
            if owner is not None and shared is not None:
                opening_time = PROGRAM_START if state is None else state.opened["time_utc"]
                reserving = owner.reserving(
                    run,
                    shared.name,
                    plan,
                    state,
                    fixed_in_advance=shared.fixed_in_advance,
                    time_utc=opening_time,
                )
                reservation.enter_context(reserving)
            if is_new:
                fields = {
                    "plan": plan.frozen_fields(),
                    "key_commitment": run,
                    "data_hmac": key.hmac(data_manifest),
                    "accountant": accountant_version(),
                    "shared_ledger": identity,
                    **(open_fields or {}),
                }
                ledger = Ledger.create(ledger_path, fields, mirror)
            else:
                ledger = Ledger.open(ledger_path, mirror, mend_at_once=mend_at_once)
            # Should the reservation or a later write fail, the files are closed.
            cleanup.callback(ledger.release)
        SamplingKey.publish(key_path)
        if owner is not None:
            ledger.witness = Membership(owner, run, ledger)
            if mend_at_once:
                ledger.witness.mend()
        cleanup.pop_all()
    return ledger, key
