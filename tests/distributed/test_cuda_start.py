"""The way to a GPU, as far as a machine without one can tell: what is chosen and refused; test_fake_gpu.py goes on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.launch import alone, train_arguments
from trainer.errors import ConfigError, HostError
from trainer.ranks import distributed
from trainer.ranks.discovery import Ranks

without_cuda = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="torch is built with CUDA: it would be used"
)


@without_cuda
def test_an_accelerator_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = alone(train_arguments(tmp_path / "run"), DS_ACCELERATOR="cuda")
    errors = [line for line in result.stderr.splitlines() if line]
    assert result.returncode == 2 and len(errors) == 1, result.stderr
    assert errors[0].startswith("error: DS_ACCELERATOR=cuda") and "has no CUDA" in errors[0]
    assert not (tmp_path / "run").exists()


NO_GPU = HostError, r"no usable GPU on host \S+: look at nvidia-smi .*580.*DS_ACCELERATOR=cpu"


@pytest.mark.parametrize(
    ("name", "is_built", "num_gpus", "expected"),
    [
        (None, True, 2, ["cuda:0", "cuda:1"]),
        ("cuda", True, 2, ["cuda:0", "cuda:1"]),
        # A host without its GPU says so itself, and does not train for years on its CPU.
        *((name, True, 0, NO_GPU) for name in (None, "cuda")),
        *(
            ("cpu", True, number, ["cpu", "cpu"]) for number in (0, 2)
        ),  # DeepSpeed computes there then, too
        (None, False, 0, ["cpu", "cpu"]),
        ("cuda", False, 0, (ConfigError, "install a build that has")),  # rank 0 speaks for all
        ("npu", True, 2, (ConfigError, "training runs on cuda or cpu")),
    ],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, name: str | None, is_built: bool, num_gpus: int, expected: Any
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if name is not None:
        monkeypatch.setenv("DS_ACCELERATOR", name)
    if isinstance(expected, list):
        assert [str(distributed.choose_device(local_rank)) for local_rank in (0, 1)] == expected
    else:
        with pytest.raises(expected[0], match=expected[1]):
            distributed.choose_device(0)


def test_deepspeed_finds_the_gpu_and_the_accelerator_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where each rank of a host sees one GPU alone, the third rank's GPU is number 0, and DeepSpeed goes by LOCAL_RANK."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DS_ACCELERATOR",
    ):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv(NCCL := "TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    ranks = Ranks(rank=2, local_rank=2, world_size=4)
    distributed.export_ranks(ranks, torch.device("cuda", 0))
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]) == (
        "2",
        "0",
        "cuda",
    )
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0", (
        "DeepSpeed refuses a LOCAL_RANK that differs from Open MPI's"
    )
    distributed.export_ranks(ranks, torch.device("cpu"))
    assert (os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]) == ("2", "cpu")
    assert os.environ[NCCL] == "0", (
        "the heartbeat names a dead rank, and ends ranks that stand still"
    )
    monkeypatch.setenv(NCCL, "3")
    distributed.export_ranks(ranks, torch.device("cuda", 0))
    assert os.environ[NCCL] == "3", "what the user has set stays"


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """By its UUID: each of them may call it number 0."""
    distributed.refuse_shared_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-3")])
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 have the same GPU \(GPU-2 of host a\)"):
        distributed.refuse_shared_gpus(
            [("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-3"), ("a", "GPU-2")]
        )
