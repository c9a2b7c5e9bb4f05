"""Puts together what a recipe takes under an engine, on so many ranks, on a named accelerator."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.config import captioner_config
from privacy.clipping.clipped_sum import Mode
from privacy.plan import PrivacyPlan
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.engines import require_supported
from trainer.planner.batches import Batches, Examples
from trainer.planner.hardware import Gpu, Network, exposed_seconds, traffic
from trainer.planner.memory import (
    RankMemory,
    Shares,
    Trainable,
    gathers_for_every_pass,
    largest_that_fits,
    rank_memory,
    room,
    shares,
)
from trainer.planner.probe import Probe
from trainer.run.clipping_mode import better_mode
from trainer.tasks import TrainingTask, make_task
from trainer.tasks.captioning import CaptioningTask

EFFICIENCY = 0.35
"""Default share of an accelerator's dense peak that all counted operations together reach; an assumption."""
PLAIN_SAMPLE = 64
"""The non-private step, for comparison, has at most so many examples: then the captioner's head works in one piece."""


@dataclass(frozen=True)
class Wanted:
    """What the command line says beside recipe and ds_config.

    Attributes:
        gpu: None leaves out everything that depends on it.
        efficiency: share of the peak, see EFFICIENCY.
        gpus_per_node, network_bandwidth: in place of the reference system's; bytes/s per GPU and direction.
    """

    engine: EngineName
    world_size: int
    gpu: Gpu | None = None
    efficiency: float = EFFICIENCY
    gpus_per_node: int | None = None
    network_bandwidth: float | None = None


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
    wanted: Wanted,
    examples: Examples,
    plan: PrivacyPlan | None,
    root: Path,
) -> dict[str, Any]:
    """Everything that `plan.py` prints beside the privacy; JSON-ready. Bytes, FLOP, seconds; per rank unless it says otherwise.

    Args:
        plan: for the capped batch; None (nobody knows the number of examples) takes the default cap.

    Raises:
        ConfigError: the engine cannot do what the ds_config says, or the accelerator cannot compute in its dtype.
        ModelConfigError, DataError: of the recipe.
    """
    require_supported(wanted.engine, machine, wanted.world_size)
    peak_rate = wanted.gpu.peak(machine.compute_dtype) if wanted.gpu is not None else None
    task, notes = planning_task(config, root)
    notes += _notes(config, machine, wanted.engine)
    probe = Probe(
        task,
        machine,
        config.privacy,
        accumulation=config.train.accumulation,
        weights_of_one_pass=gathers_for_every_pass(wanted.engine, machine),
    )
    trainable = Trainable.of(probe.model)
    busiest = shares(trainable, wanted.engine, machine, config.optimizer, wanted.world_size)
    batches, size = Batches.of(config, plan), config.train.micro_batch_size
    batch = _batch(config, batches, wanted.world_size)
    notes += [note for note in [batches.note(wanted.world_size, size)] if note is not None]
    memory = rank_memory(
        trainable,
        busiest,
        wanted.engine,
        machine,
        config.optimizer,
        accumulation=config.train.accumulation,
        world_size=wanted.world_size,
        average=config.train.ema_decay is not None,
    )
    available = _device_memory(wanted)
    mode, peaks = _choose(config, probe, memory, None if available is None else room(memory, available))
    compute = _compute(probe, mode, size, batch)
    found: dict[str, Any] = {
        "engine": wanted.engine,
        "zero_stage": machine.stage,
        "dtype": str(machine.compute_dtype).removeprefix("torch."),
        "world_size": wanted.world_size,
        "gpu": wanted.gpu.name if wanted.gpu is not None else None,
        "parameters": trainable.count,
        "frozen_parameters": trainable.frozen,
        "clipping_mode": mode,
        "accumulation": config.train.accumulation,
        "batch": batch,
        "memory": _memory(memory, peaks, mode),
        "compute": compute,
        "reading": _reading(config, examples, batch),
        "notes": notes,
    }
    if wanted.gpu is not None and peak_rate is not None and available is not None:
        found["memory"] |= _fitting(probe, memory, mode, size, available)
        found["time"] = _time(found, config, machine, wanted, wanted.gpu, peak_rate, trainable, busiest)
    return found


def _notes(config: RunConfig, machine: MachineSettings, engine: str) -> list[str]:
    found = []
    if config.train.compile:
        found.append("train.compile: planned without it; compiled blocks keep less and run faster")
    if machine.checkpoint_on_cpu:
        found.append("cpu_checkpointing: the blocks' inputs count as if they stayed on the device")
    if config.data.bucket_captions:
        found.append("data.bucket_captions: planned with captions of full length")
    if machine.compute_dtype.itemsize < 4:
        found.append("activations: the CPU path's, whose fp32 copies of one layer's bf16 tensors CUDA does not make")
    return found


def _batch(config: RunConfig, batches: Batches, world_size: int) -> dict[str, Any]:
    """The micro-batches of a logical batch, on average over steps where their number follows the sample."""
    expected, size = config.privacy.expected_batch_size, config.train.micro_batch_size
    micro_batches = batches.micro_batches(world_size, size)
    return {
        "expected_batch_size": expected,
        "micro_batch_size": size,
        "micro_batches_per_step": micro_batches,
        "rows_per_rank": micro_batches * size,
        "rows_per_step": micro_batches * size * world_size,
        "useful_share": expected / (micro_batches * size * world_size),
        "padding_share": batches.padding(world_size, size),
        "better_micro_batch_size": batches.better_size(world_size, size),
    }


def _choose(config: RunConfig, probe: Probe, memory: RankMemory, free: int | None) -> tuple[Mode, dict[Mode, int]]:
    """The recipe's mode, or the one that a start would choose; and the activations of the modes that were looked at.

    Args:
        free: bytes for activations; None, without a device, chooses bookkeeping.
    """
    size, stated = config.train.micro_batch_size, config.privacy.clipping_mode
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


def _memory(memory: RankMemory, peaks: Mapping[Mode, int], mode: Mode) -> dict[str, Any]:
    whole = replace(memory, activations=peaks[mode])
    return {**asdict(whole), "activations_by_mode": dict(peaks), "peak": whole.peak}


def _device_memory(wanted: Wanted) -> int | None:
    if wanted.gpu is None:
        return None
    return wanted.gpu.memory_per_rank(min(wanted.world_size, wanted.gpus_per_node or wanted.gpu.gpus_per_node))


def _fitting(probe: Probe, memory: RankMemory, mode: Mode, size: int, available: int) -> dict[str, Any]:
    free = room(memory, available)
    return {
        "device": available,
        "for_activations": free,
        "fits": probe.micro_batch(mode, size).peak <= free,
        "largest_micro_batch": largest_that_fits(lambda n: probe.micro_batch(mode, n).peak, free, size),
    }


def _compute(probe: Probe, mode: Mode, size: int, batch: Mapping[str, Any]) -> dict[str, Any]:
    """FLOP per example and step; padding rows cost as much as others."""
    clipped = probe.micro_batch(mode, size).flops / size
    forward, plain = (count / min(size, PLAIN_SAMPLE) for count in probe.plain_flops(min(size, PLAIN_SAMPLE)))
    return {
        "flop_per_example": clipped,
        "flop_per_example_forward": forward,
        "clipping_ratio": clipped / plain,
        "flop_per_step": clipped * batch["rows_per_step"],
        "flop_per_rank_and_step": clipped * batch["rows_per_rank"],
    }


def _reading(config: RunConfig, examples: Examples, batch: Mapping[str, Any]) -> dict[str, Any]:
    per_step = examples.mean_bytes * batch["expected_batch_size"]
    return {
        "bytes_per_example": examples.mean_bytes,
        "source": examples.source,
        "bytes_per_step": per_step,
        "bytes_of_run": per_step * config.train.num_steps,
        "bytes_of_data_set": None if examples.count is None else examples.mean_bytes * examples.count,
    }


def _time(
    found: Mapping[str, Any],
    config: RunConfig,
    machine: MachineSettings,
    wanted: Wanted,
    gpu: Gpu,
    peak_rate: float,
    trainable: Trainable,
    busiest: Shares,
) -> dict[str, Any]:
    network = Network(
        gpu.node_bandwidth,
        gpu.network_bandwidth if wanted.network_bandwidth is None else wanted.network_bandwidth,
        wanted.gpus_per_node or gpu.gpus_per_node,
    )
    sent = traffic(
        trainable,
        busiest,
        wanted.engine,
        machine,
        mode=found["clipping_mode"],
        accumulation=config.train.accumulation,
        world_size=wanted.world_size,
    )
    micro_batches = found["batch"]["micro_batches_per_step"]
    compute = found["compute"]["flop_per_rank_and_step"] / (peak_rate * wanted.efficiency)
    exposed = exposed_seconds(sent, network, wanted.world_size, micro_batches, compute)
    step = compute + exposed
    hours = step * config.train.num_steps / 3600
    per_second = config.privacy.expected_batch_size / step
    return {
        "compute_seconds_per_step": compute,
        "exposed_communication_seconds_per_step": exposed,
        "seconds_per_step": step,
        "examples_per_second": per_second,
        "hours": hours,
        "gpu_hours": hours * wanted.world_size,
        "sent_bytes_per_step": sent.per_step(micro_batches),
        "sent_bytes": asdict(sent),
        "reads_per_second": per_second,
        "reads_per_second_and_rank": per_second / wanted.world_size,
        "read_bytes_per_second": per_second * found["reading"]["bytes_per_example"],
        "assumptions": {
            "efficiency": wanted.efficiency,
            "peak_flop_per_second": peak_rate,
            **asdict(network),
            "left_out": "decoding, noise, optimizer step, checkpoints, held-out evaluation, stragglers, failures",
        },
    }
