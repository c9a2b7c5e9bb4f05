"""Correlated noise as it is added, against dense matrices in double precision."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.correlated import segment as module
from privacy.correlated.segment import Segment
from privacy.correlated.strategy import Strategy
from privacy.noise import SystemNoise

CPU = torch.device("cpu")


class Recorded(SystemNoise):
    """Keeps every draw."""

    def __init__(self) -> None:
        self.draws: list[Tensor] = []

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        self.draws.append(super().standard_normal(count, device))
        return self.draws[-1]


def dense(strategy: Strategy, rows: int) -> np.ndarray:
    return sum(
        (c * np.eye(rows, k=-k) for k, c in enumerate(strategy.coefficients[:rows])), start=np.zeros((rows, rows))
    )


@pytest.mark.parametrize("bands", [2, 3, 4, 16])
@pytest.mark.parametrize("keep_on", [None, CPU])
def test_c_times_the_noise_is_fresh_noise_and_the_sums_get_the_noise(bands: int, keep_on: torch.device | None) -> None:
    """C W = Z and released = S + W, over more rows than bands, on shards of unequal sizes and an empty one."""
    strategy, source, rows, sizes, std = Strategy.square_root(bands), Recorded(), 3 * bands + 2, (5, 0, 17, 1), 0.3
    run = Segment(strategy, keep_on)
    rng = np.random.default_rng(bands)
    sums = rng.standard_normal((rows, sum(sizes))) * 100
    released = np.empty_like(sums)
    for t in range(rows):
        shards = list(torch.from_numpy(sums[t].copy()).split(sizes))
        run.add_row(shards, std, source)
        released[t] = torch.cat(shards).numpy()
        spread = np.linalg.norm(np.linalg.inv(dense(strategy, rows))[t])
        assert run.spread == pytest.approx(spread, rel=1e-12)
    fresh = std * torch.cat(source.draws).view(rows, -1).numpy()
    np.testing.assert_allclose(dense(strategy, rows) @ (released - sums), fresh, atol=1e-12)
    assert len(np.unique(fresh)) == fresh.size  # each draw is used once


def test_pieces_of_a_large_shard_are_one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DRAWN", 3)
    strategy, source = Strategy.square_root(4), Recorded()
    run, released = Segment(strategy), []
    for _ in range(9):
        values = torch.zeros(10, dtype=torch.float64)
        run.add_row([values], 1.0, source)
        released.append(values.numpy())
    fresh = torch.cat(source.draws).view(9, 10).numpy()
    np.testing.assert_allclose(dense(strategy, 9) @ np.stack(released), fresh, atol=1e-12)


def test_one_band_is_the_noise_of_dp_sgd() -> None:
    """The very draws, added by the very function; nothing is kept, and nothing has to stay as it was."""
    run, source = Segment(Strategy.independent()), Recorded()
    for std in (0.5, 0.0, 2.0):
        values = torch.ones(4, dtype=torch.float64)
        run.add_row([values], std, source)
        expected = torch.ones(4, dtype=torch.float64)
        if std > 0:
            expected.add_(source.draws[-1], alpha=std)
        assert torch.equal(values, expected) and run.spread == 1.0
    assert len(source.draws) == 2


def row(size: int = 3) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]


class Failing(SystemNoise):
    """Fails at the second shard of its second row."""

    def __init__(self) -> None:
        self.count = 0

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        self.count += 1
        if self.count == 4:
            raise OSError("no entropy")
        return super().standard_normal(count, device)


def test_a_row_that_did_not_end_ends_the_segment() -> None:
    run, source = Segment(Strategy.square_root(3)), Failing()
    run.add_row(row(), 1.0, source)
    with pytest.raises(OSError, match="no entropy"):
        run.add_row(row(), 1.0, source)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="did not end"):
            run.add_row(row(), 1.0, source)


def test_noise_is_kept_before_it_is_added() -> None:
    """Wherever a program dies, what was added to a sum is in the history, or nothing was added."""

    class Watched(Tensor):
        seen: list[bool] = []  # noqa: RUF012

        def __iadd__(self, noise: Tensor) -> Tensor:  # type: ignore[override]
            kept = run._past[0][(run._rows) % (run._strategy.bands - 1)]
            self.seen.append(torch.equal(kept, noise.as_subclass(Tensor)))
            return self

    run = Segment(Strategy.square_root(3))
    for _ in range(4):
        run.add_row([torch.zeros(6, dtype=torch.float64).as_subclass(Watched)], 1.0, SystemNoise())
    assert Watched.seen == [True] * 4


@pytest.mark.parametrize(
    ("shards", "std", "words"),
    [
        (row(), 2.0, "must stay"),
        (row(4), 1.0, "not the shards"),
        (row()[:1], 1.0, "not the shards"),
        (row(), 0.0, "positive"),
        (row(), math.nan, "positive"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(shards: list[Tensor], std: float, words: str) -> None:
    run = Segment(Strategy.square_root(3))
    run.add_row(row(), 1.0, SystemNoise())
    with pytest.raises(ValueError, match=words):
        run.add_row(shards, std, SystemNoise())
    assert all(not values.any() for values in shards)


def test_single_precision_is_refused_and_past_noise_is_double() -> None:
    run = Segment(Strategy.square_root(2))
    with pytest.raises(TypeError, match="float64"):
        run.add_row([torch.zeros(3)], 1.0, SystemNoise())
    run = Segment(Strategy.square_root(2))
    run.add_row(row(), 1.0, SystemNoise())
    assert {past.dtype for past in run._past} == {torch.float64}


@pytest.mark.parametrize("store", [pickle.dumps, copy.deepcopy, lambda run: torch.save({"noise": run}, "/dev/null")])
def test_past_noise_cannot_be_stored(store) -> None:
    with pytest.raises(TypeError, match="checkpoint"):
        store(Segment(Strategy.square_root(2)))


def rounded_history_shift(dtype: torch.dtype, size: int) -> float:
    """How far one example moves the next row beyond its own column, in sensitivities, were past noise rounded."""
    noise = torch.randn(size, dtype=torch.float64)
    example = torch.randn(size, dtype=torch.float64)
    example /= example.norm()
    rounded = noise.to(dtype).double() - (noise - example).to(dtype).double()
    return float((rounded - example).norm())


def test_what_rounded_history_would_cost() -> None:
    """Doubles cost nothing that can be seen; bf16 more than a whole sensitivity, and more with more coordinates."""
    assert rounded_history_shift(torch.float64, 1 << 20) < 1e-6
    small, large = (rounded_history_shift(torch.bfloat16, size) for size in (1 << 16, 1 << 20))
    assert 0.3 < small < large and large > 1
