"""Runs cases in forks of one process that has imported everything, and judges how they end."""

import contextlib
import importlib
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.cases import ROOT, Case, damaged
from tests.fuzz.commands import SCRIPTS

SECONDS = 60.0
"""That a command may take: of processor time, and by the clock where nobody else uses this machine."""
REFUSED_WITHIN = 0.5
"""Processor time within which most command lines that are refused have been; it ends cases that are not tried whole."""
BEGUN = -signal.SIGPROF
"""How such a case ends, which says nothing against it."""
MOST_LINES = 8  # a ds_config with several faults has a line for each
CODES = {0, 1, 2, 3, 4, 5, 6, 7}
MEMORY_MIB = 6000  # on top of what the process has mapped already
HEAVY = [
    "trainer.run.start", "trainer.engines", "privacy.step.engine", "trainer.planner.resources", "trainer.planner.tables",
    "privacy.audit.folder", "trainer.audit.canaries", "trainer.audit.run", "trainer.weights.export", "evaluation.features",
    "evaluation.results", "evaluation.zero_shot", "evaluation.captions", "evaluation.few_shot",
    "evaluation.private_head.run", "data.synthetic.generate", "data.importers.pipeline", "dp_accounting.pld",
    "torch.utils.data", "torch.utils.tensorboard",
]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for a signal."""

    code: int
    seconds: float
    out: str
    err: str
    timed_out: bool
    has_no_reader: bool

    def problem(self) -> str | None:
        """What breaks the rule, or None."""
        lines = self.err.strip().splitlines()
        if self.timed_out:
            return f"no end within {SECONDS:.0f} s"
        if "Traceback" in self.out + self.err:
            return "traceback"
        if self.code not in CODES and self.code != BEGUN:
            return f"exit code {self.code}"
        if self.code == 1 and self.has_no_reader:
            return None  # `| head` ends a command quietly
        if self.code in (1, 2, 3, 4) and not (1 <= len(lines) <= MOST_LINES):
            return f"{len(lines)} lines on stderr"
        if self.code in (1, 2, 3, 4) and not any(line.startswith("error") for line in lines):
            return "no line that says error"
        return None


def preload() -> None:
    """Imports what commands import, so that a fork starts at once."""
    for name in (*(f"launch_scripts.{script}" for script in SCRIPTS), *HEAVY):
        importlib.import_module(name)


def run_case(case: Case, folder: Path, made: Path, *, is_whole: bool = True) -> Ended:
    """Runs one case in a fork; `folder` is its own and is removed. It may be on a disk that is nearly full, or takes no files.

    Args:
        is_whole: False ends it after REFUSED_WITHIN.
    """
    limits = dict(condition.split(" ", 1) for condition in case.conditions if " " in condition)
    mounted = {"space", "folder"} & limits.keys()
    folder.mkdir()
    try:
        if mounted:
            _run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder))
        if (made / "run").is_dir():
            shutil.copytree(made / "run", folder / "run")
        for name in ("recipe.toml", "machine.json", "study.toml"):
            content = getattr(case, name.partition(".")[0])
            (folder / name).write_bytes(content.replace(b"{case}", bytes(folder)))
        (folder / "tmp").mkdir()
        if case.damage is not None:
            _damage(folder / "run", random.Random(case.damage))
        if "space" in limits:
            left = os.statvfs(folder)
            (folder / "filler").write_bytes(bytes(max(0, left.f_bavail * left.f_bsize - int(limits["space"]))))
        if "folder" in limits:
            _run("mount", "-o", "remount,ro", str(folder))
        return _forked(case, folder, made, is_whole=is_whole)
    finally:
        if mounted:
            _run("umount", "--lazy", str(folder))
        _make_removable(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _damage(run: Path, rng: random.Random) -> None:
    """Changes, cuts off or removes one file of a run; the small ones as often as the large ones."""
    file = rng.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size))
    match rng.randrange(6):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(b"")
        case 2:
            file.unlink()
            file.mkdir()
        case _:
            file.write_bytes(damaged(file.read_bytes(), rng))


def _forked(case: Case, folder: Path, made: Path, *, is_whole: bool) -> Ended:
    out, err = os.pipe(), os.pipe()
    patience = SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.setitimer(signal.ITIMER_PROF, 0.0 if is_whole else REFUSED_WITHIN)
            os.dup2(out[1], 1)
            os.dup2(err[1], 2)
            for end in (*out, *err):
                os.close(end)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
            _child(case, folder, made)
        except SystemExit as ended:
            _leave(ended.code if isinstance(ended.code, int) else 1)
        except BaseException:  # what the interpreter does at its end
            traceback.print_exc()
            _leave(1)
        _leave(0)
    os.close(out[1])
    os.close(err[1])
    said: dict[int, list[bytes]] = {out[0]: [], err[0]: []}
    status = None
    while status is None and time.monotonic() < start + patience:
        for end in select.select(list(said), [], [], 0.02)[0]:
            said[end].append(os.read(end, 1 << 16))
        done, found, used = os.wait4(child, os.WNOHANG)
        status = found if done else None
    timed_out = status is None or used.ru_utime + used.ru_stime > SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it left behind, such as workers
    if status is None:
        status = os.waitpid(child, 0)[1]
    for end in said:
        os.set_blocking(end, False)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(end, 1 << 16):
                said[end].append(piece)
        os.close(end)
    texts = [b"".join(pieces).decode(errors="replace") for pieces in said.values()]
    return Ended(
        os.waitstatus_to_exitcode(status),
        time.monotonic() - start,
        *texts,
        timed_out,
        "stdout ended" in case.conditions,
    )


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


def _child(case: Case, folder: Path, made: Path) -> None:
    places = {
        "{case}/full": f"{made}/full",
        "{case}/readonly": f"{made}/readonly",
        "{case}": str(folder),
        "{made}": str(made),
    }

    def placed(text: str) -> str:
        for mark, path in places.items():
            text = text.replace(mark, path)
        return text

    os.chdir(ROOT)
    os.environ.update(TMPDIR=str(folder / "tmp"), HOME=str(folder / "tmp"), DS_ACCELERATOR="cpu")
    for name, value in case.environment.items():
        os.environ[name] = placed(value)
    import tempfile

    tempfile.tempdir = None
    arguments = [placed(word) for word in case.arguments]
    sys.argv = [f"launch_scripts/{case.script}.py", *arguments]
    module: Any = importlib.import_module(f"launch_scripts.{case.script}")
    _limit_memory(MEMORY_MIB)
    for condition in case.conditions:
        _apply(condition, folder)
    if case.script == "train":
        signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(7))  # as the script does before its imports
        module.main(["--rendezvous_seconds", "3", *arguments] if "--rendezvous_seconds" not in arguments else arguments)
    else:
        from trainer.config.cli import run_command

        run_command(module.main)


def _apply(condition: str, folder: Path) -> None:
    what, _, how = condition.partition(" ")
    match what:
        case "stdin":
            os.close(0)
        case "stdout" if how == "closed":
            os.close(1)
        case "stdout" if how == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        case "stdout":
            nobody, end = os.pipe()
            os.close(nobody)
            os.dup2(end, 1)
            os.close(end)
        case "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(how), int(how)))
        case "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(how), int(how)))
        case "memory":
            _limit_memory(int(how))
        case "umask":
            os.umask(0o777)
        case "no":
            gone = folder.parent / "gone"
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()


def _limit_memory(mebibytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]  # of two limits the lower one counts
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _make_removable(folder: Path) -> None:
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            os.chmod(Path(parent) / name, 0o700)  # after a umask of 0o777
