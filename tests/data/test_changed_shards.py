"""Bytes that are not what was indexed stop the run; they do not count as an undecodable example."""

from pathlib import Path

import pytest

from data.errors import ReadError
from data.index.build import build_index
from data.reading.reader import TarReader
from tests.data.conftest import picture, write_shard


@pytest.mark.parametrize("where", ["on the disk", "behind the checksum"])
def test_bytes_that_do_not_fit_the_index_are_an_error(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": f"{i}".encode()} for i in range(3)]
    shard = write_shard(tmp_path / "a.tar", samples)
    table = build_index([shard], tmp_path / "index")
    reader = TarReader(table)
    if where == "on the disk":
        with shard.open("r+b") as file:  # of the same length, as a failing disk or a careless copy leaves it
            file.seek(table.requests([1])[0].offset)
            file.write(b"x" * 512)
    else:  # an index with wrong places, whose checksums are of what stands there
        monkeypatch.setattr(reader._storage, "read_all", lambda requests: (b"x" * r.length for r in requests))
    with pytest.raises(ReadError, match=r"a\.tar at byte \d+ does not fit its index"):
        list(reader.read_all([0, 1, 2]))
