import math

import pytest
import torch

from trainer.config.recipe import ScheduleSection
from trainer.loop.schedule import learning_rate

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


def test_final_fraction() -> None:
    found = rates(100, warmup_steps=10, final_fraction=0.1)
    assert 0.1 * PEAK < found[-1] < 0.102 * PEAK
    after = rates(100, warmup_steps=10, decay_steps=50, final_fraction=0.1)
    assert after[50:] == pytest.approx([0.1 * PEAK] * 50)


@pytest.mark.parametrize("warmup", [0, 10, 70])
def test_vips_released_schedule(warmup: int) -> None:
    """min((t + 1) / warm-up, (1 + cos(pi t / T)) / 2) at t = 0, 1, ..., by torch's LambdaLR, as its training script has it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        sgd, lambda t: min((t + 1) / max(warmup, 1), 0.5 * (1 + math.cos(math.pi * t / 100)))
    )
    expected = []
    for _ in range(100):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    assert rates(100, warmup_steps=warmup, decay="cosine_from_start") == pytest.approx(expected)
    assert all(rate > 0 for rate in expected) and (warmup != 10 or max(expected) < PEAK), "the cosine has begun to fall"
