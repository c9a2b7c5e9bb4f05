"""Plans memory, time and reads of a recipe under an engine, on a number of ranks of an accelerator.

Every rank runs the same number of micro-batches of the same size; a row of padding costs as much as
an example. Every step of a private run takes the micro-batches of the capped batch
(privacy/step/batches.py); without privacy the plan takes those of the expected batch.
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
"""Assumed by default: the share of an accelerator's dense peak that counted operations reach."""
LATTICE_BYTES = 190
"""Bytes that certified arithmetic moves for a coordinate of one example's written-out gradient.

4 for the norm, 76 to scale and round in fp64, 80 for exact squares, 30 to multiply and add up, in
the unfused operations of privacy/certified/integers.py."""
DECODED_PER_SECOND = 366.0
"""Examples that one core decodes and transforms: JPEGs of 82 kB to 224 pixels.

See 2026-11-22-loader-two-cores.json."""
GPU_MTBF_HOURS = 50_000.0
"""Assumed: 419 unexpected interruptions in 54 days on 16,384 GPUs.

Llama 3, arXiv:2407.21783, section 3.3.4."""
RESTART_SECONDS = 600.0
"""Assumed for a failed job to wait for its nodes, and to start again."""
CHECKPOINT_BYTES_PER_SECOND = 1e9
"""Assumed of the file system, for all ranks together."""
WORTH_A_NOTE = 0.05
"""Padding is noted from this share of the rows on."""
BYTES_PER_EXAMPLE = 50_000
"""Assumed without an index: a JPEG of some 300 pixels a side and its caption."""
EXAMPLES_PER_SHARD = 10_000
"""Assumed without an index: the size of shards of web-scale sets."""
SAMPLED_EXAMPLES = 100_000
"""Examples whose lengths are averaged."""
PLAIN_SAMPLE = 64
"""The most examples of the non-private step, for comparison.

With so few the captioner's head works in one piece."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a plan, which the command line names beside recipe and ds_config.

    Attributes:
        gpu: None leaves out all numbers that depend on it.
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
        """Returns the ranks of a node: all of them, without a GPU or a number of GPUs."""
        default = self.gpu.gpus_per_node if self.gpu is not None else self.world_size
        return min(self.world_size, self.gpus_per_node or default)


def planning_task(config: RunConfig, root: Path) -> tuple[TrainingTask, list[str]]:
    """Returns the recipe's task, and notes on assumptions.

    Without the recipe's tokenizer it assumes the vocabulary of the model size.
    """
    tokenizer_path = root / config.data.tokenizer
    if config.model.kind != "captioner" or tokenizer_path.exists():
        return make_task(config, root), []
    size = config.model.size
    overrides = {
        **config.model.overrides,
        "image_size": config.data.image_size,
        "num_tokens": config.data.num_tokens,
    }
    model_config = captioner_config(size, **overrides)
    note = (
        f"there is no {config.data.tokenizer}: planned with the size's own vocabulary of "
        f"{model_config.vocab_size:,} words"
    )
    return CaptioningTask(model_config, size, config.data, tokenizer_path), [note]


@dataclass(frozen=True)
class Examples:
    """The examples of a recipe.

    Attributes:
        count: number of examples; None where neither index nor recipe states it.
        mean_bytes: mean size of an example's members in the shard, headers included.
        source: the source of the mean, in words.
        num_shards: number of their shards; None without an index.
    """

    count: int | None
    mean_bytes: float
    source: str
    num_shards: int | None = None


def examples(config: RunConfig, root: Path) -> Examples:
    """Returns the examples by the recipe's index or its shards' folder, else by assumption.

    Raises:
        DataError: the index is damaged, or the index of a folder is of other shards than the folder
            has now.
    """
    index = config.data.index
    # `prepare.py index` writes an index into the folder of the shards.
    folder_index = root / Path(config.data.shards).expanduser() / "index"
    table = None
    if index is not None and (root / index / MANIFEST).exists():
        # The machine of the plan need not have the shards.
        table = ExampleTable.open(root / index, root, check_shards=False)
    elif index is None and (folder_index / MANIFEST).exists():
        shards = find_shards(config.data.shards, root)
        index = str(folder_index)
        table = ExampleTable.open(folder_index, shards.root)
        table.require_shards(shards)
    if table is None:
        return Examples(config.data.num_examples, BYTES_PER_EXAMPLE, "assumed: there is no index")
    sample = np.arange(0, len(table), -(-len(table) // SAMPLED_EXAMPLES))
    lengths = table.extents(sample).lengths
    return Examples(len(table), float(lengths.mean()), f"index {index}", len(table.entries))


def micro_batches(config: RunConfig, count: int, world_size: int, ranks_per_node: int) -> int:
    """Returns the micro-batches of each rank for `count` examples.

    Where every node reads its own share (`data.staging`), there are rows for the largest share.
    """
    size = config.train.micro_batch_size
    number = num_micro_batches(count, world_size, size)
    if config.data.staging is None or not config.privacy.enabled or ranks_per_node >= world_size:
        return number
    expected_share = config.privacy.expected_batch_size * ranks_per_node / world_size
    share = min(count, share_bound(expected_share))
    return max(number, num_micro_batches(share, ranks_per_node, size))


def padding(count: int, world_size: int, size: int) -> float:
    """Returns the share of rows that are padding, of a batch that is as large as its cap."""
    return 1 - count / (num_micro_batches(count, world_size, size) * size * world_size)


def padding_note(count: int, world_size: int, size: int) -> str | None:
    """Returns a line where padding wastes more than WORTH_A_NOTE of the rows, else None.

    The line names the largest smaller micro-batch that wastes less.
    """
    share = padding(count, world_size, size)
    if share <= WORTH_A_NOTE:
        return None
    step = 8 if size > 8 else 1
    # No size below a quarter is proposed: kernels would have too little work.
    smaller_sizes = range((size - 1) // step * step, max(1, size // 4) - 1, -step)
    remedy = "no train.micro_batch_size a little below does much better"
    for smaller_size in smaller_sizes:
        smaller_share = padding(count, world_size, smaller_size)
        if smaller_share <= WORTH_A_NOTE:
            remedy = f"train.micro_batch_size={smaller_size} leaves {smaller_share:.1%}"
            break
    examples_of_rank = math.ceil(count / world_size)
    return (
        f"padding: {share:.1%} of the rows, {examples_of_rank:,} examples a rank in micro-batches "
        f"of {size:,}; {remedy}"
    )


def staged_bytes(examples: Examples, count: int, world_size: int, ranks_per_node: int) -> float:
    """Returns the bytes that staging copies to each node, of shards with `count` examples."""
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
    finds_largest: bool = True,
) -> dict[str, Any]:
    """Returns the entry `resources` of `plan.py --json`: bytes, FLOP and seconds.

    A number is per rank unless its name says otherwise.

    Args:
        finds_largest: False leaves out the largest micro-batch, which takes most of the time.

    Raises:
        ConfigError: the engine cannot do what the ds_config says, or the accelerator cannot compute
            in its dtype.
        ModelConfigError, DataError: the recipe's model or data are wrong.
    """
    engine = cluster.engine
    world_size = cluster.world_size
    gpu = cluster.gpu
    require_supported(engine, machine, world_size)
    task, notes = planning_task(config, root)
    if config.train.compile:
        notes.append("train.compile: planned without it; compiled blocks keep less and run faster")
    if machine.checkpoint_on_cpu:
        notes.append("cpu_checkpointing: the blocks' inputs count as if they stayed on the device")
    if machine.compute_dtype.itemsize < 4:
        notes.append(
            "activations: the CPU path's, whose fp32 copies of one layer's bf16 tensors CUDA does "
            "not make"
        )
    size = config.train.micro_batch_size
    expected_size = config.privacy.expected_batch_size
    count = plan.max_batch_size if plan.enabled else expected_size
    num_batches = micro_batches(config, count, world_size, cluster.ranks_per_node)
    rows = num_batches * size * world_size
    # These engines gather the weights anew for a second pass.
    one_pass = engine == "fsdp" or (engine == "deepspeed" and machine.stage == 3)
    probe = Probe(task, machine, plan, rows=2 * num_batches * size, weights_of_one_pass=one_pass)
    memory = rank_memory(
        probe.model,
        engine,
        machine,
        config.optimizer,
        accumulation=config.train.accumulation,
        world_size=world_size,
        grid=probe.clipped.grid,
        average=config.train.ema_decay is not None,
        on_cpu=gpu is not None and gpu.name == "cpu",
    )
    parameters = trained_count(probe.model)
    note = padding_note(count, world_size, size)
    if note is not None:
        notes.append(note)
    device_memory = 0 if gpu is None else gpu.memory_per_rank(cluster.ranks_per_node)
    for_activations = memory.room(device_memory)
    setting = config.privacy.clipping_mode
    mode: Mode = "bookkeeping" if setting == "auto" else setting
    if config.privacy.arithmetic == "certified":
        mode = "certified"
    elif setting == "auto" and gpu is not None:
        # Chooses as a start does by trial.
        top = memory.later_bytes
        mode, _ = better_mode(
            probe.peak(mode, size) + top,
            for_activations + top,
            lambda: probe.peak("two_pass", size) + top,
        )
    activations = probe.peak(mode, size)
    flops = probe.flops(mode, size)
    memory = replace(memory, activations=activations)
    memory_sizes = asdict(memory)
    del memory_sizes["owned"]
    sample = min(size, PLAIN_SAMPLE)
    non_private_flops = plain_flops(probe.model, probe.inputs(sample))
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
            "expected_batch_size": expected_size,
            "micro_batch_size": size,
            "micro_batches_per_step": num_batches,
            "rows_per_step": rows,
            "padding_share": padding(count, world_size, size),
        },
        "memory": {**memory_sizes, "peak": memory.peak},
        "compute": {
            "flop_per_example": flops,
            "clipping_flop_ratio": flops * sample / non_private_flops,
            "flop_per_step": flops * rows,
        },
        "reading": {
            "bytes_per_example": examples.mean_bytes,
            "source": examples.source,
            "bytes_per_step": examples.mean_bytes * expected_size,
            "staged_bytes_per_node": staged_bytes(
                examples, plan.num_examples, world_size, cluster.ranks_per_node
            ),
        },
        "notes": notes,
    }
    if gpu is None:
        return result
    result["memory"] |= {
        "device": device_memory,
        "for_activations": for_activations,
        "fits": activations <= for_activations,
        "largest_micro_batch": None,
    }
    if finds_largest:
        result["memory"]["largest_micro_batch"] = largest_that_fits(
            lambda n: probe.peak(mode, n), for_activations
        )
    lattice_seconds = 0.0
    if mode == "certified":
        lattice_seconds = LATTICE_BYTES * parameters * num_batches * size / gpu.memory_bandwidth
    peak_rate = gpu.peak(machine.compute_dtype)
    compute_seconds = flops * num_batches * size / (peak_rate * cluster.efficiency)
    step_seconds = compute_seconds + lattice_seconds
    hours = step_seconds * config.train.num_steps / 3600
    examples_per_second = expected_size / step_seconds
    cores = examples_per_second / world_size / DECODED_PER_SECOND
    result["time"] = {
        "compute_seconds_per_step": compute_seconds,
        "lattice_seconds_per_step": lattice_seconds,
        "seconds_per_step": step_seconds,
        "examples_per_second": examples_per_second,
        "hours": hours,
        "gpu_hours": hours * world_size,
        "read_bytes_per_second": examples_per_second * examples.mean_bytes,
        "decoding_cores_per_rank": cores,
    }
    result["assumptions"] = {
        "efficiency": cluster.efficiency,
        "peak_flop_per_second": peak_rate,
        "decoded_per_second_and_core": DECODED_PER_SECOND,
        "left_out": "communication, decoding, noise, optimizer step, held-out evaluation, "
        "stragglers",
    }
    if cores > config.data.num_workers:
        notes.append(
            f"data.num_workers is {config.data.num_workers}, but a rank needs {cores:.3g} cores to "
            "decode: give it as many CPUs and workers, or the device waits"
        )
    return result


def allocation(
    planned: dict[str, Any],
    config: RunConfig,
    plan: PrivacyPlan,
    gpu_price: float | None,
    gpu_mtbf_hours: float,
) -> dict[str, Any]:
    """Returns hours, GPU-hours and price of a run with failures; JSON-ready.

    A job fails once in `gpu_mtbf_hours` / ranks. Each failure repeats half of the steps between two
    checkpoints, on average, and one restart; each repeated step is charged again (contract 10).
    Young (1974) and Daly (2006), first order: of the hours without failures T, with d for writing a
    checkpoint, tau between two, R for a restart and M between failures, a run takes
    T (1 + d / tau) / (1 - (tau / 2 + R) / M), least at tau = sqrt(2 d M).

    Args:
        planned: `plan_resources`, with a time; notes are added to it.
        gpu_price: of an hour of one GPU, in any currency.
        gpu_mtbf_hours: hours of one GPU between failures that end a job.
    """
    step_seconds = planned["time"]["seconds_per_step"]
    ranks = planned["world_size"]
    hours = plan.num_steps * step_seconds / 3600
    every_steps = config.train.checkpoint_every or max(1, plan.reserved_attempts // 20)
    copies = 1 + len(moments(config.optimizer)) + (config.train.ema_decay is not None)
    coordinates = copies * planned["parameters"] + planned["frozen_parameters"]
    writing_seconds = 4 * coordinates / CHECKPOINT_BYTES_PER_SECOND
    mtbf_seconds = 3600 * gpu_mtbf_hours / ranks
    useful_share = 1 - (every_steps * step_seconds / 2 + RESTART_SECONDS) / mtbf_seconds
    best_every = round(math.sqrt(2 * writing_seconds * mtbf_seconds) / step_seconds)
    entry: dict[str, Any] = {
        "job_mtbf_hours": mtbf_seconds / 3600,
        "checkpoint_every": every_steps,
        "checkpoint_seconds": writing_seconds,
        "best_checkpoint_every": max(1, best_every),
        "hours_with_failures": None,
    }
    if useful_share <= 0:
        planned["notes"].append(
            "failures: the job fails sooner than it reaches its next checkpoint: save more often"
        )
        return entry
    total_hours = hours * (1 + writing_seconds / (every_steps * step_seconds)) / useful_share
    failures = 3600 * total_hours / mtbf_seconds
    repeated_steps = failures * (every_steps / 2 + 1)
    entry |= {
        "hours_with_failures": total_hours,
        "gpu_hours_with_failures": total_hours * ranks,
        "price": None if gpu_price is None else gpu_price * total_hours * ranks,
        "failures": failures,
        "repeated_steps": repeated_steps,
        "reserved_attempts": plan.reserved_attempts,
    }
    if repeated_steps > plan.reserved_attempts:
        planned["notes"].append(
            f"failures: about {repeated_steps:,.0f} repeated steps are charged again, and the "
            f"reserve is {plan.reserved_attempts:,} attempts: the run would stop early; give "
            "train.checkpoint_every or a larger privacy.reserved_attempts"
        )
    return entry
