"""torch.compile of a model's blocks with clipping on: the oracle's sums, no graph break, one graph for all equal blocks."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from models.config import VitConfig
from models.vit import EncoderBlock
from privacy.clipping import SUMS, ClippedSum
from privacy.errors import PrivacyConfigError
from privacy.gradients.compiled import CompiledTap, compiled_weights
from tests.distributed.test_engines import double, pairs, tiny_captioner
from tests.privacy.clipping import oracle
from trainer.config.machine import load_machine_settings
from trainer.engines.blocks import compile_blocks, require_compilable, require_compiler
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
EAGER = "aot_eager"
"""Traces, differentiates and partitions like the default backend, but needs no C++ compiler."""


def graph_breaks() -> int:
    """What torch counted in this process; its counters are not public API."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


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
    total = SUMS[mode](model, c)  # type: ignore[arg-type]
    is_padding_B = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.bool)
    for _ in range(2):
        total.zero_()
        total.add_micro_batch(model, inputs, is_padding_B)
    total.detach()
    return {name: value.clone() for name, value in total.sums()}


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_blocks_give_the_oracles_sums_without_graph_breaks(
    mode: str, checkpointed: bool
) -> None:
    model, inputs = Stack(checkpointed=checkpointed).double(), stack_inputs()
    plain = Stack().double()
    c = oracle.median_norm(plain, plain, inputs)
    expected = oracle.clipped_sum(plain, plain, inputs, c)
    with FlopCounterMode(display=False) as forward:
        plain(**inputs)
    compile_all(list(model.layers))
    torch._dynamo.utils.counters.clear()
    assert oracle.relative_error(clipped(model, inputs, c, mode), expected) < 1e-9
    assert graph_breaks() == 0
    # The first block's input requires no gradient.
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    if not checkpointed:
        # No weight gradients: the backward costs as much as the forward, and attention half as much again.
        total = ClippedSum(model, c)
        with (
            FlopCounterMode(display=False) as recorded,
            total.recorder.forward(model, inputs, 5) as passed,
        ):
            passed.backward(lambda call: None)
        assert recorded.get_total_flops() <= 2.5 * forward.get_total_flops()


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
def test_what_was_reported_may_be_overwritten(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiler does that uses the memory again; there is no copy of what the sums do not need later."""
    model, inputs = Stack(2).double(), stack_inputs()
    expected = oracle.clipped_sum(model, model, inputs, 0.5)
    compile_all(list(model.layers))
    usual, overwritten = CompiledTap.of, []

    def of(key: Tensor) -> CompiledTap:
        tap = usual(key)

        def on_gradient(x: Tensor, gradient: Tensor) -> None:
            x, gradient = x.clone(), gradient.clone()
            tap.on_gradient(x, gradient)
            overwritten.extend((x.fill_(torch.nan), gradient.fill_(torch.nan)))

        return CompiledTap(tap.on_call, on_gradient)

    monkeypatch.setattr(CompiledTap, "of", of)
    assert oracle.relative_error(clipped(model, inputs, 0.5, mode), expected) < 1e-9
    assert len(overwritten) >= 2 * 2 * 2 * 6  # tensors, blocks, micro-batches, layers


class Doubled(nn.Module):
    """Calls a layer twice on one input; both outputs have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.norm(self.layer(x))


def test_a_compiled_layer_called_twice_on_one_input_counts_twice() -> None:
    """A compiler makes one operation of two with equal arguments, which must not make one gradient of two."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 16), Doubled()).double(), stack_inputs()

    def task(x: Tensor) -> Tensor:
        loss_B: Tensor = model(x).square().sum((1, 2))
        return loss_B

    c = oracle.median_norm(model, task, inputs)
    expected = oracle.clipped_sum(model, task, inputs, c)
    model[1].compile(
        backend="aot_eager_decomp_partition"
    )  # joins equal operations, as the default backend does
    for mode in ("bookkeeping", "two_pass"):
        total = SUMS[mode](model, c)  # type: ignore[arg-type]
        total.add_micro_batch(task, inputs, torch.zeros(5, dtype=torch.bool))
        total.detach()
        assert oracle.relative_error(dict(total.sums()), expected) < 1e-9


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_parameter_without_a_layer_in_a_compiled_block_is_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Shifted())
    assert compiled_weights(model) == []
    if how == "in place":
        model[1].compile(backend=EAGER)
    else:
        model = nn.Sequential(model[0], torch.compile(model[1], backend=EAGER))
    with pytest.raises(PrivacyConfigError, match=r"1\..*shift is read without a layer"):
        ClippedSum(model, 1.0)


def test_weights_of_compiled_blocks_are_found_by_both_ways_to_compile() -> None:
    layer = nn.Linear(4, 4)
    assert compiled_weights(nn.Sequential(layer)) == []
    wrapped = compiled_weights(nn.Sequential(torch.compile(layer, backend=EAGER)))
    layer.compile(backend=EAGER)
    assert len(wrapped) == len(compiled_weights(nn.Sequential(layer))) == 2


def test_a_compiled_layer_that_folds_the_batch_is_refused_and_breaks_are_counted() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.layer(x.flatten(0, 1))

    model = Folded()
    model.compile(backend=EAGER)
    torch._dynamo.utils.counters.clear()
    total = ClippedSum(model, 1.0)
    with pytest.raises(PrivacyConfigError, match=r"layer layer \(Linear\) maps \(6, 4\)"):
        total.add_micro_batch(
            lambda x: model(x).sum(), {"x": torch.randn(3, 2, 4)}, torch.zeros(3, dtype=torch.bool)
        )
    assert graph_breaks() >= 1


@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 3), ("fsdp", 2), ("fairscale", 1)])
def test_engines_that_gather_weights_inside_blocks_are_refused(engine: str, stage: int) -> None:
    machine = load_machine_settings(ROOT / "ds_configs" / f"zero{stage}.json")
    with pytest.raises(ConfigError, match=r"train\.compile"):
        require_compilable(Stack(1), engine, machine, torch.device("cpu"))  # type: ignore[arg-type]


def test_without_a_compiler_or_blocks_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        require_compiler(torch.device("cpu"))
    machine = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
    with pytest.raises(ConfigError, match=r"blocks\(\)"):
        require_compilable(nn.Linear(2, 2), "local", machine, torch.device("cpu"))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_the_default_backend_whose_buffers_are_used_again(mode: str) -> None:
    """The real compiler fuses and reuses memory: what is kept for the sums must not be overwritten."""
    model = tiny_captioner(torch.float64)
    inputs = double(pairs(4))
    plain = copy.deepcopy(model)
    c = oracle.median_norm(plain, plain, inputs)
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    expected = oracle.clipped_sum(plain, plain, inputs, c)
    assert oracle.relative_error(clipped(model, inputs, c, mode), expected) < 1e-9
    assert graph_breaks() == 0
