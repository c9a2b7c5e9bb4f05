"""A micro-batch never waits for its device: the host reads no value that was computed there, and mixes no devices.

A GPU works behind the host; whatever reads a value back makes it run dry. Two stand-ins for a GPU see this on any machine:
tensors of the meta device have no values to read and meet no tensor of the CPU, and a dispatch mode sees every operation
that returns a value, or a shape that depends on values.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from privacy.clipping import SUMS, clipped_sum
from tests.privacy.clipping.test_models import MODELS, B, cast

aten = torch.ops.aten
WAITING = {
    *(
        aten._local_scalar_dense,
        aten.equal,
        aten.is_nonzero,
        aten.nonzero,
        aten.masked_select,
        aten.bincount,
    ),
    *(
        aten._unique,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.repeat_interleave,
    ),
    aten.embedding_dense_backward,  # on CUDA it counts its segments
}


class Waits(TorchDispatchMode):
    """Collects the operations for which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket in (
            aten.index,
            aten.index_put,
            aten.index_put_,
            aten._index_put_impl_,
        ) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func.overloadpacket in WAITING or by_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


CASES = itertools.product(
    ("captioner", "masked_autoencoder", "classifier", "adapters"),
    (torch.float32, torch.bfloat16),
    ("bookkeeping", "two_pass"),
    ("meta", "cpu"),
)
DAILY = {
    ("captioner", "bookkeeping"),
    ("masked_autoencoder", "two_pass"),
    ("adapters", "bookkeeping"),
}


@pytest.mark.parametrize(
    ("name", "dtype", "mode", "device"),
    [
        case
        if case[1::2] == (torch.float32, "meta") and case[::2] in DAILY
        else pytest.param(*case, marks=pytest.mark.full)
        for case in CASES
    ],
)
def test_no_value_comes_back(
    name: str, mode: Any, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipped_sum, "needs_blanking", lambda is_finite_B: True)  # as on CUDA
    model, inputs = cast(MODELS[name](), dtype)
    model, inputs = model.to(device), {n: x.to(device) for n, x in inputs.items()}
    clipped = SUMS[mode](model, 1.0, device=torch.device(device))
    padding_B = torch.zeros(B, dtype=torch.bool, device=device)
    clipped.add_micro_batch(model, inputs, padding_B)  # hooks and buffers are made
    with Waits() as waits:
        clipped.add_micro_batch(model, inputs, padding_B)
    assert waits.found == []
