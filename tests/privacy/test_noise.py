import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from privacy.noise import source as noise
from privacy.noise.rounded_normal import draw_rounded_normal
from privacy.noise.source import SystemNoise, add_noise
from privacy.plan.limits import MOST_DEVIATION

CPU = torch.device("cpu")
DEVIATION = 0.7 * 2.0**34
"""A usual one, in steps of a sum: equal numbers are rare."""


def _check_normal(draw: torch.Tensor, deviation: float) -> None:
    assert draw.dtype == torch.int64
    values = draw.cpu().numpy() / deviation
    edges = stats.norm.ppf(np.linspace(0, 1, 65))
    counts = np.histogram(values, edges)[0]
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    for moment, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((values**moment).mean() - expected) < 5 * math.sqrt(variance / len(values))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) * math.sqrt(len(values)) < 5


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_contract_7_draws_of_several_threads_are_normal_and_none_comes_twice(
    four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a key of its own for every piece: a shared stream would give parts that are equal or correlated."""
    drawing: set[int] = set()

    def watched(deviation: float, count: int, source: SystemNoise) -> np.ndarray:
        drawing.add(threading.get_ident())
        return draw_rounded_normal(deviation, count, source)

    monkeypatch.setattr(noise, "draw_rounded_normal", watched)
    draw = SystemNoise().rounded_normal(DEVIATION, 1_000_003, CPU)
    _check_normal(draw, DEVIATION)
    assert len(drawing) == 4
    parts = draw[:1_000_000].view(4, -1).double()
    correlated = torch.corrcoef(parts) - torch.eye(4)
    assert float(correlated.abs().max()) * math.sqrt(250_000) < 5
    # 10^12 / 2 pairs of integers with this deviation: about 12 coincide by chance.
    assert len(draw.unique()) > len(draw) - 60
    assert not torch.equal(draw[:64], SystemNoise().rounded_normal(DEVIATION, 64, CPU))


@pytest.mark.parametrize("count", [0, 1, 262_143, 524_289, 1_000_003])
def test_contract_7_threads_draw_once_for_every_coordinate(
    four_threads: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Also for the last ones, where the threads do not divide the number of coordinates."""
    sizes = []

    def sevens(_: float, size: int, __: SystemNoise) -> np.ndarray:
        sizes.append(size)
        return np.full(size, 7)

    monkeypatch.setattr(noise, "draw_rounded_normal", sevens)
    draw = SystemNoise().rounded_normal(DEVIATION, count, CPU)
    assert sum(sizes) == len(draw) == count and bool((draw == 7).all())


def test_contract_7_what_a_thread_raises_is_raised(
    four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that a thread did not fill would be no noise."""
    monkeypatch.setattr(noise, "draw_rounded_normal", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SystemNoise().rounded_normal(DEVIATION, 600_000, CPU)


@pytest.mark.gpu
def test_contract_7_the_cpu_draws_for_cuda() -> None:
    draw = SystemNoise().rounded_normal(DEVIATION, 20_000_001, torch.device("cuda"))
    assert draw.device.type == "cuda" and draw.shape == (20_000_001,)
    _check_normal(draw, DEVIATION)


def test_contract_7_nothing_is_seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    first = SystemNoise().rounded_normal(DEVIATION, 64, CPU)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert not torch.equal(first, SystemNoise().rounded_normal(DEVIATION, 64, CPU))
    assert [len(SystemNoise().rounded_normal(1.0, n, CPU)) for n in (0, 1, 2, 7)] == [0, 1, 2, 7]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32])
def test_contract_7_noise_is_added_to_whole_numbers_alone(dtype: torch.dtype) -> None:
    values = torch.zeros(3, dtype=dtype)
    with pytest.raises(TypeError, match=r"whole numbers in int64, not to torch\."):
        add_noise(values, 1e6, SystemNoise())
    assert not values.any()


def test_contract_7_a_large_shard_is_noised_in_bounded_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise, "MOST_DRAWN", 1000)
    drawn = []

    class Recording(SystemNoise):
        def rounded_normal(
            self, deviation: float, count: int, device: torch.device
        ) -> torch.Tensor:
            drawn.append(super().rounded_normal(deviation, count, device))
            return drawn[-1]

    values = torch.full((7, 500), 12, dtype=torch.int64)
    add_noise(values, DEVIATION, Recording())
    assert [len(draw) for draw in drawn] == [1000, 1000, 1000, 500]
    assert torch.equal(values.flatten(), 12 + torch.cat(drawn)) and len(values.unique()) == 3500


def test_contract_7_the_largest_sum_and_the_widest_noise_stay_within_64_bits() -> None:
    values = torch.tensor([1 << 62, -(1 << 62)]).repeat(500)
    before = values.clone()
    add_noise(values, MOST_DEVIATION, SystemNoise())
    added = values.double() - before.double()
    assert 0.9 < float(added.std()) / MOST_DEVIATION < 1.1 and torch.equal(values > 0, before > 0)


@pytest.mark.parametrize(
    "deviation", [math.nan, -1.0, 0.0, math.inf, math.nextafter(MOST_DEVIATION, math.inf)]
)
def test_contract_7_what_is_no_standard_deviation_is_refused(deviation: float) -> None:
    """No deviation at all would pass for "no noise": sums without noise have no step, and come here never."""
    values = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="standard deviation"):
        add_noise(values, deviation, SystemNoise())
    assert not values.any()
