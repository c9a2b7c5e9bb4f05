"""What a model has to shard, and how much of it the busiest rank holds, without starting an engine.

Who owns which coordinate is the engines' own answer (trainer/engines/layouts.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines.layouts import flat_partition, layout_of
from trainer.optimizers import group_names

PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay gathered."""
LIVE = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: gathered parameters are given up above this number only."""


@dataclass(frozen=True)
class Trainable:
    """The trainable parameters of a model.

    Attributes:
        shapes: by name, in the model's order.
        blocks: parameters of each repeated unit, as numbers of coordinates.
        frozen: coordinates of parameters that are not trained.
        buffers: coordinates of floating-point buffers.
    """

    shapes: Mapping[str, torch.Size]
    blocks: Sequence[int]
    frozen: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module) -> "Trainable":
        """
        Args:
            model: on any device, unsharded.
        """
        find_blocks = getattr(model, "blocks", None)
        units = list(find_blocks()) if callable(find_blocks) else []
        return cls(
            {name: p.shape for name, p in model.named_parameters() if p.requires_grad},
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


def gathers_for_every_pass(engine: EngineName, machine: MachineSettings) -> bool:
    """Whether weights exist for one pass only, so that two passes need two forwards (privacy/clipping/clipped_sum.py)."""
    return engine == "fsdp" or (engine == "deepspeed" and machine.stage == 3)


def shares(
    trainable: Trainable, engine: EngineName, machine: MachineSettings, optimizer: OptimizerSection, world_size: int
) -> Shares:
    """What the busiest rank has: coordinates that it owns by the engine's own layout, and the memory that goes with them."""
    layout = layout_of(engine, trainable.shapes, optimizer, machine, world_size)
    owned = max(layout.count(rank) for rank in range(world_size))
    largest_piece = max(piece.length for pieces in layout.pieces for piece in pieces)
    total, whole = trainable.count, trainable.count + trainable.frozen
    match engine:
        case "local":
            return Shares(owned, total, whole, total, 0, largest_piece)
        case "fairscale":  # OSS steps fp32 parameters in place, and master weights otherwise
            masters = total if machine.compute_dtype != torch.float32 else 0
            return Shares(owned, owned, whole, masters, 0, largest_piece)
        case "fsdp":  # the replicas of a shard own it together, and each steps all of it
            ranks = machine.shard_group_size or world_size
            stepped = sum(layout.count(rank) for rank in range(0, world_size, ranks))
            rest, blocks = whole - sum(trainable.blocks), trainable.blocks
            # At stage 3 one block computes while another one is fetched ahead.
            gathered = rest + (2 * max(blocks, default=0) if machine.stage == 3 else sum(blocks))
            return Shares(owned, stepped, 0, stepped + -(-trainable.frozen // ranks), gathered, largest_piece)
        case "deepspeed" if machine.stage == 3:  # small parameters stay gathered, and large ones are given up late
            zero = machine.raw["zero_optimization"]
            persistent = zero.get("stage3_param_persistence_threshold", PERSISTENT)
            live = zero.get("stage3_max_live_parameters", LIVE)
            gathered = min(total, live + sum(size for size in trainable.sizes if size <= persistent))
            return Shares(owned, owned, owned + -(-trainable.frozen // world_size), owned, gathered, largest_piece)
        case "deepspeed":
            groups = group_names(trainable.shapes, trainable.shapes, optimizer).values()
            sizes = [sum(trainable.shapes[name].numel() for name in names) for names in groups]
            padded = sum(flat_partition(size, world_size) for size in sizes)
            return Shares(owned, padded, whole, padded, 0, largest_piece)
