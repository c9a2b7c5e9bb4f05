"""What fairscale cannot do; what it can do is in test_parity.py."""

from typing import Any

import pytest
import torch

from privacy.clipping import ClippedSum
from tests.distributed.test_engines import pairs, tiny_captioner


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_checkpoint_wrapper_is_refused_by_itself(mode: Any) -> None:
    """It is reentrant, so it cannot be differentiated with respect to chosen tensors; nothing is summed."""
    from fairscale.nn import checkpoint_wrapper

    model = tiny_captioner()
    for block in model.blocks():
        checkpoint_wrapper(block)
    clipped = ClippedSum(model, 1.0, mode=mode, self_check=False)
    with pytest.raises(RuntimeError, match="Checkpointing"):
        clipped.add_micro_batch(model, pairs(), torch.zeros(7, dtype=torch.bool))
    assert all(not total.any() for _, total in clipped.sums())
