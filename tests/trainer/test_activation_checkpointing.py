"""Recomputing the blocks changes no clipped sum, in either mode, and saves memory in both."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import SUMS
from trainer.engines.blocks import checkpoint_blocks
from trainer.planner.probe import MemoryTimeline

MODES = ["bookkeeping", "two_pass"]
WAYS: dict[str, Any] = {
    "off": {"activation_checkpointing": False, "checkpoint_on_cpu": False},
    "on": {"activation_checkpointing": True, "checkpoint_on_cpu": False},
    "on cpu": {"activation_checkpointing": True, "checkpoint_on_cpu": True},
}


def checkpointed(module: nn.Module, way: str) -> nn.Module:
    checkpoint_blocks(module, SimpleNamespace(path=Path("machine.json"), **WAYS[way]))  # type: ignore[arg-type]
    return module


def captioner(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = captioner_config(
        "pico",
        image_size=32,
        patch_size=4,
        vocab_size=37,
        num_tokens=17,
        encoder_width=32,
        encoder_depth=8,
        encoder_num_heads=4,
        decoder_width=32,
        decoder_depth=4,
        decoder_num_heads=4,
    )
    return build_captioner(config, generator=torch.Generator().manual_seed(0)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32, B: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "images_BCHW": torch.randn(B, 3, 32, 32, generator=generator).to(dtype),
        "tokens_BL": torch.randint(3, 37, (B, 17), generator=generator),
        "token_mask_BL": torch.ones(B, 17, dtype=torch.bool),
    }


def clipped_sum(model: nn.Module, mode: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    clipped = SUMS[mode](model, 0.05)
    stats = clipped.add_micro_batch(model, inputs(dtype), torch.tensor([False, False, True, False]))
    assert stats.num_clipped > 0
    return dict(clipped.sums())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["on", "on cpu"])
def test_the_sum_is_the_same(mode: str, way: str) -> None:
    expected = clipped_sum(captioner(torch.float64), mode, torch.float64)
    model = checkpointed(captioner(torch.float64), way)
    assert list(expected) == [name for name, _ in model.named_parameters()]  # and the names are
    found = clipped_sum(model, mode, torch.float64)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-10, atol=1e-11, msg=name)


def peak(mode: str, way: str) -> int:
    """Sixteen examples, so that activations weigh more than the fp64 sums, which every mode holds."""
    model, batch = checkpointed(captioner(), way), inputs(B=16)
    clipped = SUMS[mode](model, 0.05)  # type: ignore[arg-type]
    with MemoryTimeline() as memory:
        clipped.add_micro_batch(model, batch, torch.zeros(16, dtype=torch.bool))
    return max(memory.live_bytes)


@pytest.mark.full
def test_peak_memory_falls() -> None:
    """two_pass keeps one block's activations; bookkeeping saves what lies between the linear layers only."""
    assert peak("two_pass", "on") < 0.4 * peak("two_pass", "off")
    assert peak("bookkeeping", "on") < 0.9 * peak("bookkeeping", "off")
