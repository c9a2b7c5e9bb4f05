import math

import pytest
import torch
from torch import nn

from trainer.config import OptimizerSection, ScheduleSection
from trainer.optimizer import decays, learning_rate, make_optimizer, parameter_groups

PEAK = 2e-3


def rates(num_steps: int, **schedule: object) -> list[float]:
    section = ScheduleSection.model_validate(schedule)
    return [learning_rate(step, num_steps, PEAK, section) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 10, 49, 50])
def test_every_step_moves_and_the_peak_ends_the_warm_up(warmup: int) -> None:
    found = rates(50, warmup_steps=warmup)
    assert all(rate > 0 for rate in found)
    assert max(found) == found[max(warmup, 1) - 1] <= PEAK
    if warmup:
        assert found[:warmup] == pytest.approx([PEAK * step / warmup for step in range(1, warmup + 1)])
        assert found[warmup - 1] == PEAK
    assert all(a > b for a, b in zip(found[max(warmup, 1) - 1 :], found[max(warmup, 1) :], strict=False)), (
        "then it falls"
    )


def test_cosine_in_numbers() -> None:
    """Warm-up 2, then 3 steps of a cosine that would be zero one step past the end."""
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)]
    assert rates(5, warmup_steps=2) == pytest.approx([PEAK / 2, PEAK, *(PEAK * c for c in cosine)])


def test_a_cosine_stopped_midway() -> None:
    """DP-Cap: 5,708 steps of a 10,000-step cosine end at 55.7 % of the peak."""
    short = rates(5708, warmup_steps=2000, decay_steps=10_000)
    assert short == rates(10_000, warmup_steps=2000)[:5708]
    assert short[1999] == PEAK and short[-1] / PEAK == pytest.approx(0.557, abs=1e-3)


def test_a_shorter_run_than_the_warm_up() -> None:
    assert rates(4, warmup_steps=10) == pytest.approx([PEAK * step / 10 for step in (1, 2, 3, 4)])


def test_final_fraction() -> None:
    found = rates(100, warmup_steps=10, final_fraction=0.1)
    assert 0.1 * PEAK < found[-1] < 0.102 * PEAK
    after = rates(100, warmup_steps=10, decay_steps=50, final_fraction=0.1)
    assert after[50:] == pytest.approx([0.1 * PEAK] * 50)


def test_constant() -> None:
    assert rates(6, warmup_steps=2, decay="constant") == [PEAK / 2] + [PEAK] * 5


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 4), True), ((16, 3, 8, 8), True), ((1, 10, 8), True), ((8,), False), ((1, 1, 8), False), ((), False)],
)
def test_weight_decay_is_for_matrices(shape: tuple[int, ...], expected: bool) -> None:
    assert decays(torch.Size(shape)) is expected


class TestGroups:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.model.named_parameters()}

    def groups(self, weight_decay: float) -> dict[float, set[int]]:
        found = parameter_groups(self.model.named_parameters(), self.shapes, weight_decay)
        assert len({group["weight_decay"] for group in found}) == len(found)
        return {group["weight_decay"]: {id(p) for p in group["params"]} for group in found}

    def test_each_parameter_once(self) -> None:
        matrices = {id(self.model[0].weight), id(self.model[2].weight)}
        others = {id(p) for p in self.model.parameters()} - matrices
        assert self.groups(0.005) == {0.005: matrices, 0.0: others}

    def test_without_decay_there_is_one_group(self) -> None:
        assert self.groups(0.0) == {0.0: {id(p) for p in self.model.parameters()}}

    def test_full_shapes_decide_where_parameters_are_sharded(self) -> None:
        """Under ZeRO-3 a parameter's own shape is (0,)."""
        sharded = [(name, nn.Parameter(torch.empty(0))) for name in self.shapes]
        found = parameter_groups(sharded, self.shapes, 0.1)
        assert {group["weight_decay"]: len(group["params"]) for group in found} == {0.1: 2, 0.0: 3}


def test_one_step_of_adamw() -> None:
    """First step: the sign of the gradient times the rate, and decoupled decay of the matrix alone."""
    model = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    config = OptimizerSection(peak_lr=1e-2, betas=(0.8, 0.9), eps=1e-12, weight_decay=0.5)
    optimizer = make_optimizer(parameter_groups(model.named_parameters(), shapes, config.weight_decay), config)
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 1e-2 for group in optimizer.param_groups)
    for p in model.parameters():
        p.grad = torch.full_like(p, -0.7)
    optimizer.step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 1e-2 * 0.5) + 1e-2)
    assert torch.allclose(model.bias, before["bias"] + 1e-2)
