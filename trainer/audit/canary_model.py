"""A model and examples for the sandbox of an audit: gradients are known, and most examples share no coordinate.

Small layers of every kind that the clipping rules know, and a loss that is linear in the weights, so that gradients stay what
they are while the weights wander. Some canaries live in one layer, at four sizes from 0.75 C to 48 C; some in all layers at once
(flat clipping); some in a layer that is called twice (their two contributions add up before the norm is taken); some are hostile:
NaN, infinite, enormous. Half of them are a crowd: small, never clipped, all at one coordinate of each layer, so that its sum is
known to the last bit.

Shapes: B examples, N canaries, G gains (one per place in the model), K entries of gradients that are not zero.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import one_hot

EMBEDDING = 64  # rows and columns
WIDTH = 32
PLACES = ("embedding", "matrix", "matrix_again", "offset", "norm", "conv", "raw", "quiet")
"""What a gain belongs to; no canary has one for "quiet", so some parameters get noise alone. Made-up examples have them all."""
SIZES = (0.75, 3.0, 12.0, 48.0)
"""Norms over C: below it and above it."""
PARTIAL = 0.9
"""This part of C is below the bound by itself: only the whole gradient of such a canary has to be clipped."""
CROWD = {"matrix": 18, "conv": 18, "offset": 22, "norm": 22, "raw": 22}
"""How far apart, in powers of two, the two gains of a crowd are. Single precision cannot hold the sum of some of either kind.

Products of matrices may add up 64 examples in single precision, which is exact up to 2^18. What else a layer has is added in
double precision, and far fewer members show when it is not. Powers of two stay what they are in bf16.
"""
KEY_BITS = 2**63 - 1


class Block(nn.Module):
    """What a run may compile, checkpoint or shard as one; the matrix is called twice on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)

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
    """Has known gradients for the canaries of an audit. All weights start at zero, so that they keep their resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.offset = (
            nn.Embedding(EMBEDDING, EMBEDDING),
            Block(),
            nn.Linear(1, WIDTH),
        )
        self.conv, self.positions = nn.Conv2d(1, WIDTH, 1, bias=False), Raw()
        self.quiet = nn.Linear(EMBEDDING, 2 * EMBEDDING, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def forward(
        self, gains_BG: Tensor, rows_B: Tensor, columns_B: Tensor, **_who: Tensor
    ) -> Tensor:
        """loss_B = sum over places of gain * one coordinate of the place's output; who it is, and its key, change nothing."""
        inside_B, q_B1, kind = rows_B % WIDTH, gains_BG[:, -1:], gains_BG.dtype
        row_BK, column_BK = (
            one_hot(index_B, WIDTH).to(kind) for index_B in (inside_B, columns_B % WIDTH)
        )
        # Zeros and ones as inputs make a layer's output one of its weights, or its offset alone.
        matrix_BK, again_BK, norm_BK = self.block(column_BK, q_B1 * row_BK)
        conv_BK = self.conv(torch.ones_like(q_B1)[:, :, None, None]).flatten(1)
        inside = (
            matrix_BK,
            again_BK,
            self.offset(q_B1),
            norm_BK,
            conv_BK,
            self.positions(torch.zeros_like(row_BK)),
        )
        picked = [_pick(output_BK, inside_B) for output_BK in inside]
        quiet_B = _pick(self.quiet(one_hot(columns_B, EMBEDDING).to(kind)), rows_B)
        outputs_BG = torch.stack(
            [_pick(self.embedding(rows_B), columns_B), *picked, quiet_B], dim=1
        )
        return (gains_BG * outputs_BG).sum(dim=1)


def _pick(output_BK: Tensor, index_B: Tensor) -> Tensor:
    return (output_BK * one_hot(index_B, output_BK.shape[1])).sum(dim=1)


def made_up(count: int) -> dict[str, Tensor]:
    """Random inputs of the model, with gains in all places, the same in every process."""
    generator = torch.Generator().manual_seed(count)
    rows_B, columns_B = torch.randint(EMBEDDING, (2, count), generator=generator)
    gains_BG, zero_B = (
        torch.randn(count, len(PLACES), generator=generator),
        torch.zeros(count, dtype=torch.int64),
    )
    return {
        "gains_BG": gains_BG,
        "rows_B": rows_B,
        "columns_B": columns_B,
        "canaries_B": zero_B,
        "keys_B": zero_B,
    }


class Entries(NamedTuple):
    """The entries of all canaries' gradients, each coordinate of a canary once; one parameter after the other."""

    names_K: NDArray[np.str_]
    index_K: NDArray[np.int64]
    canaries_K: NDArray[np.int64]
    gains_K: NDArray[np.float64]


@dataclass(frozen=True)
class Canaries:
    """The sandbox's data set; made examples of as the trainer's data room does, and read as a loop of one's own reads items.

    Attributes:
        gains_NG, rows_N, columns_N: the model's inputs, one row per example.
        crowd_N: those that share their coordinates.
        hostile_N: whether an example has a NaN, infinite or enormous gradient.
    """

    gains_NG: NDArray[np.float32]
    rows_N: NDArray[np.int64]
    columns_N: NDArray[np.int64]
    crowd_N: NDArray[np.bool_]
    hostile_N: NDArray[np.bool_]

    def item(self, canary: int, key: int) -> dict[str, NDArray[Any]]:
        """The model's inputs, without a batch dimension; of the key the 63 bits that an int64 has room for."""
        values = self.rows_N[canary], self.columns_N[canary], canary, key & KEY_BITS
        row, column, who, key_ = (np.array(value, dtype=np.int64) for value in values)
        return {
            "gains_G": self.gains_NG[canary],
            "rows": row,
            "columns": column,
            "canaries": who,
            "keys": key_,
        }

    def __len__(self) -> int:
        return len(self.rows_N)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        item = self.item(index, torch.initial_seed())  # the reader seeds it with the item's key
        return dict(
            zip(
                ("gains_BG", "rows_B", "columns_B", "canaries_B", "keys_B"),
                item.values(),
                strict=True,
            )
        )

    def __call__(self, raw: Any, key: int, /) -> dict[str, NDArray[Any]]:
        return self.item(int(raw.fields["txt"]), key)

    def draws(self, raw: Any, /) -> bool:
        """An item is a function of its key, so it is made anew every time."""
        return True

    def padding(self) -> dict[str, NDArray[Any]]:
        return {name: np.zeros_like(array) for name, array in self.item(0, 0).items()}

    def entries(self, dtype: torch.dtype) -> Entries:
        """Gradients of a model that computes in `dtype`."""
        gains_GN = torch.from_numpy(self.gains_NG).to(dtype).double().numpy().T
        inside_N, columns = self.rows_N % WIDTH, list[Any]()
        for name, index_N, gains_N in (
            ("embedding.weight", self.rows_N * EMBEDDING + self.columns_N, gains_GN[0]),
            (
                "block.matrix.weight",
                inside_N * WIDTH + self.columns_N % WIDTH,
                gains_GN[1] + gains_GN[2],
            ),
            *zip(
                ("offset.bias", "block.norm.bias", "conv.weight", "positions.raw"),
                [inside_N] * 4,
                gains_GN[3:7],
                strict=True,
            ),
        ):
            canaries = np.flatnonzero(gains_N)  # NaN is not zero
            columns.append(
                (np.full(len(canaries), name), index_N[canaries], canaries, gains_N[canaries])
            )
        return Entries(*map(np.concatenate, zip(*columns, strict=True)))


def make_canaries(num_single: int, bound: float) -> Canaries:
    """`num_single` canaries of one embedding coordinate each, some in every other place, and a crowd as large as all of them."""
    spread, part = PLACES[:-1], PARTIAL * bound
    kinds: list[tuple[dict[str, float], int, int]] = [
        ({"embedding": SIZES[i % len(SIZES)] * bound}, i // EMBEDDING, i % EMBEDDING)
        for i in range(num_single)
    ]
    kinds += [({place: 12 * bound}, i, 0) for place in CROWD for i in range(10)]
    # Each call alone stays below C, and so does each place: only their sum has to be clipped.
    kinds += [({"matrix": part, "matrix_again": part}, i, 1) for i in range(10)]
    kinds += [(dict.fromkeys(spread, part), WIDTH + i, 2) for i in range(10, 19)]
    # Not finite; finite until it is squared in single precision; finite even then, and far beyond C.
    first_hostile, hostile = len(kinds), (math.nan, 1e38, 1e15 * bound) * 4
    kinds += [
        (dict.fromkeys(spread, gain), WIDTH + i, 2) for i, gain in enumerate(hostile, start=19)
    ]
    first_of_crowd, rng = len(kinds), np.random.default_rng(0)
    # Each member has its own places at the smaller gain, so that what is lost at one place by chance is not lost at all of them.
    largest = math.floor(math.log2(bound)) - 5  # five of them stay below C / 8
    for _ in range(first_of_crowd):
        crowd = {
            place: math.ldexp(1.0, largest - apart * int(rng.integers(2)))
            for place, apart in CROWD.items()
        }
        kinds.append((crowd, WIDTH - 1, WIDTH - 1))
    gains, rows, columns = zip(*kinds, strict=True)
    gains_NG = np.array(
        [[gain.get(place, 0.0) for place in PLACES] for gain in gains], dtype=np.float32
    )
    crowd_N = np.arange(len(gains)) >= first_of_crowd
    hostile_N = (np.arange(len(gains)) >= first_hostile) & ~crowd_N
    return Canaries(gains_NG, np.array(rows), np.array(columns), crowd_N, hostile_N)
