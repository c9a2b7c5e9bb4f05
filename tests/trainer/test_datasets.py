"""Which data a run accepts: exactly the shards it names, and after its first start exactly those it started with."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from data.errors import DataError
from data.index.build import build_index
from data.index.tar_index import ExampleTable
from data.reading.reader import TarReader
from privacy.errors import PrivacyConfigError
from privacy.step.run_folder import RunFolder
from tests.data.conftest import picture, write_shard
from trainer.config.recipe import RunConfig, load_config
from trainer.run import datasets
from trainer.run.datasets import heldout_table, training_table
from trainer.run.ledger_terms import open_run_ledger

ROOT = Path(__file__).resolve().parents[2]


def shard(path: Path, count: int, seed: int = 0) -> Path:
    samples = [
        {"__key__": f"{seed}-{i}", "jpg": picture(seed + i), "txt": b"a caption"}
        for i in range(count)
    ]
    return write_shard(path, samples)


def opened(folder: RunFolder, chosen: RunConfig, table: ExampleTable) -> None:
    """Opens the ledger, or makes it, as a start does, and leaves it."""
    opening = open_run_ledger(chosen, folder, table, "one image")
    (opening.ledger or opening.create()).release()


def config(*overrides: str) -> RunConfig:
    return load_config(ROOT / "recipes" / "tiny.toml", overrides)


@pytest.fixture
def folder(tmp_path: Path, one_rank: torch.device) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_a_run_keeps_the_data_that_it_started_with(folder: RunFolder, tmp_path: Path) -> None:
    """Appending shards makes another data set: other n, other rate, other ids. The run says so and stops."""
    shards = [
        shard(tmp_path / "data" / f"train-{number}.tar", 40, number * 100) for number in range(3)
    ]
    build_index(shards[:2], tmp_path / "index")
    chosen = config(
        f"data.index={tmp_path / 'index'}", f"data.shards={tmp_path}/data/train-{{0..1}}.tar"
    )
    table = training_table(chosen, folder, ROOT)
    opened(folder, chosen, table)
    build_index(shards, tmp_path / "index")
    with pytest.raises(DataError, match="is of other shards"):
        training_table(chosen, folder, ROOT)
    more = config(
        f"data.index={tmp_path / 'index'}", f"data.shards={tmp_path}/data/train-{{0..2}}.tar"
    )
    with pytest.raises(PrivacyConfigError) as caught:
        opened(folder, more, training_table(more, folder, ROOT))
    assert caught.value.exit_code == 2
    # The same number of examples in files of the same name and size, with other bytes.
    build_index(shards[:2], tmp_path / "index")
    table = training_table(chosen, folder, ROOT)
    opened(folder, chosen, table)
    data = bytearray(shards[1].read_bytes())
    data[700] ^= 1
    shards[1].write_bytes(data)
    with pytest.raises(DataError, match=r"train-1\.tar was written after it was indexed"):
        training_table(chosen, folder, ROOT)
    build_index(shards[:2], tmp_path / "index")
    with pytest.raises(PrivacyConfigError, match="data"):
        opened(folder, chosen, training_table(chosen, folder, ROOT))


def test_a_resume_cannot_state_another_owner_limit(folder: RunFolder, tmp_path: Path) -> None:
    shard(tmp_path / "data" / "a.tar", 30)
    shards = f"data.shards={tmp_path}/data"

    def start(*overrides: str) -> None:
        chosen = config(shards, *overrides)
        table = training_table(chosen, folder, ROOT)
        opened(folder, chosen, table)

    start("privacy.max_examples_per_owner=3")
    start("privacy.max_examples_per_owner=3")
    for other in (["privacy.max_examples_per_owner=2"], []):
        with pytest.raises(
            PrivacyConfigError, match=r"max_examples_per_owner is (2|None), but .* with 3"
        ):
            start(*other)


def test_training_shards_are_no_public_heldout_shards(folder: RunFolder, tmp_path: Path) -> None:
    path = shard(tmp_path / "data" / "a.tar", 30)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.tar").symlink_to(path)
    for pattern in (path, tmp_path / "other" / "b.tar"):
        chosen = config(
            f"data.shards={tmp_path}/data", f"heldout.shards={pattern}", "heldout.is_public=true"
        )
        with pytest.raises(DataError, match="cannot be declared public"):
            heldout_table(chosen, folder, ROOT)
    private = config(
        f"data.shards={tmp_path}/data", f"heldout.shards={path}", "heldout.is_public=false"
    )
    table = heldout_table(private, folder, ROOT)
    assert table is not None and len(table) == 30


@pytest.mark.usefixtures("one_rank")
def test_staging_reads_from_the_folder_that_this_rank_names(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = mock.Mock()
    context.return_value.Process.return_value.is_alive.return_value = False
    monkeypatch.setattr(datasets, "worker_context", context)
    table = training_table(config(), folder, ROOT)
    expected = list(TarReader(table).read_all([0, 1000, 2999]))
    assert datasets.stage(table, config(), ROOT) == () and table.staging is None
    chosen = config("data.staging=$STORE_OF_THE_TEST/shards")
    monkeypatch.delenv("STORE_OF_THE_TEST", raising=False)
    with pytest.raises(DataError, match="has a variable that is not set"):
        datasets.stage(table, chosen, ROOT)
    monkeypatch.setenv("STORE_OF_THE_TEST", str(tmp_path))
    assert datasets.stage(table, chosen, ROOT) == (0,)
    assert list(TarReader(table).read_all([0, 1000, 2999])) == expected
    assert len(list((tmp_path / "shards" / "staged-shards").glob("*.tar"))) == len(table.entries)
    assert (tmp_path / "shards").stat().st_mode & 0o7 and not (
        tmp_path / "shards" / "staged-shards"
    ).stat().st_mode & 0o77
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STORE_OF_THE_TEST", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot use the folder"):
        datasets.stage(table, chosen, ROOT)


def test_a_shard_under_two_names_is_refused_with_privacy(tmp_path: Path, folder: RunFolder) -> None:
    """Epsilon of one example would be that of two copies."""
    shard(tmp_path / "a.tar", 3)
    shard(tmp_path / "b.tar", 3, seed=7)
    (tmp_path / "c.tar").write_bytes((tmp_path / "a.tar").read_bytes())
    shards = f"data.shards={tmp_path}/?.tar"
    with pytest.raises(DataError, match=r"a\.tar and c\.tar hold the same bytes"):
        training_table(config(shards), folder, ROOT)
    assert len(training_table(config(shards, "privacy.enabled=false"), folder, ROOT)) == 9
    (tmp_path / "c.tar").unlink()
    (tmp_path / "c.tar").symlink_to("b.tar")
    other = RunFolder(tmp_path / "other")
    other.create()
    with pytest.raises(DataError, match=r"b\.tar is listed twice, also as .*c\.tar"):
        training_table(config(shards), other, ROOT)
