"""A process group of this one process, for what is collective by nature; and programs of their own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.processes import ROOT, Forked, kill_group, quiet_environment
from trainer.ranks import distributed
from trainer.ranks.discovery import Ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[torch.device]:
    """The device of the only rank."""
    with mock.patch.dict(os.environ):  # `start` exports the launcher's variables
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
        device = distributed.start(Ranks())
        yield device
        dist.destroy_process_group()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """Runs a program's text with arguments in a process of its own, which is killed at the end."""
    started: list[Forked] = []

    def run(program: str, *arguments: str | Path) -> Forked:
        (tmp_path / "program.py").write_text(program)
        environment = quiet_environment(PYTHONPATH=str(ROOT))
        started.append(
            Forked([tmp_path / "program.py", *arguments], stdout=tmp_path / "said", env=environment)
        )
        return started[-1]

    yield run
    for process in started:
        kill_group(process)
