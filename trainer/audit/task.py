"""A task of canaries: each example's gradient is a chosen direction, and no two examples share a coordinate.

Small layers of every kind that the clipping rules know, a loss that is linear in the weights, so that gradients stay what
they are while the weights wander, and amplitudes far above C, so that clipping decides everything that an example adds.
Some canaries live in one layer, some in all layers at once (flat clipping), some in a layer that is called twice (their two
contributions add up before the norm is taken), and some are hostile: NaN, infinite, enormous.

Shapes: B examples, G gains (one per place in the model).
"""

import io
import itertools
import math
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.index.build import build_index
from data.index.tar_index import ExampleTable
from data.reading.reader import RawExample
from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.clipped_sum import ClippedSum
from privacy.step.engine import Engine, to_device

EMBEDDING = 64  # rows and columns
WIDTH = 32
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
        self.quiet = nn.Linear(64, 128, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, gains_BG: Tensor, rows_B: Tensor, columns_B: Tensor) -> Tensor:
        """loss_B = sum over places of gain * one coordinate of the place's output."""
        inside_B = rows_B % WIDTH
        one_hot_BK = nn.functional.one_hot(columns_B % WIDTH, WIDTH).to(gains_BG.dtype)
        zero_B1 = torch.zeros_like(gains_BG[:, :1])
        # Zeros and ones as inputs make a layer's output one of its weights, or its offset alone.
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
    """The sandbox's data set; called, it makes of a stored canary what training's loader gives to the task.

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

    def __call__(self, raw: RawExample, key: int) -> dict[str, np.ndarray]:
        """The task's inputs, and who it is, under which key it came."""
        canary = int(raw.fields["txt"])
        return self._arrays(canary, self.gains_NG[canary], np.array(key, dtype=np.uint64).view(np.int64))

    def draws(self, raw: RawExample) -> bool:
        return True

    def padding(self) -> dict[str, np.ndarray]:
        return self._arrays(0, np.zeros_like(self.gains_NG[0]), np.array(0))

    def _arrays(self, canary: int, gains_G: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        row, column = np.asarray(self.rows_N[canary]), np.asarray(self.columns_N[canary])
        return {"gains_G": gains_G, "rows": row, "columns": column, "canaries": np.array(canary), "keys": key}

    def inputs(self, ids: np.ndarray) -> dict[str, Tensor]:
        return _inputs(self.gains_NG[ids], self.rows_N[ids], self.columns_N[ids])

    def touching(self, parameter: str, size: int) -> np.ndarray:
        """The canary that touches each of a parameter's coordinates, else -1."""
        # No two canaries touch one coordinate; those with a NaN touch theirs as well, since NaN is not zero.
        owners = np.full(size, -1)
        inside = self.rows_N % WIDTH
        in_matrix = inside * WIDTH + self.columns_N % WIDTH
        for place, (name, index_N) in enumerate(
            [
                ("embedding.weight", self.rows_N * EMBEDDING + self.columns_N),
                ("matrix.weight", in_matrix),
                ("matrix.weight", in_matrix),
                ("offset.bias", inside),
                ("norm.bias", inside),
                ("conv.weight", inside),
                ("positions.raw", inside),
            ]
        ):
            if name == parameter:
                canaries = np.flatnonzero(self.gains_NG[:, place])
                owners[index_N[canaries]] = canaries
        return owners

    def write_shard(self, folder: Path) -> ExampleTable:
        """Stores the canaries as training data are stored: one tar shard of their numbers, and its index."""
        shard = folder / "canaries-000000.tar"
        with tarfile.open(shard, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for canary in range(len(self)):
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
    kinds += [(dict.fromkeys(PLACES, PARTIAL * max_grad_norm), WIDTH + i, 2) for i in range(8, 14)]
    first_hostile = len(kinds)
    # Not finite; finite until it is squared in single precision; finite even then, and far beyond C.
    hostile = [float("nan"), 1e38, 1e15 * max_grad_norm]
    kinds += [(dict.fromkeys(PLACES, gain), WIDTH + 16 + i, 2) for i, gain in enumerate(hostile)]
    gains, rows, columns = zip(*kinds, strict=True)
    return Canaries(
        np.array([[gain.get(place, 0.0) for place in PLACES] for gain in gains], dtype=np.float32),
        np.array(rows),
        np.array(columns),
        np.arange(len(kinds)) >= first_hostile,
    )


NEIGHBOUR_ROWS = 1 << 15
"""More than the examples of `sum_of_neighbours`."""


def sum_of_neighbours(clipped: ClippedSum, engine: Engine, max_grad_norm: float) -> float:
    """L2 distance of this rank's sums of two neighbouring batches that round as differently as possible. Collective.

    The sum (contract 4) is brought just above a power of two; there single-precision numbers lie twice as far apart as just
    below it. One example takes it below, or is zeroed out and does not. Hundreds of small examples follow, each 0.6 of a
    distance above: added one by one in fp32 they count as a whole distance without that example, and as half of one with it.
    So the two sums drift apart, by more than the example adds. All examples touch the same few coordinates, one in each kind
    of layer.
    """
    used = np.array([place != "matrix_again" for place in PLACES])
    together, alone, largest = (
        256,
        32,
        1024,
    )  # small examples in one micro-batch and in their own; rows of a micro-batch
    unit = max_grad_norm / math.sqrt(used.sum())  # in each place
    edge = 2.0 ** math.ceil(math.log2(8192 * unit))
    filling = edge + 0.5 * unit
    amounts = [0.9 * unit] * int(filling / (0.9 * unit))
    amounts += [filling - sum(amounts), -0.999 * unit] + [0.6 * edge * 2.0**-23] * (together + alone)
    example = len(amounts) - 1 - together - alone
    cuts = [*range(0, example, largest), example, example + 1, *range(len(amounts) - alone, len(amounts) + 1)]
    sums = []
    for is_present in (True, False):
        clipped.zero_()
        for start, stop in itertools.pairwise(cuts):
            zeros_B = np.zeros(stop - start, dtype=np.int64)
            inputs = _inputs(np.outer(amounts[start:stop], used).astype(np.float32), zeros_B, zeros_B)
            is_padding_B = torch.full((stop - start,), start == example and not is_present, device=engine.device)
            clipped.add_micro_batch(engine.module, to_device(inputs, engine), is_padding_B)
        sums.append(torch.cat([total.detach().double().cpu().view(-1) for _, total in clipped.sums()]))
    if isinstance(clipped, CertifiedSum):  # whole numbers
        sums = [total * 2.0**-clipped.lattice.exponent for total in sums]
    clipped.zero_()
    return float(torch.linalg.vector_norm(sums[0] - sums[1]))


def _inputs(gains_BG: np.ndarray, rows_B: np.ndarray, columns_B: np.ndarray) -> dict[str, Tensor]:
    arrays = {"gains_BG": gains_BG, "rows_B": rows_B, "columns_B": columns_B}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
