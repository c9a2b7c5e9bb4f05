"""A run under a launcher, the processes that belong to it, and what is left of it after a fault."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.ranks import ROOT, free_port, quiet_environment
from tests.e2e.launch import train_arguments

BIN = Path(sys.executable).parent
FAILING = "tests/e2e/failing_train.py"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        inflict: called once two steps are done; None where `failure`, the first arguments of failing_train.py, does it.
        codes: exit codes of the launcher that are right.
        says: words that one line must hold.
        rank_codes: exit codes of the ranks; None where some are killed, or may be.
        prepare, undo, clean: called before the first start, after the end of it, and after the last.
    """

    name: str
    launcher: str
    inflict: "Callable[[Run], None] | None"
    codes: tuple[int, ...]
    says: str
    failure: tuple[str, ...] = ("none", "-1", "0", "0")
    settings: tuple[str, ...] = ()
    rank_codes: tuple[int, int] | None = None
    prepare: "Callable[[Run], None]" = lambda run: None
    undo: "Callable[[Run], None]" = lambda run: None
    clean: "Callable[[Run], None]" = lambda run: None


class Run:
    """Two ranks of a tiny recipe that would go on for long."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder, self.run_dir, self.log = fault, folder, folder / "run", folder / "log"

    def arguments(self, *more: str) -> list[str]:
        settings = [text.format(folder=self.folder) for text in self.fault.settings]
        return train_arguments(
            self.run_dir, "--engine", "local", "train.num_steps=4000", "heldout.num_captions=0", "train.checkpoint_every=2",
            "train.grace_seconds=5", *settings, *more, ds_config="ds_configs/zero1.json",
        )  # fmt: skip

    def start(self) -> None:
        port, script = str(free_port()), [FAILING, *self.fault.failure]
        environment = quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RUN_OF_A_FAULT=str(self.run_dir))
        options = {
            "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", port],
            "torchrun.py": [
                *(sys.executable, "launch_scripts/cluster/torchrun.py", "--nproc_per_node", "2", "--master_port", port)
            ],
            "mpirun": [str(BIN / "mpirun"), "-n", "2", sys.executable, "-u"],
        }
        with self.log.open("ab") as log:
            self.launcher = subprocess.Popen(
                [*options[self.fault.launcher], *script, *self.arguments()], cwd=ROOT, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def processes(self) -> dict[int, tuple[list[str], dict[str, str]]]:
        """Command line and environment of everything that this run has started and that has not ended."""
        found = {}
        mark = f"RUN_OF_A_FAULT={self.run_dir}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in environment and command:
                pairs = (pair.partition("=") for pair in environment.decode(errors="replace").split("\0"))
                words = command.decode(errors="replace").split("\0")
                found[int(folder.name)] = words, {name: value for name, _, value in pairs}
        return found

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for pid, (words, environment) in self.processes().items():
            said = environment.get("RANK", environment.get("PMI_RANK"))
            if FAILING in words[1:3] and said == str(number):
                return pid
        raise AssertionError(f"there is no rank {number}: {self.log.read_text()[-2000:]}")

    def worker(self, rank: int) -> int:
        """A data worker of a rank: a child of its fork server."""
        servers = [pid for pid in children(self.rank(rank)) if children(pid)]
        return children(servers[0])[0]


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def exit_codes(run_dir: Path) -> tuple[int, ...]:
    """What the ranks of failing_train.py have ended with, sorted."""
    noted = run_dir.with_name(f"{run_dir.name}.codes")
    return tuple(sorted(int(line.split()[1]) for line in noted.read_text().splitlines())) if noted.exists() else ()
