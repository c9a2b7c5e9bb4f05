"""A task of canaries: each example's gradient is a chosen direction, and no two examples share a coordinate.

Small layers of every kind that the clipping rules know, a loss that is linear in the weights, so that gradients stay what
they are while the weights wander, and amplitudes far above C, so that clipping decides everything that an example adds.
Some canaries live in one layer, some in all layers at once (flat clipping), some in a layer that is called twice (their two
contributions add up before the norm is taken), and some are hostile: NaN, infinite, enormous.

Shapes: B examples, G gains (one per place in the model).
"""

import io
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch
from data.index.build import build_index
from data.index.tar_index import ExampleTable
from data.reading.reader import RawExample

EMBEDDING = 64  # rows and columns
WIDTH = 32
QUIET = (64, 128)  # a matrix that no gradient touches: noise alone
UNREACHED = ("quiet.weight", "offset.weight", "norm.weight")
"""Parameters without any gradient: noise alone."""
PLACES = ("embedding", "matrix", "matrix_again", "offset", "norm", "conv", "raw")
AMPLITUDE = 8.0  # times C
PARTIAL = 0.9
"""This part of C is below the bound by itself: only the whole gradient of such a canary has to be clipped."""


class CanaryModel(nn.Module):
    """All weights start at zero, so that they keep their resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(EMBEDDING, EMBEDDING)
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.offset = nn.Linear(1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv2d(1, WIDTH, 1, bias=False)
        self.positions = _Raw()
        self.quiet = nn.Linear(*QUIET, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, gains_BG: Tensor, rows_B: Tensor, columns_B: Tensor) -> Tensor:
        """loss_B = sum over places of gain * one coordinate of the place's output."""
        batch_size, dtype = len(rows_B), gains_BG.dtype
        inside_B = rows_B % WIDTH
        one_hot_BK = nn.functional.one_hot(columns_B % WIDTH, WIDTH).to(dtype)
        zero_B1 = torch.zeros(batch_size, 1, dtype=dtype, device=gains_BG.device)
        outputs = (
            _pick(self.embedding(rows_B), columns_B),
            _pick(self.matrix(one_hot_BK), inside_B),
            _pick(self.matrix(one_hot_BK), inside_B),
            _pick(self.offset(zero_B1), inside_B),
            _pick(self.norm(zero_B1.expand(-1, WIDTH)), inside_B),
            _pick(self.conv(torch.ones_like(zero_B1)[:, :, None, None]).flatten(1), inside_B),
            _pick(self.positions(zero_B1.expand(-1, WIDTH)), inside_B),
        )
        return (gains_BG * torch.stack(outputs, dim=1)).sum(dim=1)


def _pick(output_BK: Tensor, index_B: Tensor) -> Tensor:
    return (output_BK * nn.functional.one_hot(index_B, output_BK.shape[1])).sum(dim=1)


class _Raw(nn.Module):
    """A parameter that is used without a layer, as class tokens and positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x_BK: Tensor) -> Tensor:
        return x_BK + self.raw


@dataclass(frozen=True)
class Canaries:
    """The sandbox's data set.

    Attributes:
        gains_NG, rows_N, columns_N: the task's inputs, one row per example.
        hostile_N: whether an example has a NaN, infinite or enormous gradient.
    """

    gains_NG: np.ndarray
    rows_N: np.ndarray
    columns_N: np.ndarray
    hostile_N: np.ndarray

    def __len__(self) -> int:
        return len(self.rows_N)

    @cached_property
    def coordinates(self) -> list[tuple[int, str, int]]:
        """(example, parameter, flat index within it) of every coordinate that a gradient touches."""
        touching = []
        for example in range(len(self)):
            row, column = int(self.rows_N[example]), int(self.columns_N[example])
            inside = row % WIDTH
            places = {
                "embedding": ("embedding.weight", row * EMBEDDING + column),
                "matrix": ("matrix.weight", inside * WIDTH + column % WIDTH),
                "matrix_again": ("matrix.weight", inside * WIDTH + column % WIDTH),
                "offset": ("offset.bias", inside),
                "norm": ("norm.bias", inside),
                "conv": ("conv.weight", inside),
                "raw": ("positions.raw", inside),
            }
            touched = {places[p] for p, gain in zip(PLACES, self.gains_NG[example], strict=True) if gain != 0}
            touching += [(example, name, index) for name, index in sorted(touched)]
        return touching

    def batch(self, ids: np.ndarray, present_N: np.ndarray, size: int) -> Batch:
        """A micro-batch; an example that is not in the data is zeroed out, as the adjacency has it."""
        rows = np.zeros(size, dtype=np.int64)
        rows[: len(ids)] = ids
        is_padding = np.ones(size, dtype=bool)
        is_padding[: len(ids)] = ~present_N[ids]
        inputs = {
            "gains_BG": torch.from_numpy(self.gains_NG[rows]),
            "rows_B": torch.from_numpy(self.rows_N[rows]),
            "columns_B": torch.from_numpy(self.columns_N[rows]),
        }
        return Batch(inputs, torch.from_numpy(is_padding))


@dataclass(frozen=True)
class CanaryExample:
    """What training's loader makes of a stored canary: the task's inputs, and who it is, under which key it came."""

    canaries: Canaries

    def __call__(self, raw: RawExample, key: int) -> dict[str, np.ndarray]:
        canary = int(raw.fields["txt"])
        return self._arrays(canary, self.canaries.gains_NG[canary], np.array(key, dtype=np.uint64).view(np.int64))

    def padding(self) -> dict[str, np.ndarray]:
        return self._arrays(0, np.zeros(len(PLACES), dtype=np.float32), np.array(0))

    def _arrays(self, canary: int, gains_G: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        rows, columns = self.canaries.rows_N[canary], self.canaries.columns_N[canary]
        return {
            "gains_G": gains_G,
            "rows": np.asarray(rows),
            "columns": np.asarray(columns),
            "canaries": np.array(canary),
            "keys": key,
        }


def write_shard(folder: Path, num_canaries: int) -> ExampleTable:
    """Stores the canaries as training data are stored: one tar shard of their numbers, and its index."""
    shard = folder / "canaries-000000.tar"
    with tarfile.open(shard, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for canary in range(num_canaries):
            body = str(canary).encode()
            member = tarfile.TarInfo(f"canary-{canary:06d}.txt")
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return build_index([shard], folder / "index")


def make_canaries(num_single: int, max_grad_norm: float) -> Canaries:
    """`num_single` canaries of one embedding coordinate each, six in every other place, six spread ones, three hostile ones."""
    loud = AMPLITUDE * max_grad_norm
    kinds: list[tuple[dict[str, float], int, int]] = [
        ({"embedding": loud}, i // EMBEDDING, i % EMBEDDING) for i in range(num_single)
    ]
    for place in ("offset", "norm", "conv", "raw"):
        kinds += [({place: loud}, i, i) for i in range(6)]
    kinds += [({"matrix": loud}, i, 0) for i in range(6)]
    # Each call alone stays below C: only their sum has to be clipped.
    kinds += [({"matrix": PARTIAL * max_grad_norm, "matrix_again": PARTIAL * max_grad_norm}, i, 1) for i in range(6)]
    # Each place alone stays below C too.
    spread = dict.fromkeys(PLACES, PARTIAL * max_grad_norm)
    kinds += [(spread, 32 + i, 2) for i in range(8, 14)]
    hostile = [float("nan"), 1e38, 1e15 * max_grad_norm]
    first_hostile = len(kinds)
    kinds += [(dict.fromkeys(PLACES, gain), 32 + i, 2) for i, gain in zip((16, 17, 18), hostile, strict=True)]
    gains = np.array([[kind.get(place, 0.0) for place in PLACES] for kind, _, _ in kinds], dtype=np.float32)
    return Canaries(
        gains,
        np.array([row for _, row, _ in kinds]),
        np.array([column for _, _, column in kinds]),
        np.arange(len(kinds)) >= first_hostile,
    )
