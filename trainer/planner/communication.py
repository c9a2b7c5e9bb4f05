"""What travels between ranks in a logical step, and how long that takes."""

from dataclasses import dataclass

from privacy.clipping.clipped_sum import Mode
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
from trainer.planner.memory import FP32, FP64, bucket_parts
from trainer.planner.sharding import Shares, Trainable


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends, if nothing is sent twice: in every micro-batch, and once per logical batch."""

    weights_per_micro_batch: float
    weights_per_step: float
    sums_per_micro_batch: float
    sums_per_step: float

    def per_step(self, micro_batches: float) -> float:
        each = self.weights_per_micro_batch + self.sums_per_micro_batch
        return micro_batches * each + self.weights_per_step + self.sums_per_step


@dataclass(frozen=True)
class Network:
    """Rates per GPU and in one direction.

    Attributes:
        node_bandwidth: bytes/s within a node.
        network_bandwidth: bytes/s between nodes.
        reached: share of either that large collectives reach.
        hop_latency: seconds; a ring over W ranks has W - 1 hops.
    """

    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8
    reached: float = 0.8
    hop_latency: float = 5e-6

    def seconds(self, num_bytes: float, world_size: int) -> float:
        """Of one ring over all ranks in which each sends so many bytes."""
        if num_bytes == 0:
            return 0.0
        slowest = self.node_bandwidth if world_size <= self.gpus_per_node else self.network_bandwidth
        return num_bytes / (slowest * self.reached) + (world_size - 1) * self.hop_latency


def exposed_seconds(
    traffic: Traffic, network: Network, world_size: int, micro_batches: float, compute_seconds: float
) -> float:
    """Of communication that no computation hides, in one logical step.

    Weights are gathered while the previous block computes; the reduction of sums is not overlapped.
    """
    hidden = network.seconds(traffic.weights_per_micro_batch, world_size)
    exposed = micro_batches * max(0.0, hidden - compute_seconds / micro_batches)
    exposed += micro_batches * network.seconds(traffic.sums_per_micro_batch, world_size)
    exposed += network.seconds(traffic.weights_per_step, world_size)
    return exposed + network.seconds(traffic.sums_per_step, world_size)


def traffic(
    trainable: Trainable,
    shares: Shares,
    engine: EngineName,
    machine: MachineSettings,
    *,
    mode: Mode,
    accumulation: str,
    world_size: int,
) -> Traffic:
    """From the engines' rules. Sums are exact (`trainer.ranks.distributed.traffic` counts the same); weights are an estimate:

    a block's weights are gathered once per forward and once per backward, and DeepSpeed's cache of live parameters, which
    may save half of that, is not counted on.
    """
    others = (world_size - 1) / world_size
    weight_bytes = machine.compute_dtype.itemsize * (trainable.count + trainable.frozen)
    sums = _sums_bytes(trainable, shares, engine, machine, accumulation, world_size)
    passes = 2 if mode == "two_pass" else 1
    if engine == "deepspeed" and machine.stage == 3:
        return Traffic(2 * passes * weight_bytes * others, 0.0, *sums)
    if engine == "fsdp":
        ranks = machine.shard_group_size or world_size
        share = machine.compute_dtype.itemsize * (ranks - 1) / ranks
        blocks = sum(trainable.blocks)
        if machine.stage == 3:
            rest = trainable.count + trainable.frozen - blocks
            return Traffic(passes * share * (2 * blocks + rest), 0.0, *sums)
        return Traffic(0.0, weight_bytes * (ranks - 1) / ranks, *sums)
    if engine == "fairscale":
        return Traffic(0.0, FP32 * trainable.count * others, *sums)
    if engine == "deepspeed":
        return Traffic(0.0, machine.compute_dtype.itemsize * trainable.count * others, *sums)
    return Traffic(0.0, 0.0, *sums)  # every rank steps the whole model; its gradients are among the sums


def _sums_bytes(
    trainable: Trainable,
    shares: Shares,
    engine: EngineName,
    machine: MachineSettings,
    accumulation: str,
    world_size: int,
) -> tuple[float, float]:
    """(per micro-batch, per logical batch) of clipped sums in fp64, and of noised gradients in fp32 between replicas."""
    reduced = FP64 * (world_size - 1) * shares.owned
    if accumulation == "sharded":
        reduced = FP64 * (world_size - 1) * sum(bucket_parts(trainable, world_size))
    gathered = 0
    if engine == "local":
        gathered = FP32 * (world_size - 1) * shares.owned
    elif engine == "fsdp":
        replicas = world_size // (machine.shard_group_size or world_size)
        gathered = FP32 * (replicas - 1) * shares.owned
    if accumulation == "local":
        return 0.0, float(reduced + gathered)
    # From the ranks that keep the sums to those that own the coordinates: at most a rank's whole part.
    return float(reduced), float(reduced / (world_size - 1) if world_size > 1 else 0) + gathered
