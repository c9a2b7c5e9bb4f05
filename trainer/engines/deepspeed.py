"""Runs DeepSpeed ZeRO-1, 2 and 3 on gradients of ours.

DeepSpeed gathers weights in its module hooks and steps its optimizer; it averages, scales, clips
and accumulates nothing. The noised, divided shards are written to the buffers of its own reduction.
These are no public API: only `_find_spans` and `DeepSpeedEngine.step` use them, and
tests/distributed/test_engines.py compares all stages with a float64 loop.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_set_local_grad
from torch import Tensor, nn

from privacy.ranks import collectives
from privacy.ranks.engine import GradShard, Piece, ShardState, flat_part
from trainer.config.machine import MachineSettings, resolve
from trainer.config.sections import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.engines.layouts import layout_of, require_dealt
from trainer.optimizers import fresh_state, make_optimizer, moments, parameter_groups, set_rate

_FP32 = "trainer_fp32"
"""Attribute of a parameter that was sharded and cast while the model was built.

It is this rank's part of the parameter's fp32 values."""


class _Span(NamedTuple):
    """The place of an owned piece in DeepSpeed's flat fp32 partition `group`, from `start`."""

    piece: Piece
    group: int
    start: int


class DeepSpeedEngine:
    """An engine that shards with DeepSpeed; see `privacy.ranks.engine.Engine`."""

    replicated = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        machine: MachineSettings,
        device: torch.device,
        micro_batch_size: int,
    ) -> None:
        checkpoint_blocks(module, machine)
        _start()
        rank = collectives.rank()
        world_size = collectives.world_size()
        self._parameters: dict[str, Any] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self.shapes = {
            name: getattr(p, "ds_shape", p.shape) for name, p in self._parameters.items()
        }
        groups = parameter_groups(self._parameters.items(), self.shapes, optimizer)
        self.layout = layout_of("deepspeed", self.shapes, optimizer, machine, world_size)
        # Copies of the weights that this rank owns, before DeepSpeed casts them.
        masters: dict[Piece, Tensor] = {}
        for piece in self.layout.owned_by(rank):
            parameter = self._parameters[piece.name]
            if hasattr(parameter, "ds_tensor"):
                masters[piece] = parameter.__dict__.pop(_FP32)[: piece.length]
            else:
                weights = parameter.detach().flatten()
                owned = weights[piece.offset : piece.offset + piece.length]
                masters[piece] = owned.to("cpu", copy=True)
        config = resolve(machine, micro_batch_size=micro_batch_size, world_size=world_size)
        self._engine, *_ = deepspeed.initialize(
            model=module.to(device), optimizer=make_optimizer(groups, optimizer), config=config
        )
        self._stage = machine.stage
        self._config = optimizer
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self.module: nn.Module = self._engine.module
        _read_back(self._engine, machine, micro_batch_size)
        self._zero = self._engine.optimizer
        self._spans = list(_find_spans(self._zero, self._stage, self._parameters, self.shapes))
        require_dealt(self.layout, rank, [span.piece for span in self._spans], "DeepSpeed")
        # DeepSpeed has made its master weights of the weights that it rounded to bf16.
        for span in self._spans:
            flat = self._flat_partitions()[span.group]
            flat_part(flat, span.start, span.piece.length).copy_(masters[span.piece])

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Steps with the owned, noised gradients, and empties `shards` on the way."""
        if self._stage == 3:
            values = {shard.name: shard.values for shard in shards}
            # So the memory of each shard is freed once its values are copied.
            shards.clear()
            self._zero.independent_gradient_partition_epilogue()
            for name, parameter in self._parameters.items():
                padded = torch.zeros(
                    parameter.ds_tensor.numel(), dtype=torch.float32, device=self.device
                )
                if name in values:
                    padded[: values[name].numel()] = values[name]
                    del values[name]
                safe_set_local_grad(parameter, padded)
        else:
            # Offloaded partitions have a gradient buffer of their own in host memory; the others
            # take a new one.
            flats = [
                torch.zeros_like(p) if p.grad is None else p.grad.zero_()
                for p in self._flat_partitions()
            ]
            for span in reversed(self._spans):
                end = span.start + span.piece.length
                flats[span.group][span.start : end] = shards.pop().values
            assert not shards, "each shard has a span"
            for group, flat in enumerate(flats):
                self._zero.averaged_gradients[group] = [flat]
        set_rate(self._zero.param_groups, lr)
        self._engine.step()
        if self._engine.skipped_steps:
            raise RuntimeError(
                "DeepSpeed skipped a step: its overflow check must never decide about a noised "
                "gradient"
            )

    def _flat_partitions(self) -> list[Tensor]:
        """Returns this rank's flat fp32 master weights, by group."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return list(self._zero.single_partition_of_fp32_groups)

    def state(self) -> Iterator[ShardState]:
        """Yields the owned pieces of weights and moments."""
        partitions = self._flat_partitions()
        for span in self._spans:
            flat = partitions[span.group]
            length = span.piece.length
            optimizer_state = self._zero.optimizer.state.get(flat, {})
            tensors = {"param": flat_part(flat, span.start, length)}
            for kind in moments(self._config):
                if kind in optimizer_state:
                    tensors[kind] = flat_part(optimizer_state[kind], span.start, length)
            yield ShardState(span.piece, tensors)

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Sets master weights and optimizer states.

        At stages 1 and 2 the module's weights in the compute dtype must be set before the engine is
        built.
        """
        partitions = self._flat_partitions()
        for flat in partitions:
            self._zero.optimizer.state[flat] = fresh_state(self._config, flat, num_steps)
        for span in self._spans:
            flat = partitions[span.group]
            for key, values in states[span.piece].items():
                target = flat if key == "param" else self._zero.optimizer.state[flat][key]
                flat_part(target, span.start, span.piece.length).copy_(values)
            if self._stage == 3:
                parameter = self._parameters[span.piece.name]
                weights = flat_part(flat, span.start, span.piece.length)
                parameter.ds_tensor.data[: span.piece.length].copy_(weights)
                # Frees a gathered copy of the old weights.
                if parameter.ds_status == ZeroParamStatus.AVAILABLE:
                    parameter.partition()


def _find_spans(
    zero: Any, stage: int, parameters: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> Iterator[_Span]:
    """Yields the span of each piece that this rank owns, in the model's order."""
    for name, parameter in parameters.items():
        if stage == 3:
            # A parameter is cut into equal parts, padded at the end: rank r owns the r-th.
            size = parameter.ds_tensor.numel()
            offset = size * collectives.rank()
            length = min(size, shapes[name].numel() - offset)
            if length > 0:
                group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
                yield _Span(Piece(name, offset, length), group, start)
        elif parameter._hp_mapping is not None:
            # The piece is a part of a parameter that the partitions of several ranks share.
            mapping = parameter._hp_mapping
            fragment = mapping.lp_fragment_address
            start = mapping.hp_fragment_address.start
            piece = Piece(name, fragment.start, fragment.numel)
            yield _Span(piece, mapping.param_group_index, start)


def module_sharder(
    machine: MachineSettings, device: torch.device, micro_batch_size: int
) -> Callable[[nn.Module], None]:
    """Returns a function that shards the parameters of one initialised submodule.

    It does the work of `deepspeed.zero.Init`, which as a context manager would shard parameters
    without values: our models are built on the meta device first.
    """
    _start()
    rank = collectives.rank()
    world_size = collectives.world_size()
    config = resolve(machine, micro_batch_size=micro_batch_size, world_size=world_size)

    def shard(module: nn.Module) -> None:
        # A parameter that an earlier module shares with this one, such as a tied head's weight, is
        # in shards already.
        unsharded = nn.ParameterList(
            p for p in module.parameters(recurse=False) if not hasattr(p, "ds_tensor")
        )
        for parameter in unsharded:
            size = -(-parameter.numel() // world_size)
            part = parameter.detach().flatten()[rank * size : (rank + 1) * size]
            setattr(parameter, _FP32, part.to("cpu", copy=True))
        unsharded.to(device, machine.compute_dtype)
        for buffer in module.buffers(recurse=False):
            dtype = machine.compute_dtype if buffer.is_floating_point() else None
            buffer.data = buffer.data.to(device, dtype)
        if len(unsharded) > 0:
            deepspeed.zero.Init(module=unsharded, config_dict_or_path=config)

    return shard


def _start() -> None:
    """Joins DeepSpeed's group, and keeps DeepSpeed from compiling an op on CPU.

    The op is marked as incompatible. Training never uses it, it needs a compiler, and its build can
    hang on a stale lock. Other accelerators have no such op; there the list of ops, which takes
    compilers to make, is not touched.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        assert builder.NAME in deepspeed.ops.__compatible_ops__
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _read_back(engine: Any, machine: MachineSettings, micro_batch_size: int) -> None:
    """Refuses an engine that runs with other settings than its config (contract 14).

    DeepSpeed's defaults change between versions.
    """
    size = engine.train_micro_batch_size_per_gpu()
    is_bf16 = machine.compute_dtype == torch.bfloat16
    settings: dict[str, tuple[Any, Any]] = {
        "gradient_clipping": (engine.gradient_clipping(), 0.0),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), 1),
        "train_micro_batch_size_per_gpu": (size, micro_batch_size),
        "zero_optimization.stage": (engine.zero_optimization_stage(), machine.stage),
        "bf16.enabled": (engine.bfloat16_enabled(), is_bf16),
        "fp16.enabled": (engine.fp16_enabled(), False),
    }
    if machine.stage == 3:
        dtype = engine.optimizer.gradient_accumulation_dtype
        settings["data_types.grad_accum_dtype"] = (dtype, torch.float32)
    for key, (actual, expected) in settings.items():
        if actual != expected:
            raise RuntimeError(
                f"DeepSpeed runs with {key} = {actual}, but {expected} was asked for"
            )
