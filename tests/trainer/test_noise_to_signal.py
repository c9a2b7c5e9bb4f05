"""Noise-to-signal against drawn noise and clipped signal, the sentence at its edges, and the choice of a batch."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privacy.accounting.accountants import (
    ReleaseGroup,
    effective_noise_multiplier,
    epsilon_rdp,
    total_amount_of_noise,
)
from privacy.errors import PrivacyConfigError
from privacy.noise.rounded_normal import deviation_in_units
from privacy.noise.source import SystemNoise, add_noise
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.options import OPTIONS
from privacy.plan.request import PlanRequest
from privacy.run.mechanism import clipper_of
from privacy.sums.totals import real_numbers
from trainer.config.recipe import load_config
from trainer.noise_to_signal import LARGEST_THAT_LEARNS, NoiseToSignal
from trainer.planner.choice import FEWEST_STEPS, WORTH_DOUBLING, choose
from trainer.planner.memory import trained_count
from trainer.planner.resources import planning_task

ROOT = Path(__file__).resolve().parents[2]
REQUEST = PlanRequest(
    num_examples=10_000,
    expected_batch_size=200,
    num_steps=600,
    target_epsilon=8.0,
    target_delta=1e-5,
)


class Pull(nn.Module):
    """Every example pulls the weights in one direction, with a gradient far longer than C."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 1, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.layer(x_BD)[:, 0]


def test_ratios_are_those_of_real_sums_and_real_noise() -> None:
    """Steps of the plan's own clipper and noise on examples that all agree: the most signal that there can be."""
    size, batch, steps, bound = 20_000, 12, 25, 0.37
    plan = make_plan(
        PlanRequest(
            num_examples=1000,
            expected_batch_size=batch,
            num_steps=steps,
            noise_multiplier=1.7,
            max_grad_norm=bound,
        )
    )
    torch.manual_seed(0)
    model, x_BD = Pull(size), torch.randn(1, size).expand(batch, size).contiguous()
    found = NoiseToSignal.of(plan, size)
    assert found is not None
    clipped = clipper_of(plan, model)
    clipped.add_micro_batch(model, {"x_BD": x_BD}, torch.zeros(batch, dtype=torch.bool))
    ((_, total),) = clipped.sums()
    signal = total.double().flatten() / batch
    source, noises = SystemNoise(), []
    for _ in range(steps):
        noise = torch.zeros(size, dtype=torch.int64)
        add_noise(noise, deviation_in_units(1.7 * clipped.sensitivity, clipped.exponent), source)
        noises.append(real_numbers(noise, clipped.exponent) / batch)
    lengths = [float(noise.norm() / signal.norm()) for noise in noises]
    assert np.mean(lengths) == pytest.approx(found.per_step, rel=0.01)
    assert float(sum(noises).norm() / (steps * signal.norm())) == pytest.approx(
        found.accumulated, rel=0.03
    )
    assert float(signal.norm()) == pytest.approx(bound, rel=2e-3)


def test_the_accumulated_ratio_is_the_total_amount_of_noise() -> None:
    """TAN sqrt(P / 2) / n (Sander et al. 2023): at one TAN, batch and steps do not matter."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, steps, parameters = (
            int(rng.integers(100, 10**8)),
            int(rng.integers(1, 10**4)),
            int(rng.integers(1, 10**9)),
        )
        batch, sigma = int(rng.integers(1, n)), float(rng.uniform(0.3, 20))
        found = NoiseToSignal(parameters, sigma, batch, steps)
        amount = total_amount_of_noise([ReleaseGroup(batch / n, sigma, steps)])
        assert found.accumulated == pytest.approx(amount * math.sqrt(parameters / 2) / n)


def test_nothing_without_noise_and_the_same_for_every_way_to_clip() -> None:
    request = replace(REQUEST, target_epsilon=None, noise_multiplier=1.0)
    plain = NoiseToSignal.of(make_plan(request), 1000)
    assert plain is not None
    assert NoiseToSignal.of(make_plan(replace(request, noise_multiplier=0.0)), 1000) is None
    assert (
        NoiseToSignal.of(make_plan(replace(request, enabled=False, noise_multiplier=None)), 1000)
        is None
    )
    others = [
        {"clipping_function": name} for name in OPTIONS["clipping_function"] if name != "flat"
    ]
    others += [
        {"arithmetic": "certified"},
        {"max_grad_norm": 1e-3},
        {"informal_reasons": ("a simulation",)},
    ]
    for other in others:
        assert NoiseToSignal.of(make_plan(replace(request, **other)), 1000) == plain


SENTENCES = (
    "as published runs",
    "as small runs that learned",
    "open",
    "as runs that learned nothing",
)


def rank(found: NoiseToSignal) -> int:
    """Which of the four sentences it is: the higher, the worse."""
    (number,) = (
        number
        for number, words in enumerate(SENTENCES)
        if re.match(rf"{words}\b(?! nothing)", found.sentence)
    )
    assert found.learns is (True, True, None, False)[number] and found.sentence in found.line
    assert (
        found.as_json()["sentence"] == found.sentence and found.as_json()["learns"] is found.learns
    )
    return number


def of_ratios(per_step: float, accumulated: float, kind: str) -> NoiseToSignal:
    """One parameter and a batch of one, so that sigma is the ratio per step."""
    return NoiseToSignal(1, per_step, 1, max(1, round((per_step / accumulated) ** 2)), kind)


@pytest.mark.parametrize("kind", LARGEST_THAT_LEARNS)
def test_more_noise_never_has_a_better_sentence(kind: str) -> None:
    """Over both ratios, far below the published runs and far above all; every sentence is seen."""
    found = []
    for accumulated in np.geomspace(1e-5, 30, 40):
        found += [
            of_ratios(accumulated * steps**0.5, accumulated, kind)
            for steps in (1, 7, 60, 500, 6000, 10**5)
        ]
    ranks = [(one.per_step, one.accumulated, rank(one)) for one in found]
    assert {worst for *_, worst in ranks} == {0, 1, 2, 3}
    for per_step, accumulated, better in ranks:
        assert all(worse >= better for p, a, worse in ranks if p >= per_step and a >= accumulated)


@pytest.mark.parametrize(
    "name", ["dpcap_tiny", "dpcap_base", "dpcap_large", "vip_nano", "vip_base", "vip_large"]
)
def test_recipes_of_publications_read_as_published(name: str) -> None:
    config = load_config(ROOT / f"recipes/{name}.toml")
    assert config.data.num_examples is not None
    parameters = trained_count(planning_task(config, ROOT)[0].skeleton())
    plan = make_plan(config.privacy.request(config.train.num_steps, config.data.num_examples))
    found = NoiseToSignal.of(plan, parameters, config.model.kind)
    assert found is not None and rank(found) == 0
    if name == "dpcap_base":
        assert f"{found.per_step:.4f}" == "0.0074"


# The choice


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_the_choice_is_feasible_and_the_best_of_its_row(seed: int) -> None:
    """It keeps compute, data and epsilon, and no step along the row of powers of two is better by the rule.

    A delta below 1e-12, which exact noise allows, is accounted by RDP, which is fast; epsilon is recomputed from numbers.
    """
    rng = np.random.default_rng(seed)
    n, own, target = (
        int(10 ** rng.uniform(3, 5)),
        2 ** int(rng.integers(3, 8)),
        float(rng.uniform(1, 10)),
    )
    steps = int(n * rng.uniform(1, 10)) // own + FEWEST_STEPS
    sizes = {"num_examples": n, "expected_batch_size": own, "num_steps": steps}
    request = PlanRequest(
        **sizes, target_epsilon=target, target_delta=1e-13, cap=None, arithmetic="certified"
    )
    chosen, largest = choose(request, 100_000), min(n, own * steps // FEWEST_STEPS)
    batch = chosen["expected_batch_size"]
    assert (
        1 <= batch <= largest and chosen["num_steps"] == round(own * steps / batch) >= FEWEST_STEPS
    )

    def resized(size: int) -> PrivacyPlan:
        return make_plan(
            replace(request, expected_batch_size=size, num_steps=round(own * steps / size))
        )

    def ratio(size: int) -> float:
        found = NoiseToSignal.of(resized(size), 100_000)
        assert found is not None
        return found.accumulated

    assert 2 * batch > largest or ratio(2 * batch) > (1 - WORTH_DOUBLING) * ratio(batch)
    assert batch == 1 or batch % 2 or ratio(batch) <= (1 - WORTH_DOUBLING) * ratio(batch // 2)
    assert chosen["noise_to_signal"]["accumulated"] == pytest.approx(ratio(batch), rel=0.02)
    plan = resized(batch)
    sigma = effective_noise_multiplier(plan.noise_multiplier, plan.sensitivity_slack)
    group = ReleaseGroup(plan.sample_rate, sigma, plan.num_steps + plan.reserved_attempts)
    assert (
        epsilon_rdp([group], plan.accounted_delta) <= target
        and chosen["epsilon_with_reserve"] <= target
    )


def test_a_choice_needs_poisson_sampling_and_an_epsilon() -> None:
    wrong = [
        replace(REQUEST, target_epsilon=None, noise_multiplier=1.0),
        replace(REQUEST, sampling="shuffle"),
        replace(REQUEST, enabled=False),
        replace(REQUEST, informal_reasons=("a simulation",)),
    ]
    for request in wrong:
        with pytest.raises(
            PrivacyConfigError, match="needs a private run, Poisson sampling and a target"
        ):
            choose(request, 1000)
