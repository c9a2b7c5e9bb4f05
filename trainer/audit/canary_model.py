"""A model and examples for the sandbox of an audit, with known gradients.

The model has small layers of every kind that the clipping rules know, and a loss that is linear in
the weights, so gradients stay constant while the weights change. Some canaries have a gradient in
one layer, at four sizes from 0.75 C to 48 C; some in all layers (flat clipping); some in a layer
that is called twice (their two contributions add up before the norm is taken); some are hostile:
NaN, infinite, enormous. Most canaries share no coordinate. Half of all examples are a crowd: small,
never clipped, all at one coordinate of each layer, so that its sum is known to the last bit.

Shapes: B examples, N canaries, G gains (one per place in the model), K entries of gradients that
    are not zero.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import one_hot

EMBEDDING = 64
"""Rows and columns of the embedding."""
WIDTH = 32
PLACES = ("embedding", "matrix", "matrix_again", "offset", "norm", "conv", "raw", "quiet")
"""The places of the model that have a gain. No canary has a gain for "quiet", so some parameters
get noise alone; made-up examples have all gains."""
SIZES = (0.75, 3.0, 12.0, 48.0)
"""Norms over C, below it and above it."""
PARTIAL = 0.9
"""A part of C that needs no clipping in one place: only the sum over several places does."""
CROWD = {"matrix": 18, "conv": 18, "offset": 22, "norm": 22, "raw": 22}
"""The distance, in powers of two, of the two gains of a crowd: single precision cannot hold the sum
of some of either kind.

Products of matrices may add up 64 examples in single precision, which is exact up to 2^18. Other
gradients of a layer are added in double precision, and far fewer members show when they are not.
Powers of two are exact in bf16.
"""
KEY_BITS = 2**63 - 1


class Block(nn.Module):
    """A unit that a run may compile, checkpoint or shard; it calls the matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, one_hot_BK: Tensor, x_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.matrix(one_hot_BK), self.matrix(one_hot_BK), self.norm(x_BK)


class Raw(nn.Module):
    """A parameter that is used without a layer, as class tokens and positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x_BK: Tensor) -> Tensor:
        return x_BK + self.raw


class CanaryModel(nn.Module):
    """A model with known gradients for the canaries of an audit.

    All weights start at zero, so that they keep their resolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(EMBEDDING, EMBEDDING)
        self.block = Block()
        self.offset = nn.Linear(1, WIDTH)
        self.conv = nn.Conv2d(1, WIDTH, 1, bias=False)
        self.positions = Raw()
        self.quiet = nn.Linear(EMBEDDING, 2 * EMBEDDING, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def forward(
        self, gains_BG: Tensor, rows_B: Tensor, columns_B: Tensor, **_identity: Tensor
    ) -> Tensor:
        """Returns loss_B, the sum over places of gain * one coordinate of the place's output.

        The number of a canary and its key change nothing.
        """
        dtype = gains_BG.dtype
        inner_rows_B = rows_B % WIDTH
        q_B1 = gains_BG[:, -1:]
        row_BK = one_hot(inner_rows_B, WIDTH).to(dtype)
        column_BK = one_hot(columns_B % WIDTH, WIDTH).to(dtype)
        # Zeros and ones as inputs make a layer's output one of its weights, or its offset alone.
        matrix_BK, matrix_again_BK, norm_BK = self.block(column_BK, q_B1 * row_BK)
        conv_BK = self.conv(torch.ones_like(q_B1)[:, :, None, None]).flatten(1)
        offset_BK = self.offset(q_B1)
        raw_BK = self.positions(torch.zeros_like(row_BK))
        outputs = [matrix_BK, matrix_again_BK, offset_BK, norm_BK, conv_BK, raw_BK]
        coordinates = [_pick(output_BK, inner_rows_B) for output_BK in outputs]
        quiet_BK = self.quiet(one_hot(columns_B, EMBEDDING).to(dtype))
        quiet_B = _pick(quiet_BK, rows_B)
        embedding_B = _pick(self.embedding(rows_B), columns_B)
        outputs_BG = torch.stack([embedding_B, *coordinates, quiet_B], dim=1)
        return (gains_BG * outputs_BG).sum(dim=1)


def _pick(output_BK: Tensor, index_B: Tensor) -> Tensor:
    return (output_BK * one_hot(index_B, output_BK.shape[1])).sum(dim=1)


def made_up(count: int) -> dict[str, Tensor]:
    """Returns random inputs of the model with gains in all places, the same in every process."""
    generator = torch.Generator().manual_seed(count)
    rows_B, columns_B = torch.randint(EMBEDDING, (2, count), generator=generator)
    gains_BG = torch.randn(count, len(PLACES), generator=generator)
    zero_B = torch.zeros(count, dtype=torch.int64)
    return {
        "gains_BG": gains_BG,
        "rows_B": rows_B,
        "columns_B": columns_B,
        "canaries_B": zero_B,
        "keys_B": zero_B,
    }


class Entries(NamedTuple):
    """The entries of all canaries' gradients, each coordinate of a canary once, by parameter."""

    names_K: NDArray[np.str_]
    index_K: NDArray[np.int64]
    canaries_K: NDArray[np.int64]
    gains_K: NDArray[np.float64]


@dataclass(frozen=True)
class Canaries:
    """The sandbox's data set.

    The trainer's data room makes examples of it, and a loop of one's own reads it as items.

    Attributes:
        gains_NG, rows_N, columns_N: the model's inputs, one row per example.
        crowd_N: whether an example is of the crowd, which shares its coordinates.
        hostile_N: whether an example has a NaN, infinite or enormous gradient.
    """

    gains_NG: NDArray[np.float32]
    rows_N: NDArray[np.int64]
    columns_N: NDArray[np.int64]
    crowd_N: NDArray[np.bool_]
    hostile_N: NDArray[np.bool_]

    def item(self, canary: int, key: int) -> dict[str, NDArray[Any]]:
        """Returns the model's inputs without a batch dimension.

        Of the key it takes the 63 bits for which an int64 has room.
        """
        return {
            "gains_G": self.gains_NG[canary],
            "rows": np.array(self.rows_N[canary], dtype=np.int64),
            "columns": np.array(self.columns_N[canary], dtype=np.int64),
            "canaries": np.array(canary, dtype=np.int64),
            "keys": np.array(key & KEY_BITS, dtype=np.int64),
        }

    def __len__(self) -> int:
        return len(self.rows_N)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        # The reader seeds torch with the item's key.
        inputs = self.item(index, torch.initial_seed())
        names = ("gains_BG", "rows_B", "columns_B", "canaries_B", "keys_B")
        return dict(zip(names, inputs.values(), strict=True))

    def __call__(self, raw: Any, key: int, /) -> dict[str, NDArray[Any]]:
        return self.item(int(raw.fields["txt"]), key)

    def draws(self, raw: Any, /) -> bool:
        """Returns whether an item depends on its key, so that it must be made anew every time."""
        return True

    def padding(self) -> dict[str, NDArray[Any]]:
        return {name: np.zeros_like(array) for name, array in self.item(0, 0).items()}

    def entries(self, dtype: torch.dtype) -> Entries:
        """Returns the gradients of a model that computes in `dtype`."""
        gains_GN = torch.from_numpy(self.gains_NG).to(dtype).double().numpy().T
        inner_rows_N = self.rows_N % WIDTH
        embedding_index_N = self.rows_N * EMBEDDING + self.columns_N
        matrix_index_N = inner_rows_N * WIDTH + self.columns_N % WIDTH
        # (name of the parameter, coordinate, gradient)
        parameters = [
            ("embedding.weight", embedding_index_N, gains_GN[0]),
            ("block.matrix.weight", matrix_index_N, gains_GN[1] + gains_GN[2]),
            ("offset.bias", inner_rows_N, gains_GN[3]),
            ("block.norm.bias", inner_rows_N, gains_GN[4]),
            ("conv.weight", inner_rows_N, gains_GN[5]),
            ("positions.raw", inner_rows_N, gains_GN[6]),
        ]
        parts: list[Any] = []
        for name, index_N, gains_N in parameters:
            # NaN is not zero.
            canaries = np.flatnonzero(gains_N)
            names = np.full(len(canaries), name)
            parts.append((names, index_N[canaries], canaries, gains_N[canaries]))
        return Entries(*map(np.concatenate, zip(*parts, strict=True)))


def make_canaries(num_single: int, bound: float) -> Canaries:
    """Returns `num_single` canaries of one embedding coordinate each, others, and a crowd.

    The others have gradients in every other place; the crowd has as many members as all of them.
    """
    # (gains by place, row, column)
    kinds: list[tuple[dict[str, float], int, int]] = []
    for index in range(num_single):
        gain = SIZES[index % len(SIZES)] * bound
        kinds.append(({"embedding": gain}, index // EMBEDDING, index % EMBEDDING))
    for place in CROWD:
        kinds += [({place: 12 * bound}, row, 0) for row in range(10)]
    # Each call alone stays below C, and so does each place: only their sum has to be clipped.
    part = PARTIAL * bound
    spread = PLACES[:-1]
    kinds += [({"matrix": part, "matrix_again": part}, row, 1) for row in range(10)]
    kinds += [(dict.fromkeys(spread, part), WIDTH + row, 2) for row in range(10, 19)]
    # NaN; finite until it is squared in single precision; finite even then, and far above C.
    first_hostile = len(kinds)
    hostile_gains = (math.nan, 1e38, 1e15 * bound) * 4
    for row, gain in enumerate(hostile_gains, start=19):
        kinds.append((dict.fromkeys(spread, gain), WIDTH + row, 2))
    first_of_crowd = len(kinds)
    rng = np.random.default_rng(0)
    # Five gains of this size stay below C / 8.
    largest = math.floor(math.log2(bound)) - 5
    # Each member has its own places at the smaller gain, so that a loss that chance hides at one
    # place shows at another.
    for _ in range(first_of_crowd):
        gains = {}
        for place, distance in CROWD.items():
            gains[place] = math.ldexp(1.0, largest - distance * int(rng.integers(2)))
        kinds.append((gains, WIDTH - 1, WIDTH - 1))
    gains_N, rows, columns = zip(*kinds, strict=True)
    rows_of_gains = [[gains.get(place, 0.0) for place in PLACES] for gains in gains_N]
    gains_NG = np.array(rows_of_gains, dtype=np.float32)
    numbers_N = np.arange(len(kinds))
    crowd_N = numbers_N >= first_of_crowd
    hostile_N = (numbers_N >= first_hostile) & ~crowd_N
    return Canaries(gains_NG, np.array(rows), np.array(columns), crowd_N, hostile_N)
