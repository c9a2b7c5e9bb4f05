"""Audits of a run folder's records.

privacy/verify.py judges the ledger, as anybody can. This file adds the checks of the holder of
`private/`: the sampling key, the mirror, and the record of attempts, the ledger's second witness.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from .. import verify
from ..card.ledger_card import read_snapshot
from ..card.run_card import read_recipe
from ..errors import ConfigError, PrivacyStateRefused
from ..files.public import require_ledger
from ..ledger.attempts import LedgerMark, MembersRecord, ledger_gap, read_lines, record_gap
from ..ledger.records import LedgerState
from ..plan.numbers import PrivacyPlan
from ..sampling.keys import SamplingKey
from ..step.run_folder import RunFolder
from .audit_report import AuditReport, Check, fact, random_check, undecided
from .second_sampler import Attempt, SecondSampler, read_attempts

MAX_COINS = 10**9
"""Coins that one audit of a schedule tosses again; of a longer run it looks at a part of the
attempts."""


def ledger_audit(run_dir: Path, data_manifest: bytes | None = None) -> AuditReport:
    """Returns the report of `audit.py ledger`: verify.py's checks and those of `private/`.

    Args:
        data_manifest: identifies the data, of which the ledger holds an HMAC; None where no index
            exists to compare.

    Raises:
        ConfigError: the folder has no ledger, or cannot be judged.
    """
    ledger = require_ledger(run_dir)
    # The record of attempts is read before the ledger and again after it, since a run in progress
    # writes both.
    marks_before = recorded_attempts(run_dir)
    try:
        _, verdict = verify.verify(run_dir, None)
    except verify.BadInput as error:
        raise ConfigError(str(error)) from error
    checks = [
        Check(check["name"], check["outcome"], check["sentence"]) for check in verdict["checks"]
    ]
    # The trainer's own reader judges too: a ledger that one of the two readers refuses is refused.
    try:
        snapshot = read_snapshot(ledger)
    except PrivacyStateRefused as error:
        return AuditReport("ledger", [*checks, fact("legal_order", False, str(error))])
    state = snapshot.state
    order = f"{state.num_lines} lines are in legal order, as the trainer reads them"
    checks += [
        fact("legal_order", True, order),
        _key_check(run_dir, state, data_manifest),
        attempts_check(run_dir, state, marks_before),
        _mirror_check(run_dir, ledger, state),
    ]
    claim = {name: verdict.get(name) for name in ("formal_guarantee", "epsilon", "delta")}
    return AuditReport("ledger", checks, {"attempts_charged": state.num_charged, **claim})


def schedule_audit(run_dir: Path, max_coins: int = MAX_COINS) -> AuditReport:
    """Returns the report of `audit.py schedule`.

    It reads private/sampling.key, so it runs inside the trust boundary.

    Raises:
        ConfigError: the folder has no ledger.
        PrivacyStateRefused: a broken ledger, or no key that fits it.
    """
    marks_before = recorded_attempts(run_dir)
    folder = RunFolder(run_dir)
    snapshot = read_snapshot(require_ledger(run_dir))
    state = snapshot.state
    # The key must be the one to which the ledger was committed before the first coin: another key
    # would make other coins.
    SamplingKey.load(folder.key, state.opened["key_commitment"])
    attempts = read_attempts(snapshot.records)
    records = {}
    for line in recorded_attempts(run_dir) or ():
        # Without the lines that a run in progress has added since the ledger was read.
        if isinstance(line, MembersRecord) and line.seq < state.num_lines:
            records[(line.nonce, line.step, line.attempt)] = line
    checks = members_checks(state.plan, attempts, folder.key.read_bytes(), records, max_coins)
    checks.append(attempts_check(run_dir, state, marks_before))
    return AuditReport("schedule", checks)


def members_checks(
    plan: PrivacyPlan,
    attempts: Sequence[Attempt],
    secret: bytes,
    records: Mapping[tuple[str, int, int], MembersRecord],
    max_coins: int = MAX_COINS,
) -> list[Check]:
    """Returns the checks of batch sizes and members against independent coins of rate q.

    Coins, cap and deal come from a second sampler, which shares no code with the one that trained;
    they are compared with the private record of the examples that the ranks were dealt. A rate that
    both samplers have wrong would show in the number of inclusions.

    Args:
        secret: the key's 32 bytes.
        records: (nonce, step, attempt) -> its record.
        max_coins: bounds the work: beyond it the audit takes retries, and other attempts evenly
            over the run.
    """
    if plan.sampling != "poisson" or not attempts:
        return [
            undecided(
                "trained_members",
                "nothing was charged yet, or coins depend on each other, as those of "
                f"{plan.sampling!r} may",
            )
        ]
    n = plan.num_examples
    sampler = SecondSampler(secret, n, plan.expected_batch_size, plan.cap)
    max_attempts = max(2, max_coins // n)
    audited_attempts = list(attempts)
    if len(attempts) > max_attempts:
        # A program that forgets its attempts gets the coins of a retry wrong.
        retries = [attempt for attempt in attempts if attempt.attempt > 0][: max_attempts // 2]
        places = np.linspace(0, len(attempts) - 1, max_attempts - len(retries))
        indices = places.round().astype(int).tolist()
        audited_attempts = retries + [attempts[index] for index in indices]
    num_inclusions = 0
    num_comparisons = 0
    wrong_steps = []
    for attempt in audited_attempts:
        candidates, members = sampler.members(attempt)
        num_inclusions += len(candidates)
        record = records.get((attempt.nonce.hex(), attempt.step, attempt.attempt))
        if record is None:
            continue
        num_comparisons += 1
        try:
            world_size = len(record.digests)
            deal = sampler.deal(attempt, members, record.rows_per_rank, world_size, record.nodes)
            digests = [sampler.digest(attempt, rank, ids) for rank, (ids, _) in enumerate(deal)]
            counts = [len(ids) for ids, _ in deal]
            agrees = list(record.digests) == digests and list(record.counts) == counts
        except (ValueError, IndexError):
            # The record has too few rows for the members, or impossible nodes.
            agrees = False
        if not agrees:
            wrong_steps.append(attempt.step)
    num_coins = n * len(audited_attempts)
    p_value = float(stats.binomtest(num_inclusions, num_coins, plan.sample_rate).pvalue)
    inclusions = (
        f"{num_inclusions} inclusions in {len(audited_attempts)} attempts of {n} examples, "
        f"{num_coins * plan.sample_rate:.0f} expected"
    )
    mean_size = num_inclusions / len(audited_attempts)
    size_check = random_check("batch_size_total", p_value, inclusions, statistic=mean_size)
    if not num_comparisons:
        sentence = "the run kept no record of what it trained on (private/members.jsonl)"
        return [size_check, undecided("trained_members", sentence)]
    num_wrong = len(wrong_steps)
    first = f" (first at step {wrong_steps[0]})" if wrong_steps else ""
    sentence = (
        f"in {num_wrong} of {num_comparisons} attempts the ranks were dealt other examples than "
        f"the coins say{first}"
    )
    members_check = fact(
        "trained_members", not wrong_steps, sentence, statistic=num_wrong, threshold=0
    )
    return [size_check, members_check]


def recorded_attempts(run_dir: Path) -> list[LedgerMark] | None:
    """Returns the current lines of the private record of attempts; None without such a file."""
    path = RunFolder(run_dir).members
    return list(read_lines(path)) if path.exists() else None


def attempts_check(
    run_dir: Path, state: LedgerState, marks_before: Sequence[LedgerMark] | None
) -> Check:
    """Returns the check that recorded attempts and charges are the same.

    The last attempt of a session may lack its charge, since the program may have ended between the
    two. A run in progress writes while it is audited: lines that were recorded before the ledger
    was read must be in it, and its charges must be recorded now.

    Args:
        marks_before: the record as it was before the ledger was read; None without such a file.
    """
    folder = RunFolder(run_dir)
    marks_now = recorded_attempts(run_dir)
    if marks_before is not None and marks_now is not None:
        contradiction = ledger_gap(marks_before, state)
        if contradiction is None:
            contradiction = record_gap(state, marks_now)
        if contradiction is not None:
            return fact("attempts", False, contradiction)
        sentence = f"{len(state.intents)} charges are those of the attempts in private/"
        return fact("attempts", True, sentence)
    # A private head has no record: it samples no examples.
    if folder.private.is_dir() and "head" not in state.opened:
        sentence = (
            f"{folder.members} is gone: it records every attempt, and is made before the ledger"
        )
        return fact("attempts", False, sentence)
    sentence = "there is no private/ here, so charges are not compared with the record of attempts"
    return fact("attempts", True, sentence)


def _key_check(run_dir: Path, state: LedgerState, data_manifest: bytes | None) -> Check:
    """Returns the check of sampling key and data against the ledger's commitment and HMAC."""
    path = RunFolder(run_dir).key
    if not path.exists():
        sentence = "there is no sampling key here to compare with the ledger's commitment"
        return fact("sampling_key", True, sentence)
    try:
        key = SamplingKey.load(path, state.opened["key_commitment"])
    except PrivacyStateRefused as error:
        return fact("sampling_key", False, str(error))
    if data_manifest is not None and key.hmac(data_manifest) != state.opened.get("data_hmac"):
        sentence = "the index in private/ is of other data than the ledger was opened with"
        return fact("sampling_key", False, sentence)
    sentence = "private/sampling.key is the key that the ledger is committed to"
    return fact("sampling_key", True, sentence)


def _mirror_check(run_dir: Path, ledger: Path, state: LedgerState) -> Check:
    """Returns the check that the mirror is a prefix of the ledger, which is written first."""
    if not state.mirrored:
        sentence = "the ledger has no mirror: a rollback of the whole run folder cannot be detected"
        return fact("mirror", True, sentence)
    # The recipe in the folder names the path; an auditor on another machine may not reach it.
    name = read_recipe(run_dir).get("privacy", {}).get("ledger_mirror")
    mirror: bytes | None = None
    if isinstance(name, str) and name:
        with contextlib.suppress(OSError):
            mirror = Path(name).read_bytes()
    if mirror is None:
        return undecided("mirror", "the ledger has a mirror, which could not be read")
    is_prefix = ledger.read_bytes().startswith(mirror)
    relation = "a prefix of the ledger" if is_prefix else "longer or different: a rollback"
    return fact("mirror", is_prefix, f"the mirror is {relation}")
