"""One DP-SGD step at scale, in the order in which it happens. Start here.

`train_step` takes the clipped sums of all micro-batches, writes the intent into the ledger (before them, if sums are communicated
with every micro-batch), reduces once, lets the owner of each shard add noise, divides by the public expected batch size, steps
the optimizer and writes `done`. `Run.take` (privacy/run/run.py) calls it, once a turn of its caller's loop.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..boundary import Private, Public, Reason
from ..clipping import ClippedSum, MicroBatchStats
from ..gradients.recorder import Task
from ..noise.rounded_normal import deviation_in_units
from ..noise.source import NoiseSource, add_noise
from ..plan.numbers import PrivacyPlan
from ..plan.releases import Release
from ..ranks import clock, collectives
from ..ranks.engine import Engine, GradShard, to_device
from ..sampling.poisson import Sampler
from ..sums.reduction import reduce_to_owners
from ..sums.totals import real_numbers_


class StepLedger(Protocol):
    """The two records of a step; collective. `privacy.run.ledger.RunLedger` is the one that charges."""

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        """Charges the attempt, durably, before anything that depends on a gradient leaves its process."""
        ...

    def done(self, step: int, **noised: Any) -> None:
        """The update of `step` is made; `noised` is what the record states of the noised sums (privacy/noise/refutation.py)."""
        ...


class MicroBatch(Protocol):
    """A micro-batch of fixed shape: `inputs` for the task, B rows each; bool rows that count as nothing, undecodable ones too."""

    @property
    def inputs(self) -> Mapping[str, Tensor]: ...

    @property
    def is_padding_B(self) -> Tensor: ...

    @property
    def num_undecodable(self) -> int: ...


@dataclass(frozen=True)
class Mechanism:
    """Everything that turns examples into one private step; training, audits and benchmarks build the same.

    Attributes:
        sampler: decides who is in a step.
        clipped: the plan's clipped sum, on the engine's module.
        noise: gives the owner of a shard its rounded normals.
        engine: applies what was noised.
        task: maps the inputs of a micro-batch to one loss per example; the engine's module, or a function that calls it.
    """

    plan: PrivacyPlan
    sampler: Sampler
    clipped: ClippedSum
    noise: NoiseSource
    engine: Engine
    task: Task


@dataclass(frozen=True)
class Charge:
    """What a step asks and tells when it is charged.

    Attributes:
        learning_rate: gives the rate of a step, from 1 on.
        note: learns of a step just before ranks agree on its charge, for whoever watches over them.
    """

    ledger: StepLedger
    learning_rate: Callable[[int], float]
    note: Callable[[int], object]


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves behind, private and public by type.

    `private` holds sums over all ranks, computed without noise: MicroBatchStats' fields and the number of undecodable
    examples. `noised_grad_norm` is post-processing of the noised gradient.
    `communication_bytes` is what this rank sent for the sums; it follows from the number of micro-batches. `seconds` are those of
    the step's phases on this rank.
    """

    lr: Public[float]
    noised_grad_norm: Public[float]
    private: dict[str, Private[float]]
    communication_bytes: Private[int]
    seconds: dict[str, Private[float]]


def train_step(
    mechanism: Mechanism, charge: Charge, step: int, micro_batches: Iterator[MicroBatch]
) -> StepRecord:
    """Takes one DP-SGD step on one logical batch. Every rank passes the same number of micro-batches."""
    plan, clipped, engine = mechanism.plan, mechanism.clipped, mechanism.engine
    laps = clock.Laps(engine.device)
    clipped.zero_()
    collectives.traffic.reset()
    release = clipped.release(plan.noise_multiplier)
    # Without privacy C is infinite.
    noise_std = release["std"] if plan.noise_multiplier > 0 else 0.0
    stats: list[MicroBatchStats] = []
    num_undecodable = 0
    if clipped.leaves_process:  # sharded accumulation sums over ranks with every micro-batch
        lr = _intend(charge, step, release)
    # The sum of clipped gradients: no noise, no division; locally also no communication.
    for batch in micro_batches:
        # Pinned by the loader.
        is_padding_B = batch.is_padding_B.to(engine.device, non_blocking=True)
        stats.append(
            clipped.add_micro_batch(mechanism.task, to_device(batch.inputs, engine), is_padding_B)
        )
        num_undecodable += batch.num_undecodable
    clipped.require_repeated()
    laps.end("gradients")  # the wait for data is in it
    if not clipped.leaves_process:
        lr = _intend(charge, step, release)
    laps.end("intent")

    shards = reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)
    laps.end("reduction")
    collectives.require_sound(engine.device)  # no noise hides what is incomplete
    for number in range(len(shards)):  # by number: what a loop variable holds is not freed
        # Whole numbers until the noise is in them; without noise there is no step.
        if clipped.exponent is not None:
            deviation = deviation_in_units(noise_std, clipped.exponent)
            add_noise(shards[number].values, deviation, mechanism.noise)
            shards[number] = shards[number]._replace(
                values=real_numbers_(shards[number].values, clipped.exponent)
            )
        # The public constant, never the realised batch size.
        shards[number].values.div_(plan.expected_batch_size)
    laps.end("noise")
    norm, noised = _norm(shards, noise_std / plan.expected_batch_size)
    engine.step(shards, lr=lr)  # may free them
    stated = noised if noise_std > 0 else {}  # without noise nothing of it may stand in the ledger
    charge.ledger.done(step, **stated)
    laps.end("update")
    return _record(lr, norm, stats, num_undecodable, laps.seconds)


def _intend(charge: Charge, step: int, release: Release) -> float:
    """The charge: durable, and acknowledged by all ranks, before anything that depends on a gradient leaves its process.

    Returns the step's learning rate. In an own loop it is a user's code: asked for before `note`, which finds what it
    wrote to the weights, and behind the gradients, which go through nothing that it wrote.
    """
    lr = charge.learning_rate(step)
    charge.note(step)
    collectives.agree(
        ready=True
    )  # a rank that failed until here, or ran out of time to stop, costs no charge
    charge.ledger.intent(step, releases=[release])
    return lr


def _norm(shards: Sequence[GradShard], scale: float) -> tuple[float, dict[str, Any]]:
    """Norm of the noised gradient over all ranks, added in fp64, and what `done` states of it, in nine digits. Collective.

    Where several ranks own coordinates that is also the norm of the one that is smallest beside its noise: a sum over all of them
    hides one that lacks its noise.

    Args:
        scale: standard deviation of the noise in a coordinate of the gradient.
    """
    table = torch.zeros(
        collectives.world_size(), 2, dtype=torch.float64
    )  # of each rank: coordinates, squared norm
    if shards:
        squared = torch.stack([torch.dot(shard.values, shard.values) for shard in shards]).sum()
        count = sum(shard.values.numel() for shard in shards)
        table[collectives.rank()] = torch.tensor([count, float(squared)], dtype=torch.float64)
    owners = [
        (int(count), squared)
        for count, squared in collectives.all_reduce_sum(table).tolist()
        if count
    ]
    norm = math.sqrt(math.fsum(squared for _, squared in owners))
    stated: dict[str, Any] = {"noised_norm": float(f"{norm:.9g}")}
    if len(owners) > 1 and scale > 0:
        count, squared = min(
            owners, key=lambda one: (one[1] / scale**2 - one[0]) / math.sqrt(one[0])
        )
        share = {
            "owners": len(owners),
            "coordinates": count,
            "norm": float(f"{math.sqrt(squared):.9g}"),
        }
        stated["smallest_share"] = share
    return norm, stated


def _record(
    lr: float,
    norm: float,
    stats: Sequence[MicroBatchStats],
    num_undecodable: int,
    seconds: dict[str, Private[float]],
) -> StepRecord:
    """What the step shows, summed over its micro-batches and all ranks."""
    mine: list[Tensor] = [
        torch.stack([value.double() for value in column]).sum().cpu()
        for column in zip(*stats, strict=True)
    ]
    totals = collectives.all_reduce_sum(
        torch.stack([*mine, torch.tensor(float(num_undecodable), dtype=torch.float64)])
    )
    names = (*MicroBatchStats._fields, "num_undecodable")
    return StepRecord(
        lr=Public(lr, Reason.SCHEDULE),
        noised_grad_norm=Public(norm, Reason.NOISED),
        private={name: Private(total) for name, total in zip(names, totals.tolist(), strict=True)},
        communication_bytes=Private(collectives.traffic.bytes.total()),
        seconds=seconds,
    )
