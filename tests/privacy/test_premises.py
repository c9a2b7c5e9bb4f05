"""The premises of the proof: an honest run has them, and an object that violates one by the least is refused before a charge."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evaluation.private_head.methods import METHODS
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import head_plan, train_head
from privacy import verify
from privacy.accounting.accountants import ReleaseGroup
from privacy.clipping import ClippedSum
from privacy.errors import PrivacyConfigError
from privacy.guards import premises
from privacy.guards.premises import NoisedSum, require_noised, require_premises
from privacy.noise.source import SystemNoise
from privacy.numerics import precision
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import SENSITIVITY_SLACK, Release
from privacy.plan.request import PlanRequest
from privacy.ranks.engine import Piece, ShardLayout, even_layout
from privacy.run.mechanism import clipper_of
from privacy.sampling.sampler import sampler_of
from privacy.step.batches import max_rows
from privacy.step.step import Mechanism
from privacy.sums.grid import Grid, Unit
from privacy.sums.totals import SumTarget
from tests.privacy.loop.own import make, quick

KINDS: dict[str, dict[str, Any]] = {
    "floating": {},
    "float64": {},
    "without a cap": {"cap": None},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
}


@dataclass
class Opened:
    """The objects of a run that is about to be opened; a test changes one of them."""

    plan: PrivacyPlan
    sampler: Any
    clipped: ClippedSum
    engine: Any
    micro_batch_size: int = 8

    def require(self) -> None:
        mechanism = Mechanism(
            self.plan, self.sampler, self.clipped, SystemNoise(), self.engine, self.engine
        )
        require_premises(mechanism, self.micro_batch_size)


def opened(kind: str = "floating", **changes: Any) -> Opened:
    """A run of a model with a large and two small parameters."""
    asked: dict[str, Any] = {
        "num_examples": 1700,
        "expected_batch_size": 70,
        "num_steps": 5,
        "noise_multiplier": 1.1,
        "max_grad_norm": 0.7,
        "sensitivity_slack": SENSITIVITY_SLACK,
    }
    plan = make_plan(PlanRequest(**asked | KINDS[kind] | changes))
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30))
    model = model.double() if kind == "float64" else model
    clipped = clipper_of(plan, model, rows=max_rows(sampler_of(plan), 8, (), 70))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    dtype, device = next(model.parameters()).dtype, torch.device("cpu")
    return Opened(
        plan,
        sampler_of(plan),
        clipped,
        SimpleNamespace(
            shapes=shapes, layout=even_layout(shapes, 1), compute_dtype=dtype, device=device
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_run_has_all_premises(kind: str) -> None:
    opened(kind).require()


def coarser(of: Opened) -> None:
    """Steps one bit coarser than the coarsest with sqrt(d) h <= 2^-13 C, which would do."""
    num_coordinates = of.engine.layout.count(0)
    allowed = next(f for f in range(60) if num_coordinates * 4**13 <= Fraction(0.7) ** 2 * 4**f)
    of.clipped.accumulator.unit = Unit(allowed, 1 << allowed)
    of.require()
    of.clipped.accumulator.unit = Unit(allowed - 1, 1 << allowed)


def owned(change: Callable[[list[Piece]], list[Piece]]) -> Callable[[Opened], None]:
    def changed(of: Opened) -> None:
        of.engine.layout = ShardLayout((tuple(change(list(of.engine.layout.pieces[0]))),))

    return changed


def untold(of: Opened) -> None:
    del of.engine.shapes["1.bias"]
    of.engine.layout = even_layout(of.engine.shapes, 1)


def less_noise(of: Opened) -> None:
    """The next smaller double that the noise would have, in place of sigma C or a little more."""
    release = of.clipped.release(1.1)
    std = release["std"]
    while Fraction(math.nextafter(std, math.inf)) >= Fraction(1.1) * Fraction(0.7):
        std = math.nextafter(std, 0)
    of.clipped.release = lambda _: release | {"std": std}  # type: ignore[method-assign]


def more_noise_charged(of: Opened) -> None:
    charge(of, noise_multiplier=of.plan.effective_noise_multiplier * (1 + 2**-48))


def charge(of: Opened, **changes: Any) -> None:
    """Another release group than the plan's is what the accountant gets."""
    charged = replace(of.plan.release_group(1), **changes)
    of.plan.__dict__["release_group"] = lambda count: charged.times(count)


def sample(of: Opened, **changes: Any) -> None:
    """Other coins than the plan's are those that the run would take."""
    of.sampler = replace(of.sampler, **changes)


def another_divisor(of: Opened) -> None:
    of.plan = replace(of.plan, expected_batch_size=71)


def many_rows(of: Opened) -> None:
    unit = of.clipped.accumulator.unit
    assert unit is not None and of.clipped.grid.layout == "int32+int16"
    of.clipped.grid = replace(of.clipped.grid, rows=(2**15 - 4) * 2**30 // unit.largest + 1)


def wrapping(of: Opened) -> None:
    unit = of.clipped.accumulator.unit
    assert unit is not None
    of.clipped.grid = replace(of.clipped.grid, layout="int64", rows=-(-(2**62) // unit.largest))


VIOLATIONS: dict[str, tuple[str, Callable[[Opened], None]]] = {
    "a step that is too coarse": ("round by at most 2\\^-13 C", coarser),
    "a coordinate without owner": (
        "has no owner",
        owned(lambda pieces: [*pieces[:-1], pieces[-1]._replace(length=29)]),
    ),
    "a coordinate with two owners": (
        "owned twice",
        owned(lambda pieces: [*pieces, Piece("0.bias", 29, 1)]),
    ),
    "an owner of something else": (
        "is not a trained parameter",
        owned(lambda pieces: [*pieces, Piece("2.bias", 0, 1)]),
    ),
    "a parameter without noise": ("that are summed", untold),
    "less noise than sigma C": ("worth sigma", less_noise),
    "more noise charged than sigma / (1 + r)": ("what is charged", more_noise_charged),
    "another slack": (
        "what is charged",
        lambda of: setattr(
            of, "plan", replace(of.plan, sensitivity_slack=SENSITIVITY_SLACK - 1e-12)
        ),
    ),
    "a rate that is rounded down": (
        "q is rounded up",
        lambda of: charge(of, sample_rate=math.nextafter(of.plan.sample_rate, 0)),
    ),
    "a sampler with another cap": (
        "cap that is charged",
        lambda of: sample(of, cap=of.sampler.cap + 1),
    ),  # type: ignore[operator]
    "a sampler of more examples": ("number of examples", lambda of: sample(of, num_examples=1701)),
    "another divisor": ("divided by B = q n = 70, and not by 71", another_divisor),
    "more rows than 6 bytes hold": ("fits into 6 bytes", many_rows),
    "more rows than 62 bits hold": ("stays below 2\\^62 steps", wrapping),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_an_object_that_violates_a_premise_is_refused(name: str) -> None:
    words, violate = VIOLATIONS[name]
    of = opened()
    of.require()
    violate(of)
    with pytest.raises(PrivacyConfigError, match=words) as refused:
        of.require()
    assert "\n" not in str(refused.value)


def test_a_run_with_one_member_more_than_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = opened()
    most = of.sampler.cap
    assert most is not None
    for rows, raises in ((most, False), (most - 1, True)):
        monkeypatch.setattr(premises, "max_micro_batches", lambda *_, rows=rows: rows)
        of.micro_batch_size = 1
        if raises:
            with pytest.raises(PrivacyConfigError, match=f"{most} members of a step have rows"):
                of.require()
        else:
            of.require()


@pytest.mark.parametrize("changed", ["step", "bound", "owners"])
def test_ranks_that_differ_are_refused(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = opened()
    of.engine.layout = even_layout(of.engine.shapes, 2)

    def two(check: Callable[[], tuple[tuple[Any, ...], int]]) -> list[tuple[tuple[Any, ...], int]]:
        (step, bound, owners), rows = check()
        second = {
            "nothing": (step, bound, owners),
            "step": (step + 1, bound, owners),
            "bound": (step, math.nextafter(bound, 1), owners),
            "owners": (step, bound, b"others"),
        }
        return [((step, bound, owners), rows), (second[differs], rows)]

    monkeypatch.setattr(premises.collectives, "refuse_together", two)
    differs = "nothing"
    of.require()
    differs = changed
    with pytest.raises(PrivacyConfigError, match="same step"):
        of.require()


@pytest.mark.parametrize("excess", [0, 1])
def test_rows_of_all_ranks_together_have_room_in_a_sum(
    excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either rank alone has half of the rows for which 62 bits have room."""
    of = opened()
    of.engine.layout = even_layout(of.engine.shapes, 2)
    unit = of.clipped.accumulator.unit
    assert unit is not None
    most = (2**62 - 1) // unit.largest

    def two(check: Callable[[], tuple[Any, int]]) -> list[tuple[Any, int]]:
        facts, _ = check()
        return [(facts, most // 2), (facts, most - most // 2 + excess)]

    monkeypatch.setattr(premises.collectives, "refuse_together", two)
    refusal = pytest.raises(PrivacyConfigError, match=r"stays below 2\^62 steps")
    with refusal if excess else contextlib.nullcontext():
        of.require()


def test_sums_of_one_example_more_in_single_precision_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SumTarget, "examples", 65)
    opened("float64").require()
    with pytest.raises(PrivacyConfigError, match=r"a sum of 65 examples in torch\.float32"):
        opened().require()


def test_products_that_are_not_exact_are_refused_though_the_clipper_was_made_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = opened()
    monkeypatch.setattr(precision, "_inexact_product", lambda *_: "products (mm)")
    with pytest.raises(PrivacyConfigError, match="are not exact"):
        of.require()


SLACK = 1e-3
CHARGED = ReleaseGroup(1.0, 1 / (1 + SLACK), 1)


def require_one(
    *, std: float = 1.5, bound: float = 1.0, d: int = 1, num_rows: int = 1, slack: float = SLACK
) -> None:
    """A sum in steps of 2^-20 that is charged with sigma = 1."""
    release = Release(name="sum", std=std, sensitivity=bound)
    require_noised([NoisedSum(release, d, Unit(20, 1 << 20), num_rows)], CHARGED, 1.0, slack)


EDGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("round by at most", {"d": 4**7}, {"d": 4**7 + 1}),
    ("2\\^62 steps", {"num_rows": 2**42 - 1}, {"num_rows": 2**42}),
    ("2\\^50 steps", {"std": math.nextafter(2.0**30, 0)}, {"std": 2.0**30}),
    (
        "worth sigma",
        {"std": math.nextafter(1.0, 0)},
        {"std": 1 - 2**-52},
    ),  # a double above it is drawn
    ("what is charged", {"slack": SLACK}, {"slack": SLACK + 2**-48}),
    *(("finite number", {"bound": 1.0}, {"bound": bound}) for bound in (math.inf, math.nan, 0.0)),
]


@pytest.mark.parametrize(("words", "holds", "violates"), EDGES)
def test_a_premise_of_a_sum_holds_up_to_its_edge(
    words: str, holds: dict[str, Any], violates: dict[str, Any]
) -> None:
    require_one(**holds)
    with pytest.raises(PrivacyConfigError, match=words):
        require_one(**violates)


def test_sums_that_round_nothing_may_have_any_step() -> None:
    """And certified arithmetic, whose integers are checked one by one, is charged with sigma itself."""
    release = Release(name="sum", std=1.0, sensitivity=1.0)
    require_noised(
        [NoisedSum(release, 10**9, Unit(20, 1 << 20), 1)], ReleaseGroup(1.0, 1.0, 1), 1.0, 0.0
    )


def test_several_releases_that_are_worth_less_than_sigma_are_refused() -> None:
    """Two sums that share sigma = 1 by halves, as the statistics of a private head do."""
    half = Release(name="half", std=math.sqrt(2) * (1 + 1e-15), sensitivity=1.0)
    shared = NoisedSum(half, 1, Unit(20, 1 << 20), 1)
    require_noised([shared, shared], CHARGED, 1.0, SLACK)
    less = shared._replace(release=half | {"std": half["std"] * (1 - 1e-9)})
    with pytest.raises(PrivacyConfigError, match="noise of all releases is worth sigma"):
        require_noised([shared, less], CHARGED, 1.0, SLACK)


def test_what_claims_nothing_needs_no_premise_but_its_owners() -> None:
    """A simulation of less noise, a run without noise, and one without privacy."""
    for changes in (
        {"informal_reasons": ("a simulation",)},
        {"noise_multiplier": 0.0},
        {"enabled": False},
    ):
        of = opened(**changes)
        if of.clipped.exponent is not None:
            charge(of, noise_multiplier=9.0)
        of.require()
        of.engine.layout = ShardLayout((of.engine.layout.pieces[0][1:],))
        with pytest.raises(PrivacyConfigError, match="has no owner"):
            of.require()


def start_loop(folder: Path) -> None:
    with quick(), make(folder) as loop:
        next(iter(loop))


def start_head(folder: Path) -> None:
    features, labels = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    train_head(Rows(features, labels), 3, next(iter(METHODS)), epsilon=4.0, output=folder)


@pytest.mark.parametrize("start", [start_loop, start_head])
def test_a_start_without_a_premise_charges_nothing(
    start: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one of the trainer: tests/trainer/test_refused_starts.py."""
    usual = Grid.of
    monkeypatch.setattr(
        Grid, "of", lambda *given, **named: replace(usual(*given, **named), bits=13)
    )
    with pytest.raises(
        PrivacyConfigError, match=r"a premise of the guarantee does not hold: .* round by at most"
    ):
        start(tmp_path / "run")
    assert not (tmp_path / "run/ledger.jsonl").exists() and not list(tmp_path.rglob("sampling.key"))


# The same from a ledger alone


def edge(holds: Callable[[int], bool], first: int, step: int) -> int:
    """The last of first, first + step, ... that holds, as the exact inequality says."""
    return next(f for f in range(first, 300 * step, step) if not holds(f + step))


def verified(plan: PrivacyPlan, d: int, exponent: int) -> None:
    read = verify.read_plan(json.loads(json.dumps(plan.frozen_fields())), head=False)
    verify.check_sum_exponent({"sum_exponent": exponent, "noised_coordinates": d}, read)


def test_the_verifier_asks_for_steps_that_are_fine_enough_and_have_room() -> None:
    bound, d = Fraction(0.7), 1290
    plan = opened().plan
    coarsest = edge(lambda f: d * 4**13 <= bound**2 * 4**f, 40, -1)
    drawn = edge(lambda f: Fraction(1.1) * bound * 2**f <= 2**50, 40, 1)
    many = opened(num_examples=10**8, expected_batch_size=10**7, cap=10**7).plan
    whole = edge(lambda f: 10**7 * bound * (1 + Fraction(SENSITIVITY_SLACK)) * 2**f < 2**62, 30, 1)
    assert whole < drawn
    for of, last, beyond, words in (
        (plan, coarsest, coarsest - 1, "by more than 2\\^-13 C"),
        (plan, drawn, drawn + 1, "the noise passes 2\\^50"),
        (many, whole, whole + 1, "a sum of 10000000 examples passes 2\\^62"),
    ):
        verified(of, d, last)
        with pytest.raises(verify.Violated, match=words):
            verified(of, d, beyond)


def test_the_verifier_asks_for_the_steps_of_a_head_s_statistics() -> None:
    plan = head_plan(1000, 4.0, None)
    read = verify.read_plan(json.loads(json.dumps(plan.frozen_fields())), head=True)
    release = {"name": "moments", "std": 3.0, "sensitivity": 1.0}
    whole = edge(lambda f: 1000 * 2**f < 2**62, 30, 1)
    drawn = edge(lambda f: 3 * 2**f <= 2**50, 30, 1)
    for std, last, words in (
        (3.0, drawn, "the noise passes 2\\^50"),
        (0.001, whole, "a sum of 1000 examples passes 2\\^62"),
    ):
        stated = [release | {"std": std}]
        verify.check_sum_exponents_of_head({"sum_exponents": {"moments": last}}, read, stated)
        with pytest.raises(verify.Violated, match=words):
            verify.check_sum_exponents_of_head(
                {"sum_exponents": {"moments": last + 1}}, read, stated
            )
    for exponents in ({}, {"moments": 20, "other": 20}, {"moments": 20.5}):
        with pytest.raises(verify.Violated, match="must state a step for each release"):
            verify.check_sum_exponents_of_head({"sum_exponents": exponents}, read, [release])
