"""The sandbox of an audit: real steps on canaries, with notes of everything that an audit needs.

A run is opened and stepped by privacy/run/run.py, as in the trainer and in a loop of one's own,
from the start of either. Checks, coins, rows, reading, clipping, reduction, noise, optimizer,
checkpoints, ledger and settings are those of the audited run. Three things differ: model and
examples (canary_model.py); an optimizer whose settings make a step w -= gradient exactly; and a
noise source that is watched, and silent in the first steps. The inputs of model and optimizer are
noted where they arrive. Wrappers around functions of the process watch the file layer, the entropy
and the values that leave the process, so the audited code does not report about itself. Rank 0
judges the notes of all ranks (judge.py).

    session 1  silent steps in the run's micro-batches; the last one is "killed" before its `done`
    session 2  from a checkpoint: that step again, two more silent ones and half of the noisy ones,
    in
               micro-batches of 1,100
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

from privacy.audit.audit_report import AuditReport, fact
from privacy.card.run_card import read_recipe
from privacy.checkpoints.read import Checkpoint
from privacy.errors import ConfigError, PrivacyConfigError
from privacy.files.public import require_ledger
from privacy.guards.isolation import Isolation
from privacy.ledger.attempts import MembersRecord, read_lines
from privacy.ledger.records import read_ledger
from privacy.loop.fields import Example, floats, integers
from privacy.loop.opening import LoopStart
from privacy.loop.reading import Reader
from privacy.noise.source import NoiseSource, SystemNoise
from privacy.plan.numbers import PrivacyPlan
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives
from privacy.run.run import Run, RunParts, RunSetup, Step, open_run
from privacy.run.run_ledger import open_ledger
from privacy.step.run_folder import RunFolder
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
"""A high rate, so that few steps test many examples; sigma and C are the run's own."""
LARGE = 1100
"""Rows of the second session's micro-batches: more than EXAMPLES_PER_PART of a part."""


class SandboxFailed(RuntimeError):
    """A failure of the sandbox, which says nothing about the mechanism."""

    exit_code = 1


Side = Callable[[Path, Canaries, PlanRequest, int], RunSetup]
"""Makes the start of the trainer or of a loop of one's own: (folder, canaries, request, rows of a
micro-batch) -> start."""
ENORMOUS = 2.0**40
_RMSPROP = {"lr": ENORMOUS, "eps": ENORMOUS, "alpha": 0.0}
_ADAM = {"lr": ENORMOUS, "eps": ENORMOUS, "betas": (0.0, 0.0)}
ALIKE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1.0},
    "RMSprop": _RMSPROP,
    "Adam": _ADAM,
    "AdamW": _ADAM | {"weight_decay": 0.0},
}
"""Settings that make a step w -= gradient, up to rounding; SGD replaces other optimizers."""


def audited_plan(run_dir: Path) -> PrivacyPlan:
    """Returns the plan of a run folder.

    Raises:
        ConfigError: the folder has no run, or a run without noise.
    """
    require_ledger(run_dir)
    if not (run_dir / "config.toml").exists():
        raise ConfigError(
            f"run folder {run_dir} has no config.toml, so the settings of its steps are unknown"
        )
    plan = read_ledger(run_dir / "ledger.jsonl").plan
    if not plan.enabled or plan.noise_multiplier == 0:
        raise ConfigError(
            f"run folder {run_dir}: trained without noise, so there is no mechanism to audit"
        )
    return plan


def ranks_of(run_dir: Path) -> int:
    """Returns the number of ranks of a run's last step, at most MOST_RANKS, or by default 2."""
    path = RunFolder(run_dir).members
    lines = read_lines(path) if path.is_file() else ()
    counts = [len(line.counts) for line in lines if isinstance(line, MembersRecord)]
    return min(MOST_RANKS, counts[-1]) if counts else 2


def is_of_a_loop(run_dir: Path) -> bool:
    """Returns whether a loop of one's own wrote the folder: its config.toml has no model."""
    return "model" not in read_recipe(run_dir)


def loop_audit(run_dir: Path, *, ranks: int | None = None) -> AuditReport:
    """Audits the mechanism of a loop of one's own; see `mechanism_audit`."""
    plan = audited_plan(run_dir)
    config = read_recipe(run_dir)
    micro_batch_size = config["train"]["micro_batch_size"]
    work = partial(_of_a_loop, plan, micro_batch_size, config["optimizer"]["name"])
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
    """Runs one process of the sandbox of a loop."""
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
    return run_sandbox(
        plan, loop_side(optimizer), folder, micro_batch_size, words=f"a loop with {optimizer}"
    )


def loop_side(optimizer: str) -> Side:
    """Returns the function that makes starts of a loop with an optimizer of that class."""
    name = optimizer if optimizer in ALIKE else "SGD"
    make_optimizer = getattr(torch.optim, name)

    def start(
        folder: Path, canaries: Canaries, request: PlanRequest, micro_batch_size: int
    ) -> LoopStart:
        model = CanaryModel()
        fields = {
            "gains_BG": floats(len(PLACES)),
            "rows_B": integers(EMBEDDING),
            "columns_B": integers(EMBEDDING),
            "canaries_B": integers(len(canaries)),
            "keys_B": integers(KEY_BITS),
        }
        return LoopStart(
            model=model,
            optimizer=make_optimizer(model.parameters(), **ALIKE[name]),
            loss=model,
            request=request,
            reader=Reader(canaries, Example(fields), micro_batch_size),
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
"""Runs one process of the sandbox: (folder, rank, ranks, port) -> the report on rank 0, or None."""


def in_processes(ranks: int, work: Work, finish: Callable[[int], object] = os._exit) -> AuditReport:
    """Runs the audit in fresh processes on this machine's CPU and returns the report.

    A fork would not survive the threads of torch and the locks of this process.

    Args:
        finish: ends a process with an exit code; interpreter shutdown after gloo traffic aborts now
            and then.

    Raises:
        SandboxFailed: a rank died; the other ranks, which would wait for it, are ended.
    """
    # Another program may take the port before rank 0 does. Then the ranks report it, and the audit
    # has to be started again.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        try:
            spawn(_rank, (work, ranks, port, Path(folder), finish), ranks)
        except ProcessException as error:
            reason = str(error).strip().splitlines()[-1]
            raise SandboxFailed(
                f"sandbox rank {error.error_index} did not end well: {reason}"
            ) from error
        report: AuditReport = pickle.loads((Path(folder) / "report").read_bytes())
    return report


def _rank(
    rank: int, work: Work, ranks: int, port: int, folder: Path, finish: Callable[[int], object]
) -> None:
    # The audit may itself run under a launcher, whose ranks are not those of the sandbox.
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "OMPI_", "RANK", "LOCAL_RANK", "WORLD_SIZE")):
            del os.environ[name]
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The lines of a start are about the sandbox, and stdout may have to be JSON.
    with contextlib.redirect_stdout(io.StringIO()):
        report = work(folder, rank, ranks, port)
    if report is not None:
        (folder / "report").write_bytes(pickle.dumps(report))
    if ranks > 1:
        dist.barrier()
    finish(0)


class Fsync(NamedTuple):
    """The file or folder that an fsync made durable.

    Attributes:
        place: device and inode of the file or folder.
        returned_at: the time when the call had returned.
        size: of a file, in bytes, before the call.
        inodes: of a folder, the inode of each name in it before the call.
    """

    place: tuple[int, int]
    returned_at: int
    size: int
    inodes: dict[str, int]


class Tape:
    """A record of one rank's attempts, which is also the rank's noise source.

    Wrappers around functions of the process write it. Times are of the machine's monotonic clock,
    so times of all ranks, which run on one machine, can be compared.

    Attributes:
        session: its number; `last` is its last step, which is killed in the first session.
        is_finite: whether the weights of all ranks are finite.
    """

    def __init__(self, source: NoiseSource, present_N: np.ndarray, silent: int) -> None:
        self._source = source
        self._present_N = present_N
        self._num_silent = silent
        self.attempts: list[dict[str, Any]] = []
        self.fsyncs: list[Fsync] = []
        self.session = -1
        self.last = 0
        self.is_finite = True
        self._entropy_bytes = 0
        self.run: Run
        self._begin()

    def _begin(self) -> None:
        """Empties the notes of a single attempt."""
        self._is_silent = True
        self._draws: list[Tensor] = []
        self._deviations: list[float] = []
        # (canaries, keys) of each micro-batch
        self._examples: list[tuple[Tensor, Tensor]] = []
        self._gradient = np.zeros(0)
        self._released_at = 0
        self._least_entropy = sys.maxsize

    # The method of a noise source.

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        """Returns numbers of the source and notes them; returns zeros in silent steps."""
        self._release()
        bytes_before = self._entropy_bytes
        draws = self._source.rounded_normal(deviation, count, device)
        self._least_entropy = min(self._least_entropy, self._entropy_bytes - bytes_before)
        self._draws.append(draws.detach().to("cpu", torch.int64, copy=True))
        self._deviations.append(deviation)
        return torch.zeros_like(draws) if self._is_silent else draws

    def _release(self) -> None:
        """Notes the time of the attempt's first release.

        A release begins before noise is drawn, or before a value that depends on a gradient leaves
        the process.
        """
        self._released_at = self._released_at or time.monotonic_ns()

    # Wrappers around functions of the process.

    def watch(self) -> ExitStack:
        """Wraps functions of the process until the returned stack is closed."""
        stack = ExitStack()
        for owner, name in ((os, "fsync"), (os, "urandom"), (collectives, "reduce_scatter_sum")):
            wrapper = partial(getattr(self, f"_{name}"), getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, wrapper))
        return stack

    def _reduce_scatter_sum(self, original: Callable[..., None], *arguments: Any) -> None:
        # One rank alone calls the reduction as well, so the order is judged for any number of
        # ranks.
        self._release()
        original(*arguments)

    def _fsync(self, original: Callable[[Any], None], file: Any) -> None:
        # Bytes that are written while fsync runs may not be durable, so size and names are read
        # before the call, and the time after it.
        status = os.fstat(file)
        names = os.listdir(file) if stat.S_ISDIR(status.st_mode) else []
        inodes: dict[str, int] = {}
        for name in names:
            # The file may just be removed.
            with contextlib.suppress(FileNotFoundError):
                inodes[name] = os.stat(name, dir_fd=file, follow_symlinks=False).st_ino
        original(file)
        place = (status.st_dev, status.st_ino)
        self.fsyncs.append(Fsync(place, time.monotonic_ns(), status.st_size, inodes))

    # The noise source may ask for entropy through this function alone, as `privacy/noise/source.py`
    # does. A source with another seed takes no entropy here, which the audit finds.
    def _urandom(self, original: Callable[[int], bytes], size: int, /) -> bytes:
        self._entropy_bytes += size
        return original(size)

    def _step(self, original: Callable[..., None], shards: Sequence[Any], **rates: Any) -> None:
        """Notes the gradient that the optimizer gets, in fp64."""
        self._gradient = _flat([shard.values for shard in shards])
        original(shards, **rates)

    def _batches(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Notes examples and keys that reach the model.

        Zeroes out canaries that are not in the data, as the adjacency does.
        """
        for batch in batches:
            canaries_B = batch.inputs["canaries_B"]
            keys_B = batch.inputs["keys_B"]
            is_example_B = ~batch.is_padding_B
            self._examples.append((canaries_B[is_example_B], keys_B[is_example_B]))
            is_absent_B = ~torch.from_numpy(self._present_N)[canaries_B]
            is_padding_B = batch.is_padding_B | is_absent_B
            # The batch is a NamedTuple.
            yield batch._replace(is_padding_B=is_padding_B)  # type: ignore[attr-defined]

    # The steps of a run.

    def take_steps(self) -> None:
        """Takes the session's steps; the first session is "killed" before the `done` of its
        last."""
        run = self.run
        is_first = self.session == 0
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
        # The start may have reduced made-up sums.
        self._begin()
        # Silent steps show the clipped sums exactly; the noise is drawn all the same, and noted.
        self._is_silent = step.number <= self._num_silent
        old_weights = self._weights()
        with ExitStack() as patches:
            wrapper = partial(self._step, run.engine.step)
            patches.enter_context(mock.patch.object(run.engine, "step", wrapper))
            if is_killed:
                # The run dies between the update and its `done`.
                patches.enter_context(mock.patch.object(run.ledger, "done"))
            run.take(step, self._batches)
        new_weights = self._weights()
        self._end(step.number, old_weights, new_weights)
        self.is_finite = not collectives.on_any(not np.isfinite(new_weights).all())[0]

    def _weights(self) -> np.ndarray:
        # A copy, since an engine may return views of tensors that it updates in place.
        return _flat([state.tensors["param"] for state in self.run.engine.state()]).copy()

    def _end(self, step: int, old_weights: np.ndarray, new_weights: np.ndarray) -> None:
        """Adds the notes of an attempt to `attempts`."""
        size = len(new_weights)
        draws = torch.cat([torch.zeros(0, dtype=torch.int64), *self._draws]).numpy()
        num_draws = len(draws)
        if num_draws != size:
            # Then no number belongs to a coordinate.
            draws = np.zeros(size, np.int64)
        canaries, keys = zip(*self._examples, strict=True)
        note = {
            "step": step,
            "session": self.session,
            "silent": self._is_silent,
            "before": old_weights,
            "after": new_weights,
            "draws": draws,
            "num_draws": num_draws,
            "deviations": self._deviations,
            "handed": self._gradient,
            "ids": torch.cat(canaries).cpu().numpy(),
            "keys": torch.cat(keys).cpu().numpy().view(np.uint64),
            "released_at": self._released_at,
            "least_entropy": self._least_entropy,
        }
        self.attempts.append(note)


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    """Returns the values that this rank owns, one after the other; a rank may own none.

    They are in fp64, in which sums and noise are added.
    """
    arrays = [tensor.detach().cpu().double().numpy().ravel() for tensor in tensors]
    return np.concatenate([np.zeros(0), *arrays])


def finds_mixing(run: Run, num_rows: int) -> bool:
    """Returns whether the check of micro-batches finds a task that mixes examples. Collective.

    The task adds a hundredth of each loss to the next one.
    """
    task = run.mechanism.task

    def mixing(**inputs: Tensor) -> Tensor:
        loss_B = task(**inputs)
        return loss_B + 0.01 * loss_B.roll(1)

    isolation = Isolation(replace(run.mechanism, task=mixing), run.parts.isolation.padding)
    try:
        isolation.require(made_up(max(2, num_rows)))
    except PrivacyConfigError:
        return True
    return False


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
    """Takes all attempts of this rank; returns the report of all ranks on rank 0, or None.
    Collective.

    Args:
        audited: the run's plan. The sandbox has its sigma, C and slack, at a higher rate.
        micro_batch_size: the run's.
        words: further settings of the run that the sandbox has, for the report.
        num_single: canaries of one coordinate; by default enough examples for two micro-batches of
            the run's size on each rank, up to 2,048.
        source: of noise; by default the plan's.
    """
    if not num_single:
        rows_of_two = 2 * micro_batch_size * collectives.world_size()
        num_single = min(max(512, rows_of_two), 2048)
    canaries = make_canaries(num_single, audited.max_grad_norm)
    num_steps = silent_steps + noisy_steps
    request = PlanRequest(
        num_examples=len(canaries),
        expected_batch_size=round(SAMPLE_RATE * len(canaries)),
        num_steps=num_steps,
        noise_multiplier=audited.noise_multiplier,
        target_delta=audited.target_delta,
        max_grad_norm=audited.max_grad_norm,
        clipping_function=audited.clipping_function,
        arithmetic=audited.arithmetic,
        # The sandbox claims no epsilon, so little noise is no reason to refuse it.
        allow_small_noise=True,
        informal_reasons=("it is a sandbox of an audit",),
        # Contract 4 states this slack for floating point.
        sensitivity_slack=SENSITIVITY_SLACK if audited.arithmetic == "floating" else 0.0,
    )
    # An eighth of the examples is not in the data, whatever the sampler chooses.
    coins = collectives.broadcast_object([secrets.randbelow(8) > 0 for _ in range(len(canaries))])
    present_N = np.array(coins) | canaries.crowd_N
    tape = Tape(source or SystemNoise(), present_N, silent_steps)
    sizes = (micro_batch_size, LARGE, micro_batch_size)
    last_steps = (silent_steps - 2, silent_steps + noisy_steps // 2, num_steps)

    def build(
        original: Callable[..., RunParts], plan: PrivacyPlan, resumed: Checkpoint | None
    ) -> RunParts:
        """Returns a side's parts with the watched noise and the sandbox's checkpoints."""
        parts = original(plan, resumed)
        return replace(
            parts,
            mechanism=replace(parts.mechanism, noise=tape),
            save_every=num_steps,
            in_background=False,
        )

    num_passed = 0
    is_mixed = False
    finds_planted = False
    with tape.watch():
        for session, (size, last_step) in enumerate(zip(sizes, last_steps, strict=True)):
            tape.session = session
            tape.last = last_step
            with ExitStack() as stack:
                start = side(folder, canaries, request, size)
                stack.callback(start.folder.release)
                open_sandbox_ledger = partial(
                    open_ledger,
                    start.folder,
                    lambda _: request,
                    lambda: b"canaries",
                    mirror=None,
                    described=lambda *_: {},
                )
                stack.enter_context(mock.patch.object(start, "open_ledger", open_sandbox_ledger))
                stack.enter_context(mock.patch.object(start, "build", partial(build, start.build)))
                # An alarm would end the run; the report shall say what else is wrong, too.
                stack.enter_context(mock.patch.object(Isolation, "stop_if_mixed"))
                run = open_run(start)
                assert isinstance(run, Run), "no session but the last ends the run"
                stack.callback(run.ledger.release)
                tape.run = run
                tape.take_steps()
                isolation = run.parts.isolation
                num_passed += isolation.num_passed
                is_mixed |= isolation.is_mixed
                if session == len(sizes) - 1 and tape.is_finite:
                    finds_planted = finds_mixing(run, size)
            if not tape.is_finite:
                break
    tapes = collectives.gather_objects((tape.attempts, tape.fsyncs))
    [is_mixed] = collectives.on_any(is_mixed)
    if collectives.rank() != 0:
        return None
    counts = f"{len(tapes)} ranks, {len(canaries)} examples, q = {SAMPLE_RATE}, {num_steps} steps"
    rows = f"micro-batches of {micro_batch_size} and {LARGE}"
    clipping = f"{tape.run.mechanism.clipped.mode} clipping"
    judge = Judge(audited, tape.run, tapes, sizes, canaries, present_N)
    report = judge.report(words=f"{counts}, {rows}, {clipping}, {words}")
    if tape.is_finite:
        words_of_plant = "is found" if finds_planted else "is not found"
        check = fact(
            "isolation",
            finds_planted and num_passed > 0 and not is_mixed,
            f"{num_passed} secret micro-batches agree with their halves"
            f"{', and others do not' if is_mixed else ''}; a task that mixes examples "
            f"{words_of_plant}",
        )
        report = replace(report, checks=[*report.checks, check])
    return report
