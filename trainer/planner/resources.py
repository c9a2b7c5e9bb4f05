"""What a recipe takes under an engine, on a number of ranks, on a named accelerator; and what a run takes of an allocation.

A job fails once in `gpu_mtbf_hours` / ranks. Each failure repeats half of the steps between two checkpoints, on average, and one
restart; each repeated step is charged again (contract 10). Young (1974) and Daly (2006), first order: of the hours without
failures T, with d for writing a checkpoint, tau between two, R for a restart and M between failures, a run takes
T (1 + d / tau) / (1 - (tau / 2 + R) / M), least at tau = sqrt(2 d M).

Every rank runs the same number of micro-batches of the same size, whose rows without an example cost as much as examples and
count for nothing. Every step of a private run takes the micro-batches of the capped batch (privacy/step/batches.py); without
privacy their number follows the batch, and is planned for the expected one.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.index.shards import find_shards
from data.index.tar_index import MANIFEST, ExampleTable
from models.config import captioner_config
from privacy.clipping.clipped_sum import Mode
from privacy.plan.numbers import PrivacyPlan
from privacy.sampling.rows import share_bound
from privacy.step.batches import num_micro_batches
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.engines import require_supported
from trainer.hardware import Gpu
from trainer.optimizers import moments
from trainer.planner.memory import largest_that_fits, rank_memory, trained_count
from trainer.planner.probe import Probe, plain_flops
from trainer.run.clipping_mode import better_mode
from trainer.tasks import CaptioningTask, TrainingTask, make_task

EFFICIENCY = 0.35
"""Default share of an accelerator's dense peak that all counted operations together reach; an assumption."""
LATTICE_BYTES = 190
"""Bytes that a coordinate of one example moves through memory in certified arithmetic once its gradient is written out: 4 for
the norm, 76 to scale and round in fp64, 80 for exact squares, 30 to multiply and add up, in the unfused operations of
privacy/certified/integers.py."""
DECODED_PER_SECOND = 366.0
"""Examples that one core decodes and transforms: JPEGs of 82 kB to 224 pixels (2026-11-22-loader-two-cores.json)."""
GPU_MTBF_HOURS = 50_000.0
"""Assumed: 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv:2407.21783, section 3.3.4)."""
RESTART_SECONDS = 600.0
"""Assumed for a failed job to wait for its nodes, and to start again."""
CHECKPOINT_BYTES_PER_SECOND = 1e9
"""Assumed of the file system, for all ranks together."""
WORTH_A_NOTE = 0.05
"""Padding is noted from this share of the rows on."""
BYTES_PER_EXAMPLE = 50_000
"""Assumed where no index says better: a JPEG of some 300 pixels a side and its caption."""
EXAMPLES_PER_SHARD = 10_000
"""Assumed where no index says better: what the makers of web-scale sets put into one."""
SAMPLED = 100_000
"""Examples whose lengths are averaged."""
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
    overrides = {
        **config.model.overrides,
        "image_size": data.image_size,
        "num_tokens": data.num_tokens,
    }
    model_config = captioner_config(size, **overrides)
    note = f"there is no {data.tokenizer}: planned with the size's own vocabulary of {model_config.vocab_size:,} words"
    return CaptioningTask(model_config, size, data, root / data.tokenizer), [note]


@dataclass(frozen=True)
class Examples:
    """The examples of a recipe.

    Attributes:
        count: how many there are; None where nobody says.
        mean_bytes: mean size of an example's members in the shard, headers included.
        source: where the mean is from, in words.
        num_shards: how many shards they lie in; None where no index says.
    """

    count: int | None
    mean_bytes: float
    source: str
    num_shards: int | None = None


def examples(config: RunConfig, root: Path) -> Examples:
    """The examples by the recipe's index or that of its folder of shards, else by assumption.

    Raises:
        DataError: the index is damaged, or that of a folder is of other shards than there are now.
    """
    index, own = config.data.index, root / Path(config.data.shards).expanduser() / "index"
    table = None
    if index is not None and (root / index / MANIFEST).exists():  # the shards need not be there
        table = ExampleTable.open(root / index, root, check_shards=False)
    elif (
        index is None and (own / MANIFEST).exists()
    ):  # what `prepare.py index` wrote for this folder
        shards = find_shards(config.data.shards, root)
        index, table = str(own), ExampleTable.open(own, shards.root)
        table.require_shards(shards)
    if table is None:
        return Examples(config.data.num_examples, BYTES_PER_EXAMPLE, "assumed: there is no index")
    lengths = table.extents(np.arange(0, len(table), -(-len(table) // SAMPLED))).lengths
    return Examples(len(table), float(lengths.mean()), f"index {index}", len(table.entries))


def micro_batches(config: RunConfig, count: int, world_size: int, ranks_per_node: int) -> int:
    """Micro-batches of each rank for `count` examples.

    Where every node reads its own share (`data.staging`), there are rows for the largest share.
    """
    size = config.train.micro_batch_size
    number = num_micro_batches(count, world_size, size)
    if config.data.staging is None or not config.privacy.enabled or ranks_per_node >= world_size:
        return number
    share = min(
        count, share_bound(config.privacy.expected_batch_size * ranks_per_node / world_size)
    )
    return max(number, num_micro_batches(share, ranks_per_node, size))


def padding(count: int, world_size: int, size: int) -> float:
    """Share of the rows that are padding and need not be: those between a small batch and its cap do not count."""
    return 1 - count / (num_micro_batches(count, world_size, size) * size * world_size)


def padding_note(count: int, world_size: int, size: int) -> str | None:
    """One line where padding wastes more than WORTH_A_NOTE of the rows, and the largest smaller micro-batch that does not."""
    share = padding(count, world_size, size)
    if share <= WORTH_A_NOTE:
        return None
    step = (
        8 if size > 8 else 1
    )  # nothing below a quarter is proposed: kernels would be busy with less
    smaller = range((size - 1) // step * step, max(1, size // 4) - 1, -step)
    remedy = "no train.micro_batch_size a little below does much better"
    for better in smaller:
        if (left := padding(count, world_size, better)) <= WORTH_A_NOTE:
            remedy = f"train.micro_batch_size={better} leaves {left:.1%}"
            break
    rows = math.ceil(count / world_size)
    return f"padding: {share:.1%} of the rows, {rows:,} examples a rank in micro-batches of {size:,}; {remedy}"


def staged_bytes(examples: Examples, count: int, world_size: int, ranks_per_node: int) -> float:
    """Bytes that staging copies to each node (`data.staging`), of shards that hold `count` examples."""
    shards = examples.num_shards or math.ceil(count / EXAMPLES_PER_SHARD)
    # A shard on the border between two nodes is copied to both.
    borders = 2 if ranks_per_node < world_size else 0
    per_node = math.ceil(shards * min(1.0, ranks_per_node / world_size)) + borders
    return min(per_node, shards) * examples.mean_bytes * count / shards


def plan_resources(
    config: RunConfig,
    machine: MachineSettings,
    cluster: Cluster,
    examples: Examples,
    plan: PrivacyPlan,
    root: Path,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    """Everything that `plan.py` prints but the privacy; JSON-ready. Bytes, FLOP, seconds; per rank unless it says otherwise.

    Args:
        whole: False leaves out the largest micro-batch, which takes most of the time.

    Raises:
        ConfigError: the engine cannot do what the ds_config says, or the accelerator cannot compute in its dtype.
        ModelConfigError, DataError: the recipe's model or data are wrong.
    """
    engine, world_size, gpu = cluster.engine, cluster.world_size, cluster.gpu
    require_supported(engine, machine, world_size)
    task, notes = planning_task(config, root)
    if config.train.compile:
        notes.append("train.compile: planned without it; compiled blocks keep less and run faster")
    if machine.checkpoint_on_cpu:
        notes.append("cpu_checkpointing: the blocks' inputs count as if they stayed on the device")
    if machine.compute_dtype.itemsize < 4:
        notes.append(
            "activations: the CPU path's, whose fp32 copies of one layer's bf16 tensors CUDA does not make"
        )
    size, expected = config.train.micro_batch_size, config.privacy.expected_batch_size
    count = plan.max_batch_size if plan.enabled else expected
    number = micro_batches(config, count, world_size, cluster.ranks_per_node)
    on_cpu = gpu is not None and gpu.name == "cpu"
    one_pass = engine == "fsdp" or (engine == "deepspeed" and machine.stage == 3)
    probe = Probe(task, machine, plan, rows=2 * number * size, weights_of_one_pass=one_pass)
    memory = rank_memory(
        probe.model,
        engine,
        machine,
        config.optimizer,
        accumulation=config.train.accumulation,
        world_size=world_size,
        grid=probe.clipped.grid,
        average=config.train.ema_decay is not None,
        on_cpu=on_cpu,
    )
    parameters = trained_count(probe.model)
    if (note := padding_note(count, world_size, size)) is not None:
        notes.append(note)
    available = 0 if gpu is None else gpu.memory_per_rank(cluster.ranks_per_node)
    free, top = memory.room(available), memory.on_top
    mode: Mode = (
        "bookkeeping" if config.privacy.clipping_mode == "auto" else config.privacy.clipping_mode
    )
    if config.privacy.arithmetic == "certified":
        mode = "certified"
    elif config.privacy.clipping_mode == "auto" and gpu is not None:  # as a start does by trial
        mode, _ = better_mode(
            probe.peak(mode, size) + top, free + top, lambda: probe.peak("two_pass", size) + top
        )
    activations, flops = probe.peak(mode, size), probe.flops(mode, size)
    memory = replace(memory, activations=activations)
    sample = min(size, PLAIN_SAMPLE)
    result: dict[str, Any] = {
        "engine": engine,
        "zero_stage": machine.stage,
        "dtype": str(machine.compute_dtype).removeprefix("torch."),
        "world_size": world_size,
        "gpu": None if gpu is None else gpu.name,
        "parameters": parameters,
        "frozen_parameters": sum(p.numel() for p in probe.model.parameters()) - parameters,
        "clipping_mode": mode,
        "accumulation": config.train.accumulation,
        "batch": {
            "expected_batch_size": expected,
            "micro_batch_size": size,
            "micro_batches_per_step": number,
            "rows_per_step": number * size * world_size,
            "padding_share": padding(count, world_size, size),
        },
        "memory": {name: size for name, size in asdict(memory).items() if name != "owned"}
        | {"peak": memory.peak},
        "compute": {
            "flop_per_example": flops,
            "clipping_flop_ratio": flops * sample / plain_flops(probe.model, probe.inputs(sample)),
            "flop_per_step": flops * number * size * world_size,
        },
        "reading": {
            "bytes_per_example": examples.mean_bytes,
            "source": examples.source,
            "bytes_per_step": examples.mean_bytes * expected,
            "staged_bytes_per_node": staged_bytes(
                examples, plan.num_examples, world_size, cluster.ranks_per_node
            ),
        },
        "notes": notes,
    }
    if gpu is None:
        return result
    result["memory"] |= {
        "device": available,
        "for_activations": free,
        "fits": activations <= free,
        "largest_micro_batch": largest_that_fits(lambda n: probe.peak(mode, n), free)
        if whole
        else None,
    }
    lattice = (
        LATTICE_BYTES * parameters * number * size / gpu.memory_bandwidth
        if mode == "certified"
        else 0.0
    )
    peak_rate = gpu.peak(machine.compute_dtype)
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
        "left_out": "communication, decoding, noise, optimizer step, held-out evaluation, stragglers",
    }
    if cores > config.data.num_workers:
        notes.append(
            f"data.num_workers is {config.data.num_workers}, but a rank needs {cores:.3g} cores to decode: give it as many CPUs "
            "and workers, or the device waits"
        )
    return result


def allocation(
    planned: dict[str, Any],
    config: RunConfig,
    plan: PrivacyPlan,
    gpu_price: float | None,
    gpu_mtbf_hours: float,
) -> dict[str, Any]:
    """Hours, GPU-hours and price of a run that fails now and then; JSON-ready.

    Args:
        planned: `plan_resources`, with a time; notes are added to it.
        gpu_price: of an hour of one GPU, in any currency.
        gpu_mtbf_hours: hours of one GPU between failures that end a job.
    """
    step, ranks, train = planned["time"]["seconds_per_step"], planned["world_size"], config.train
    hours = plan.num_steps * step / 3600
    every = train.checkpoint_every or max(1, plan.reserved_attempts // 20)
    copies = 1 + len(moments(config.optimizer)) + (train.ema_decay is not None)
    writing = (
        4
        * (copies * planned["parameters"] + planned["frozen_parameters"])
        / CHECKPOINT_BYTES_PER_SECOND
    )
    between = 3600 * gpu_mtbf_hours / ranks
    left = 1 - (every * step / 2 + RESTART_SECONDS) / between
    found: dict[str, Any] = {
        "job_mtbf_hours": between / 3600,
        "checkpoint_every": every,
        "checkpoint_seconds": writing,
        "best_checkpoint_every": max(1, round(math.sqrt(2 * writing * between) / step)),
        "hours_with_failures": None,
    }
    if left <= 0:
        planned["notes"].append(
            "failures: the job fails sooner than it reaches its next checkpoint: save more often"
        )
        return found
    total = hours * (1 + writing / (every * step)) / left
    failures = 3600 * total / between
    repeated = failures * (every / 2 + 1)
    found |= {
        "hours_with_failures": total,
        "gpu_hours_with_failures": total * ranks,
        "price": None if gpu_price is None else gpu_price * total * ranks,
        "failures": failures,
        "repeated_steps": repeated,
        "reserved_attempts": plan.reserved_attempts,
    }
    if repeated > plan.reserved_attempts:
        planned["notes"].append(
            f"failures: about {repeated:,.0f} repeated steps are charged again, and the reserve is {plan.reserved_attempts:,} "
            "attempts: the run would stop early; give train.checkpoint_every or a larger privacy.reserved_attempts"
        )
    return found
