"""Who am I, by each launcher's environment. (Talking to other ranks: tests/distributed.)"""

import pytest

from trainer.errors import ConfigError
from trainer.ranks.discovery import Ranks, discover_ranks, first_host

ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
LAUNCHERS = {
    "torchrun": {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"},
    "mvapich": {
        "MV2_COMM_WORLD_RANK": "5",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "8",
    },
    "mpich": {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"},
    "slurm": {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher: str) -> None:
    found = discover_ranks({"HOME": "/root", **LAUNCHERS[launcher], **ADDRESS})
    assert found == Ranks(rank=5, local_rank=1, world_size=8, address="node0", port=1234)
    assert not found.is_main


def test_one_process() -> None:
    assert discover_ranks({}) == Ranks(0, 0, 1, "127.0.0.1", 29500)
    assert discover_ranks({"WORLD_SIZE": "8"}) == Ranks(), "half of a launcher is none"
    assert discover_ranks({"MASTER_ADDR": "node0"}).is_main


def test_the_inner_launcher_wins() -> None:
    """`deepspeed` inside of a Slurm allocation starts the ranks; the allocation's variables are those of the shell."""
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    assert discover_ranks({**shell, **LAUNCHERS["torchrun"], **ADDRESS}).rank == 5
    assert discover_ranks({**shell, **LAUNCHERS["openmpi"], **ADDRESS}).rank == 5


def test_mpirun_inside_of_an_interactive_step() -> None:
    """Every rank inherits the step's variables, whose rank is that of the shell."""
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
    found = discover_ranks({**shell, "PMI_RANK": "5", "PMI_SIZE": "8", **ADDRESS})
    assert (found.rank, found.world_size, found.local_rank) == (5, 8, 5)


def test_srun_with_pmi_knows_the_local_rank() -> None:
    both = {**LAUNCHERS["slurm"], "PMI_RANK": "5", "PMI_SIZE": "8", **ADDRESS}
    assert discover_ranks(both) == Ranks(rank=5, local_rank=1, world_size=8, address="node0", port=1234)


def test_slurm_says_where_to_meet() -> None:
    """Two jobs on one node take different ports."""
    step = {**LAUNCHERS["slurm"], "SLURM_STEP_NODELIST": "node[07-08,11],other", "SLURM_JOB_ID": "123456"}
    found = discover_ranks(step)
    assert (found.address, found.port) == ("node07", 23456)
    assert discover_ranks({**step, **ADDRESS}).address == "node0"
    assert discover_ranks({**step, **ADDRESS}).port == 1234


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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_several_ranks_need_an_address(launcher: str) -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set") as caught:
        discover_ranks(LAUNCHERS[launcher])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", ["", "x", "1.5"])
def test_garbage(launcher: str, position: int, value: str) -> None:
    name = list(LAUNCHERS[launcher])[position]
    with pytest.raises(ConfigError, match=name):
        discover_ranks({**LAUNCHERS[launcher], **ADDRESS, name: value})


def test_the_shell_of_a_batch_script_is_no_rank() -> None:
    """Slurm sets its ranks there as well, but only srun starts them."""
    assert discover_ranks({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}) == Ranks()


@pytest.mark.parametrize("rank", ["8", "-1"])
def test_a_rank_outside_of_the_world(rank: str) -> None:
    with pytest.raises(ConfigError, match="no such rank"):
        discover_ranks({"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "8", **ADDRESS})


@pytest.mark.parametrize("address", ["a b", "=1!\f\f<j", "http://host", "x\ny"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is"):
        discover_ranks({**LAUNCHERS["torchrun"], "MASTER_ADDR": address, "MASTER_PORT": "1"})
