"""The sandbox of an audit: real steps on canaries, with everything written down that an audit needs.

A run is opened and stepped by what the trainer and a loop of one's own open and step theirs by (privacy/run/run.py), from the
start of either: checks, coins, rows, reading, clipping, reduction, noise, optimizer, checkpoints and ledger are those of the
audited run, and so are its settings. Only this differs: model and examples (canary_model.py), an optimizer whose settings make it
w -= gradient exactly, and a noise source that is watched, and silent in the first steps. What reaches the model and the optimizer
is noted where it arrives; the file layer, the entropy and what leaves the process are watched by functions around those of the
process, so that nothing that is audited has to report about itself. Rank 0 judges what all ranks noted (judge.py).

    session 1  silent steps in the run's micro-batches; the last one is "killed" before its `done`
    session 2  from a checkpoint: that step again, two more silent ones and half of the noisy ones, in micro-batches of 1,100
    session 3  from a checkpoint: the rest, in the run's micro-batches
"""

import contextlib
import io
import os
import pickle
import secrets
import socket
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from privacy.audit.report import AuditReport
from privacy.card.folder import read_recipe
from privacy.checkpoints.read import Checkpoint
from privacy.errors import ConfigError
from privacy.files.public import require_ledger
from privacy.ledger.members import MembersRecord, read_lines
from privacy.ledger.records import read_ledger
from privacy.loop.fields import Example, floats, integers
from privacy.loop.opening import LoopStart
from privacy.loop.reading import Reader
from privacy.noise.source import NoiseSource, SystemNoise
from privacy.plan.numbers import PrivacyPlan
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives
from privacy.run.ledger import open_ledger
from privacy.run.run import Parts, Run, Start, Step, open_run
from privacy.step.folder import RunFolder
from privacy.step.step import MicroBatch
from trainer.audit.canary_model import (
    EMBEDDING,
    KEY_BITS,
    PLACES,
    Canaries,
    CanaryModel,
    made_up,
    make_canaries,
)
from trainer.audit.judge import Judge

MOST_RANKS = 4
SAMPLE_RATE = 0.25
"""The sandbox samples at a high rate, so that few steps say much; sigma and C are the run's own."""
LARGE = 1100
"""Rows of the second session's micro-batches: more than a part of a micro-batch has (EXAMPLES_PER_PART)."""


class SandboxFailed(RuntimeError):
    """The sandbox did not end well; nothing is known about the mechanism."""

    exit_code = 1


Side = Callable[[Path, Canaries, PlanRequest, int], Start]
"""What of the trainer, or of a loop of one's own, the sandbox runs: its start, for a micro-batch of so many rows."""
ENORMOUS = 2.0**40
ALIKE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1.0},
    "RMSprop": {"lr": ENORMOUS, "eps": ENORMOUS, "alpha": 0.0},
    "Adam": {"lr": ENORMOUS, "eps": ENORMOUS, "betas": (0.0, 0.0)},
    "AdamW": {"lr": ENORMOUS, "eps": ENORMOUS, "betas": (0.0, 0.0), "weight_decay": 0.0},
}
"""Settings that make a step w -= gradient, up to rounding; for other optimizers SGD stands in."""


def audited_plan(run_dir: Path) -> PrivacyPlan:
    """The plan of a run folder.

    Raises:
        ConfigError: no run there, or one without noise.
    """
    require_ledger(run_dir)
    if not (run_dir / "config.toml").exists():
        raise ConfigError(
            f"run folder {run_dir} has no config.toml, so nobody knows how its steps were taken"
        )
    plan = read_ledger(run_dir / "ledger.jsonl").plan
    if not plan.enabled or plan.noise_multiplier == 0:
        raise ConfigError(
            f"run folder {run_dir}: trained without noise, so there is no mechanism to audit"
        )
    return plan


def ranks_of(run_dir: Path) -> int:
    """The ranks of a run's last step, as far as this machine may run so many; two where nothing says how many there were."""
    path = RunFolder(run_dir).members
    lines = read_lines(path) if path.is_file() else ()
    counts = [len(line.counts) for line in lines if isinstance(line, MembersRecord)]
    return min(MOST_RANKS, counts[-1]) if counts else 2


def is_of_a_loop(run_dir: Path) -> bool:
    """Whether a loop of one's own wrote the folder: its config.toml has no model."""
    return "model" not in read_recipe(run_dir)


def loop_audit(run_dir: Path, *, ranks: int | None = None) -> AuditReport:
    """Audits the mechanism of a loop of one's own; see `mechanism_audit`."""
    plan, config = audited_plan(run_dir), read_recipe(run_dir)
    work = partial(
        _of_a_loop, plan, config["train"]["micro_batch_size"], config["optimizer"]["name"]
    )
    return in_processes(ranks or ranks_of(run_dir), work)


def _of_a_loop(
    plan: PrivacyPlan,
    micro_batch_size: int,
    optimizer: str,
    folder: Path,
    rank: int,
    ranks: int,
    port: int,
) -> AuditReport | None:
    """One process of the sandbox."""
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
    return run_sandbox(
        plan, loop_side(optimizer), folder, micro_batch_size, words=f"a loop with {optimizer}"
    )


def loop_side(optimizer: str) -> Side:
    """Starts of a loop with an optimizer of that class."""
    kind, number = optimizer if optimizer in ALIKE else "SGD", integers(EMBEDDING)

    def start(
        folder: Path, canaries: Canaries, request: PlanRequest, micro_batch_size: int
    ) -> LoopStart:
        model, who = (
            CanaryModel(),
            {"canaries_B": integers(len(canaries)), "keys_B": integers(KEY_BITS)},
        )
        example = Example(
            {"gains_BG": floats(len(PLACES)), "rows_B": number, "columns_B": number, **who}
        )
        return LoopStart(
            model=model,
            optimizer=getattr(torch.optim, kind)(model.parameters(), **ALIKE[kind]),
            loss=model,
            request=request,
            reader=Reader(canaries, example, micro_batch_size),
            folder=RunFolder(folder / "run"),
            made_up=made_up(4),
            learning_rate=None,
            num_workers=0,
            save_every=None,
            data_version="canaries",
            mirror=None,
            unit="one canary",
            may_restart=False,
            starts_from=[],
            fallback=False,
        )

    return start


Work = Callable[[Path, int, int, int], AuditReport | None]
"""What one process of the sandbox does: (folder, rank, ranks, port) -> the report, on rank 0."""


def in_processes(ranks: int, work: Work, finish: Callable[[int], object] = os._exit) -> AuditReport:
    """Audits in fresh processes on this machine's CPU; threads of torch and locks of this one would not survive a fork.

    Args:
        finish: ends a process, with that exit code; interpreter shutdown after gloo traffic aborts now and then.

    Raises:
        SandboxFailed: a rank died; the others are ended then, which would wait for it.
    """
    # Another program may take the port before rank 0 does. Then the ranks say so, and the audit is started again.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        try:
            spawn(_rank, (work, ranks, port, Path(folder), finish), ranks)
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise SandboxFailed(
                f"sandbox rank {error.error_index} did not end well: {last}"
            ) from error
        report: AuditReport = pickle.loads((Path(folder) / "report").read_bytes())
    return report


def _rank(
    rank: int, work: Work, ranks: int, port: int, folder: Path, finish: Callable[[int], object]
) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "OMPI_", "RANK", "LOCAL_RANK", "WORLD_SIZE")):
            del os.environ[
                name
            ]  # the audit may itself run under a launcher, whose ranks are not the sandbox's
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(
        io.StringIO()
    ):  # what a start says is about the sandbox, and stdout may be JSON
        report = work(folder, rank, ranks, port)
    if report is not None:
        (folder / "report").write_bytes(pickle.dumps(report))
    if ranks > 1:
        dist.barrier()
    finish(0)


class Fsync(NamedTuple):
    """What an fsync made durable.

    Attributes:
        place: device and inode of the file or folder.
        at: when the call had returned.
        size: of a file, in bytes, before the call.
        inodes: of a folder, the inode of each name in it before the call.
    """

    place: tuple[int, int]
    at: int
    size: int
    inodes: dict[str, int]


class Tape:
    """What one rank does, attempt by attempt. It is the noise source too, and stands around functions of the process.

    Times are of the machine's monotonic clock, so that those of all ranks, which run on one machine, can be compared.

    Attributes:
        session: its number; `last` is its last step, which is killed in the first session.
    """

    def __init__(self, source: NoiseSource, present_N: np.ndarray, silent: int) -> None:
        self._source, self._present_N, self._num_silent = source, present_N, silent
        self.attempts: list[dict[str, Any]] = []
        self.fsyncs: list[Fsync] = []
        self.session, self.last, self._entropy_bytes, self.is_finite = -1, 0, 0, True
        self.run: Run
        self._begin()

    def _begin(self) -> None:
        """Empties what belongs to a single attempt."""
        self._is_silent = True
        self._drawn: list[Tensor] = []
        self._deviations: list[float] = []
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._handed = np.zeros(0)
        self._released_at, self._least_entropy = 0, sys.maxsize

    # The method of a noise source.

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        """Keeps the whole numbers that were drawn; in silent steps they do not reach the weights."""
        self._release()
        before = self._entropy_bytes
        drawn = self._source.rounded_normal(deviation, count, device)
        self._least_entropy = min(self._least_entropy, self._entropy_bytes - before)
        self._drawn.append(drawn.detach().to("cpu", torch.int64, copy=True))
        self._deviations.append(deviation)
        return torch.zeros_like(drawn) if self._is_silent else drawn

    def _release(self) -> None:
        """Noise is about to be drawn, or a value that depends on a gradient is about to leave the process."""
        self._released_at = self._released_at or time.monotonic_ns()

    # What stands around functions of the process while it is watched.

    def watch(self) -> ExitStack:
        """Until it is closed."""
        stack = ExitStack()
        for owner, name in ((os, "fsync"), (os, "urandom"), (collectives, "reduce_scatter_sum")):
            around = partial(getattr(self, f"_{name}"), getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, around))
        return stack

    def _reduce_scatter_sum(self, original: Callable[..., None], *arguments: Any) -> None:
        # One rank alone reduces as well; the order is judged alike, whatever the number of ranks.
        self._release()
        original(*arguments)

    def _fsync(self, original: Callable[[Any], None], file: Any) -> None:
        # What is written while fsync runs may not be durable, so size and names are taken before and the time afterwards.
        status, inodes = os.fstat(file), dict[str, int]()
        for name in os.listdir(file) if stat.S_ISDIR(status.st_mode) else ():
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                inodes[name] = os.stat(name, dir_fd=file, follow_symlinks=False).st_ino
        original(file)
        self.fsyncs.append(
            Fsync((status.st_dev, status.st_ino), time.monotonic_ns(), status.st_size, inodes)
        )

    # The noise source may ask for entropy through this function alone, as `privacy/noise/source.py` does. A source
    # that is seeded otherwise takes none, and is found by that.
    def _urandom(self, original: Callable[[int], bytes], size: int, /) -> bytes:
        self._entropy_bytes += size
        return original(size)

    def _step(self, original: Callable[..., None], shards: Sequence[Any], **rates: Any) -> None:
        """Notes, in fp64, what the optimizer gets."""
        self._handed = _flat([shard.values for shard in shards])
        original(shards, **rates)

    def _batches(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Notes who reaches the model, under which key; zeroes out, as the adjacency does, canaries that are not in the data."""
        for batch in batches:
            canaries_B, keys_B = batch.inputs["canaries_B"], batch.inputs["keys_B"]
            self._seen.append((canaries_B[~batch.is_padding_B], keys_B[~batch.is_padding_B]))
            is_absent_B = ~torch.from_numpy(self._present_N)[canaries_B]
            yield batch._replace(is_padding_B=batch.is_padding_B | is_absent_B)  # type: ignore[attr-defined]  # a NamedTuple

    # The steps of a run.

    def take_steps(self) -> None:
        """Takes the session's steps; the first session is "killed" before the `done` of its last."""
        run, is_first = self.run, self.session == 0
        with contextlib.closing(run.steps()) as steps:
            for step in steps:
                is_killed = is_first and step.number == self.last
                self._take(step, is_killed=is_killed)
                if is_killed or not self.is_finite:
                    break
                run.keep(step)
                if is_first and step.number == self.last - 1:
                    run.save()
                if step.number == self.last:
                    run.stop()

    def _take(self, step: Step, *, is_killed: bool) -> None:
        run = self.run
        self._begin()  # a start may have reduced made-up sums
        # Silent steps show the clipped sums exactly; the noise is drawn all the same, and its numbers are kept.
        self._is_silent = step.number <= self._num_silent
        before = self._weights()
        with ExitStack() as around:
            watch = partial(self._step, run.engine.step)
            around.enter_context(mock.patch.object(run.engine, "step", watch))
            if is_killed:  # between the update and its `done`
                around.enter_context(mock.patch.object(run.ledger, "done"))
            run.take(step, self._batches)
        after = self._weights()
        self._end(step.number, before, after)
        self.is_finite = not collectives.on_any(not np.isfinite(after).all())[0]

    def _weights(self) -> np.ndarray:
        # A copy, since an engine may hand out views of what it updates in place.
        return _flat([state.tensors["param"] for state in self.run.engine.state()]).copy()

    def _end(self, step: int, before: np.ndarray, after: np.ndarray) -> None:
        drawn = torch.cat([torch.zeros(0, dtype=torch.int64), *self._drawn]).numpy()
        ids, keys = (torch.cat(column).cpu().numpy() for column in zip(*self._seen, strict=True))
        # A source that was asked for another number leaves no numbers that could be laid beside the coordinates.
        self.attempts.append(
            {
                "step": step,
                "session": self.session,
                "silent": self._is_silent,
                "before": before,
                "after": after,
                "draws": drawn if len(drawn) == len(after) else np.zeros(len(after), np.int64),
                "num_draws": len(drawn),
                "deviations": self._deviations,
                "handed": self._handed,
                "ids": ids,
                "keys": keys.view(np.uint64),
                "released_at": self._released_at,
                "least_entropy": self._least_entropy,
            }
        )


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    """What this rank owns, side by side, in fp64, in which sums and noise are added; a rank may own nothing."""
    return np.concatenate(
        [np.zeros(0), *(tensor.detach().cpu().double().numpy().ravel() for tensor in tensors)]
    )


def run_sandbox(
    audited: PrivacyPlan,
    side: Side,
    folder: Path,
    micro_batch_size: int,
    *,
    words: str = "",
    num_single: int | None = None,
    silent_steps: int = 6,
    noisy_steps: int = 48,
    source: NoiseSource | None = None,
) -> AuditReport | None:
    """All attempts of this rank; on rank 0 what follows from those of all. Collective.

    Args:
        audited: the run's plan. The sandbox has its sigma, C and slack, at a higher rate.
        micro_batch_size: the run's.
        words: what else of the run the sandbox has, for the report.
        num_single: canaries of one coordinate; by default enough examples for two micro-batches of the run's on each rank, as far
            as there is room for so many.
        source: of noise; by default the plan's.
    """
    num_single = num_single or min(max(512, 2 * micro_batch_size * collectives.world_size()), 2048)
    canaries = make_canaries(num_single, audited.max_grad_norm)
    # The slack is what contract 4 states for floating point. A sandbox claims no epsilon, which its plan says, and little noise
    # is no reason to refuse it.
    same = "noise_multiplier target_delta max_grad_norm clipping_function arithmetic"
    request = PlanRequest(
        num_examples=len(canaries),
        expected_batch_size=round(SAMPLE_RATE * len(canaries)),
        num_steps=silent_steps + noisy_steps,
        allow_small_noise=True,
        sensitivity_slack=SENSITIVITY_SLACK if audited.arithmetic == "floating" else 0.0,
        informal_reasons=("it is a sandbox of an audit",),
        **{name: getattr(audited, name) for name in same.split()},
    )
    # An eighth of the examples is not in the data, whatever the sampler chooses.
    coins = collectives.broadcast_object([secrets.randbelow(8) > 0 for _ in range(len(canaries))])
    present_N = np.array(coins) | canaries.crowd_N
    tape, num_steps = Tape(source or SystemNoise(), present_N, silent_steps), request.num_steps
    sizes = micro_batch_size, LARGE, micro_batch_size
    ends = silent_steps - 2, silent_steps + noisy_steps // 2, num_steps

    def build(
        original: Callable[..., Parts], plan: PrivacyPlan, resumed: Checkpoint | None
    ) -> Parts:
        """A side's parts, with the watched noise, and checkpoints where the sandbox wants them."""
        parts = original(plan, resumed)
        return replace(
            parts,
            mechanism=replace(parts.mechanism, noise=tape),
            save_every=num_steps,
            in_background=False,
        )

    with tape.watch():
        for tape.session, (size, tape.last) in enumerate(zip(sizes, ends, strict=True)):
            with ExitStack() as around:
                start = side(folder, canaries, request, size)
                around.callback(start.folder.release)
                opening = partial(
                    open_ledger, start.folder, lambda _: request, lambda: b"canaries", mirror=None
                )
                opening = partial(opening, described=lambda *_: {})
                around.enter_context(mock.patch.object(start, "open_ledger", opening))
                around.enter_context(mock.patch.object(start, "build", partial(build, start.build)))
                opened = open_run(start)
                assert isinstance(opened, Run), "no session but the last ends the run"
                around.callback(opened.ledger.release)
                tape.run = opened
                tape.take_steps()
            if not tape.is_finite:
                break
    tapes = collectives.gather_objects((tape.attempts, tape.fsyncs))
    if collectives.rank() != 0:
        return None
    counts = f"{len(tapes)} ranks, {len(canaries)} examples, q = {SAMPLE_RATE}, {num_steps} steps"
    rows = f"micro-batches of {micro_batch_size} and {LARGE}, {tape.run.mechanism.clipped.mode} clipping"
    judge = Judge(audited, tape.run, tapes, sizes, canaries, present_N)
    return judge.report(words=f"{counts}, {rows}, {words}")
