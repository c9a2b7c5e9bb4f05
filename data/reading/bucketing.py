"""Less padding: captions of like length share a micro-batch, which is cut to its longest one.

For training without privacy. In exact arithmetic no gradient changes: only which examples meet in a micro-batch does, and
no example's loss depends on its neighbours or on padding. But matrix products of another shape round differently, so that one
long caption moves the gradients of all its neighbours: by up to 1.1 C together in bf16, and the sensitivity is C no longer.
Shapes also follow the sample: timings and memory of such a run are as private as its data (contract 12).
"""

import numpy as np

from data.batch import Batch
from data.errors import DataError
from data.index.tar_index import ExampleTable

MASK, CAPTION_INPUTS = "token_mask_BL", ("tokens_BL", "token_mask_BL")
_MULTIPLE = 8
"""Lengths are rounded up to few different ones, for kernels that are chosen by shape."""


def by_caption_length(table: ExampleTable, ids: np.ndarray, micro_batch_size: int) -> np.ndarray:
    """An order of the ids by their stored caption length; within a micro-batch by id, which reads fastest.

    Returns:
        int64 (len(ids),): places in `ids`.
    """
    order = np.lexsort((ids, table.caption_classes(ids)))
    starts = range(0, len(order), micro_batch_size)
    pieces = [order[start : start + micro_batch_size] for start in starts]
    return np.concatenate([np.empty(0, np.int64), *(piece[np.argsort(ids[piece], kind="stable")] for piece in pieces)])


def cut_to_longest(batch: Batch) -> Batch:
    """Cuts captions to the longest of the micro-batch; see `CAPTION_INPUTS`."""
    used_L = batch.inputs[MASK].any(dim=0)
    longest = int(used_L.nonzero().max()) + 1
    length = min(len(used_L), -(-longest // _MULTIPLE) * _MULTIPLE)
    cut = {name: batch.inputs[name][:, :length].contiguous() for name in CAPTION_INPUTS}
    return batch._replace(inputs=batch.inputs | cut)


def require_captions(names: list[str]) -> None:
    """
    Raises:
        DataError: there is nothing to bucket by.
    """
    if not set(CAPTION_INPUTS) <= set(names):
        raise DataError("data.bucket_captions needs captions, which this task does not have; remove it from the recipe")
