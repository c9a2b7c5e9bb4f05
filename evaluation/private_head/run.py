"""The command `private-head`: one head, from features to weights, with a ledger of its own, and what all heads of a folder cost.

The plan is charged before any noise is drawn.
"""

import hashlib
import inspect
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from safetensors.numpy import save_file

from data.errors import DataError
from evaluation.features import WHITEN_ON, Features, device_of, load_inputs
from evaluation.linear_probe import cross_validated_regression
from evaluation.options import PrivateHeadOptions
from evaluation.private_head.methods import METHODS, Budget, HeadMethod, accuracy
from evaluation.private_head.rows import ROWS_PER_BLOCK, Rows, rounding
from evaluation.results import PrivateRelease, Results
from privacy import verify
from privacy.accounting.accountants import claimed_epsilon
from privacy.accounting.rounding import rounded_up
from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused, placed, say
from privacy.files.durable import make_directory, require_apart
from privacy.files.toml_text import toml_value
from privacy.guards.premises import NoisedSum, require_noised
from privacy.ledger.claim import ParentLedger, claim_of, keep_copies, parent_states, require_kept
from privacy.ledger.members import (
    FILE,
    MarkedLedger,
    ledger_gap,
    members_digest,
    read_lines,
)
from privacy.ledger.records import LedgerState, read_ledger
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.noise.source import NoiseSource, SystemNoise
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.plan.request import PlanRequest
from trainer.errors import ConfigError
from trainer.weights.start import ledgers_of

WHITENING_FLOOR = 1e-3
"""Added to a variance, relative to the largest one: directions in which public pictures hardly vary are not blown up."""
GIVEN_FEATURES = (
    "the training examples, given what made the features of each from that example alone"
)


@dataclass(frozen=True)
class HeadResult:
    """Weights (L, D) float64, and what they carry, a private encoder's charges included; epsilon is None without a claim."""

    weights_LD: np.ndarray
    epsilon: float | None
    delta: float


class Whitening(NamedTuple):
    """x -> (x - centre) matrix, after which features of public pictures have mean 0 and nearly equal variances in all directions.

    Features of an encoder are mostly their common mean, and vary most in a few directions. Clipping and noise go by their
    length, which tells no classes apart. Only public pictures may say what mean and directions are.
    """

    name: str
    digest: str
    centre_D: np.ndarray
    matrix_DD: np.ndarray

    @classmethod
    def of(cls, public: Features) -> "Whitening":
        """
        Raises:
            DataError: fewer than two usable pictures, or all are alike.
        """
        x_ND = public.values_ND[
            public.is_usable_N & np.isfinite(public.values_ND).all(axis=1)
        ].astype(np.float64)
        if not x_ND.size:
            raise DataError(f"{public.name}: no picture can be used to whiten features on")
        values_D, vectors_DD = np.linalg.eigh(np.atleast_2d(np.cov(x_ND, rowvar=False, bias=True)))
        if not values_D[-1] > 0:
            raise DataError(
                f"{public.name}: all usable pictures have equal features; whitening takes different ones"
            )
        scale_D = np.sqrt(values_D + WHITENING_FLOOR * values_D[-1])
        digest = hashlib.sha256(x_ND.tobytes()).hexdigest()
        return cls(public.name, digest, x_ND.mean(axis=0), vectors_DD / scale_D @ vectors_DD.T)

    def apply(self, x_ND: np.ndarray) -> None:
        """In place, each row by itself. A row of zeros stands for no example and stays one; what is not finite stays so."""
        with np.errstate(all="ignore"):  # without a word about an example
            for start in range(0, len(x_ND), ROWS_PER_BLOCK):
                block = slice(start, start + ROWS_PER_BLOCK)
                is_there_N1 = x_ND[block].any(axis=1, keepdims=True)
                x_ND[block] = np.where(
                    is_there_N1, (x_ND[block] - self.centre_D) @ self.matrix_DD, 0
                )


def head_plan(num_examples: int, epsilon: float, delta: float | None) -> PrivacyPlan:
    """One full-batch release: no sampling, so no amplification, and an exact epsilon.

    Raises:
        PrivacyConfigError: an epsilon or delta that cannot be met, or too many examples.
    """
    if rounding(num_examples) > SENSITIVITY_SLACK / 4:
        raise PrivacyConfigError(
            f"a private head cannot take {num_examples:,} examples: rounding may move its sums further than the "
            f"accounting charges for; train it on at most 96,000,000"
        )
    request = PlanRequest(
        num_examples=num_examples,
        expected_batch_size=num_examples,
        num_steps=1,
        target_epsilon=epsilon,
        target_delta=delta,
        sensitivity_slack=SENSITIVITY_SLACK,
        reserved_attempts=0,
        cap=None,
    )
    return make_plan(request)


def train_head(
    rows: Rows,
    num_classes: int,
    method: str,
    *,
    epsilon: float,
    delta: float | None = None,
    output: Path,
    options: dict[str, Any] | None = None,
    shared: SharedTerms | None = None,
    noise: NoiseSource | None = None,
    covers: str = GIVEN_FEATURES,
    behind: Sequence[ParentLedger] = (),
    whitening: Whitening | None = None,
) -> HeadResult:
    """Trains a head of `METHODS[method]` and writes ledger, weights and head.json into the new folder `output`.

    The number of examples, the number of classes and the method's options count as public.

    Args:
        covers: which examples the guarantee is about, and given what; for ledger, card and head.json.
        behind: the ledgers of private runs that made the encoder; their charges compose with the head's.
        whitening: what the rows go through, in place; head.safetensors is for features as they were.

    Raises:
        PrivacyConfigError: labels out of range, unknown method or option, a folder with a head in it or with the beginning of
            another one.
        BudgetSpent: an earlier attempt in this folder ended between the charge and the weights; it stays charged.
        PrivacyStateRefused: the ledger in this folder lacks what private/ recorded.
    """
    head = make_method(method, options or {})
    rows.require_labels_below(num_classes)
    plan = head_plan(rows.num_examples, epsilon, delta)
    private = output / "private"
    if shared is not None:
        require_apart({"the shared ledger": Path(shared.path)}, output)
    make_directory(private, 0o700)
    facts: dict[str, Any] = {
        "head": {
            "method": method,
            "num_classes": num_classes,
            **asdict(head),  # type: ignore[call-overload]
            "covers": covers,
        }
    }
    if whitening is not None:
        facts["head"] |= {"whitened_on": whitening.name, "whitened_on_sha256": whitening.digest}
    statistics = head.statistics(num_classes, rows.width)
    budget = Budget(
        statistics, 1 / plan.noise_multiplier, noise or SystemNoise(), plan.num_examples
    )
    sums = [
        NoisedSum(release, statistic.size, budget.units[statistic.name], plan.num_examples)
        for release, statistic in zip(budget.releases, statistics, strict=True)
    ]
    require_noised(sums, plan.release_group(1), plan.noise_multiplier, SENSITIVITY_SLACK)
    facts["sum_exponents"] = {name: unit.exponent for name, unit in budget.units.items()}
    facts |= (
        {"behind": keep_copies(output, behind)}
        if behind and not (output / "ledger.jsonl").exists()
        else {}
    )
    members = private / FILE
    ledger, key = open_run_state(
        output / "ledger.jsonl",
        private / "sampling.key",
        plan,
        data_manifest=rows.data_digest(),
        open_fields=facts,
        members=members,
        shared=shared,
    )
    try:
        if ledger.state.closed is not None:
            raise PrivacyConfigError(
                f"{output} has a finished head already; name another folder with --output"
            )
        if ledger.budget_spent() is not None:
            raise BudgetSpent(
                f"{output}: an earlier attempt was charged and gave no head; choose another folder"
            )
        if ledger.state.opened["head"] != json.loads(json.dumps(facts["head"])):
            raise PrivacyConfigError(
                f"{output} was begun with another head, or other words; choose another folder"
            )
        require_kept(output, ledger.state.opened, behind)
        nonce, count = ledger.start_session({}), plan.num_examples
        digest = members_digest(key, nonce, 0, 1, 0, np.arange(count))
        marked = MarkedLedger(ledger, members)
        marked.note(1, 0, nonce, count, [(count, digest)])
        marked.write(lambda ledger: ledger.intent(1, 0, budget.releases))
        # Behind the digest of the data: a product's last bits depend on the number of threads.
        if whitening is not None:
            whitening.apply(rows.features_ND)
        weights_LD = head.fit(rows, num_classes, budget)
        budget.require_spent()
        tensors = {"weight": weights_LD}
        if (
            whitening is not None
        ):  # features before it get the scores that the weights give those after it
            weight_LD = weights_LD @ whitening.matrix_DD
            tensors = {"weight": weight_LD, "bias": -weight_LD @ whitening.centre_D}
        save_file(tensors, output / "head.safetensors")
        ledger.done(1, 0)
        marked.write(lambda ledger: ledger.close("finished"))
        claim = claim_of(output, ledger.state)
        claimed, claimed_delta = (None, plan.target_delta) if claim is None else claim
    finally:
        ledger.release()
    result = HeadResult(weights_LD, claimed, claimed_delta)
    statement = {
        **facts["head"],
        "epsilon": claimed,
        "delta": claimed_delta,
        "num_examples": plan.num_examples,
    }
    with placed(output / "head.json"):
        (output / "head.json").write_text(json.dumps(statement, indent=1) + "\n")
    shutil.copy(verify.__file__, output / "verify.py")
    return result


def make_method(method: str, options: dict[str, Any]) -> HeadMethod:
    """
    Raises:
        PrivacyConfigError: unknown method or option; the line lists the choices. Or a value that an option cannot have.
    """
    if method not in METHODS:
        raise PrivacyConfigError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    known = list(inspect.signature(METHODS[method]).parameters)
    if unknown := options.keys() - set(known):
        raise PrivacyConfigError(
            f"{method} has no option {min(unknown)!r}; choose among {', '.join(known)}"
        )
    try:
        return METHODS[method](**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise PrivacyConfigError(
            f"{method}: {first['loc'][0]} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        ) from error


def without_noise(
    rows: Rows, num_classes: int, method: str, options: dict[str, Any] | None = None
) -> np.ndarray:
    """The same estimator without privacy, for comparison; (L, D)."""
    head = make_method(method, options or {})
    rows.require_labels_below(num_classes)
    budget = Budget(head.statistics(num_classes, rows.width), np.inf, None, rows.num_examples)
    return head.fit(rows, num_classes, budget)


class Together(NamedTuple):
    """What all releases in a folder of heads cost at the largest of their deltas, the private runs behind encoders included."""

    num_releases: int
    epsilon: float
    delta: float


def spent_in(folder: Path) -> Together:
    """Everything that the ledgers of the heads in this folder have charged, earlier commands and heads that failed included.

    Raises:
        PrivacyStateRefused: a ledger is broken, or lacks what private/ recorded.
    """
    # By the last line: heads on features of one encoder have the same ledgers behind them.
    states: dict[str, LedgerState] = {}
    heads: list[LedgerState] = []
    for path in sorted(folder.glob("*/ledger.jsonl")):
        members = path.parent / "private" / FILE
        recorded = list(read_lines(members)) if members.is_file() else []
        heads.append(state := read_ledger(path))
        if (lost := ledger_gap(recorded, state)) is not None:
            raise PrivacyStateRefused(
                f"{path} and {members} contradict each other: {lost}; restore both from one backup"
            )
        states |= {
            one.hashes[-1]: one for one in (state, *parent_states(path.parent, state.opened))
        }
    groups = [group for state in states.values() for group in state.charged_groups()]
    if not groups:
        return Together(0, 0.0, 0.0)
    delta = max(state.plan.target_delta for state in heads)
    left = delta - math.fsum(state.plan.noise_tail_delta for state in states.values())
    value = claimed_epsilon(groups, left)[0] if left > 0 else math.inf
    return Together(sum(state.num_charged for state in heads), value, delta)


def private_head(options: PrivateHeadOptions) -> Results | None:
    """Trains a private classifier head on frozen features."""
    output, method = options.output_folder, options.method
    chosen = {
        name: toml_value(value)
        for name, _, value in (text.partition("=") for text in options.option)
    }
    folder = options.heads or (None if output is None else output / "private_heads")
    if folder is None:
        raise ConfigError("give --output (or --heads), a folder for the head and its ledger")
    make_method(method, chosen)  # refused before the features are computed
    if options.whiten_on is not None and _place(options.whiten_on) in map(
        _place, (options.train, options.test)
    ):
        raise ConfigError(
            f"--whiten_on {options.whiten_on} is not public: what it says of its pictures has no noise"
        )
    on = {} if options.whiten_on is None else {WHITEN_ON: options.whiten_on}
    inputs = load_inputs(options, train=options.train, test=options.test, **on)
    if inputs is None:
        return None
    train, test = inputs.features["train"], inputs.features["test"].usable()
    whitening = Whitening.of(inputs.features[WHITEN_ON]) if on else None
    if whitening is not None:
        if whitening.centre_D.shape != train.values_ND.shape[1:]:
            raise ConfigError(
                f"--whiten_on {options.whiten_on} has features of another width than --train"
            )
        whitening.apply(test[0])
    num_classes = options.num_classes or len(train.class_names)
    if not num_classes:
        raise ConfigError(
            "--num_classes is required: inferring it from the training labels would leak private information"
        )
    if num_classes < len(train.class_names):  # names are public; what labels are among them is not
        missing = f"label {num_classes} ({train.class_names[num_classes]})"
        raise ConfigError(
            f"--num_classes {num_classes} leaves out {missing}: the data name {len(train.class_names)} classes"
        )
    # The guarantee holds given what made the features; that has a guarantee of its own, or none.
    behind: Sequence[ParentLedger] = ()
    if inputs.model is None or options.train.startswith("features:"):
        given = "what made the features of each from that example alone"
    elif inputs.model.formal_guarantee:
        given = (
            "nothing: what the encoder spent is composed with the head, in case it has seen them"
        )
        assert inputs.opened is not None
        behind = ledgers_of(inputs.opened.path, inputs.opened.manifest)
    else:
        given = "the encoder, which has no formal guarantee: if it has seen them, none is left"
    covers = f"the examples of {options.train}, given {given}"
    covers += "" if whitening is None else f"; {options.whiten_on} is declared public"
    spent_in(folder)  # a broken ledger in there would leave open what all heads together cost
    rows, own = (
        private_rows(train, num_classes),
        folder / f"{method}-epsilon-{options.target_epsilon:g}",
    )
    shared = None if options.shared_ledger is None else SharedTerms(options.shared_ledger, own.name)
    head = train_head(
        rows,
        num_classes,
        method,
        epsilon=options.target_epsilon,
        delta=options.delta,
        output=own,
        options=chosen,
        shared=shared,
        covers=covers,
        behind=behind,
        whitening=whitening,
    )
    scalars = {
        f"{method}/epsilon-{options.target_epsilon:g}/accuracy": accuracy(head.weights_LD, *test)
    }
    details: dict[str, Any] = {"options": chosen}
    notes = []
    together = spent_in(folder)
    if together.num_releases > 1:
        details["all_heads_together"] = together._asdict()
        notes.append(
            f"the {together.num_releases} releases in {folder}, earlier ones included, cost epsilon "
            f"{rounded_up(together.epsilon)} at delta {together.delta:.3g} together where they are of the same examples; "
            "choosing a head by its accuracy costs the test data's privacy"
        )
    if options.compare:
        used = rows.features_ND.any(axis=1)
        x_ND, y_N = rows.features_ND[used], rows.labels_N[used]
        plain, _ = cross_validated_regression(x_ND, y_N, num_classes, device=device_of(options))
        weights_LD = without_noise(rows, num_classes, method, chosen)
        scalars[f"{method}/without_privacy/accuracy"] = accuracy(weights_LD, *test)
        scalars["regression/without_privacy/accuracy"] = plain.accuracy(*test)
    released = []
    if head.epsilon is not None:
        what, ledger = f"weights of a {method} head", str(own / "ledger.jsonl")
        released.append(PrivateRelease(what, ledger, head.epsilon, head.delta, covers))
    return Results(
        "private-head", scalars, inputs.uses(), inputs.model, (), details, released, notes=notes
    )


def _place(source: str) -> tuple[str, Path]:
    """What a source is and where, however its path is written."""
    kind, _, where = source.partition(":")
    return kind, Path(where).expanduser().resolve()


def private_rows(train: Features, num_classes: int) -> Rows:
    """Rows that are not usable, or whose label is out of range, become zero in their place, decided by each row alone.

    They stay: how many rows there are must not follow from an example's bytes.
    """
    keep_N = train.is_usable_N & (train.labels_N >= 0) & (train.labels_N < num_classes)
    train.values_ND[~keep_N] = 0  # a copy may take gigabytes
    if (
        not keep_N.all()
    ):  # on the console, which is inside the trust boundary, and before anything is charged
        dropped = np.count_nonzero(~keep_N)
        say(
            f"private: {dropped:,} of {len(keep_N):,} training examples are unusable or have no label below "
            f"{num_classes}; they add nothing",
            file=sys.stderr,
        )
    return Rows(train.values_ND, np.where(keep_N, train.labels_N, 0))
