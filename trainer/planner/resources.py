"""Puts together what a recipe takes under an engine, on a number of ranks, on a named accelerator."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.config import captioner_config
from privacy.clipping.accumulators import EXAMPLES_PER_PART
from privacy.clipping.clipped_sum import Mode
from privacy.plan import PrivacyPlan
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.engines import require_supported
from trainer.planner.batches import Examples, micro_batches, padding, padding_note, staged_bytes
from trainer.planner.hardware import Gpu
from trainer.planner.memory import RankMemory, Trainable, better_mode, largest_that_fits, rank_memory
from trainer.planner.probe import Probe
from trainer.planner.roofline import roofline
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
        gpus_per_node: in place of the reference system's.
    """

    engine: EngineName
    world_size: int
    gpu: Gpu | None = None
    efficiency: float = EFFICIENCY
    gpus_per_node: int | None = None

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
    config: RunConfig, machine: MachineSettings, cluster: Cluster, examples: Examples, plan: PrivacyPlan, root: Path
) -> dict[str, Any]:
    """Everything that `plan.py` prints but the privacy; JSON-ready. Bytes, FLOP, seconds; per rank unless it says otherwise.

    Raises:
        ConfigError: the engine cannot do what the ds_config says, or the accelerator cannot compute in its dtype.
        ModelConfigError, DataError: the recipe's model or data are wrong.
    """
    engine, world_size, accumulation = cluster.engine, cluster.world_size, config.train.accumulation
    require_supported(engine, machine, world_size)
    peak_rate = cluster.gpu.peak(machine.compute_dtype) if cluster.gpu is not None else None
    task, notes = planning_task(config, root)
    if config.train.compile:
        notes.append("train.compile: planned without it; compiled blocks keep less and run faster")
    if machine.checkpoint_on_cpu:
        notes.append("cpu_checkpointing: the blocks' inputs count as if they stayed on the device")
    if machine.compute_dtype.itemsize < 4:
        notes.append("activations: the CPU path's, whose fp32 copies of one layer's bf16 tensors CUDA does not make")
    size, expected = config.train.micro_batch_size, config.privacy.expected_batch_size
    count = plan.max_batch_size if plan.enabled else expected
    number = micro_batches(config, count, world_size, cluster.ranks_per_node)
    on_cpu = cluster.gpu is not None and cluster.gpu.name == "cpu"
    probe, memory = probed(
        config, machine, engine, task, plan, rows=2 * number * size, world_size=world_size, on_cpu=on_cpu
    )
    trainable = Trainable.of(probe.model)
    note = padding_note(count, world_size, size)
    notes += [] if note is None else [note]
    available = free = None
    if cluster.gpu is not None:
        available = cluster.gpu.memory_per_rank(cluster.ranks_per_node)
        free = memory.room(available)
    mode = _mode(config, probe, memory, free)
    activations, flops = probe.micro_batch(mode, size)
    flops //= size  # padding rows cost as much as others
    memory = replace(memory, activations=activations)
    sample = min(size, PLAIN_SAMPLE)
    result: dict[str, Any] = {
        "engine": engine,
        "zero_stage": machine.stage,
        "dtype": str(machine.compute_dtype).removeprefix("torch."),
        "world_size": world_size,
        "gpu": cluster.gpu.name if cluster.gpu is not None else None,
        "parameters": trainable.count,
        "frozen_parameters": trainable.frozen,
        "clipping_mode": mode,
        "accumulation": accumulation,
        "batch": {
            "expected_batch_size": expected,
            "micro_batch_size": size,
            "micro_batches_per_step": number,
            "rows_per_step": number * size * world_size,
            "padding_share": padding(count, world_size, size),
        },
        "memory": {name: size for name, size in asdict(memory).items() if name != "owned"} | {"peak": memory.peak},
        "compute": {
            "flop_per_example": flops,
            "clipping_flop_ratio": flops * sample / probe.plain_flops(sample)[1],
            "flop_per_step": flops * number * size * world_size,
        },
        "reading": {
            "bytes_per_example": examples.mean_bytes,
            "source": examples.source,
            "bytes_per_step": examples.mean_bytes * expected,
            "staged_bytes_per_node": staged_bytes(examples, plan.num_examples, world_size, cluster.ranks_per_node),
        },
        "notes": notes,
    }
    if cluster.gpu is None or peak_rate is None or available is None or free is None:
        return result
    result["memory"] |= {
        "device": available,
        "for_activations": free,
        "fits": activations <= free,
        "largest_micro_batch": largest_that_fits(lambda n: probe.micro_batch(mode, n).peak, free),
    }
    if cluster.gpu.name != "cpu" and mode != "certified":
        probe.clipped.mode = mode
        part = probe.inputs(min(size, EXAMPLES_PER_PART))
        result["compute"]["clipping_ratio"] = roofline(probe.clipped, probe.module, part, cluster.gpu).ratio
    lattice = 0.0
    if mode == "certified":
        lattice = LATTICE_BYTES * trainable.count * number * size / cluster.gpu.memory_bandwidth
    compute = flops * number * size / (peak_rate * cluster.efficiency)
    step = compute + lattice
    hours, per_second = step * config.train.num_steps / 3600, expected / step
    cores = per_second / world_size / DECODED_PER_SECOND
    result["time"] = {
        "compute_seconds_per_step": compute,
        "lattice_seconds_per_step": lattice,
        "seconds_per_step": step,
        "examples_per_second": per_second,
        "hours": hours,
        "gpu_hours": hours * world_size,
        "read_bytes_per_second": per_second * examples.mean_bytes,
        "decoding_cores_per_rank": cores,
    }
    result["assumptions"] = {
        "efficiency": cluster.efficiency,
        "peak_flop_per_second": peak_rate,
        "decoded_per_second_and_core": DECODED_PER_SECOND,
        "left_out": "communication, decoding, noise, optimizer step, checkpoints, held-out evaluation, stragglers, failures",
    }
    if cores > config.data.num_workers:
        notes.append(
            f"data.num_workers is {config.data.num_workers}, but a rank needs {cores:.3g} cores to decode: give it as many CPUs "
            "and workers, or the device waits"
        )
    return result


def probed(
    config: RunConfig, machine: MachineSettings, engine: EngineName, task: TrainingTask, plan: PrivacyPlan, *, rows: int,
    world_size: int, on_cpu: bool,
) -> tuple[Probe, RankMemory]:  # fmt: skip
    """What answers for micro-batches of any size, and everything else that a rank holds; see the two classes."""
    one_pass = engine == "fsdp" or (engine == "deepspeed" and machine.stage == 3)
    probe = Probe(task, machine, plan, rows=rows, weights_of_one_pass=one_pass)
    memory = rank_memory(
        Trainable.of(probe.model), engine, machine, config.optimizer, accumulation=config.train.accumulation,
        world_size=world_size, grid=probe.grid, average=config.train.ema_decay is not None, on_cpu=on_cpu, bands=plan.bands,
    )  # fmt: skip
    return probe, memory


def _mode(config: RunConfig, probe: Probe, memory: RankMemory, free: int | None) -> Mode:
    """The recipe's mode, or the one that a start would choose.

    Args:
        free: bytes for activations; None, without a device, chooses bookkeeping.
    """
    size, stated = config.train.micro_batch_size, config.privacy.clipping_mode
    if config.privacy.arithmetic == "certified":
        return "certified"
    if stated != "auto":
        return stated
    mode, _ = better_mode(
        probe.micro_batch("bookkeeping", size).peak + memory.on_top,
        None if free is None else free + memory.on_top,
        lambda: probe.micro_batch("two_pass", size).peak + memory.on_top,
    )
    return mode
