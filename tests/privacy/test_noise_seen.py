"""Norms of noised sums refute noise that was stated and not drawn, and no honest run, by both implementations.

The conditions are those of privacy/noise/refutation.py; verify.py has its own copy of the test.
"""

import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn

from privacy import verify
from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.noise import refutation
from privacy.noise.source import SystemNoise
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from tests.privacy.cards import without_surroundings
from tests.privacy.loop.own import D, K, make, rows
from tests.privacy.published import ASKED, COORDINATES, exponent_of, noised

STEPS = 40


def plan_of(steps: int = STEPS, **changes: Any) -> PrivacyPlan:
    return make_plan(PlanRequest(**ASKED | {"num_steps": steps} | changes))


PLAN = plan_of(max_grad_norm=3.0)
Stated = Callable[[PrivacyPlan, float, int], dict[str, Any]]


def ledger_of(
    path: Path,
    plan: PrivacyPlan,
    stated: Stated,
    coordinates: int = COORDINATES,
    exponent: int | None = None,
) -> Path:
    """A ledger of all steps of a plan; `stated` is what each `done` states."""
    fields = {
        "plan": plan.frozen_fields(),
        "key_commitment": "ab" * 32,
        "noised_coordinates": coordinates,
    }
    fields["sum_exponent"] = exponent_of(plan, coordinates) if exponent is None else exponent
    path.unlink(missing_ok=True)
    with Ledger.create(path, fields) as ledger:
        ledger.start_session({})
        release = release_of_step(plan.noise_multiplier, plan.max_grad_norm)
        for step in range(1, plan.num_steps + 1):
            ledger.intent(step, 0, [release])
            ledger.done(step, 0, **stated(plan, release["std"], step))
    return path


def refuted(path: Path) -> str:
    """What both implementations call too small, in words; "" where the noise is not refuted."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    ours, theirs = refutation.noise_seen(records)[1], ""
    try:
        verify.noise_of_ledger(verify.read_ledger(path))
    except verify.Violated as error:
        theirs = str(error)
    assert bool(ours) == bool(theirs), (ours, theirs)
    assert theirs == "" or set(ours[:9]) <= {
        word.strip() for word in theirs.partition("the norm of ")[2].split(",")
    }
    return ", ".join(ours)


@pytest.fixture(autouse=True)
def _no_fsync(no_fsync: None) -> None:
    """Durability is not what these tests are about."""


def drawn(
    seed: int, part: float = 1.0, owners: tuple[int, ...] = (COORDINATES,), silent: int = -1
) -> Stated:
    """Honest noise and no sum, the worst case of an honest run; a part of the noise, or one owner without any."""
    rng = np.random.default_rng(seed)

    def stated(plan: PrivacyPlan, std: float, step: int) -> dict[str, Any]:
        scale = std / plan.expected_batch_size
        squares = [
            part**2 * rng.chisquare(count) * (number != silent)
            for number, count in enumerate(owners)
        ]
        said: dict[str, Any] = {"noised_norm": float(f"{scale * math.sqrt(sum(squares)):.9g}")}
        if len(owners) > 1:
            worst = min(
                range(len(owners)),
                key=lambda one: (squares[one] - owners[one]) / math.sqrt(owners[one]),
            )
            norm = float(f"{scale * math.sqrt(squares[worst]):.9g}")
            said["smallest_share"] = {
                "owners": len(owners),
                "coordinates": owners[worst],
                "norm": norm,
            }
        return said

    return stated


SHARDS = (12_000, 7_997, 3)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize(
    "owners", [(COORDINATES,), SHARDS, (1,) * 3], ids=["one owner", "shards", "few coordinates"]
)
def test_honest_noise_is_not_refuted(seeds: range, owners: tuple[int, ...], tmp_path: Path) -> None:
    for seed in seeds:
        path = ledger_of(tmp_path / "ledger.jsonl", PLAN, drawn(seed, owners=owners), sum(owners))
        assert refuted(path) == "", f"seed {seed}"


def whole_steps(seed: int, coordinates: int, step: float) -> Stated:
    """Honest noise and no sum, in whole steps: what a coarse step leaves of it."""
    rng = np.random.default_rng(seed)

    def stated(plan: PrivacyPlan, std: float, _: int) -> dict[str, Any]:
        norm = float(np.linalg.norm(np.rint(rng.normal(size=coordinates) * std / step))) * step
        return {"noised_norm": float(f"{norm / plan.expected_batch_size:.9g}")}

    return stated


@pytest.mark.parametrize("deviation", [0.2, 0.6, 3.0, 40.0], ids=lambda s: f"{s} steps")
@pytest.mark.parametrize("coordinates", [1, 3, 5000])
def test_honest_noise_in_coarse_steps_is_not_refuted(
    deviation: float, coordinates: int, tmp_path: Path
) -> None:
    """Half a step for each coordinate: a factor 1 + 1 / (2 s) on the norm would refute s = 0.2, where most draws are 0."""
    exponent = 13  # 2^-13 C, the coarsest step that one coordinate may have
    exponent += math.ceil(math.log2(coordinates) / 2)
    sigma = deviation * 2.0**-exponent
    plan = plan_of(20, noise_multiplier=sigma, allow_small_noise=True, informal_reasons=("a test",))
    stated = whole_steps(int(10 * deviation), coordinates, 2.0**-exponent)
    assert refuted(ledger_of(tmp_path / "ledger", plan, stated, coordinates, exponent)) == ""
    if deviation == 40.0 and coordinates > 1000:  # and what is refuted still is

        def half(plan: PrivacyPlan, std: float, step: int) -> dict[str, Any]:
            return stated(plan, std / 2, step)

        assert "step 1" in refuted(ledger_of(tmp_path / "half", plan, half, coordinates, exponent))


LIES = {  # what was drawn in place of the stated noise
    "halved": drawn(0, 0.5),
    "a hundredth less": drawn(0, 0.99),
    "for C = 1": drawn(0, 1 / PLAN.max_grad_norm),
    "none on one owner of three": drawn(0, owners=SHARDS, silent=1),
}


@pytest.mark.parametrize("name", LIES)
def test_noise_that_was_not_drawn_is_refuted(name: str, tmp_path: Path) -> None:
    said = refuted(ledger_of(tmp_path / "ledger.jsonl", PLAN, LIES[name]))
    assert "all steps together" in said if "one owner" not in name else "step 1," in said


def test_a_sum_over_all_owners_hides_one_of_them(tmp_path: Path) -> None:
    """One owner of 500 without noise makes the whole 0.999 as long; the smallest share shows it."""
    owners = (COORDINATES // 500,) * 500
    honest, lying = drawn(1, owners=owners), drawn(1, owners=owners, silent=7)
    assert refuted(ledger_of(tmp_path / "a", plan_of(4), honest)) == ""
    assert refuted(ledger_of(tmp_path / "b", plan_of(4), lying)).startswith("step 1, step 2")

    def whole(*arguments: Any) -> dict[str, Any]:
        said = lying(*arguments)
        return {name: said[name] for name in said if name != "smallest_share"}

    assert refuted(ledger_of(tmp_path / "c", plan_of(4), whole)) == ""


@pytest.mark.parametrize("coordinates", [1, 2, 53, 999, 1000, 10**9])
def test_the_quantile_is_exact_below_1000_coordinates_and_a_bound_above(coordinates: int) -> None:
    """At levels of one and of very many comparisons."""
    for level in (1e-9, 1e-15):
        edge = coordinates - 2 * math.sqrt(coordinates * math.log(1 / level))
        edge = float(chi2.ppf(level, coordinates)) if coordinates < 1000 else edge
        for judge in (refutation.is_too_small, verify.too_small):
            assert judge(edge * (1 - 1e-6), coordinates, level) and not judge(
                edge * (1 + 1e-6), coordinates, level
            )
        if coordinates < 10**6:
            assert chi2.cdf(edge, coordinates) <= level * (1 + 1e-6), (
                "no false alarm beyond the level"
            )


@pytest.mark.parametrize(
    ("coordinates", "part", "said"),
    [
        (COORDINATES, 1.0, ""),
        (2 * COORDINATES, 1.0, "all steps together"),  # what is counted twice is a false alarm
        (COORDINATES, 1e3, ""),  # large norms say nothing, since data may make them
    ],
)
def test_the_test_is_one_sided_and_needs_the_very_number_of_coordinates(
    coordinates: int, part: float, said: str, tmp_path: Path
) -> None:
    path = ledger_of(
        tmp_path / "l", plan_of(4), lambda *arguments: noised(*arguments, part=part), coordinates
    )
    assert said in refuted(path) and (said != "" or refuted(path) == "")


def test_a_norm_that_one_done_leaves_out_is_refused_by_both_readers(tmp_path: Path) -> None:
    """Otherwise whoever publishes would leave out what betrays the run."""
    path = ledger_of(tmp_path / "ledger.jsonl", plan_of(2), noised)
    with pytest.raises(PrivacyStateRefused, match="does not state the norm of the noised gradient"):
        ledger_of(tmp_path / "more.jsonl", plan_of(2), lambda *_: {})
    read = verify.read_ledger(path)
    read.releases[1][-1].pop("noised_norm")
    with pytest.raises(verify.Violated, match="`done` of step 2 does not state what was noised"):
        verify.noise_of_ledger(read)


# Real steps


class Weak(SystemNoise):
    """Half of the noise, as a wrong factor somewhere would make it."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return super().rounded_normal(0.5 * deviation, count, device)


class Tied(nn.Module):
    """A frozen layer, a trained one, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(D, 64).requires_grad_(False)
        self.twice = nn.Linear(64, 64)
        self.again = self.twice
        self.head = nn.Linear(64, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.twice(torch.tanh(self.frozen(x))))))


@pytest.mark.parametrize("noise", [SystemNoise, Weak])
def test_a_loop_of_one_s_own_states_norms_and_halved_noise_is_refuted(
    noise: type[SystemNoise], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P is counted once a coordinate: frozen parameters are none, a layer that is used twice is one."""
    without_surroundings(monkeypatch)
    monkeypatch.setattr("privacy.run.mechanism.SystemNoise", noise)
    model = Tied()
    with make(tmp_path / "run", model, rows(), num_steps=3) as loop:
        norms = [step.noised_grad_norm for step in islice(loop, 3)]
        card = json.loads((loop.write_card() / "privacy_card.json").read_text())
    state = read_ledger(tmp_path / "run/ledger.jsonl")
    assert state.opened["noised_coordinates"] == 64 * 64 + 64 + 64 * K + K
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_bytes().splitlines()]
    stated = [line["noised_norm"] for line in lines if line["type"] == "done"]
    assert stated == [float(f"{norm:.9g}") for norm in norms]
    code, found = verify.verify(tmp_path / "run")
    said = next(check for check in found["checks"] if check["name"] == "noise")
    page = (tmp_path / "run/report/privacy_card.md").read_text()
    if noise is SystemNoise:
        assert code == 0 and said["sentence"].startswith(
            "not refuted: 3 norms over 4355 coordinates"
        ), found["checks"]
        assert (
            "| drawn noise | not refuted: 3 norms over 4,355 coordinates" in page
            and "believe no" not in page
        )
    else:
        assert code == 5 and said["outcome"] == "violated" and "step 1" in said["sentence"]
        assert "| drawn noise | refuted" in page and any(
            "believe no epsilon" in line for line in card["warnings"]
        )
