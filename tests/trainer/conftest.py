"""A process group of this one process, for what is collective by nature."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

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
