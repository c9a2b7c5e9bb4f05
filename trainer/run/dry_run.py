"""A start without a run: `train.py --dry_run` asks everything that a start can be refused for, and leaves nothing behind.

A folder that holds a run is read, and nothing in it is written. In place of one that does not, a folder beside it stands in: the
index of shards that have none, ledger and key are made there, and go with it. So a refused start is refused in the same words.
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
from privacy.run.ledger import Opening
from privacy.run.run import Finished, Run, open_run
from privacy.sampling.keys import KEY_BYTES, NONCE_BYTES, SamplingKey
from privacy.step.batches import LogicalBatches
from privacy.step.folder import RunFolder
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.hardware import gpu_of
from trainer.planner.resources import Cluster, examples, plan_resources
from trainer.ranks.discovery import Ranks
from trainer.run.announce import announce
from trainer.run.datasets import training_table
from trainer.run.ledger import open_run_ledger, require_places
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
    """Starts the run up to its first charge, says what would run, and takes it back; collective. Returns the exit code.

    Args and errors are those of `trainer.run.start.train`.
    """
    prepare_process(config, device)
    asked = RunFolder(run_dir)
    with _nothing_left(asked) as folder:
        start = DryStart(
            config, machine, engine, folder, root, ranks, device, None, may_restart, asked=asked
        )
        run = open_run(start, is_dry=True)
        hosts = collectives.gather_objects(socket.gethostname())
        dealt = (
            []
            if isinstance(run, Finished) or config.data.streaming
            else deal_one_step(start, run, hosts)
        )
        if ranks.is_main:
            if isinstance(run, Finished):
                say(f"{run_dir} is finished: there would be nothing to do")
            else:
                announce(start.training(run), engine, machine, start.choice)
                for line in (
                    *dealt,
                    *_forecast(start, run, -(-ranks.world_size // len(set(hosts)))),
                ):
                    say(line)
            say("dry run: nothing is charged or left behind; without --dry_run it starts")
    return DONE


@contextlib.contextmanager
def _nothing_left(asked: RunFolder) -> Iterator[RunFolder]:
    """The folder to start in: where a new one would be made, on the same file system. Errors name the one asked for."""

    def beside() -> Path | None:
        there = next(path for path in asked.root.parents if path.exists())
        prefix = f".{asked.root.name}.dry-{socket.gethostname()}-"
        for left in there.glob(
            f"{prefix}*"
        ):  # by dry runs of this host, of which some may have been killed
            with contextlib.suppress(ValueError, PermissionError):
                try:
                    os.kill(int(left.name.removeprefix(prefix)), 0)
                except ProcessLookupError:
                    shutil.rmtree(left, ignore_errors=True)
        return None if asked.ledger.exists() else there / f"{prefix}{os.getpid()}"

    stand_in = on_main(beside)
    if stand_in is None:
        yield asked
        return
    try:
        yield RunFolder(stand_in)
    except Exception as error:
        error.args = tuple(str(part).replace(str(stand_in), str(asked.root)) for part in error.args)
        raise
    finally:
        if collectives.rank() == 0:
            shutil.rmtree(stand_in, ignore_errors=True)


@dataclass(kw_only=True)
class DryStart(TrainerStart):
    """A start whose `folder` may stand in for the one that was asked for; it writes nowhere else."""

    asked: RunFolder

    @property
    def is_new(self) -> bool:
        return self.folder is not self.asked

    def require_places(self) -> None:
        on_main(lambda: require_places(self.asked, self.config.privacy))

    def take_folder(self) -> None:
        def look() -> None:
            self.asked.require_kinds()
            self.asked.require_whole()
            if self.asked.root.exists() and not self.asked.root.is_dir():
                self.asked.create()  # refuses
            if self.asked.private.is_dir():
                self.asked.lock()
            self.folder.take()
            for name in (
                "index",
                "heldout-index",
                self.asked.members.name,
            ):  # what a real start would find
                there = self.asked.private / name
                if (there / MANIFEST).exists() or there.is_file():
                    (self.folder.private / name).symlink_to(there)

        on_main(look if self.is_new else self.folder.take)

    def open_data(self) -> None:
        """No shard is copied to this node (data.staging)."""
        self.table = training_table(self.config, self.folder, self.root)

    def open_ledger(self) -> Opening:
        """Opens a new run's ledger in the folder that stands in: makes no mirror, asks the data owner, and reserves nothing."""
        privacy, config = self.config.privacy, self.config
        mirror, shared = privacy.ledger_mirror, privacy.shared_ledger
        if self.is_new:
            if mirror is not None and not Path(mirror).exists():
                mirror = str(self.folder.root / "mirror.jsonl")
            privacy = privacy.model_copy(update={"ledger_mirror": mirror, "shared_ledger": None})
            config = config.model_copy(update={"privacy": privacy})
        opening = open_run_ledger(config, self.folder, self.table, self.task.unit, self.behind)
        if self.is_new and shared is not None:
            fixed = privacy.fixed_in_advance

            def ask() -> None:
                with (
                    contextlib.suppress(_Asked),
                    SharedLedger(shared).reserving(
                        "", self.asked.root.name, opening.plan, fixed_in_advance=fixed
                    ),
                ):
                    raise _Asked

            on_main(ask)
        return opening


class _Asked(Exception):
    """Leaves before the reservation is written."""


class DealtPart(NamedTuple):
    """What one rank is dealt: its examples, the rows of its micro-batches, and what it reads for them."""

    examples: int
    rows: int
    bytes: int
    shards: frozenset[int]


def deal_one_step(start: DryStart, run: Run, hosts: Sequence[str]) -> list[str]:
    """Deals a step as the run would, with coins of a key that is thrown away, and says what it comes to. Collective.

    The number of examples that is printed says nothing about the data: those coins decide no step of any run.

    Args:
        hosts: each rank's host, which stands for its node where nodes read their own shares (data.staging).
    """
    plan, config, table = run.plan, start.config, start.table
    size = config.train.micro_batch_size
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    nodes = tuple(numbers[host] for host in hosts) if config.data.staging is not None else ()
    secret = on_main(lambda: secrets.token_bytes(KEY_BYTES + NONCE_BYTES))
    batches = LogicalBatches(
        run.mechanism.sampler,
        SamplingKey(secret[:KEY_BYTES]),
        secret[KEY_BYTES:],
        {},
        size,
        pads_to_cap=plan.enabled,
        nodes=nodes,
        expected_batch_size=plan.expected_batch_size,
    )
    dealt = batches.plan(1)
    places = table.extents(dealt.example_ids)
    shards = frozenset(np.unique(places.shards).tolist())
    mine = DealtPart(
        len(dealt.example_ids), dealt.num_micro_batches * size, int(places.lengths.sum()), shards
    )
    parts = collectives.gather_objects(mine)
    examples, rows = sum(part.examples for part in parts), sum(part.rows for part in parts)
    opened = frozenset[int]().union(*(part.shards for part in parts))
    bytes_read = sum(part.bytes for part in parts)
    grid = run.mechanism.clipped.grid
    sums = f"{6 if grid.layout == 'int32+int16' else 8} bytes a coordinate ({grid.layout})"
    return [
        f"one step is dealt: {examples:,} examples in {rows:,} rows, {1 - examples / rows:.1%} of them padding; "
        f"{dealt.num_micro_batches:,} micro-batches of {size:,} a rank",
        f"sums take {sums}",
        f"the step reads {bytes_read / 1e9:.3g} GB from {len(opened):,} of {len(table.entries):,} shards, one rank at most "
        f"{max(part.bytes for part in parts) / 1e9:.3g} GB from {max(len(part.shards) for part in parts):,}",
    ]


def _forecast(start: DryStart, run: Run, ranks_per_host: int) -> Iterator[str]:
    """How much is left to do, and how long that takes on this device; plan.py says more."""
    config, machine, steps = start.config, start.machine, run.plan.num_steps - run.step
    gpu = gpu_of(start.device)
    cluster = Cluster(start.engine_name, start.ranks.world_size, gpu, gpus_per_node=ranks_per_host)
    planned = plan_resources(
        config, machine, cluster, examples(config, start.root), run.plan, start.root, whole=False
    )
    yield (
        f"would take {steps:,} steps from step {run.first_step:,}, each of {planned['batch']['micro_batches_per_step']:,} "
        f"micro-batches of {config.train.micro_batch_size:,} on each rank; {planned['memory']['peak'] / 2**30:.3g} GiB at peak"
    )
    if gpu is not None:
        seconds = planned["time"]["seconds_per_step"] * steps
        size, unit = (
            (3600, "hours")
            if seconds >= 3600
            else (60, "minutes")
            if seconds >= 60
            else (1, "seconds")
        )
        yield (
            f"about {seconds / size:,.3g} {unit} of computing (ranks: {cluster.world_size:,}), at an assumed "
            f"{cluster.efficiency:.0%} of what {gpu.name} can do"
        )
