"""What ranks must have in common, and what is said when they have not."""

import os
from pathlib import Path

import pytest

from privacy.step.run_folder import RunFolder
from tests.distributed.ranks import ROOT, run_ranks
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.errors import ConfigError, RemoteError
from trainer.ranks.rendezvous import refuse_differences, require_shared, settings_of

HOSTS = ["nodea", "nodeb", "nodeb"]
SETTINGS = {
    "torch": "2.13.0",
    "the ds_config": "a1",
    "$NCCL_ALGO": "Ring",
    "$NCCL_SOCKET_IFNAME": "set",
}


def introduced(environ: dict[str, str], *overrides: str, root: Path = ROOT) -> dict[str, str]:
    config = load_config(ROOT / "recipes/tiny.toml", list(overrides))
    machine = load_machine_settings(ROOT / "ds_configs/zero3.json")
    return settings_of(environ, root, config, machine, {"--engine": "deepspeed"})


def refused(*ranks: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_differences(ranks, HOSTS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in SETTINGS.items() if key != name}


def test_equal_ranks_and_what_may_differ() -> None:
    refuse_differences([SETTINGS] * 3, HOSTS)
    refuse_differences([introduced({})] * 3, HOSTS)
    refuse_differences([SETTINGS, without("$NCCL_ALGO")], HOSTS, may_differ=["NCCL_ALGO"])


def test_a_variable_that_is_missing_on_another_host() -> None:
    said = refused(SETTINGS, SETTINGS, without("$NCCL_ALGO"))
    assert said.startswith(
        "rank 2 (host nodeb) differs from rank 0 (host nodea): NCCL_ALGO is not set, but Ring on rank 0; "
    )
    assert ".deepspeed_env" in said
    assert "NCCL_ALGO is Ring, but not set on rank 0" in refused(without("$NCCL_ALGO"), SETTINGS)
    assert "NCCL_SOCKET_IFNAME is not set, but set on rank 0" in refused(
        SETTINGS, without("$NCCL_SOCKET_IFNAME")
    )


def test_no_value_of_a_secret_takes_part() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "HF_TOKEN": "s3cret",
        "https_proxy": "http://me:s3cret@x",
    }
    found = introduced(environ)
    assert "s3cret" not in str(found)
    assert {name: found[f"${name}"] for name in environ} == dict.fromkeys(environ, "set")


def test_another_recipe_and_other_code(tmp_path: Path) -> None:
    one, other = introduced({}), introduced({}, "train.num_steps=5")
    assert {name for name in one if one[name] != other[name]} == {"the recipe's train"}
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "loop.py").write_text("pass")
    found = introduced({}, root=tmp_path)["the code in trainer/"]
    (tmp_path / "trainer" / "loop.py").write_text("pass\n")
    assert introduced({}, root=tmp_path)["the code in trainer/"] != found


def rank_meets(device: object, folders: list[str], seconds: float) -> list[str]:
    """Run by `run_ranks`: what each rank is told about its run folder."""
    from privacy.ranks import collectives

    said = []
    rank = collectives.rank()
    collectives.on_main(lambda: RunFolder(Path(folders[0])).create())
    try:
        require_shared(RunFolder(Path(folders[rank])), seconds)
    except (ConfigError, RemoteError) as error:
        said.append(str(error))

    def check() -> None:  # on one rank alone
        if rank == 1:
            raise MemoryError("allocate memory")

    try:
        collectives.refuse_together(check)
    except (MemoryError, RemoteError) as error:
        said.append(f"{type(error).__name__} {getattr(error, 'exit_code', '')}")
    said.append(os.uname().nodename)
    return said


def test_a_run_folder_that_another_rank_does_not_see(tmp_path: Path) -> None:
    folders = [str(tmp_path / "shared"), str(tmp_path / "elsewhere")]
    found = run_ranks(f"{__name__}:rank_meets", 2, folders=folders, seconds=0.5)
    host = found[0][-1]
    for said, folder in zip(found, folders, strict=True):
        assert f"run folder {folder}: rank 1 (host {host}) did not see within" in said[0], said
    # No rank waits for one that failed in a check.
    assert [said[1] for said in found] == ["RemoteError 1", "MemoryError "]
