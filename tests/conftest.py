"""What a session of tests shares; and where its time goes: after pytest's slowest tests, the slowest files."""

import os

# Before anything imports torch, whose threads otherwise wait for each other: on a busy machine tests then take several times as
# much processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import loss_distributions, self_check
from tests.parts import NUM_PARTS, note, of_part
from tests.processes import end_server

# Examples that each searched property is tried on. `make test` finds what a few find; `make test-all` searches.
settings.register_profile("few", deadline=None, max_examples=15)
settings.register_profile("full", deadline=None, max_examples=300)
settings.load_profile("few")

BEGAN = time.monotonic()
BEFORE, GAINED = pytest.StashKey[set[str]](), pytest.StashKey[list[str]]()
"""What lay in the working tree before the first test, and what else lies there after the last."""
SLOWEST = 20
AT_LEAST = 60.0  # seconds in all; a single file run by hand needs no table
MEMORY = Path("/dev/shm")
ROOM = 4 * 2**30  # bytes; a whole session takes a tenth of it
ROOT = Path(__file__).resolve().parents[1]
CACHES = {
    ".git",
    ".venv",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
}
"""Folders in which programs keep what they may make again."""
COVERAGE = ROOT / "runs" / "coverage"
"""What `make coverage` measures is written there, by all processes of a session."""


def is_roomy(folder: Path) -> bool:
    """Whether tests may have their files there: programs among them, and everything that a session writes."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return (
        found.f_bavail * found.f_frsize >= ROOM
        and not found.f_flag & os.ST_NOEXEC
        and os.access(folder, os.W_OK)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=int,
        choices=range(1, NUM_PARTS + 1),
        help="one part of all tests (tests/parts.py)",
    )


def entries(folder: Path, left_out: frozenset[Path] = frozenset({COVERAGE})) -> set[str]:
    """Returns the paths of all files and folders below a folder, relative to it, but for caches."""
    paths = set[str]()
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = [
            name for name in folders if name not in CACHES and here / name not in left_out
        ]
        paths |= {str((here / name).relative_to(folder)) for name in (*folders, *files)}
    return paths


def is_worker(config: pytest.Config) -> bool:
    """Whether another process of this session watches over the working tree."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not is_worker(session.config):
        session.config.stash[BEFORE] = entries(ROOT)


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):  # as a shell starts what runs in the background; ranks inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_roomy(
        MEMORY
    ):  # runs and ledgers sync their files thousands of times, which a disk takes milliseconds for
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if loss_distributions.FOLDER not in os.environ:  # the workers of this session inherit it
        os.environ[loss_distributions.FOLDER] = tempfile.mkdtemp(prefix="loss-distributions-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(loss_distributions.FOLDER)))


@pytest.hookimpl(trylast=True)  # behind the choice by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts processes comes first: a long test that is the last one keeps all other workers waiting."""
    items.sort(
        key=lambda item: (
            item.nodeid.split("/")[1] not in ("e2e", "distributed", "fuzz", "launch_scripts")
        )
    )
    if config.option.part is not None:
        items[:], others = of_part(items, config.option.part)
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    if "dp_accounting" in sys.modules:  # the collected tests have imported what they use
        loss_distributions.share()
    gc.collect()
    gc.freeze()  # the collector then passes over all modules and tests, again and again in a session of thousands


def pytest_sessionfinish(session: pytest.Session) -> None:
    end_server()
    for child in (
        multiprocessing.active_children()
    ):  # data workers ignore SIGTERM, and Python waits for them at its end
        child.kill()
    if not is_worker(session.config):
        gained = sorted(entries(ROOT) - session.config.stash.get(BEFORE, set()))
        session.config.stash[GAINED] = gained
        if gained and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (
        config.option.part is not None and config.args_source != pytest.Config.ArgsSource.ARGS
    ):  # a whole part
        note(config.option.part, terminalreporter.stats, time.monotonic() - BEGAN)
    if gained := config.stash.get(GAINED, []):
        terminalreporter.section("tests write into their temporary folders alone")
        for name in gained[:SLOWEST]:
            terminalreporter.write_line(f"{name} is new in the working tree")
        terminalreporter.write_line(
            f"{len(gained)} in all: write into tmp_path, or end what else runs in this clone"
        )
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "nodeid"):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if seconds.total() < AT_LEAST:
        return
    terminalreporter.section(f"slowest {min(SLOWEST, len(seconds))} files of {len(seconds)}")
    for name, total in seconds.most_common(SLOWEST):
        terminalreporter.write_line(f"{total:7.1f}s {name}")
    terminalreporter.write_line(f"{seconds.total():7.1f}s all, on all workers together")


@pytest.fixture(scope="module")
def trusted_models() -> Iterator[None]:
    """For modules about something else than the self-check."""
    with self_check.trusted_models():
        yield
