"""Tries a start without a run: `train.py --dry_run` makes all its checks and changes nothing.

A folder that holds a run is only read. Without one, a temporary folder beside its place takes new
indexes, ledger and key, and is removed. So a start is refused in the same words as without
`--dry_run`.
"""

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.index.tar_index import MANIFEST
from privacy.errors import DONE
from privacy.ledger.shared import SharedLedger
from privacy.ranks import collectives
from privacy.ranks.collectives import on_main, say
from privacy.run.run import Finished, Run, open_run
from privacy.run.run_ledger import LedgerOpening
from privacy.sampling.keys import KEY_BYTES, NONCE_BYTES, SamplingKey
from privacy.step.batches import LogicalBatches
from privacy.step.run_folder import RunFolder
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.hardware import gpu_of
from trainer.planner.resources import Cluster, examples, plan_resources
from trainer.ranks.discovery import Ranks
from trainer.run.announce import announce
from trainer.run.datasets import training_table
from trainer.run.ledger_terms import open_run_ledger, require_places
from trainer.run.start import TrainerStart, prepare_process


def dry_run(
    config: RunConfig,
    machine: MachineSettings,
    engine: EngineName,
    run_dir: Path,
    root: Path,
    ranks: Ranks,
    device: torch.device,
    *,
    may_restart: bool = False,
) -> int:
    """Starts the run up to its first charge, prints its size, and returns the exit code.

    Collective. Every file of the start is removed. See `trainer.run.start.train` for arguments and
    errors.
    """
    prepare_process(config, device)
    run_folder = RunFolder(run_dir)
    with _temporary_folder(run_folder) as folder:
        start = DryStart(
            config,
            machine,
            engine,
            folder,
            root,
            ranks,
            device,
            None,
            may_restart,
            run_folder=run_folder,
        )
        run = open_run(start, is_dry=True)
        hosts = collectives.gather_objects(socket.gethostname())
        lines = []
        if not isinstance(run, Finished) and not config.data.streaming:
            lines = deal_one_step(start, run, hosts)
        if ranks.is_main:
            if isinstance(run, Finished):
                say(f"{run_dir} is finished: there would be nothing to do")
            else:
                announce(start.training(run), engine, machine, start.choice)
                ranks_per_host = -(-ranks.world_size // len(set(hosts)))
                for line in (*lines, *_forecast(start, run, ranks_per_host)):
                    say(line)
            say("dry run: nothing is charged or left behind; without --dry_run it starts")
    return DONE


@contextlib.contextmanager
def _temporary_folder(run_folder: RunFolder) -> Iterator[RunFolder]:
    """Yields the folder to start in, and removes a temporary one. Errors name the run folder.

    A run folder with a ledger is yielded itself. The temporary folder is on the same file system
    as the run folder would be.
    """

    def place_beside() -> Path | None:
        parent = next(path for path in run_folder.root.parents if path.exists())
        prefix = f".{run_folder.root.name}.dry-{socket.gethostname()}-"
        # Folders of this host's dry runs; of those that were killed, the process is gone.
        for folder in parent.glob(f"{prefix}*"):
            with contextlib.suppress(ValueError, PermissionError):
                try:
                    os.kill(int(folder.name.removeprefix(prefix)), 0)
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)
        return None if run_folder.ledger.exists() else parent / f"{prefix}{os.getpid()}"

    temporary = on_main(place_beside)
    if temporary is None:
        yield run_folder
        return
    try:
        yield RunFolder(temporary)
    except Exception as error:
        temporary_name = str(temporary)
        name = str(run_folder.root)
        error.args = tuple(str(part).replace(temporary_name, name) for part in error.args)
        raise
    finally:
        if collectives.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


@dataclass(kw_only=True)
class DryStart(TrainerStart):
    """A start whose `folder` may be a temporary one in place of `run_folder`.

    It writes nowhere else.
    """

    run_folder: RunFolder

    @property
    def is_new(self) -> bool:
        """Returns whether the run folder holds no run yet, so that `folder` is temporary."""
        return self.folder is not self.run_folder

    def require_places(self) -> None:
        """Refuses a mirror or a shared ledger inside the run folder."""
        on_main(lambda: require_places(self.run_folder, self.config.privacy))

    def take_folder(self) -> None:
        """Checks the run folder as a start does, and links its indexes to the temporary folder."""

        def take_temporary_folder() -> None:
            self.run_folder.require_kinds()
            self.run_folder.require_whole()
            if self.run_folder.root.exists() and not self.run_folder.root.is_dir():
                self.run_folder.create()  # refuses
            if self.run_folder.private.is_dir():
                self.run_folder.lock()
            self.folder.take()
            # A start reads these if an earlier start has left them.
            for name in ("index", "heldout-index", self.run_folder.members.name):
                path = self.run_folder.private / name
                if (path / MANIFEST).exists() or path.is_file():
                    (self.folder.private / name).symlink_to(path)

        on_main(take_temporary_folder if self.is_new else self.folder.take)

    def open_data(self) -> None:
        """Opens the private examples, and copies no shard to this node (data.staging)."""
        self.table = training_table(self.config, self.folder, self.root)

    def open_ledger(self) -> LedgerOpening:
        """Opens a new run's ledger in the temporary folder.

        Makes no mirror, and asks the shared ledger for the budget without reserving it.
        """
        config = self.config
        privacy = config.privacy
        shared_ledger = privacy.shared_ledger
        if self.is_new:
            mirror = privacy.ledger_mirror
            if mirror is not None and not Path(mirror).exists():
                mirror = str(self.folder.root / "mirror.jsonl")
            privacy = privacy.model_copy(update={"ledger_mirror": mirror, "shared_ledger": None})
            config = config.model_copy(update={"privacy": privacy})
        opening = open_run_ledger(
            config, self.folder, self.table, self.task.unit, self.parent_ledgers
        )
        if self.is_new and shared_ledger is not None:
            fixed_in_advance = privacy.fixed_in_advance

            def ask() -> None:
                reservation = SharedLedger(shared_ledger).reserving(
                    "", self.run_folder.root.name, opening.plan, fixed_in_advance=fixed_in_advance
                )
                with contextlib.suppress(_Asked), reservation:
                    raise _Asked

            on_main(ask)
        return opening


class _Asked(Exception):
    """Leaves before the reservation is written."""


class DealtPart(NamedTuple):
    """Counts one rank's share of a step: examples, rows of micro-batches, bytes and shards read."""

    examples: int
    rows: int
    bytes: int
    shards: frozenset[int]


def deal_one_step(start: DryStart, run: Run, hosts: Sequence[str]) -> list[str]:
    """Deals a step with coins of a key that is thrown away, and returns lines of its size.

    Collective. The printed number of examples tells nothing about the data: those coins decide no
    step of any run.

    Args:
        hosts: each rank's host, which stands for its node where nodes read their own shares
            (data.staging).
    """
    plan = run.plan
    config = start.config
    table = start.table
    micro_batch_size = config.train.micro_batch_size
    nodes: tuple[int, ...] = ()
    if config.data.staging is not None:
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        nodes = tuple(numbers[host] for host in hosts)
    secret = on_main(lambda: secrets.token_bytes(KEY_BYTES + NONCE_BYTES))
    batches = LogicalBatches(
        run.mechanism.sampler,
        SamplingKey(secret[:KEY_BYTES]),
        secret[KEY_BYTES:],
        {},
        micro_batch_size,
        pads_to_cap=plan.enabled,
        nodes=nodes,
        expected_batch_size=plan.expected_batch_size,
    )
    batch = batches.plan(1)
    extents = table.extents(batch.example_ids)
    part_of_rank = DealtPart(
        len(batch.example_ids),
        batch.num_micro_batches * micro_batch_size,
        int(extents.lengths.sum()),
        frozenset(np.unique(extents.shards).tolist()),
    )
    parts = collectives.gather_objects(part_of_rank)
    examples = sum(part.examples for part in parts)
    rows = sum(part.rows for part in parts)
    shards_read = frozenset[int]().union(*(part.shards for part in parts))
    gigabytes = sum(part.bytes for part in parts) / 1e9
    most_gigabytes = max(part.bytes for part in parts) / 1e9
    most_shards = max(len(part.shards) for part in parts)
    layout = run.mechanism.clipped.grid.layout
    bytes_per_sum = 6 if layout == "int32+int16" else 8
    return [
        f"one step is dealt: {examples:,} examples in {rows:,} rows, {1 - examples / rows:.1%} of "
        f"them padding; {batch.num_micro_batches:,} micro-batches of {micro_batch_size:,} a rank",
        f"sums take {bytes_per_sum} bytes a coordinate ({layout})",
        f"the step reads {gigabytes:.3g} GB from {len(shards_read):,} of {len(table.entries):,} "
        f"shards, one rank at most {most_gigabytes:.3g} GB from {most_shards:,}",
    ]


def _forecast(start: DryStart, run: Run, ranks_per_host: int) -> Iterator[str]:
    """Yields how many steps remain, and how long they take on this device; plan.py says more."""
    config = start.config
    num_steps = run.plan.num_steps - run.step
    gpu = gpu_of(start.device)
    cluster = Cluster(start.engine_name, start.ranks.world_size, gpu, gpus_per_node=ranks_per_host)
    resources = plan_resources(
        config,
        start.machine,
        cluster,
        examples(config, start.root),
        run.plan,
        start.root,
        finds_largest=False,
    )
    micro_batches = resources["batch"]["micro_batches_per_step"]
    peak_gib = resources["memory"]["peak"] / 2**30
    yield (
        f"would take {num_steps:,} steps from step {run.first_step:,}, each of "
        f"{micro_batches:,} micro-batches of {config.train.micro_batch_size:,} on each rank; "
        f"{peak_gib:.3g} GiB at peak"
    )
    if gpu is not None:
        duration = resources["time"]["seconds_per_step"] * num_steps
        unit = "seconds"
        if duration >= 3600:
            duration /= 3600
            unit = "hours"
        elif duration >= 60:
            duration /= 60
            unit = "minutes"
        yield (
            f"about {duration:,.3g} {unit} of computing (ranks: {cluster.world_size:,}), at an "
            f"assumed {cluster.efficiency:.0%} of what {gpu.name} can do"
        )
