"""Requests to stop, and the grace time."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import Forked
from trainer.errors import StepDropped
from trainer.loop import stopping
from trainer.loop.stopping import StopRequests

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def abandoned() -> threading.Event:
    return threading.Event()


@pytest.fixture
def requests(
    tmp_path: Path, abandoned: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StopRequests]:
    monkeypatch.setattr(stopping, "MARGIN_SECONDS", 0.1)
    made = StopRequests(tmp_path / "STOP", grace_seconds=0.2, abandon=abandoned.set)
    yield made
    made.close()


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_file(requests: StopRequests, tmp_path: Path) -> None:
    assert not requests.pending() and not requests.grace_is_over()
    (tmp_path / "STOP").touch()
    assert requests.pending() and not requests.grace_is_over()


def test_sigusr1_has_no_hurry(requests: StopRequests, abandoned: threading.Event) -> None:
    """It comes minutes before the end (Slurm), so the step may take its time."""
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(requests.pending)
    with requests.step():
        assert not abandoned.wait(0.6) and not requests.grace_is_over()


def test_max_minutes(tmp_path: Path) -> None:
    requests = StopRequests(tmp_path / "STOP", grace_seconds=1, max_minutes=0.3 / 60)
    assert not requests.pending()
    wait_until(requests.pending)
    requests.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_step_that_does_not_end_is_abandoned_while_the_main_thread_is_blocked(
    requests: StopRequests, abandoned: threading.Event, number: signal.Signals
) -> None:
    """No Python handler runs inside a C call; the signal is noticed all the same."""
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    with requests.step():
        assert abandoned.wait(10)


def test_a_step_that_ends_in_time_is_not(
    requests: StopRequests, abandoned: threading.Event
) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with requests.step():
        wait_until(requests.pending)
    assert not abandoned.wait(0.6), "saving is never abandoned"
    assert requests.grace_is_over()


def test_a_step_before_its_intent_is_dropped(requests: StopRequests) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    done = []
    with pytest.raises(StepDropped):  # noqa: PT012
        for number in requests.droppable(iter(range(1000))):
            done.append(number)
            time.sleep(0.05)
    assert 1 <= len(done) < 100


def test_the_signals_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made = StopRequests(tmp_path / "STOP", grace_seconds=1)
    assert signal.getsignal(signal.SIGTERM) != before
    made.close()
    assert signal.getsignal(signal.SIGTERM) == before


SCRIPT = """
import os, sys, time, threading
from trainer.loop.stopping import StopRequests, end_on_signals
from pathlib import Path
end_on_signals(lambda: os._exit(7))
if sys.argv[1] == "training":
    requests = StopRequests(Path("/nowhere"), grace_seconds=60)
    print("training", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    print("pending", requests.pending(), flush=True)
    requests.close()
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()  # blocked where no handler runs
"""
"""Before training; in a process of its own, since the handlers stay."""


def test_what_a_shell_had_ignored_stays_ignored(start: Callable[..., Forked]) -> None:
    process = start("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + SCRIPT, "setup")
    process.wait_for_line("ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 7


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)]
)
def test_a_signal_before_training_ends_it(
    start: Callable[..., Forked], number: signal.Signals
) -> None:
    process = start(SCRIPT, "setup")
    process.wait_for_line("ready")
    time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=20) == 7


def test_training_takes_over_and_gives_back(start: Callable[..., Forked], tmp_path: Path) -> None:
    process = start(SCRIPT, "training", tmp_path / "go")
    process.wait_for_line("training")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    (tmp_path / "go").touch()
    process.wait_for_line("pending True")
    process.wait_for_line("ready")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 7
