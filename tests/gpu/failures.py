"""Kills, stops and moves: what a run keeps when its process dies, is asked to stop, or goes to another device.

`python -m tests.gpu.failures DEVICE` prints as JSON how long other threads stand still while a device starts and blocks compile.
A heartbeat is such a thread: one that stands still for 30 seconds would have its rank declared dead.
"""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from privacy.clipping import clipped_sum
from privacy.ledger.records import read_ledger
from tests.distributed import test_chain
from tests.distributed.ranks import free_port
from tests.e2e.launch import TRAIN, count, train_arguments
from tests.gpu.checks import ROOT, Check, Setting, environment, start
from tests.gpu.sums import captioner, error_of, expected_sum, moved
from trainer.engines.blocks import compile_blocks, require_compiler
from trainer.errors import ConfigError
from trainer.ranks.heartbeat import Timing

WITHIN = 240
DEAD_AFTER = Timing().dead_after


def checks(setting: Setting) -> Iterator[Check]:
    yield from _interrupted(setting, signal.SIGKILL, expected=-signal.SIGKILL)
    yield from _interrupted(setting, signal.SIGTERM, expected=7)
    yield from _chain(setting)
    yield _pauses(setting)


def _interrupted(setting: Setting, number: signal.Signals, *, expected: int) -> Iterator[Check]:
    """Sends the signal after two of ten steps; the same command must finish the run."""
    run_dir, log = setting.folder / f"run-{number.name}", setting.folder / f"{number.name}.log"
    arguments = train_arguments(
        run_dir,
        "--engine",
        "local",
        "train.num_steps=10",
        "heldout.num_captions=0",
        ds_config="ds_configs/zero1.json",
    )
    process = start(setting.device.type, TRAIN, *arguments, log=log)
    deadline = time.monotonic() + WITHIN
    while count(run_dir, "done") < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    first = process.wait(WITHIN)
    again = start(setting.device.type, TRAIN, *arguments, log=log).wait(WITHIN)
    state = read_ledger(run_dir / "ledger.jsonl")
    measured = {
        "exit": first,
        "exit_of_the_second_start": again,
        "charged": state.num_charged,
        "done": count(run_dir, "done"),
    }
    lost = (
        10 if number == signal.SIGKILL else 0
    )  # steps since the last checkpoint and the one that ran are taken again
    holds = first == expected and again == 0 and 10 <= state.num_charged <= 10 + lost
    if not holds:
        measured["log"] = log.read_text()[-1500:]
    yield Check(
        f"{number.name} and resume",
        holds,
        measured,
        f"exit {expected}, then 0; 10 to {10 + lost} steps charged",
    )


def _chain(setting: Setting) -> Iterator[Check]:
    """What a link saves, the next one loads to the last bit: weights and moments, on other devices and engines."""
    there, folder = setting.device.type, setting.folder / "chain"
    folder.mkdir()
    last = None
    for engine, device in [("local", there), ("zero2", "cpu"), ("fsdp", there)]:
        before, after = _link(engine, device, folder, setting.folder)
        if last is not None:
            same = test_chain.equal_bits(before, last)
            yield Check(
                f"hand-over to {engine} on {device}",
                same,
                {"tensors": len(before)},
                "equal to the last bit",
            )
        last = after


def _link(
    engine: str, device: str, folder: Path, scratch: Path
) -> tuple[test_chain.State, test_chain.State]:
    arguments = {
        "engine": engine,
        "optimizer": "adamw",
        "folder": folder,
        "num_steps": test_chain.STEPS_PER_LINK,
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    (scratch / "arguments").write_bytes(pickle.dumps((arguments, clipped_sum.WRITTEN_ENTRIES)))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.distributed.ranks",
            "tests.distributed.test_chain:rank_link",
            str(scratch),
        ],
        cwd=ROOT,
        env=environment(device, **alone, MASTER_PORT=str(free_port())),
        check=True,
        timeout=WITHIN,
    )
    # The file was written by the process above, in a folder that this program made.
    before, after = pickle.loads((scratch / "result-0").read_bytes())
    os.unlink(scratch / "result-0")
    return before, after


def _pauses(setting: Setting) -> Check:
    """The heartbeat is a thread; what holds the interpreter for longer than its limit ends a healthy run."""
    device = setting.device.type
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.failures", device],
        cwd=ROOT,
        env=environment(device),
        stdout=subprocess.PIPE,
        check=True,
        timeout=WITHIN,
    )
    pauses = json.loads(done.stdout.splitlines()[-1])
    holds = all(
        seconds < DEAD_AFTER / 3 for seconds in pauses.values() if not isinstance(seconds, str)
    )
    return Check("pauses of the heartbeat", holds, pauses, f"below {DEAD_AFTER / 3:g} s")


def longest_pause(work: Callable[[], object]) -> float:
    """The longest time between two ticks of a thread that wants to tick every hundredth of a second while this works."""
    ended, ticks = threading.Event(), [time.monotonic()]

    def tick() -> None:
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max((b - a for a, b in itertools.pairwise(ticks)), default=0.0)


def main(device: torch.device) -> None:
    pauses: dict[str, float | str] = {}
    expected, bound = expected_sum(captioner(), torch.float32)
    made = captioner()

    def first() -> None:
        error_of(moved(made, device, torch.float32), bound, "bookkeeping", expected)

    def compiled() -> None:
        compile_blocks(made[0])
        first()

    pauses["first micro-batch"] = longest_pause(first)
    try:
        require_compiler(device)
    except ConfigError as error:
        pauses["compilation"] = str(error)
    else:
        pauses["compilation"] = longest_pause(compiled)
    print(json.dumps(pauses))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
