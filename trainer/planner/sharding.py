"""How many coordinates the busiest rank owns, engine by engine, without starting one.

The engines deal out coordinates by their own rules (trainer/engines). What they will do is repeated here in closed form;
tests/trainer/test_planner_engines.py holds it against the layouts of real engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.errors import ConfigError
from trainer.optimizers import parameter_groups

ZERO_ALIGNMENT = 2
"""DeepSpeed pads the flat groups of stages 1 and 2 to multiples of this times the number of ranks."""
PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay gathered."""
LIVE = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: gathered parameters are given up above this number only."""


@dataclass(frozen=True)
class Trainable:
    """The trainable parameters of a model.

    Attributes:
        shapes: by name, in the model's order.
        groups: names by optimizer group, in the order in which an engine gets them.
        blocks: parameters of each repeated unit, as numbers of coordinates.
        frozen: coordinates of parameters that are not trained.
        buffers: coordinates of floating-point buffers.
    """

    shapes: Mapping[str, torch.Size]
    groups: Sequence[Sequence[str]]
    blocks: Sequence[int]
    frozen: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: OptimizerSection) -> "Trainable":
        """
        Args:
            model: on any device, unsharded.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        shapes = {name: p.shape for name, p in trained.items()}
        names = {id(p): name for name, p in trained.items()}
        groups = parameter_groups(trained.items(), shapes, optimizer)
        find_blocks = getattr(model, "blocks", None)
        units = list(find_blocks()) if callable(find_blocks) else []
        return cls(
            shapes,
            [[names[id(p)] for p in group["params"]] for group in groups],
            [sum(p.numel() for p in unit.parameters()) for unit in units],
            sum(p.numel() for p in model.parameters() if not p.requires_grad),
            sum(b.numel() for b in model.buffers() if b.is_floating_point()),
        )

    @property
    def count(self) -> int:
        """P: trainable coordinates."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    def group_sizes(self) -> list[int]:
        return [sum(self.shapes[name].numel() for name in names) for names in self.groups]


@dataclass(frozen=True)
class Shares:
    """Coordinates on the rank that has the most.

    Attributes:
        owned: whose sums it reduces and noises.
        stepped: whose optimizer states it holds, padding included.
        weights: of the copy in the compute dtype that it keeps between uses; 0 where the master weights are that copy.
        masters: of fp32 master weights.
        gathered: further weights that exist while a micro-batch runs.
        largest_piece: the longest run that is noised at once.
    """

    owned: int
    stepped: int
    weights: int
    masters: int
    gathered: int
    largest_piece: int


def require_supported(engine: EngineName, machine: MachineSettings, world_size: int) -> None:
    """Refuses what the engine itself would refuse at its start, before a cluster is booked.

    Raises:
        ConfigError
    """
    where = f"ds_config {machine.path}: zero_optimization"
    offloads = machine.offload_optimizer or machine.offload_param
    if world_size < 1:
        raise ConfigError(f"--world_size is {world_size}; it must be at least 1")
    if offloads and engine in ("local", "fairscale"):
        raise ConfigError(f"{where}: --engine {engine} cannot offload; use deepspeed or fsdp")
    if engine == "fsdp" and machine.offload_optimizer and not machine.offload_param:
        raise ConfigError(f"{where}.offload_optimizer: FSDP2 needs offload_param beside it (stage 3)")
    if engine == "fairscale" and machine.stage == 3:
        raise ConfigError(f"{where}.stage 3 is refused with --engine fairscale; use stage 1, or --engine fsdp")
    if machine.zero_init and engine != "deepspeed":
        raise ConfigError(f"{where}.zero_init needs --engine deepspeed, not {engine}")
    if machine.shard_group_size is not None and engine != "fsdp":
        raise ConfigError(f"{where}.zero_hpz_partition_size needs --engine fsdp, not {engine}")
    if machine.shard_group_size is not None and world_size % machine.shard_group_size != 0:
        raise ConfigError(
            f"{where}.zero_hpz_partition_size {machine.shard_group_size} must divide the {world_size} ranks"
        )


def gathers_for_every_pass(engine: EngineName, machine: MachineSettings) -> bool:
    """Whether weights exist for one pass only, so that two passes need two forwards (privacy/clipping/clipped_sum.py)."""
    return engine == "fsdp" or (engine == "deepspeed" and machine.stage == 3)


def shares(trainable: Trainable, engine: EngineName, machine: MachineSettings, world_size: int) -> Shares:
    """Of the busiest rank."""
    match engine:
        case "local":
            return _local(trainable, world_size)
        case "fairscale":
            return _fairscale(trainable, machine, world_size)
        case "fsdp":
            return _fsdp(trainable, machine, world_size)
        case "deepspeed" if machine.stage == 3:
            return _zero3(trainable, machine, world_size)
        case "deepspeed":
            return _zero12(trainable, world_size)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _local(trainable: Trainable, world_size: int) -> Shares:
    """Everything is on every rank; coordinates are dealt out for the noise only."""
    total = trainable.count
    owned = _ceil(total, world_size)
    return Shares(owned, total, total + trainable.frozen, total, 0, min(owned, max(trainable.sizes)))


def _zero12(trainable: Trainable, world_size: int) -> Shares:
    """Each optimizer group is one flat tensor, cut into equal parts."""
    parts = [
        _ceil(size, ZERO_ALIGNMENT * world_size) * ZERO_ALIGNMENT * world_size // world_size
        for size in trainable.group_sizes()
    ]
    owned = sum(min(part, size) for part, size in zip(parts, trainable.group_sizes(), strict=True))
    total = trainable.count + trainable.frozen
    return Shares(owned, sum(parts), total, sum(parts), 0, min(owned, max(trainable.sizes)))


def _zero3(trainable: Trainable, machine: MachineSettings, world_size: int) -> Shares:
    """Each parameter is cut into equal parts. Small ones stay whole besides; large ones are given up late."""
    zero = machine.raw["zero_optimization"]
    persistent = zero.get("stage3_param_persistence_threshold", PERSISTENT)
    live = zero.get("stage3_max_live_parameters", LIVE)
    parts = [_ceil(size, world_size) for size in trainable.sizes]
    gathered = min(trainable.count, live + sum(size for size in trainable.sizes if size <= persistent))
    part = sum(parts)
    return Shares(part, part, part + _ceil(trainable.frozen, world_size), part, gathered, max(parts))


def _fsdp(trainable: Trainable, machine: MachineSettings, world_size: int) -> Shares:
    """Each parameter is cut along its first dimension; replicas of a shard share the noise of it."""
    ranks = machine.shard_group_size or world_size
    parts = [_ceil(shape[0], ranks) * shape[1:].numel() for shape in map(_rows, trainable.shapes.values())]
    stepped, replicas = sum(parts), world_size // ranks
    rest = trainable.count + trainable.frozen - sum(trainable.blocks)
    # Stage 3: what is in no block, and two blocks: one that computes and one that is fetched ahead.
    gathered = rest + 2 * max(trainable.blocks, default=0) if machine.stage == 3 else rest + sum(trainable.blocks)
    owned = _ceil(stepped, replicas)
    return Shares(owned, stepped, 0, stepped + _ceil(trainable.frozen, ranks), gathered, min(owned, max(parts)))


def _rows(shape: torch.Size) -> torch.Size:
    return shape if len(shape) > 0 else torch.Size([1])


def _fairscale(trainable: Trainable, machine: MachineSettings, world_size: int) -> Shares:
    """Whole parameters, each to the rank that has least so far; master weights are on every rank."""
    owned = [0] * world_size
    for names in trainable.groups:
        for name in names:
            owned[owned.index(min(owned))] += trainable.shapes[name].numel()
    total = trainable.count
    masters = total if machine.compute_dtype != torch.float32 else 0
    return Shares(max(owned), max(owned), total + trainable.frozen, masters, 0, max(trainable.sizes))
