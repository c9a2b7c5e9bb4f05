"""Puts together what a recipe takes under an engine, on a number of ranks, on a named accelerator."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.config import captioner_config
from privacy.clipping.clipped_sum import Mode
from privacy.plan import PrivacyPlan, make_plan
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.engines import require_supported
from trainer.planner.bands import with_bands
from trainer.planner.batches import Batches, Examples
from trainer.planner.hardware import Gpu, Network, exposed_seconds, traffic
from trainer.planner.memory import (
    FP64,
    RankMemory,
    Shares,
    Trainable,
    largest_that_fits,
    rank_memory,
    room,
    shares,
)
from trainer.planner.probe import Probe
from trainer.planner.staging import REQUEST_PRICE, STORE_GBITS, micro_batches_of_shares, staging_costs
from trainer.run.clipping_mode import better_mode
from trainer.tasks import TrainingTask, make_task
from trainer.tasks.captioning import CaptioningTask

EFFICIENCY = 0.35
"""Default share of an accelerator's dense peak that all counted operations together reach; an assumption."""
LATTICE_BYTES = 190
"""Bytes that a coordinate of one example moves through memory in certified arithmetic once its gradient is written out: 4 for
the norm, 76 to scale and round in fp64, 80 for exact squares, 30 to multiply and add up, in the unfused operations of
privacy/clipping/integers.py."""
DECODED_PER_SECOND = 366.0
"""Examples that one core decodes and transforms: JPEGs of 82 kB to 224 pixels (benchmarks/loader.py, 2026-11-22)."""
PLAIN_SAMPLE = 64
"""The non-private step, for comparison, has at most this many examples: then the captioner's head works in one piece."""


@dataclass(frozen=True)
class Cluster:
    """What the command line says in addition to recipe and ds_config.

    Attributes:
        gpu: None leaves out everything that depends on it.
        efficiency: share of the peak, see EFFICIENCY.
        gpus_per_node, network_bandwidth: in place of the reference system's; bytes/s per GPU and direction.
        decoded_per_second: examples that one core decodes.
        store_gbits, request_price: see `trainer.planner.staging`.
    """

    engine: EngineName
    world_size: int
    gpu: Gpu | None = None
    efficiency: float = EFFICIENCY
    gpus_per_node: int | None = None
    network_bandwidth: float | None = None
    decoded_per_second: float = DECODED_PER_SECOND
    store_gbits: float = STORE_GBITS
    request_price: float = REQUEST_PRICE

    @property
    def ranks_per_node(self) -> int:
        """Without a GPU or a number, all ranks are on one node."""
        of_gpu = self.gpu.gpus_per_node if self.gpu is not None else self.world_size
        return min(self.world_size, self.gpus_per_node or of_gpu)


def planning_task(config: RunConfig, root: Path) -> tuple[TrainingTask, list[str]]:
    """The recipe's task, and what was assumed: without the recipe's tokenizer, the model size's own vocabulary."""
    if config.model.kind != "captioner" or (root / config.data.tokenizer).exists():
        return make_task(config, root), []
    data, size = config.data, config.model.size
    overrides = {**config.model.overrides, "image_size": data.image_size, "num_tokens": data.num_tokens}
    model_config = captioner_config(size, **overrides)
    note = f"there is no {data.tokenizer}: planned with the size's own vocabulary of {model_config.vocab_size:,} words"
    return CaptioningTask(model_config, size, data, root / data.tokenizer), [note]


def plan_resources(
    config: RunConfig,
    machine: MachineSettings,
    cluster: Cluster,
    examples: Examples,
    plan: PrivacyPlan | None,
    root: Path,
) -> dict[str, Any]:
    """Everything that `plan.py` prints but the privacy; JSON-ready. Bytes, FLOP, seconds; per rank unless it says otherwise.

    Args:
        plan: its cap is taken; None (nobody knows the number of examples) takes the default cap.

    Raises:
        ConfigError: the engine cannot do what the ds_config says, or the accelerator cannot compute in its dtype.
        ModelConfigError, DataError: the recipe's model or data are wrong.
    """
    require_supported(cluster.engine, machine, cluster.world_size)
    peak_rate = cluster.gpu.peak(machine.compute_dtype) if cluster.gpu is not None else None
    task, notes = planning_task(config, root)
    if config.train.compile:
        notes.append("train.compile: planned without it; compiled blocks keep less and run faster")
    if machine.checkpoint_on_cpu:
        notes.append("cpu_checkpointing: the blocks' inputs count as if they stayed on the device")
    if machine.compute_dtype.itemsize < 4:
        notes.append("activations: the CPU path's, whose fp32 copies of one layer's bf16 tensors CUDA does not make")
    probe = Probe(
        task,
        machine,
        plan or plan_of_shapes(config),
        accumulation=config.train.accumulation,
        weights_of_one_pass=cluster.engine == "fsdp" or (cluster.engine == "deepspeed" and machine.stage == 3),
    )
    trainable = Trainable.of(probe.model)
    busiest = shares(trainable, cluster.engine, machine, config.optimizer, cluster.world_size)
    batches, size = Batches.of(config, plan), config.train.micro_batch_size
    expected = config.privacy.expected_batch_size
    micro_batches = micro_batches_of_shares(
        config,
        batches.micro_batches(cluster.world_size, size),
        max(batches.counts),
        cluster.world_size,
        cluster.ranks_per_node,
    )
    rows = micro_batches * size * cluster.world_size
    batch = {  # on average over steps where the number of micro-batches follows the sample
        "expected_batch_size": expected,
        "micro_batch_size": size,
        "micro_batches_per_step": micro_batches,
        "rows_per_rank": micro_batches * size,
        "rows_per_step": rows,
        "useful_share": expected / rows,
        "padding_share": batches.padding(cluster.world_size, size),
        "better_micro_batch_size": batches.better_size(cluster.world_size, size),
    }
    notes += [note for note in [batches.note(cluster.world_size, size)] if note is not None]
    memory = rank_memory(
        trainable,
        busiest,
        cluster.engine,
        machine,
        config.optimizer,
        accumulation=config.train.accumulation,
        world_size=cluster.world_size,
        average=config.train.ema_decay is not None,
        on_cpu=cluster.gpu is not None and cluster.gpu.name == "cpu",
        bands=config.privacy.bands if plan is None else plan.bands,
    )
    available = free = None
    if cluster.gpu is not None:
        available = cluster.gpu.memory_per_rank(cluster.ranks_per_node)
        free = room(memory, available)
    mode, peaks = _choose(config, probe, memory, free)
    memory = replace(memory, activations=peaks[mode])
    certified: dict[str, Any] | None = None
    if mode == "certified":
        # Whole numbers and the fp64 numbers that they become are there together.
        memory = replace(memory, step=memory.step + FP64 * busiest.owned)
        certified = {
            "rows_at_once": probe.rows_at_once(size),
            "lattice_bytes_per_example": LATTICE_BYTES * trainable.count,
        }
    flops = probe.micro_batch(mode, size).flops / size  # padding rows cost as much as others
    sample = min(size, PLAIN_SAMPLE)
    forward, plain = (count / sample for count in probe.plain_flops(sample))
    read = examples.mean_bytes * expected
    result: dict[str, Any] = {
        "engine": cluster.engine,
        "zero_stage": machine.stage,
        "dtype": str(machine.compute_dtype).removeprefix("torch."),
        "world_size": cluster.world_size,
        "gpu": cluster.gpu.name if cluster.gpu is not None else None,
        "parameters": trainable.count,
        "frozen_parameters": trainable.frozen,
        "clipping_mode": mode,
        "accumulation": config.train.accumulation,
        "certified": certified,
        "batch": batch,
        "memory": {**asdict(memory), "activations_by_mode": peaks, "peak": memory.peak},
        "compute": {
            "flop_per_example": flops,
            "flop_per_example_forward": forward,
            "clipping_ratio": flops / plain,
            "flop_per_step": flops * rows,
            "flop_per_rank_and_step": flops * micro_batches * size,
        },
        "reading": {
            "bytes_per_example": examples.mean_bytes,
            "source": examples.source,
            "bytes_per_step": read,
            "bytes_of_run": read * config.train.num_steps,
            "bytes_of_data_set": None if examples.count is None else examples.mean_bytes * examples.count,
            "staging": staging_costs(
                config, examples, cluster.world_size, cluster.ranks_per_node, cluster.store_gbits, cluster.request_price
            ),
        },
        "notes": notes,
    }
    if cluster.gpu is not None and peak_rate is not None and available is not None and free is not None:
        result["memory"] |= {
            "device": available,
            "for_activations": free,
            "fits": peaks[mode] <= free,
            "largest_micro_batch": largest_that_fits(lambda n: probe.micro_batch(mode, n).peak, free, size),
        }
        time = _time(result, config, machine, cluster, cluster.gpu, peak_rate, trainable, busiest)
        result["time"] = time
        cores, workers = time["decoding_cores_per_rank"], config.data.num_workers
        if cores > workers:
            notes.append(
                f"data.num_workers is {workers}, but a rank needs {cores:.3g} cores to decode: give it as many CPUs and workers, "
                "or the device waits"
            )
    return result


def plan_of_shapes(config: RunConfig) -> PrivacyPlan:
    """A plan that makes the recipe's clipper where nobody knows the number of examples; it claims nothing."""
    request = config.privacy.request(config.train.num_steps, config.privacy.expected_batch_size)
    sigma = request.noise_multiplier or 0.3  # the least that needs no permission
    return make_plan(
        replace(
            with_bands(request, 1), noise_multiplier=sigma, target_epsilon=None, informal_reasons=("planned by shapes",)
        )
    )


def _choose(config: RunConfig, probe: Probe, memory: RankMemory, free: int | None) -> tuple[Mode, dict[Mode, int]]:
    """The recipe's mode, or the one that a start would choose; and the activations of the modes that were looked at.

    Args:
        free: bytes for activations; None, without a device, chooses bookkeeping.
    """
    size, stated = config.train.micro_batch_size, config.privacy.clipping_mode
    if config.privacy.arithmetic == "certified":
        return "certified", {"certified": probe.micro_batch("certified", size).peak}
    if stated != "auto":
        return stated, {stated: probe.micro_batch(stated, size).peak}
    bookkeeping = probe.micro_batch("bookkeeping", size).peak
    mode, less = better_mode(
        bookkeeping + memory.on_top,
        None if free is None else free + memory.on_top,
        lambda: probe.micro_batch("two_pass", size).peak + memory.on_top,
    )
    peaks: dict[Mode, int] = {"bookkeeping": bookkeeping}
    return mode, peaks if less is None else peaks | {"two_pass": less - memory.on_top}


def _time(
    result: Mapping[str, Any],
    config: RunConfig,
    machine: MachineSettings,
    cluster: Cluster,
    gpu: Gpu,
    peak_rate: float,
    trainable: Trainable,
    busiest: Shares,
) -> dict[str, Any]:
    network = Network(
        gpu.node_bandwidth,
        gpu.network_bandwidth if cluster.network_bandwidth is None else cluster.network_bandwidth,
        cluster.gpus_per_node or gpu.gpus_per_node,
    )
    sent = traffic(
        trainable,
        busiest,
        cluster.engine,
        machine,
        mode=result["clipping_mode"],
        accumulation=config.train.accumulation,
        world_size=cluster.world_size,
    )
    micro_batches, certified = result["batch"]["micro_batches_per_step"], result["certified"]
    lattice = 0.0
    if certified is not None:
        lattice = certified["lattice_bytes_per_example"] * result["batch"]["rows_per_rank"] / gpu.memory_bandwidth
        micro_batches *= config.train.micro_batch_size / certified["rows_at_once"]  # each part has passes of its own
    compute = result["compute"]["flop_per_rank_and_step"] / (peak_rate * cluster.efficiency)
    exposed = exposed_seconds(sent, network, cluster.world_size, micro_batches, compute)
    step = compute + lattice + exposed
    hours = step * config.train.num_steps / 3600
    per_second = config.privacy.expected_batch_size / step
    return {
        "compute_seconds_per_step": compute,
        "lattice_seconds_per_step": lattice,
        "exposed_communication_seconds_per_step": exposed,
        "seconds_per_step": step,
        "examples_per_second": per_second,
        "hours": hours,
        "gpu_hours": hours * cluster.world_size,
        "sent_bytes_per_step": sent.per_step(micro_batches),
        "sent_bytes": asdict(sent),
        "reads_per_second": per_second,
        "reads_per_second_and_rank": per_second / cluster.world_size,
        "decoding_cores_per_rank": per_second / cluster.world_size / cluster.decoded_per_second,
        "read_bytes_per_second": per_second * result["reading"]["bytes_per_example"],
        "assumptions": {
            "efficiency": cluster.efficiency,
            "peak_flop_per_second": peak_rate,
            "decoded_per_second_and_core": cluster.decoded_per_second,
            **asdict(network),
            "left_out": "decoding, noise, optimizer step, checkpoints, held-out evaluation, stragglers, failures",
        },
    }
