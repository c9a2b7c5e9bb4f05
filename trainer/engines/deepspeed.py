"""DeepSpeed ZeRO-1, 2 and 3: sharded parameters, master weights and optimizer states; gradients come from us.

DeepSpeed gathers weights in its module hooks and steps its optimizer. Nothing is averaged, scaled, clipped or accumulated by
it: the noised, divided shards are written where its own reduction would have put them, and `engine.step()` does the rest.
That place is not public API. It is confined to `_find_spans` and `DeepSpeedEngine.step`, and
tests/distributed/test_engines.py compares all stages with a float64 loop, so a DeepSpeed that moves it fails the test.
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
from trainer.config.optimizer import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.engines.layouts import layout_of, require_dealt
from trainer.optimizers import fresh_state, make_optimizer, moments, parameter_groups, set_rate

_FP32 = "trainer_fp32"
"""Attribute of a parameter that was sharded and cast while the model was built: this rank's part of its fp32 values."""


class _Span(NamedTuple):
    """Where one owned piece lives: `length` coordinates of DeepSpeed's flat fp32 partition `group`, from `start`."""

    piece: Piece
    group: int
    start: int


class DeepSpeedEngine:
    """See `privacy.ranks.engine.Engine`."""

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
        self._parameters: dict[str, Any] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self.shapes = {
            name: getattr(p, "ds_shape", p.shape) for name, p in self._parameters.items()
        }
        groups = parameter_groups(self._parameters.items(), self.shapes, optimizer)
        self.layout = layout_of(
            "deepspeed", self.shapes, optimizer, machine, collectives.world_size()
        )
        masters: dict[
            Piece, Tensor
        ] = {}  # a copy of what this rank owns of the weights, before DeepSpeed casts them
        for piece in self.layout.owned_by(collectives.rank()):
            parameter = self._parameters[piece.name]
            if hasattr(parameter, "ds_tensor"):
                masters[piece] = parameter.__dict__.pop(_FP32)[: piece.length]
            else:
                whole = parameter.detach().flatten()
                masters[piece] = whole[piece.offset : piece.offset + piece.length].to(
                    "cpu", copy=True
                )
        config = resolve(
            machine, micro_batch_size=micro_batch_size, world_size=collectives.world_size()
        )
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
        require_dealt(
            self.layout, collectives.rank(), [span.piece for span in self._spans], "DeepSpeed"
        )
        for span in self._spans:  # DeepSpeed begins with the weights that it has rounded to bf16
            flat = self._flat_partitions()[span.group]
            flat_part(flat, span.start, span.piece.length).copy_(masters[span.piece])

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        if self._stage == 3:
            values = {shard.name: shard.values for shard in shards}
            shards.clear()  # so that each is freed once its values are taken
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
            # Offloaded partitions have a gradient buffer of their own in host memory; the others take a new one.
            flats = [
                torch.zeros_like(p) if p.grad is None else p.grad.zero_()
                for p in self._flat_partitions()
            ]
            for span in reversed(self._spans):
                flats[span.group][span.start : span.start + span.piece.length] = shards.pop().values
            assert not shards, "each shard has a span"
            for group, flat in enumerate(flats):
                self._zero.averaged_gradients[group] = [flat]
        set_rate(self._zero.param_groups, lr)
        self._engine.step()
        if self._engine.skipped_steps:
            raise RuntimeError(
                "DeepSpeed skipped a step: its overflow check must never decide about a noised gradient"
            )

    def _flat_partitions(self) -> list[Tensor]:
        """This rank's flat fp32 master weights, by group."""
        zero = self._zero
        return list(
            zero.fp32_partitioned_groups_flat
            if self._stage == 3
            else zero.single_partition_of_fp32_groups
        )

    def state(self) -> Iterator[ShardState]:
        partitions = self._flat_partitions()
        for span in self._spans:
            flat = partitions[span.group]
            stepped = self._zero.optimizer.state.get(flat, {})
            tensors = {
                "param": flat,
                **{kind: stepped[kind] for kind in moments(self._config) if kind in stepped},
            }
            yield ShardState(
                span.piece,
                {k: flat_part(t, span.start, span.piece.length) for k, t in tensors.items()},
            )

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """At stages 1 and 2 the module's own (compute dtype) weights must have been set before the engine was built."""
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
                parameter.ds_tensor.data[: span.piece.length].copy_(
                    flat_part(flat, span.start, span.piece.length)
                )
                if (
                    parameter.ds_status == ZeroParamStatus.AVAILABLE
                ):  # a gathered copy of the old weights
                    parameter.partition()


def _find_spans(
    zero: Any, stage: int, parameters: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> Iterator[_Span]:
    for name, parameter in parameters.items():
        if (
            stage == 3
        ):  # each parameter is cut into equal parts, padded at the end: rank r owns the r-th
            size = parameter.ds_tensor.numel()
            offset = size * collectives.rank()
            length = min(size, shapes[name].numel() - offset)
            if length > 0:
                group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
                yield _Span(Piece(name, offset, length), group, start)
        elif (
            parameter._hp_mapping is not None
        ):  # a parameter may straddle the borders of two ranks' partitions
            mapping = parameter._hp_mapping
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield _Span(Piece(name, low.start, low.numel), mapping.param_group_index, high.start)


def module_sharder(
    machine: MachineSettings, device: torch.device, micro_batch_size: int
) -> Callable[[nn.Module], None]:
    """Does what `deepspeed.zero.Init` does to an initialised module, for the parameters of one submodule after the other.

    As a context manager it would shard parameters that have no values yet: our models are built on the meta device first.
    """
    _start()
    rank, world_size = collectives.rank(), collectives.world_size()
    config = resolve(machine, micro_batch_size=micro_batch_size, world_size=world_size)

    def shard(module: nn.Module) -> None:
        # Without what an earlier module shares with this one, such as a tied head's weight: that is in shards already.
        direct = nn.ParameterList(
            p for p in module.parameters(recurse=False) if not hasattr(p, "ds_tensor")
        )
        for parameter in direct:
            part = -(-parameter.numel() // world_size)
            values = parameter.detach().flatten()[rank * part : (rank + 1) * part]
            setattr(parameter, _FP32, values.to("cpu", copy=True))
        direct.to(device, machine.compute_dtype)
        for buffer in module.buffers(recurse=False):
            buffer.data = buffer.data.to(
                device, machine.compute_dtype if buffer.is_floating_point() else None
            )
        if len(direct) > 0:
            deepspeed.zero.Init(module=direct, config_dict_or_path=config)

    return shard


def _start() -> None:
    """Joins DeepSpeed's group. Training never uses the op that is marked as incompatible, which DeepSpeed compiles on CPU.

    That op needs a compiler and can hang on a stale lock. Other accelerators have no such op, and there nothing asks for the
    list of ops, which takes compilers to make.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        assert builder.NAME in deepspeed.ops.__compatible_ops__
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _read_back(engine: Any, machine: MachineSettings, micro_batch_size: int) -> None:
    """Requires that DeepSpeed understood what was meant (contract 14): its defaults change between versions."""
    settings: dict[str, tuple[Any, Any]] = {
        "gradient_clipping": (engine.gradient_clipping(), 0.0),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), 1),
        "train_micro_batch_size_per_gpu": (
            engine.train_micro_batch_size_per_gpu(),
            micro_batch_size,
        ),
        "zero_optimization.stage": (engine.zero_optimization_stage(), machine.stage),
        "bf16.enabled": (engine.bfloat16_enabled(), machine.compute_dtype == torch.bfloat16),
        "fp16.enabled": (engine.fp16_enabled(), False),
    }
    if machine.stage == 3:
        settings["data_types.grad_accum_dtype"] = (
            engine.optimizer.gradient_accumulation_dtype,
            torch.float32,
        )
    for key, (actual, expected) in settings.items():
        if actual != expected:
            raise RuntimeError(
                f"DeepSpeed runs with {key} = {actual}, but {expected} was asked for"
            )
