"""The command `private-head`: trains one head on frozen features, with a ledger of its own.

The ledger charges the plan before any noise is drawn. `joint_cost_of` composes the charges of all
heads in a folder.
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
from evaluation.command_options import PrivateHeadOptions
from evaluation.features import WHITEN_ON, Features, device_of, load_inputs
from evaluation.linear_probe import cross_validated_regression
from evaluation.private_head.methods import METHODS, Budget, HeadMethod, accuracy
from evaluation.private_head.rows import ROWS_PER_BLOCK, Rows, rounding
from evaluation.results import PrivateRelease, Results
from privacy import verify
from privacy.accounting.accountants import claimed_epsilon
from privacy.accounting.rounding import rounded_up
from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused, placed, say
from privacy.files.durable import make_directory, require_distinct_files
from privacy.files.toml_text import toml_value
from privacy.guards.premises import NoisedSum, require_noised
from privacy.ledger.attempts import (
    FILE,
    MarkedLedger,
    ledger_gap,
    members_digest,
    read_lines,
)
from privacy.ledger.claim import ParentLedger, claim_of, keep_copies, parent_states, require_kept
from privacy.ledger.records import LedgerState, read_ledger
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.noise.source import NoiseSource, SystemNoise
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.plan.request import PlanRequest
from trainer.errors import ConfigError
from trainer.weights.initial_weights import ledgers_of

WHITENING_FLOOR = 1e-3
"""Is added to every variance, as a part of the largest one: without it, whitening would magnify the
directions in which public pictures hardly vary."""
GIVEN_FEATURES = (
    "the training examples, given what made the features of each from that example alone"
)


@dataclass(frozen=True)
class HeadResult:
    """Holds weights (L, D) float64, and the epsilon and delta that they carry.

    A private encoder's charges are included. epsilon is None without a claim.
    """

    weights_LD: np.ndarray
    epsilon: float | None
    delta: float


class Whitening(NamedTuple):
    """The map x -> (x - centre) matrix, which whitens the features of public pictures.

    After it their mean is 0 and their variances are nearly equal in all directions. An encoder's
    features are mostly their common mean, and vary most in a few directions. Clipping and noise
    follow a feature's length, to which those parts contribute most, and which tells no classes
    apart. Mean and directions come from public pictures only, because they get no noise.

    Attributes:
        name: of the public pictures.
        digest: SHA-256 of their features.
    """

    name: str
    digest: str
    centre_D: np.ndarray
    matrix_DD: np.ndarray

    @classmethod
    def of(cls, public: Features) -> "Whitening":
        """Returns the whitening that features of public pictures determine.

        Raises:
            DataError: fewer than two usable pictures, or all are alike.
        """
        is_finite_N = np.isfinite(public.values_ND).all(axis=1)
        x_ND = public.values_ND[public.is_usable_N & is_finite_N].astype(np.float64)
        if not x_ND.size:
            raise DataError(f"{public.name}: no picture can be used to whiten features on")
        covariance_DD = np.atleast_2d(np.cov(x_ND, rowvar=False, bias=True))
        eigenvalues_D, eigenvectors_DD = np.linalg.eigh(covariance_DD)
        if not eigenvalues_D[-1] > 0:
            raise DataError(
                f"{public.name}: all usable pictures have equal features; "
                "whitening takes different ones"
            )
        scale_D = np.sqrt(eigenvalues_D + WHITENING_FLOOR * eigenvalues_D[-1])
        matrix_DD = eigenvectors_DD / scale_D @ eigenvectors_DD.T
        digest = hashlib.sha256(x_ND.tobytes()).hexdigest()
        return cls(public.name, digest, x_ND.mean(axis=0), matrix_DD)

    def apply(self, x_ND: np.ndarray) -> None:
        """Whitens features in place, each row by itself.

        A row of zeros stands for no example and stays zero. A row that is not finite stays so.
        """
        # A warning of numpy would reveal an example.
        with np.errstate(all="ignore"):
            for start in range(0, len(x_ND), ROWS_PER_BLOCK):
                block = slice(start, start + ROWS_PER_BLOCK)
                is_example_N1 = x_ND[block].any(axis=1, keepdims=True)
                whitened_ND = (x_ND[block] - self.centre_D) @ self.matrix_DD
                x_ND[block] = np.where(is_example_N1, whitened_ND, 0)


def head_plan(num_examples: int, epsilon: float, delta: float | None) -> PrivacyPlan:
    """Returns the plan of one full-batch release.

    It samples nothing, so nothing is amplified and epsilon is exact.

    Raises:
        PrivacyConfigError: an epsilon or delta that cannot be met, or too many examples.
    """
    if rounding(num_examples) > SENSITIVITY_SLACK / 4:
        raise PrivacyConfigError(
            f"a private head cannot take {num_examples:,} examples: rounding may move its sums "
            f"further than the accounting charges for; train it on at most 96,000,000"
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
    parent_ledgers: Sequence[ParentLedger] = (),
    whitening: Whitening | None = None,
) -> HeadResult:
    """Trains a head of `METHODS[method]` and writes its files into the new folder `output`.

    The files are the ledger, head.safetensors, head.json and verify.py. The number of examples, the
    number of classes and the method's options count as public.

    Args:
        covers: which examples the guarantee is about, and given what; for ledger, card and
            head.json.
        parent_ledgers: the ledgers of private runs that made the encoder; their charges compose
            with the head's.
        whitening: is applied to the rows, in place; head.safetensors is for features before it.

    Raises:
        PrivacyConfigError: labels out of range, unknown method or option, a folder that holds a
            finished head or the start of another one.
        BudgetSpent: an earlier attempt in this folder ended between the charge and the weights; its
            charge stays.
        PrivacyStateRefused: the ledger in this folder lacks a line that private/ recorded.
    """
    head = make_method(method, options or {})
    rows.require_labels_below(num_classes)
    plan = head_plan(rows.num_examples, epsilon, delta)
    private = output / "private"
    if shared is not None:
        require_distinct_files({"the shared ledger": Path(shared.path)}, output)
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
    mu = 1 / plan.noise_multiplier
    budget = Budget(statistics, mu, noise or SystemNoise(), plan.num_examples)
    sums = []
    for release, statistic in zip(budget.releases, statistics, strict=True):
        unit = budget.units[statistic.name]
        sums.append(NoisedSum(release, statistic.size, unit, plan.num_examples))
    require_noised(sums, plan.release_group(1), plan.noise_multiplier, SENSITIVITY_SLACK)
    facts["sum_exponents"] = {name: unit.exponent for name, unit in budget.units.items()}
    ledger_file = output / "ledger.jsonl"
    # A ledger that exists names its copies already.
    if parent_ledgers and not ledger_file.exists():
        facts["behind"] = keep_copies(output, parent_ledgers)
    members = private / FILE
    ledger, key = open_run_state(
        ledger_file,
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
        # The ledger holds JSON: a tuple of `facts` would differ from the list that was read.
        stated_head = json.loads(json.dumps(facts["head"]))
        if ledger.state.opened["head"] != stated_head:
            raise PrivacyConfigError(
                f"{output} was begun with another head, or other words; choose another folder"
            )
        require_kept(output, ledger.state.opened, parent_ledgers)
        nonce = ledger.start_session({})
        count = plan.num_examples
        digest = members_digest(key, nonce, 0, 1, 0, np.arange(count))
        marked = MarkedLedger(ledger, members)
        marked.note(1, 0, nonce, count, [(count, digest)])
        marked.write(lambda ledger: ledger.intent(1, 0, budget.releases))
        # The ledger's digest is of the rows before whitening: the last bits of a product depend on
        # the number of threads.
        if whitening is not None:
            whitening.apply(rows.features_ND)
        weights_LD = head.fit(rows, num_classes, budget)
        budget.require_spent()
        tensors = {"weight": weights_LD}
        if whitening is not None:
            # Folds the whitening into the weights, so that the head takes an encoder's features.
            folded_LD = weights_LD @ whitening.matrix_DD
            tensors = {"weight": folded_LD, "bias": -folded_LD @ whitening.centre_D}
        save_file(tensors, output / "head.safetensors")
        ledger.done(1, 0)
        marked.write(lambda ledger: ledger.close("finished"))
        claim = claim_of(output, ledger.state)
    finally:
        ledger.release()
    claimed, claimed_delta = (None, plan.target_delta) if claim is None else claim
    statement = {
        **facts["head"],
        "epsilon": claimed,
        "delta": claimed_delta,
        "num_examples": plan.num_examples,
    }
    with placed(output / "head.json"):
        (output / "head.json").write_text(json.dumps(statement, indent=1) + "\n")
    shutil.copy(verify.__file__, output / "verify.py")
    return HeadResult(weights_LD, claimed, claimed_delta)


def make_method(method: str, options: dict[str, Any]) -> HeadMethod:
    """Returns the method with its options.

    Raises:
        PrivacyConfigError: an unknown method or option, of which the line lists the choices; or a
            value that an option cannot have.
    """
    if method not in METHODS:
        raise PrivacyConfigError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    names = list(inspect.signature(METHODS[method]).parameters)
    unknown = options.keys() - set(names)
    if unknown:
        raise PrivacyConfigError(
            f"{method} has no option {min(unknown)!r}; choose among {', '.join(names)}"
        )
    try:
        return METHODS[method](**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = first["loc"][0]
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise PrivacyConfigError(f"{method}: {option} = {first['input']!r}: {reason}") from error


def without_noise(
    rows: Rows, num_classes: int, method: str, options: dict[str, Any] | None = None
) -> np.ndarray:
    """Returns the weights (L, D) of the same estimator without privacy, for comparison."""
    head = make_method(method, options or {})
    rows.require_labels_below(num_classes)
    budget = Budget(head.statistics(num_classes, rows.width), np.inf, None, rows.num_examples)
    return head.fit(rows, num_classes, budget)


class JointCost(NamedTuple):
    """Holds the joint epsilon of all releases in a folder of heads, at the largest of their deltas.

    The private runs that made the encoders are included.
    """

    num_releases: int
    epsilon: float
    delta: float


def joint_cost_of(folder: Path) -> JointCost:
    """Returns the joint cost of all charges in the ledgers of a folder of heads.

    Heads of earlier commands and heads that failed are included.

    Raises:
        PrivacyStateRefused: a ledger is broken, or lacks a line that private/ recorded.
    """
    # The hash of its last line identifies a ledger. Heads on features of one encoder have the same
    # parent ledgers, whose charges count once.
    states: dict[str, LedgerState] = {}
    heads: list[LedgerState] = []
    for path in sorted(folder.glob("*/ledger.jsonl")):
        members = path.parent / "private" / FILE
        marks = list(read_lines(members)) if members.is_file() else []
        head = read_ledger(path)
        heads.append(head)
        contradiction = ledger_gap(marks, head)
        if contradiction is not None:
            raise PrivacyStateRefused(
                f"{path} and {members} contradict each other: {contradiction}; "
                "restore both from one backup"
            )
        for state in (head, *parent_states(path.parent, head.opened)):
            states[state.hashes[-1]] = state
    groups = [group for state in states.values() for group in state.charged_groups()]
    if not groups:
        return JointCost(0, 0.0, 0.0)
    delta = max(head.plan.target_delta for head in heads)
    # The noise of version 0.1 has a tail whose delta the accountant cannot spend.
    delta_without_tails = delta - math.fsum(
        state.plan.noise_tail_delta for state in states.values()
    )
    epsilon = math.inf
    if delta_without_tails > 0:
        epsilon, *_ = claimed_epsilon(groups, delta_without_tails)
    return JointCost(sum(head.num_charged for head in heads), epsilon, delta)


def private_head(options: PrivateHeadOptions) -> Results | None:
    """Trains a private classifier head on frozen features."""
    method = options.method
    output = options.output_folder
    method_options: dict[str, Any] = {}
    for text in options.option:
        name, _, literal = text.partition("=")
        method_options[name] = toml_value(literal)
    folder = options.heads
    if folder is None and output is not None:
        folder = output / "private_heads"
    if folder is None:
        raise ConfigError("give --output (or --heads), a folder for the head and its ledger")
    # Refuses bad options before features are computed, which takes long.
    make_method(method, method_options)
    sources = {"train": options.train, "test": options.test}
    if options.whiten_on is not None:
        private_places = [_resolved_source(source) for source in sources.values()]
        if _resolved_source(options.whiten_on) in private_places:
            raise ConfigError(
                f"--whiten_on {options.whiten_on} is not public: whitening gets no noise; "
                "name other pictures than those of --train and --test"
            )
        sources[WHITEN_ON] = options.whiten_on
    inputs = load_inputs(options, **sources)
    if inputs is None:
        return None
    train = inputs.features["train"]
    test = inputs.features["test"].usable()
    whitening = None
    if options.whiten_on is not None:
        whitening = Whitening.of(inputs.features[WHITEN_ON])
        if whitening.centre_D.shape != train.values_ND.shape[1:]:
            raise ConfigError(
                f"--whiten_on {options.whiten_on} has features of another width than --train"
            )
        test_ND, _ = test
        whitening.apply(test_ND)
    num_classes = options.num_classes or len(train.class_names)
    if not num_classes:
        raise ConfigError(
            "--num_classes is required: inferring it from the training labels would leak private "
            "information"
        )
    # Class names are public. The labels that occur among them are not.
    if num_classes < len(train.class_names):
        missing = f"label {num_classes} ({train.class_names[num_classes]})"
        raise ConfigError(
            f"--num_classes {num_classes} leaves out {missing}: "
            f"the data name {len(train.class_names)} classes"
        )
    # The guarantee holds given what made the features; that has a guarantee itself, or none.
    parent_ledgers: Sequence[ParentLedger] = ()
    if inputs.model is None or options.train.startswith("features:"):
        condition = "what made the features of each from that example alone"
    elif inputs.model.formal_guarantee:
        condition = (
            "nothing: what the encoder spent is composed with the head, in case it has seen them"
        )
        assert inputs.opened is not None
        parent_ledgers = ledgers_of(inputs.opened.path, inputs.opened.manifest)
    else:
        condition = "the encoder, which has no formal guarantee: if it has seen them, none is left"
    covers = f"the examples of {options.train}, given {condition}"
    if whitening is not None:
        covers += f"; {options.whiten_on} is declared public"
    # Refuses a broken ledger in the folder before this head is charged: the joint cost would be
    # unknown.
    joint_cost_of(folder)
    rows = private_rows(train, num_classes)
    head_folder = folder / f"{method}-epsilon-{options.target_epsilon:g}"
    shared = None
    if options.shared_ledger is not None:
        shared = SharedTerms(options.shared_ledger, head_folder.name)
    head = train_head(
        rows,
        num_classes,
        method,
        epsilon=options.target_epsilon,
        delta=options.delta,
        output=head_folder,
        options=method_options,
        shared=shared,
        covers=covers,
        parent_ledgers=parent_ledgers,
        whitening=whitening,
    )
    tag = f"{method}/epsilon-{options.target_epsilon:g}/accuracy"
    scalars = {tag: accuracy(head.weights_LD, *test)}
    details: dict[str, Any] = {"options": method_options}
    notes = []
    cost = joint_cost_of(folder)
    if cost.num_releases > 1:
        details["all_heads_together"] = cost._asdict()
        joint_epsilon = rounded_up(cost.epsilon)
        notes.append(
            f"the {cost.num_releases} releases in {folder}, earlier ones included, cost epsilon "
            f"{joint_epsilon} at delta {cost.delta:.3g} together where they are of the same "
            "examples; choosing a head by its accuracy costs the test data's privacy"
        )
    if options.compare:
        is_used_N = rows.features_ND.any(axis=1)
        x_ND = rows.features_ND[is_used_N]
        y_N = rows.labels_N[is_used_N]
        plain, _ = cross_validated_regression(x_ND, y_N, num_classes, device=device_of(options))
        weights_LD = without_noise(rows, num_classes, method, method_options)
        scalars[f"{method}/without_privacy/accuracy"] = accuracy(weights_LD, *test)
        scalars["regression/without_privacy/accuracy"] = plain.accuracy(*test)
    releases = []
    if head.epsilon is not None:
        ledger = str(head_folder / "ledger.jsonl")
        releases.append(
            PrivateRelease(f"weights of a {method} head", ledger, head.epsilon, head.delta, covers)
        )
    return Results(
        "private-head", scalars, inputs.uses(), inputs.model, (), details, releases, notes=notes
    )


def _resolved_source(source: str) -> tuple[str, Path]:
    """Returns kind and resolved path of a source, equal for two spellings of one path."""
    kind, _, location = source.partition(":")
    return kind, Path(location).expanduser().resolve()


def private_rows(train: Features, num_classes: int) -> Rows:
    """Returns the rows of a private head; unusable ones are zero in their place.

    A row is unusable without an image or a label below `num_classes`, which is decided by that row
    alone. It stays, because the number of rows must not follow from an example's bytes.
    """
    is_usable_N = train.is_usable_N & (train.labels_N >= 0) & (train.labels_N < num_classes)
    # In place, because a copy may take gigabytes.
    train.values_ND[~is_usable_N] = 0
    if not is_usable_N.all():
        # The console is inside the trust boundary, and nothing is charged yet.
        num_unusable = np.count_nonzero(~is_usable_N)
        say(
            f"private: {num_unusable:,} of {len(is_usable_N):,} training examples are unusable or "
            f"have no label below {num_classes}; they add nothing",
            file=sys.stderr,
        )
    return Rows(train.values_ND, np.where(is_usable_N, train.labels_N, 0))
