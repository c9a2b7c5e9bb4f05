"""Who am I, by each launcher's environment. (Talking to other ranks: tests/distributed.)"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from privacy.step import collectives
from trainer.errors import ConfigError
from trainer.ranks.discovery import Ranks, discover_ranks, first_host

ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
LAUNCHERS = {
    "torchrun": {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"},
    "mvapich": {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_SIZE": "8"},
    "mpich": {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"},
    "slurm": {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
}
SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
"""Slurm sets its variables in an allocation's shell too, but only srun starts ranks."""
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
STEP = {**LAUNCHERS["slurm"], "SLURM_STEP_NODELIST": "node[07-08,11],other", "SLURM_JOB_ID": "123456"}
FIFTH = Ranks(rank=5, local_rank=1, world_size=8, address="node0", port=1234)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        *(({"HOME": "/root", **variables, **ADDRESS}, FIFTH) for variables in LAUNCHERS.values()),
        *(({**v, "MASTER_ADDR": "node0"}, Ranks(5, 1, 8, "node0", 29500)) for v in LAUNCHERS.values()),
        ({}, Ranks(0, 0, 1, "127.0.0.1", 29500)),
        ({"WORLD_SIZE": "8"}, Ranks()),  # half of a launcher is none
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, Ranks()),  # one rank needs no address
        ({"RANK": "3", "WORLD_SIZE": "4", **ADDRESS}, Ranks(3, 3, 4, "node0", 1234)),  # as if all were on one machine
        ({**SHELL, "SLURM_NTASKS": "8"}, Ranks()),
        # The inner launcher wins. In an interactive step every rank inherits the variables of the shell.
        ({**SHELL, **LAUNCHERS["torchrun"], **ADDRESS}, FIFTH),
        ({**SHELL, **LAUNCHERS["openmpi"], **ADDRESS}, FIFTH),
        ({**SHELL, "SLURM_STEP_ID": "0", **PMI, **ADDRESS}, Ranks(5, 5, 8, "node0", 1234)),
        ({**LAUNCHERS["slurm"], **PMI, **ADDRESS}, FIFTH),  # srun with PMI knows the local rank
        # Slurm says where to meet; two jobs on one node take different ports.
        (STEP, Ranks(5, 1, 8, "node07", 23456)),
        ({**STEP, **ADDRESS}, FIFTH),
    ],
)
def test_ranks_are_those_that_the_launcher_says(environment: dict[str, str], found: Ranks) -> None:
    assert discover_ranks(environment) == found
    assert found.is_main == (found.rank == 0)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("node0", "node0"),
        ("node0,node1", "node0"),
        ("node[3-5]", "node3"),
        ("node[03,05-07].site", "node03.site"),
        ("a-[9-11],b", "a-9"),
        ("rack[1-2]node[04-07,9],login", "rack1node04"),
    ],
)
def test_the_first_host_of_a_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


TORCHRUN = {**LAUNCHERS["torchrun"], **ADDRESS}


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        *((variables, "MASTER_ADDR is not set") for variables in LAUNCHERS.values()),
        *(
            ({**variables, **ADDRESS, name: value}, name)
            for variables in LAUNCHERS.values()
            for name in list(variables)[:3]
            for value in ("", "x", "1.5")
        ),
        *(({**TORCHRUN, "RANK": rank}, "no such rank") for rank in ("8", "-1")),
        *(({**TORCHRUN, "MASTER_ADDR": a}, "MASTER_ADDR is") for a in ("a b", "=1!\f\f<j", "http://host", "x\ny")),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "http"),
    ],
)
def test_garbage_is_refused_by_name(environment: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        discover_ranks(environment)
    assert caught.value.exit_code == 2


def test_nothing_is_used_after_an_error_of_nccl(one_rank: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by a private name of torch. Gloo raises by itself and is not asked."""
    group, gpu = dist.group.WORLD, torch.device("cuda")
    assert group is not None and group._get_backend(one_rank) is not None
    collectives.require_sound(gpu)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    for error in (ErrorType.SUCCESS, ErrorType.COMM_ERROR, ErrorType.TIMEOUT):
        answer = SimpleNamespace(get_error=lambda error=error: error)
        monkeypatch.setattr(type(group), "_get_backend", lambda self, device, answer=answer: answer)
        expected = pytest.raises(RuntimeError, match=f"NCCL reports {error.name}: .*nothing of it is used")
        with contextlib.nullcontext() if error == ErrorType.SUCCESS else expected:
            collectives.require_sound(gpu)
