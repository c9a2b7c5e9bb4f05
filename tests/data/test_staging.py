"""Shards staged on a node: the same examples, whole shards in one order whatever the key, kills, rot and full disks."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError, ReadError
from data.index.build import build_index
from data.index.tar_index import ExampleTable
from data.reading import staging as module
from data.reading.reader import TarReader
from data.reading.records import RemoteOptions
from data.reading.staging import Staging, open_folder, require_room
from tests.data.conftest import ROOT, archive, members
from tests.data.support.servers import RangeServer, range_server

NUM_SHARDS, FEW, PER_SHARD = 64, 12, 5
QUICK = RemoteOptions(timeout_seconds=10, tries=2, backoff_seconds=0.01, connections=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for number in range(NUM_SHARDS):
        (folder / f"train-{number:03d}.tar").write_bytes(
            archive(members(PER_SHARD, np.random.default_rng(number)))
        )
    return folder


@pytest.fixture(scope="module")
def many(served: Path, tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    return build_index(sorted(served.glob("*.tar")), tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def local(served: Path, tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    """A few of them."""
    return build_index(sorted(served.glob("*.tar"))[:FEW], tmp_path_factory.mktemp("index"))


@pytest.fixture
def server(served: Path) -> Iterator[RangeServer]:
    with range_server(served) as server:
        yield server


def staged(
    local: ExampleTable, server: RangeServer, folder: Path, start: int = 0, stop: int | None = None
) -> ExampleTable:
    """The table of a process on the node that has `folder`."""
    open_folder(folder)
    table = ExampleTable.open(local.index_dir, server.url, remote=QUICK, check_shards=False)
    table.staging = Staging(str(folder), start, len(local) if stop is None else stop)
    return table


def shard_requests(server: RangeServer) -> list[str]:
    """Paths in order; no request had a range."""
    assert all(span is None for _, span in server.requests)
    return [path for path, _ in server.requests]


def test_the_server_learns_nothing_of_who_is_read(
    many: ExampleTable, server: RangeServer, tmp_path: Path
) -> None:
    """64 shards on two nodes; then a start where the second has three quarters. Two runs read other members."""
    logs, members_read = [], []
    quarter = len(many) // 4
    expected = TarReader(many)
    for run in range(2):
        server.requests.clear()
        rng = np.random.default_rng(run)
        for node, start, stop in (
            (0, 0, 2 * quarter),
            (1, 2 * quarter, 4 * quarter),
            (1, quarter, 4 * quarter),
        ):
            reader = TarReader(staged(many, server, tmp_path / f"run{run}-node{node}", start, stop))
            ids = rng.choice(np.arange(start, stop), 40, replace=False)
            assert list(reader.read_all(ids)) == list(expected.read_all(ids))
            members_read.append(set(ids.tolist()))
        logs.append(shard_requests(server))
    assert members_read[0] != members_read[3]
    # Each node has its shards once and in their order; at last the second fetches only those that are new.
    order = [*range(64), *range(16, 32)]
    assert logs[0] == logs[1] == [f"/train-{number:03d}.tar" for number in order]


def test_many_readers_copy_each_shard_once(
    local: ExampleTable, server: RangeServer, tmp_path: Path
) -> None:
    table = staged(local, server, tmp_path / "store")
    expected = list(TarReader(local).read_all(range(len(local))))
    orders = [np.random.default_rng(number).permutation(len(local)) for number in range(6)]
    with ThreadPoolExecutor(len(orders)) as pool:
        found = list(pool.map(lambda order: list(TarReader(table).read_all(order)), orders))
    for order, raws in zip(orders, found, strict=True):
        assert raws == [expected[i] for i in order]
    assert shard_requests(server) == [f"/train-{number:03d}.tar" for number in range(FEW)]


COPY = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from data.index.tar_index import ExampleTable
from data.reading.records import RemoteOptions
from data.reading.staging import Staging
table = ExampleTable.open(Path(sys.argv[2]), sys.argv[3], remote=RemoteOptions(connections=1), check_shards=False)
table.staging = Staging(sys.argv[4], 0, len(table))
table.storage().stage_all()
"""


def test_a_kill_loses_nothing_and_nothing_torn_is_trusted(
    local: ExampleTable, server: RangeServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    table = staged(local, server, store)
    server.faults.extend([None] * 7 + ["hang"])
    command = [sys.executable, "-c", COPY, str(ROOT), str(local.index_dir), server.url, str(store)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while len(server.requests) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(store.glob("*.tar"))) == 7
    whole = {entry.sha256 for entry in local.entries[:7]}
    assert {path.stem for path in store.glob("*.tar")} == whole
    (store / f"{local.entries[7].sha256}.part").write_bytes(b"half of a shard")
    server.requests.clear()
    require_room(store, table.entries)
    assert list(TarReader(table).read_all(range(len(local)))) == list(
        TarReader(local).read_all(range(len(local)))
    )
    assert shard_requests(server) == [f"/train-{number:03d}.tar" for number in range(7, FEW)]
    assert not list(store.glob("*.part"))


def test_a_copy_that_rots_is_an_error_that_names_it(
    local: ExampleTable, server: RangeServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    table = staged(local, server, store)
    TarReader(table).read(0)
    path = store / f"{local.entries[3].sha256}.tar"
    body = path.read_bytes()
    path.write_bytes(body[:700] + bytes(9) + body[709:])
    with pytest.raises(ReadError, match=f"{path.name} .*the bytes changed.*delete it") as caught:
        list(TarReader(table).read_all(range(3 * PER_SHARD, 4 * PER_SHARD)))
    assert "\n" not in str(caught.value)
    path.unlink()
    assert TarReader(table).read(3 * PER_SHARD) == TarReader(local).read(3 * PER_SHARD)


def test_a_shard_that_is_not_what_was_indexed_is_an_error(
    local: ExampleTable, served: Path, tmp_path: Path
) -> None:
    """Of the same size: only its hash tells. Nothing of it stays."""
    other = tmp_path / "other"
    other.mkdir()
    for path in served.glob("train-00*.tar"):
        (other / path.name).write_bytes(path.read_bytes())
    body = bytearray((other / "train-001.tar").read_bytes())
    body[600] ^= 1
    (other / "train-001.tar").write_bytes(body)
    with range_server(other) as server:
        table = staged(local, server, tmp_path / "store")
        with pytest.raises(ReadError, match=r"train-001\.tar is not what was indexed") as caught:
            TarReader(table).read(PER_SHARD)
        assert "\n" not in str(caught.value)
    there = {path.stem for path in (tmp_path / "store").glob("*.[tp]ar*")}
    assert local.entries[0].sha256 in there and local.entries[1].sha256 not in there


def test_a_disk_that_is_too_small_ends_in_one_line(
    local: ExampleTable, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    table = staged(local, server, store, 0, PER_SHARD)
    TarReader(table).read(0)  # copies the first shard alone
    size = sum(entry.size for entry in local.entries)
    for free, is_enough in ((size, True), (size - local.entries[0].size - 1, False)):
        usage = type("Usage", (), {"free": free + module._MARGIN_BYTES})()
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _, usage=usage: usage)
        if is_enough:
            require_room(store, table.entries)
        else:
            with pytest.raises(
                DataError, match=r"has .* GB free, but the shards of this node take"
            ) as caught:
                require_room(store, table.entries)
            assert "\n" not in str(caught.value) and str(store) in str(caught.value)
    with pytest.raises(DataError, match="of shards that this start does not need"):
        require_room(store, table.entries[1:])


def test_a_reader_waits_while_another_copies_and_not_for_one_that_hangs(
    local: ExampleTable, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody copies again and again what somebody clears."""
    store, looks = tmp_path / "store", Counter[Path]()
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.3)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)

    def size_of(folder: Path) -> int:
        looks[folder] += 1
        return min(looks[folder], 20)  # it grows twenty times

    open_folder(store)
    with monkeypatch.context() as growing, module._locked(store):
        growing.setattr(module, "_size_of", size_of)
        table = staged(local, server, store)
        table.remote = replace(QUICK, timeout_seconds=0.01, tries=1)
        with pytest.raises(
            ReadError, match=r"another process has held .*/lock for \d+ s without copying a byte"
        ) as caught:
            TarReader(table).read(0)
    assert "\n" not in str(caught.value) and looks[store] > 20 and server.requests == []
    assert module._size_of(store) == sum(path.stat().st_size for path in store.iterdir()) > 0
    monkeypatch.setattr(
        module, "fsync_path", lambda path: [tar.unlink() for tar in store.glob("*.tar")]
    )
    with pytest.raises(ReadError, match="was copied and is gone"):
        TarReader(staged(local, server, store)).read(0)
    assert len(server.requests) == FEW


def test_a_store_is_private_and_keeps_its_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(open_folder, [tmp_path / "store"] * 8))
    assert (
        len(set(names)) == 1 and len(names[0]) == 32 and open_folder(tmp_path / "other") != names[0]
    )
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot use the folder"):
        open_folder(tmp_path / "file")
