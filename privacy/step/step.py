"""One DP-SGD step at scale, in the order in which it happens. Start here.

`train_step` takes the clipped sums of all micro-batches, writes the intent into the ledger (before
them, if sums are communicated with every micro-batch), reduces once, lets the owner of each shard
add noise, divides by the public expected batch size, steps the optimizer and writes `done`.
`Run.take` (privacy/run/run.py) calls it, once a turn of its caller's loop.
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
    """Writes the two records of a step; collective. `privacy.run.run_ledger.RunLedger` charges."""

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        """Charges durably, before a value that depends on a gradient leaves its process."""
        ...

    def done(self, step: int, **noised: Any) -> None:
        """Records the update of `step` as made.

        Args:
            noised: the record's statements about the noised sums (privacy/noise/refutation.py).
        """
        ...


class MicroBatch(Protocol):
    """A micro-batch of fixed shape.

    Attributes:
        inputs: the task's arguments, of B rows each.
        is_padding_B: bool, the rows that contribute zero, those of undecodable examples included.
        num_undecodable: examples of this micro-batch that could not be decoded.
    """

    @property
    def inputs(self) -> Mapping[str, Tensor]: ...

    @property
    def is_padding_B(self) -> Tensor: ...

    @property
    def num_undecodable(self) -> int: ...


@dataclass(frozen=True)
class Mechanism:
    """The parts that turn examples into one private step.

    Training, audits and benchmarks build the same.

    Attributes:
        sampler: decides which examples are in a step.
        clipped: the plan's clipped sum, on the engine's module.
        noise: gives the owner of a shard its rounded normals.
        engine: applies the noised gradient.
        task: maps the inputs of a micro-batch to one loss per example; the engine's module, or a
            function that calls it.
    """

    plan: PrivacyPlan
    sampler: Sampler
    clipped: ClippedSum
    noise: NoiseSource
    engine: Engine
    task: Task


@dataclass(frozen=True)
class Charge:
    """Holds the ledger of a step's charge, and two functions that the step calls before it.

    Attributes:
        learning_rate: gives the rate of a step, from 1 on.
        note: learns of a step just before ranks agree on its charge, so that guards can refuse it.
    """

    ledger: StepLedger
    learning_rate: Callable[[int], float]
    note: Callable[[int], object]


@dataclass(frozen=True)
class StepRecord:
    """Holds the measurements of one step, private and public by type.

    Attributes:
        noised_grad_norm: post-processing of the noised gradient.
        private: sums over all ranks, computed without noise: MicroBatchStats' fields and the number
            of undecodable examples.
        communication_bytes: sent by this rank for the sums; follows from the number of
            micro-batches.
        seconds: of the step's phases on this rank.
    """

    lr: Public[float]
    noised_grad_norm: Public[float]
    private: dict[str, Private[float]]
    communication_bytes: Private[int]
    seconds: dict[str, Private[float]]


def train_step(
    mechanism: Mechanism, charge: Charge, step: int, micro_batches: Iterator[MicroBatch]
) -> StepRecord:
    """Takes one DP-SGD step on one logical batch.

    Args:
        micro_batches: of this rank, as many as on every other rank.
    """
    plan = mechanism.plan
    clipped = mechanism.clipped
    engine = mechanism.engine
    laps = clock.Laps(engine.device)
    clipped.zero_()
    collectives.traffic.reset()
    release = clipped.release(plan.noise_multiplier)
    # Without privacy C is infinite.
    noise_std = release["std"] if plan.noise_multiplier > 0 else 0.0
    stats: list[MicroBatchStats] = []
    num_undecodable = 0
    # Sharded accumulation sums over ranks with every micro-batch, so its charge comes first.
    if clipped.leaves_process:
        lr = _intend(charge, step, release)
    # The sum of clipped gradients: no noise, no division; locally also no communication.
    for batch in micro_batches:
        inputs = to_device(batch.inputs, engine)
        # Need not block: the loader has pinned the memory.
        is_padding_B = batch.is_padding_B.to(engine.device, non_blocking=True)
        stats.append(clipped.add_micro_batch(mechanism.task, inputs, is_padding_B))
        num_undecodable += batch.num_undecodable
    clipped.require_repeated()
    # This phase includes the wait for data.
    laps.end("gradients")
    if not clipped.leaves_process:
        lr = _intend(charge, step, release)
    laps.end("intent")

    shards = reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)
    laps.end("reduction")
    # The noise would hide that an incomplete reduction lacks the sums of some ranks.
    collectives.require_sound(engine.device)
    # By number: a loop variable would keep the memory of a shard that is replaced.
    for number in range(len(shards)):
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
    norm, norm_record = _norm(shards, noise_std / plan.expected_batch_size)
    # The engine may free the shards.
    engine.step(shards, lr=lr)
    # Without noise the norm is private, and the ledger is public.
    charge.ledger.done(step, **(norm_record if noise_std > 0 else {}))
    laps.end("update")
    return _record(lr, norm, stats, num_undecodable, laps.seconds)


def _intend(charge: Charge, step: int, release: Release) -> float:
    """Charges the step: durably, and acknowledged by all ranks; returns its learning rate.

    No value that depends on a gradient leaves its process before. In an own loop the rate is a
    user's code: it is called before `note`, which sees its writes to the weights, and after the
    gradients, which depend on nothing that it wrote.
    """
    lr = charge.learning_rate(step)
    charge.note(step)
    # A rank that failed until here, or ran out of time to stop, costs no charge.
    collectives.agree(ready=True)
    charge.ledger.intent(step, releases=[release])
    return lr


def _norm(shards: Sequence[GradShard], scale: float) -> tuple[float, dict[str, Any]]:
    """Returns the noised gradient's norm over all ranks, and its record for `done`. Collective.

    Squares are added in fp64; the record has nine digits. Where several ranks own coordinates, it
    also has the norm of the share that is smallest beside its noise: a sum over all shares hides
    one that lacks its noise.

    Args:
        scale: standard deviation of the noise in a coordinate of the gradient.
    """
    # One row per rank: number of coordinates, squared norm.
    table = torch.zeros(collectives.world_size(), 2, dtype=torch.float64)
    if shards:
        squares = torch.stack([torch.dot(shard.values, shard.values) for shard in shards])
        num_coordinates = sum(shard.values.numel() for shard in shards)
        row = [num_coordinates, float(squares.sum())]
        table[collectives.rank()] = torch.tensor(row, dtype=torch.float64)
    shares = []
    for count, squared in collectives.all_reduce_sum(table).tolist():
        if count:
            shares.append((int(count), squared))
    norm = math.sqrt(math.fsum(squared for _, squared in shares))
    record: dict[str, Any] = {"noised_norm": float(f"{norm:.9g}")}
    if len(shares) > 1 and scale > 0:
        # Standardised, since a share of few coordinates has a small norm anyway.
        excesses = [(squared / scale**2 - count) / math.sqrt(count) for count, squared in shares]
        count, squared = shares[excesses.index(min(excesses))]
        record["smallest_share"] = {
            "owners": len(shares),
            "coordinates": count,
            "norm": float(f"{math.sqrt(squared):.9g}"),
        }
    return norm, record


def _record(
    lr: float,
    norm: float,
    stats: Sequence[MicroBatchStats],
    num_undecodable: int,
    seconds: dict[str, Private[float]],
) -> StepRecord:
    """Returns the record of the step, summed over its micro-batches and all ranks."""
    columns = zip(*stats, strict=True)
    sums = [torch.stack([number.double() for number in column]).sum().cpu() for column in columns]
    sums.append(torch.tensor(float(num_undecodable), dtype=torch.float64))
    totals = collectives.all_reduce_sum(torch.stack(sums)).tolist()
    names = (*MicroBatchStats._fields, "num_undecodable")
    return StepRecord(
        lr=Public(lr, Reason.SCHEDULE),
        noised_grad_norm=Public(norm, Reason.NOISED),
        private={name: Private(total) for name, total in zip(names, totals, strict=True)},
        communication_bytes=Private(collectives.traffic.bytes.total()),
        seconds=seconds,
    )
