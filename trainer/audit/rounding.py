"""Two neighbouring batches whose sums round as differently as possible (contract 4).

The partial sum is brought just above a power of two; there single-precision numbers lie twice as far apart as just below it.
One example x takes it below, or is zeroed out and does not. Hundreds of small examples follow, each 0.6 of a distance above:
added one by one in fp32 they count as a whole distance without x, and as half of one with x. So the two sums drift apart, by
more than x itself adds. All examples touch the same few coordinates, one in each kind of layer.
"""

import itertools
import math

import numpy as np
import torch

from data.batch import Batch
from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.clipped_sum import ClippedSum
from privacy.step.engine import Engine, to_device
from trainer.audit.task import PLACES

_USED = [place != "matrix_again" for place in PLACES]
_TOGETHER, _ALONE = 256, 32  # small examples in one micro-batch, and in micro-batches of their own
_LARGEST = 1024


def sum_of_neighbours(clipped: ClippedSum, engine: Engine, max_grad_norm: float) -> float:
    """L2 distance between this rank's clipped sums of a batch and of the same batch with one example zeroed out. Collective."""
    unit = max_grad_norm / math.sqrt(sum(_USED))  # in each place
    edge = 2.0 ** math.ceil(math.log2(8192 * unit))
    filling = edge + 0.5 * unit
    amounts = [0.9 * unit] * int(filling / (0.9 * unit))
    amounts += [filling - sum(amounts), -0.999 * unit] + [0.6 * edge * 2.0**-23] * (_TOGETHER + _ALONE)
    example = len(amounts) - 1 - _TOGETHER - _ALONE
    cuts = [*range(0, example, _LARGEST), example, example + 1, *range(len(amounts) - _ALONE, len(amounts) + 1)]
    sums = []
    for is_present in (True, False):
        clipped.zero_()
        for start, stop in itertools.pairwise(cuts):
            batch = _batch(amounts[start:stop], is_padding=start == example and not is_present)
            clipped.add_micro_batch(
                engine.module, to_device(batch.inputs, engine), batch.is_padding_B.to(engine.device)
            )
        sums.append(torch.cat([total.detach().double().cpu().view(-1) for _, total in clipped.sums()]))
    if isinstance(clipped, CertifiedSum):  # whole numbers
        sums = [total * 2.0**-clipped.lattice.exponent for total in sums]
    clipped.zero_()
    return float(torch.linalg.vector_norm(sums[0] - sums[1]))


def _batch(amounts: list[float], *, is_padding: bool) -> Batch:
    gains_BG = np.outer(amounts, _USED).astype(np.float32)
    zeros_B = torch.zeros(len(amounts), dtype=torch.int64)
    inputs = {"gains_BG": torch.from_numpy(gains_BG), "rows_B": zeros_B, "columns_B": zeros_B}
    return Batch(inputs, torch.full((len(amounts),), is_padding))
