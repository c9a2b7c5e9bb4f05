"""What a part of the acceptance yields, and on what it runs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Check:
    """One line of the table and of the record.

    Attributes:
        holds: None where the check was not run; `measured` then says why.
        measured: what was seen, as JSON.
        expected: what it is held against.
    """

    name: str
    holds: bool | None
    measured: Any
    expected: str


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        reduced: small models and few repetitions, so that a CPU gets through all parts in minutes.
        folder: empty, for what the part writes.
    """

    device: torch.device
    reduced: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def choose(self, full: Any, reduced: Any) -> Any:
        return reduced if self.reduced else full

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall time of `work` on the device, from an idle device to an idle device."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def environment(device: str, **more: str) -> dict[str, str]:
    """The environment of a single process that trains on `device`, whatever launched this program."""
    ours = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device, "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        ours["CUDA_VISIBLE_DEVICES"] = ""
    return {**os.environ, **ours, **more}


def start(device: str, *command: str, log: Path) -> "subprocess.Popen[bytes]":
    """Starts `python COMMAND` in a session of its own; its output goes to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(device),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
