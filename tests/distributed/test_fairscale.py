"""What fairscale cannot do, and why it is refused; what it can do is in test_parity.py."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from privacy.clipping import ClippedSum
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import pairs, tiny_captioner


def rank_fully_sharded(device: torch.device) -> tuple[str, str]:
    """Errors of fairscale's FullyShardedDataParallel on CPU: as it is, and as if it had the CUDA streams that it wants."""
    from fairscale.nn import FullyShardedDataParallel

    def error(streams: dict[str, Any]) -> str:
        inner = FullyShardedDataParallel(nn.Linear(4, 4), bucket_cap_mb=0)
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(4, 4)), bucket_cap_mb=0)
        model._lazy_init()
        for module in (model, inner):
            module._streams.update(streams)
        root = torch.zeros((), requires_grad=True)
        try:
            torch.autograd.grad(model(torch.randn(2, 4) + root).sum(), [root])
        except Exception as found:
            return f"{type(found).__name__}: {found}"
        return "none"

    as_it_is = error({})
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: _Stream()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment]
    return as_it_is, error({name: _Stream() for name in ("all_gather", "post_backward", "fp32_to_fp16")})


class _Stream:
    def wait_stream(self, other: object) -> None: ...
    def synchronize(self) -> None: ...


def test_fully_sharded_data_parallel_cannot_differentiate_for_one_tensor() -> None:
    ((on_cpu, with_streams),) = run_ranks(f"{__name__}:rank_fully_sharded", 1)
    assert on_cpu == "KeyError: 'all_gather'"
    assert "expected to be in states [<TrainingState.BACKWARD_POST" in with_streams


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_checkpoint_wrapper_is_refused_by_itself(mode: Any) -> None:
    """It is reentrant, so it cannot be differentiated with respect to chosen tensors; nothing is summed."""
    from fairscale.nn import checkpoint_wrapper

    model = tiny_captioner()
    for block in model.blocks():
        checkpoint_wrapper(block)
    clipped = ClippedSum(model, 1.0, mode=mode)
    with pytest.raises(RuntimeError, match=r"Checkpointing is not compatible with \.grad\(\)"):
        clipped.add_micro_batch(model, pairs(), torch.zeros(7, dtype=torch.bool))
    assert all(not total.any() for _, total in clipped.sums())
