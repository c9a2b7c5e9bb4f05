"""torch.compile of a model's blocks with clipping on: the oracle's sums, no graph break, one graph for all equal blocks."""

import copy
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.captioner import Captioner
from models.config import VitConfig
from models.vit import EncoderBlock
from privacy.clipping import ClippedSum
from privacy.errors import PrivacyConfigError
from tests.models.tiny import tiny_captioner
from tests.privacy.clipping import oracle

EAGER = "aot_eager"
"""Traces, differentiates and partitions like the default backend, but needs no C++ compiler."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Stack(nn.Module):
    """Equal blocks of a vision transformer, more than torch.compile would compile one by one (8)."""

    def __init__(self, depth: int = 10, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = VitConfig(width=16, num_heads=2)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().mean((1, 2))


def stack_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    scale = torch.arange(1, 6)[:, None, None]
    return {"x": torch.randn(5, 6, 16, generator=generator, dtype=torch.float64) * scale}


def compile_all(blocks: list[nn.Module], backend: str = EAGER) -> None:
    for block in blocks:
        block.compile(backend=backend)


def clipped(model: nn.Module, inputs: dict[str, Tensor], c: float, mode: str) -> dict[str, Tensor]:
    total = ClippedSum(model, c, mode=mode)  # type: ignore[arg-type]
    is_padding_B = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.bool)
    for _ in range(2):
        total.zero_()
        total.add_micro_batch(model, inputs, is_padding_B)
    total.detach()
    return {name: value.clone() for name, value in total.sums()}


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_give_the_oracles_sums_without_graph_breaks(mode: str, checkpointed: bool) -> None:
    model, inputs = Stack(checkpointed=checkpointed).double(), stack_inputs()
    plain = Stack().double()
    c = oracle.median_norm(plain, plain, inputs)
    expected = oracle.clipped_sum(plain, plain, inputs, c)
    compile_all(list(model.layers))
    torch._dynamo.utils.counters.clear()
    assert oracle.relative_error(clipped(model, inputs, c, mode), expected) < 1e-9
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert 1 <= counters["stats"]["unique_graphs"] <= 2  # the first block's input requires no gradient
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_captioner_with_compiled_blocks() -> None:
    torch.manual_seed(0)
    model: Captioner = tiny_captioner().double()
    inputs = {
        "images_BCHW": torch.randn(4, 3, 16, 16, dtype=torch.float64) * torch.arange(1, 5)[:, None, None, None],
        "tokens_BL": torch.randint(3, 11, (4, 7)),
        "token_mask_BL": torch.arange(7) < torch.tensor([[7], [5], [3], [7]]),
    }
    plain = copy.deepcopy(model)
    c = oracle.median_norm(plain, plain, inputs)
    compile_all(model.blocks())
    assert list(model.state_dict()) == list(plain.state_dict())
    for mode in ("bookkeeping", "two_pass"):
        expected = oracle.clipped_sum(plain, plain, inputs, c)
        assert oracle.relative_error(clipped(model, inputs, c, mode), expected) < 1e-9
    with torch.no_grad():  # and outside of clipping the model is what it was
        torch.testing.assert_close(model(**inputs), plain(**inputs))
