"""A part of the rehearsal: a list of named stages, each of which is run once, measured and written down.

A stage that is written down is not run again, so a part that was interrupted goes on where it was.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


class Part:
    """What one part writes down, in `folder`.

    Attributes:
        folder: room for the part's files: data, run folders, logs. It stays until the part begins anew.
        sizes: the largest size of each dimension that has run, such as {"expected_batch_size": 1310720}.
    """

    def __init__(self, name: str, folder: Path, *, anew: bool = False) -> None:
        self.name, self.folder = name, folder
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = folder / "stages.jsonl"
        self.stages: list[dict[str, Any]] = []
        if self._lines.exists():
            self.stages = [json.loads(line) for line in self._lines.read_text().splitlines()]
        self.sizes: dict[str, int] = {}

    def stage(self, name: str, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Runs `work` unless it is written down already, and returns what it measured.

        Wall seconds, processor seconds and peak memory of this process and its children stand beside what `work` returns.

        Args:
            work: does the stage, asserts what has to hold, and returns numbers and words that JSON can hold.
        """
        for stage in self.stages:
            if stage["name"] == name:
                say(f"{self.name}: {name}: done before")
                return stage["measured"]
        say(f"{self.name}: {name} ...")
        began, used = time.monotonic(), processor_seconds()
        measured = dict(work())
        seconds = time.monotonic() - began
        stage = {
            "name": name,
            "seconds": round(seconds, 2),
            "processor_seconds": round(processor_seconds() - used, 2),
            "peak_gib": round(peak_bytes() / GIB, 3),
            "measured": measured,
        }
        with self._lines.open("a") as file:
            file.write(json.dumps(stage) + "\n")
        self.stages.append(stage)
        say(f"{self.name}: {name}: {seconds:.1f} s, {json.dumps(measured)}")
        return measured

    def ran(self, **sizes: int) -> None:
        """Notes that these dimensions have run at these sizes: `tests/rehearsal/test_sizes.py` compares recipes with them."""
        for dimension, size in sizes.items():
            self.sizes[dimension] = max(size, self.sizes.get(dimension, 0))


def say(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)


def processor_seconds() -> float:
    """User and system time of this process and of all its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_bytes() -> int:
    """The largest resident memory of this process so far, or of any one of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(usage.ru_maxrss for usage in usages) * 1024


def command(*words: object, log: Path | None = None, code: int = 0, **environment: str) -> str:
    """Runs a command of the project from its root to its end, and returns what it printed on both streams.

    Args:
        log: keeps what the command prints; with it the output is there while the command runs.
        code: the exit code that it must have.

    Raises:
        AssertionError: it ended with another exit code; the message holds the end of its output.
    """
    surroundings = {**os.environ, "DS_ACCELERATOR": "cpu", **environment}
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "command.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            ended = subprocess.run(
                [str(word) for word in words],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=surroundings,
                check=False,
            )
        said = log.read_text(errors="replace")
    assert ended.returncode == code, f"{words}: exit {ended.returncode}, not {code}\n{said[-3000:]}"
    return said


@contextmanager
def lap(measured: dict[str, Any], name: str) -> Iterator[None]:
    """Writes the wall and processor seconds of what is inside to `measured`, as NAME_seconds and NAME_processor_seconds."""
    began, used = time.monotonic(), processor_seconds()
    yield
    measured[f"{name}_seconds"] = round(time.monotonic() - began, 3)
    measured[f"{name}_processor_seconds"] = round(processor_seconds() - used, 3)
