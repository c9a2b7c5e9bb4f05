"""One thread and no leftover seed: these models are too small to share cores for."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_and_seeded():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
