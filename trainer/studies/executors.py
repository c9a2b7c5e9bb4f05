"""How the points of a study come to run here, in a pool of processes, or by a script. An array job of Slurm: slurm.py."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.files import write_durably
from trainer.loop.fit import BUDGET_SPENT, DONE
from trainer.loop.stopping import STOPPED_EARLY
from trainer.studies.folder import StudyFolder

_POLL_SECONDS = 0.2
_STOP_SECONDS = 60.0  # train.py ends within its grace_seconds (20) and a little
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass(frozen=True)
class Trainer:
    """The command that trains one point."""

    root: Path
    ds_config: str
    engine: str

    def command(self, folder: StudyFolder, name: str) -> list[str]:
        return [
            sys.executable, str(self.root / "launch_scripts" / "train.py"),
            "--ds_config", str(self.root / self.ds_config),
            "--recipe", str(folder.recipe(name)),
            "--engine", self.engine,
            "--run_dir", str(folder.run(name)),
        ]  # fmt: skip


@dataclass
class Outcome:
    """Exit codes of the runs that were started, and the runs that needed no start."""

    codes: dict[str, int] = field(default_factory=dict)
    finished_before: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def exit_code(self) -> int:
        """A defect or bad input of any run before a stop, before a spent budget, before 0."""
        codes = self.codes.values()
        failed = [code for code in codes if code not in (DONE, BUDGET_SPENT, STOPPED_EARLY)]
        if failed:
            return failed[0] if failed[0] > 0 else 1  # killed by a signal
        if self.stopped or STOPPED_EARLY in codes:
            return STOPPED_EARLY
        return BUDGET_SPENT if BUDGET_SPENT in codes else DONE


class LocalPool:
    """Runs the points here, `workers` at a time. SIGTERM and Ctrl-C stop the runs, which save; the same command resumes."""

    def __init__(self, folder: StudyFolder, trainer: Trainer, workers: int, say: Callable[[str], None]) -> None:
        self._folder, self._trainer, self._workers, self._say = folder, trainer, workers, say
        self._running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._threads = max(1, (os.cpu_count() or 1) // workers)
        self._outcome = Outcome()
        self._stopped_at = 0.0
        self._waited_for: set[str] = set()

    def run(self, names: Sequence[str]) -> Outcome:
        """Runs until all points have ended, or until SIGTERM or SIGINT asks for a stop."""
        waiting = list(names)

        def request_stop(*_: object) -> None:
            if not self._outcome.stopped:
                self._outcome.stopped, self._stopped_at = True, time.monotonic()
            for process, _started in self._running.values():
                process.terminate()

        handlers = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self._running or (waiting and not self._outcome.stopped):
                self._collect()
                for name in list(waiting):
                    if len(self._running) >= self._workers or self._outcome.stopped:
                        break
                    if self._start(name):
                        waiting.remove(name)
                time.sleep(_POLL_SECONDS)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self._outcome

    def _start(self, name: str) -> bool:
        """Whether the point is off the list: started, or finished before."""
        if self._folder.in_use(name):  # by a trainer of a study that was killed: it ends by itself
            if name not in self._waited_for:
                self._waited_for.add(name)
                self._say(f"{name}: another trainer has it; waiting for its end")
            return False
        progress = self._folder.progress(name)
        if progress == "finished":
            self._outcome.finished_before.append(name)
            return True
        if progress == "budget spent":
            self._outcome.codes[name] = BUDGET_SPENT
            self._say(f"{name}: the budget is spent and steps remain; not started again")
            return True
        self._say(f"{name}: {'starts' if progress == 'new' else 'resumes'}")
        libc, parent = ctypes.CDLL(None), os.getpid()

        def end_with_parent() -> None:  # by SIGTERM, so that the run saves and exits 7
            libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != parent:  # it died before we could ask
                os._exit(STOPPED_EARLY)

        with self._folder.log(name).open("ab") as log:
            process = subprocess.Popen(
                self._trainer.command(self._folder, name),
                cwd=self._trainer.root,
                env={"OMP_NUM_THREADS": str(self._threads), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us alone; we pass it on as SIGTERM
                preexec_fn=end_with_parent,
            )
        self._folder.record(point=name, event="start", pid=process.pid)
        self._running[name] = (process, time.monotonic())
        return True

    def _collect(self) -> None:
        for name, (process, started) in list(self._running.items()):
            if self._outcome.stopped and time.monotonic() - self._stopped_at > _STOP_SECONDS:
                process.kill()
            code = process.poll()
            if code is None:
                continue
            if self._outcome.stopped and code == -signal.SIGTERM:
                code = STOPPED_EARLY  # before it could listen: nothing was begun
            del self._running[name]
            self._outcome.codes[name] = code
            seconds = round(time.monotonic() - started, 2)
            self._folder.record(point=name, event="end", exit_code=code, seconds=seconds)
            ending = {
                DONE: "done",
                BUDGET_SPENT: "stopped, its budget is spent and steps remain",
                STOPPED_EARLY: "stopped on request; the same command resumes it",
            }.get(code)
            if ending is None:  # the trainer's last error says what and where, if a user can mend it
                log = self._folder.log(name)
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                errors = [line for line in lines if line.startswith("error")]
                last = (errors or lines or ["nothing was printed"])[-1]
                ending = f"failed with exit code {code}: {last} (log: {log})"
            self._say(f"{name}: {ending} ({seconds:.0f} s)")


_SCRIPT = """\
#!/bin/bash
# Study {study}: trains the points with the given numbers (0 to {last}), all of them without a number. The same call resumes.
#   STUDY_LAUNCHER="deepspeed --num_gpus 8" {script} 3        (default: {python})
# What it prints shows training loss: keep it to yourself, in a file under {private} for instance.
# Exit code: the first that is not 0 of launch_scripts/train.py (3 budget spent, 7 stopped and resumable).
set -u
points=(
{points}
)
cd {root} || exit 2
[ $# -gt 0 ] || set -- "${{!points[@]}}"
code=0
for number in "$@"; do
    point=${{points[$number]:?there is no point $number}}
    ${{STUDY_LAUNCHER:-{python}}} launch_scripts/train.py --ds_config {ds_config} --engine {engine} \\
        --recipe {recipes}/"$point".toml --run_dir {runs}/"$point"
    ended=$?
    [ $code -ne 0 ] || code=$ended
done
exit $code
"""


def write_script(folder: StudyFolder, trainer: Trainer, study: str, names: Sequence[str]) -> Path:
    """Writes study_dir/submit.sh, which is executable and needs nothing else of the study."""
    path = folder.root / "submit.sh"
    quote = shlex.quote
    text = _SCRIPT.format(
        study=study,
        last=len(names) - 1,
        script=quote(str(path)),
        private=quote(str(folder.private)),
        python=quote(trainer.command(folder, names[0])[0]),
        points="\n".join(f"    {quote(name)}" for name in names),
        root=quote(str(trainer.root)),
        ds_config=quote(trainer.ds_config),
        engine=quote(trainer.engine),
        recipes=quote(str(folder.recipes)),
        runs=quote(str(folder.runs)),
    )
    write_durably(path, text)
    path.chmod(0o755)
    return path
