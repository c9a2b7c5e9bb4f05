"""Forks fresh programs for tests/processes.py, which starts one such server per pytest worker.

Importing torch, DeepSpeed and the trainer costs five to eight CPU seconds, and tests start hundreds of programs. The server
imports them once, has one thread, runs nothing itself, and so forks children that nothing has touched before.
"""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
import PIL.Image
import torch

from tests import loss_distributions
from tests.processes import Start

PRELOADED = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "functorch.compile",
    "networkx",
    "setuptools",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
    "deepspeed.comm.mori",
    "fairscale.optim.oss",
    "dp_accounting.pld.accountant",
    "prv_accountant",
    "torch.utils.tensorboard",
    "torch.profiler._cupti_monitor",
    "PIL.Image",
    "rich._emoji_codes",
    "trainer.config.cli",
    "trainer.run.start",
    "trainer.card_of_run",
    "trainer.publish",
    "trainer.engines.deepspeed",
    "trainer.engines.fairscale",
    "trainer.engines.fsdp",
)
"""What ranks and commands import, at once or when they build an engine."""


def _serve(connection: Connection) -> Start | None:
    """Answers starts with a process id, and process ids with an exit code or None; returns only in children, and at the end."""
    running: set[int] = set()
    while True:
        try:
            question = connection.recv()
        except EOFError:
            break
        if isinstance(question, Start):
            pid = os.fork()
            if pid == 0:
                connection.close()
                return question
            running.add(pid)
            connection.send(pid)
        else:
            pid, status = os.waitpid(question, os.WNOHANG)
            running.discard(pid)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _become(start: Start) -> None:
    """Turns this child into what a fresh Python would be at the first line of the program."""
    os.setsid()
    for stream, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, start.stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, start.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        file = os.open(path, flags, 0o644)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    if "PYTHONWARNINGS" not in start.environment:
        warnings.filters.remove(("ignore", None, Warning, None, 0))  # type: ignore[attr-defined] - the server's own
    gc.enable()
    numpy.random.seed()  # noqa: NPY002 - Python's own generator seeds itself after a fork
    torch.seed()
    paths = [path for path in start.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if start.command[0] == "-m":
        sys.path[:1] = [str(start.folder), *paths]
        sys.argv = list(start.command[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(start.folder, start.command[0]).parent), *paths]
        sys.argv = list(start.command)
        runpy.run_path(sys.argv[0], run_name="__main__")


_exit_codes = [0]


def _end_without_teardown() -> None:
    """Python's last act, freeing every module one by one, costs more than most programs of tests."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_codes[-1])


def _main() -> None:
    atexit.register(_end_without_teardown)  # the first to be registered is the last to be called
    for name in PRELOADED:
        importlib.import_module(name)
    PIL.Image.init()  # imports the readers of all formats
    loss_distributions.share()
    torch.set_num_threads(1)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(
            f"{len(threads)} threads run in the process that tests fork: a fork copies only one of them"
        )
    gc.collect()
    gc.disable()
    gc.freeze()  # the collector does not touch, and so does not copy, the memory that children share
    start = _serve(Connection(int(sys.argv[1])))
    if start is not None:
        try:
            _become(start)
        except SystemExit as end:
            _exit_codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
        except BaseException:
            _exit_codes.append(1)
            raise


if __name__ == "__main__":
    _main()
