"""Audits of a run folder's records.

What the ledger alone decides is judged by privacy/verify.py, as anybody can judge it. Here stands what only the holder of
`private/` can check: the sampling key, the mirror, and the private record of attempts, which is the ledger's second witness.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from .. import verify
from ..card.folder import read_recipe
from ..card.report import read_snapshot
from ..errors import ConfigError, PrivacyStateRefused
from ..files.public import require_ledger
from ..ledger.members import LedgerMark, MembersRecord, not_in_ledger, not_recorded, read_lines
from ..ledger.records import LedgerState
from ..plan.numbers import PrivacyPlan
from ..sampling.keys import SamplingKey
from ..step.folder import RunFolder
from .report import AuditReport, Check, fact, random_check, undecided
from .second_sampler import Attempt, SecondSampler, read_attempts

MAX_COINS = 10**9
"""Coins that one audit of a schedule tosses again; a longer run is audited on a part of its attempts."""


def ledger_audit(run_dir: Path, data_manifest: bytes | None = None) -> AuditReport:
    """`audit.py ledger`: verify.py's judgement, and the private part of the folder where it is there.

    Args:
        data_manifest: what identifies the data, of which the ledger holds an HMAC; None where nothing is there to compare.

    Raises:
        ConfigError: no ledger there, or a folder that cannot be judged.
    """
    ledger, before = require_ledger(run_dir), recorded_attempts(run_dir)
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
        return AuditReport("ledger", [*checks, fact("legal_order", False, str(error))])
    state = snapshot.state
    checks += [
        fact(
            "legal_order",
            True,
            f"{state.num_lines} lines are in legal order, as the trainer reads them",
        ),
        _key_check(run_dir, state, data_manifest),
        attempts_check(run_dir, state, before),
        _mirror_check(run_dir, ledger, state),
    ]
    claim = {name: found.get(name) for name in ("formal_guarantee", "epsilon", "delta")}
    return AuditReport("ledger", checks, {"attempts_charged": state.num_charged, **claim})


def schedule_audit(run_dir: Path, max_coins: int = MAX_COINS) -> AuditReport:
    """`audit.py schedule`: reads private/sampling.key, so it runs inside the trust boundary.

    Raises:
        ConfigError: no ledger there.
        PrivacyStateRefused: a broken ledger, or no key that fits it.
    """
    before = recorded_attempts(run_dir)
    # The key must be the one to which the ledger was committed before the first coin: another one would make other coins.
    folder, snapshot = RunFolder(run_dir), read_snapshot(require_ledger(run_dir))
    SamplingKey.load(folder.key, snapshot.state.opened["key_commitment"])
    attempts, plan = read_attempts(snapshot.records), snapshot.state.plan
    recorded = {
        (line.nonce, line.step, line.attempt): line
        for line in recorded_attempts(run_dir) or ()
        if isinstance(line, MembersRecord)
        and line.seq < snapshot.state.num_lines  # without what a run in progress added since
    }
    checks = members_checks(plan, attempts, folder.key.read_bytes(), recorded, max_coins)
    return AuditReport("schedule", [*checks, attempts_check(run_dir, snapshot.state, before)])


def members_checks(
    plan: PrivacyPlan,
    attempts: Sequence[Attempt],
    secret: bytes,
    recorded: Mapping[tuple[str, int, int], MembersRecord],
    max_coins: int = MAX_COINS,
) -> list[Check]:
    """Were the members of every batch the ones that independent coins of rate q choose, cut by the cap and dealt by the key?

    Coins, cap and deal come from a second sampler, which shares no code with the one that trained; they are compared with the
    private record of what the ranks were dealt. A rate that both have wrong would show in the number of inclusions.

    Args:
        secret: the key's 32 bytes.
        max_coins: bounds the work: then retries, and other attempts evenly over the run.
    """
    if plan.sampling != "poisson" or not attempts:
        nothing = f"nothing was charged yet, or coins depend on each other, as those of {plan.sampling!r} may"
        return [undecided("trained_members", nothing)]
    second = SecondSampler(secret, plan.num_examples, plan.expected_batch_size, plan.cap)
    count, taken = max(2, max_coins // plan.num_examples), list(attempts)
    if (
        len(attempts) > count
    ):  # coins of a retry are what a program that forgets its attempts gets wrong
        retries = [attempt for attempt in attempts if attempt.attempt > 0][: count // 2]
        evenly = (
            np.linspace(0, len(attempts) - 1, count - len(retries)).round().astype(int).tolist()
        )
        taken = retries + [attempts[index] for index in evenly]
    n, total, compared, wrong = plan.num_examples, 0, 0, []
    for attempt in taken:
        chosen, members = second.members(attempt)
        total += len(chosen)
        record = recorded.get((attempt.nonce.hex(), attempt.step, attempt.attempt))
        if record is None:
            continue
        compared += 1
        try:
            dealt = second.deal(
                attempt, members, record.rows_per_rank, len(record.digests), record.nodes
            )
            digests = [second.digest(attempt, rank, ids) for rank, (ids, _) in enumerate(dealt)]
            same = (list(record.digests), list(record.counts)) == (
                digests,
                [len(ids) for ids, _ in dealt],
            )
        except (ValueError, IndexError):  # too few rows for the members, or nodes that are none
            same = False
        wrong += [] if same else [attempt.step]
    coins = n * len(taken)
    inclusions = f"{total} inclusions in {len(taken)} attempts of {n} examples, {coins * plan.sample_rate:.0f} expected"
    total_p = float(stats.binomtest(total, coins, plan.sample_rate).pvalue)
    first = f" (first at step {wrong[0]})" if wrong else ""
    others = f"in {len(wrong)} of {compared} attempts the ranks were dealt other examples than the coins say{first}"
    trained = fact("trained_members", not wrong, others, statistic=len(wrong), threshold=0)
    if not compared:
        trained = undecided(
            "trained_members",
            "the run kept no record of what it trained on (private/members.jsonl)",
        )
    return [
        random_check("batch_size_total", total_p, inclusions, statistic=total / len(taken)),
        trained,
    ]


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
        same = f"{len(state.intents)} charges are those of the attempts in private/"
        return fact("attempts", wrong is None, wrong or same)
    if folder.private.is_dir() and "head" not in state.opened:  # a private head samples nobody
        gone = f"{folder.members} is gone: it records every attempt, and is made before the ledger"
        return fact("attempts", False, gone)
    return fact(
        "attempts",
        True,
        "there is no private/ here, so charges are not compared with the record of attempts",
    )


def _key_check(run_dir: Path, state: LedgerState, data_manifest: bytes | None) -> Check:
    """The sampling key is the one to which the ledger was committed before the first coin, and the data are those it names."""
    path = RunFolder(run_dir).key
    if not path.exists():
        return fact(
            "sampling_key",
            True,
            "there is no sampling key here to compare with the ledger's commitment",
        )
    try:
        key = SamplingKey.load(path, state.opened["key_commitment"])
    except PrivacyStateRefused as error:
        return fact("sampling_key", False, str(error))
    if data_manifest is not None and key.hmac(data_manifest) != state.opened.get("data_hmac"):
        return fact(
            "sampling_key",
            False,
            "the index in private/ is of other data than the ledger was opened with",
        )
    return fact(
        "sampling_key", True, "private/sampling.key is the key that the ledger is committed to"
    )


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
