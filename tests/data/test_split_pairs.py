"""Examples whose members lie in different shards are refused, wherever they lie; what only looks like it is not."""

import io
import itertools
import re
import shlex
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.index import keys as module
from data.index.build import BAD_SHARDS, build_index
from data.index.keys import KEY, find_split
from data.index.shards import find_shards, read_shard_list
from data.index.tar_index import MANIFEST, ExampleTable
from data.reading.reader import TarReader
from launch_scripts.prepare import main
from tests.data.servers import range_server
from tests.e2e.launch import alone, train_arguments

Shard = list[tuple[str, list[str]]]  # keys with extensions, in order
EXTENSIONS = ("jpg", "txt", "json")


def write(folder: Path, shards: list[Shard]) -> list[Path]:
    folder.mkdir()
    paths = []
    for number, shard in enumerate(shards):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for key, extensions in shard:
                for extension in extensions:
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(info.name)
                    tar.addfile(info, io.BytesIO(info.name.encode()))
        paths.append(folder / f"train-{number:03d}.tar")
        paths[-1].write_bytes(buffer.getvalue())
    return paths


def made(rng: np.random.Generator) -> list[Shard]:
    """Shards of whole examples, some of which lack members; keys are those of the data set, or each shard counts its own."""
    counts_anew = rng.random() < 0.4
    shards: list[Shard] = []
    for _ in range(rng.integers(2, 7)):
        first = 0 if counts_anew else sum(map(len, shards))
        whole = [*EXTENSIONS[: 2 + rng.integers(2)]]
        shards.append([(f"k{first + n:04d}", list(whole)) for n in range(rng.integers(1, 9))])
    for shard in shards:
        for _, extensions in shard:
            if rng.random() < 0.05 and len(extensions) > 1:
                extensions.remove(str(rng.choice(extensions)))
    return shards


def taken_apart(shards: list[Shard], rng: np.random.Generator) -> None:
    """Moves members of one example to any place of another shard that does not have its key."""
    at = int(rng.integers(len(shards)))
    key, extensions = shards[at][rng.integers(len(shards[at]))]
    others = [n for n, shard in enumerate(shards) if n != at and key not in [k for k, _ in shard]]
    if others and len(extensions) > 1:
        part = extensions[int(rng.integers(1, len(extensions))) :]
        del extensions[-len(part) :]
        other = shards[int(rng.choice(others))]
        other.insert(int(rng.integers(len(other) + 1)), (key, part))


def split_keys(shards: list[Shard]) -> set[str]:
    """By comparing every example with every other: disjoint, and neighbours or nowhere whole."""
    found = set()
    places = [
        (n, i, key, set(extensions)) for n, shard in enumerate(shards) for i, (key, extensions) in enumerate(shard)
    ]
    for one, two in itertools.combinations(places, 2):
        if one[2] == two[2] and not one[3] & two[3]:
            is_next = two[0] == one[0] + 1 and one[1] == len(shards[one[0]]) - 1 and two[1] == 0
            is_whole = any(key == one[2] and parts >= one[3] | two[3] for _, _, key, parts in places)
            if is_next or not is_whole:
                found.add(one[2])
    return found


def is_mended(arguments: list[str]) -> bool:
    """False where keys that are counted anew make it impossible to say what belongs together."""
    try:
        return main(arguments) == 0
    except DataError as error:
        if "nothing says which members belong together" in str(error):
            return False
        raise


def holders(shards: list[Shard], wanted: str) -> set[str]:
    return {f"train-{n:03d}" for n, shard in enumerate(shards) if wanted in [key for key, _ in shard]}


@pytest.mark.parametrize("most_keys", [1 << 23, 3])
def test_parts_anywhere_in_two_shards_are_refused_until_they_are_repacked(
    most_keys: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated shards, against a comparison of all examples with all others."""
    monkeypatch.setattr(module, "MOST_KEYS", most_keys)
    refused = accepted = mended = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        shards = made(rng)
        for _ in range(rng.integers(3)):
            taken_apart(shards, rng)
        paths = write(tmp_path / str(seed), shards)
        expected, index = split_keys(shards), tmp_path / f"index{seed}"
        begun = paths[: int(rng.integers(len(paths)))]  # the others come later, or all at once
        if begun and not split_keys(shards[: len(begun)]):
            build_index(begun, index)
        if not expected:
            assert len(build_index(paths, index)) == sum(map(len, shards)), seed
            accepted += 1
            continue
        with pytest.raises(DataError, match="hold parts of one example") as caught:
            build_index(paths, index)
        message, refused = str(caught.value), refused + 1
        assert "\n" not in message
        [key] = re.findall(r"of one example, '(\w+)'", message)
        named = set(re.findall(r"(train-\d+)\.tar", message.partition(" hold parts")[0]))
        assert key in expected and len(named) == 2 and named <= holders(shards, key), (seed, message)
        # The command of the message mends what can be mended, and says where nothing tells which parts belong together.
        command = re.findall(r"prepare.py (repack \S+ --output)", message)[0]
        concerned = set(re.findall(r"(train-\d+)\.tar", command))
        assert named <= concerned <= set().union(*(holders(shards, key) for key in expected)), (seed, message)
        assert all(len(concerned & holders(shards, key)) >= 2 for key in expected), (seed, message)
        out = tmp_path / f"out{seed}"
        if not is_mended([*shlex.split(command), str(out)]):
            continue
        others = [path for path in paths if path.stem not in concerned]
        table = build_index([*others, *sorted(out.glob("*.tar"))], tmp_path / f"index{seed}-again")
        bodies = [sorted(raw.fields.values()) for raw in TarReader(table).read_all(range(len(table)))]
        members = sorted(f"{k}.{e}".encode() for shard in shards for k, es in shard for e in es)
        assert sorted(itertools.chain(*bodies)) == members and len(bodies) < sum(map(len, shards))
        mended += 1
    assert refused > 15 and accepted > 15 and mended > 10, (refused, accepted, mended)


PAIR = ["jpg", "txt"]
APART: list[Shard] = [
    [("a", PAIR), ("b", ["jpg"]), ("c", PAIR)],
    [("d", PAIR)],
    [("e", PAIR), ("b", ["txt"]), ("f", PAIR)],
]


def test_shards_with_parts_are_listed_and_may_be_excluded(tmp_path: Path) -> None:
    write(tmp_path / "shards", APART)
    found = find_shards(str(tmp_path / "shards"), tmp_path)
    with pytest.raises(
        DataError, match=r"train-000\.tar and .*train-002\.tar .*'b': its members \.jpg and \.txt; bring"
    ):
        build_index(found, tmp_path / "index")
    exclude = read_shard_list(tmp_path / "index" / BAD_SHARDS, found)
    assert exclude == {"train-000.tar", "train-002.tar"}
    assert len(build_index(found, tmp_path / "index", exclude=exclude)) == 1


def test_parts_of_shards_on_a_server_are_named(tmp_path: Path) -> None:
    write(tmp_path / "shards", APART)
    with range_server(tmp_path / "shards") as server:
        found = find_shards(f"{server.url}/train-{{000..002}}.tar", tmp_path)
        with pytest.raises(DataError, match=r"'b': its members .* fetch these shards, and bring them together"):
            build_index(found, tmp_path / "index")


def test_an_index_without_its_keys_is_built_again(tmp_path: Path) -> None:
    """Else more shards would be appended that hold parts of its examples."""
    paths = write(tmp_path / "shards", APART)
    build_index(paths[:2], tmp_path / "index")
    next((tmp_path / "index").glob("keys-*")).unlink()
    with pytest.raises(DataError, match="hold parts of one example"):
        build_index(paths, tmp_path / "index")
    assert len(ExampleTable.open(tmp_path / "index", tmp_path / "shards")) == 4, "the one before is still whole"


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_start_refuses_parts(streaming: str, tmp_path: Path) -> None:
    """Streams too: a start makes the index that their recipe names no other for."""
    write(tmp_path / "shards", APART)
    settings = [f"data.shards={tmp_path}/shards", f"data.streaming={streaming}", "data.num_workers=0"]
    settings += ["privacy.enabled=false", "data.provenance=public"] if streaming == "true" else []
    done = alone(train_arguments(tmp_path / "run", "--engine", "local", *settings, ds_config="ds_configs/zero1.json"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "hold parts of one example, 'b'" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert not (tmp_path / "run" / "private" / "index" / MANIFEST).exists()


def test_pictures_and_captions_in_shards_of_their_own(tmp_path: Path) -> None:
    """So large a number of shards that the command names them together."""
    shards: list[Shard] = [[(f"{n}", [part])] for part in PAIR for n in range(8)]
    paths = write(tmp_path / "shards", shards)
    with pytest.raises(DataError, match="SHARDS as all 16 that hold such parts"):
        build_index(paths, tmp_path / "index")


def test_memory_is_bounded_by_what_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and captions of other keys: each of 100,000 examples might be a part."""
    monkeypatch.setattr(module, "MOST_KEYS", 2048)
    sets, per_shard, num_shards = [frozenset({"jpg"}), frozenset({"txt"})], 1024, 100
    rng = np.random.default_rng(0)
    hashes = rng.permutation(per_shard * num_shards).astype(np.uint64) * np.uint64(2654435761)
    split = int(rng.integers(50, 100)) * per_shard + 700

    def tables() -> Iterator[np.ndarray]:
        for first in range(0, len(hashes), per_shard):
            keys_K = np.zeros(per_shard, dtype=KEY)
            keys_K["hash"], keys_K["extensions"] = hashes[first : first + per_shard], first // per_shard % 2
            yield keys_K

    tracemalloc.start()
    assert find_split(tables, sets) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, "all keys would be 2 MB with their ids"
    hashes[split] = hashes[5 if split // per_shard % 2 else per_shard + 5]
    found = find_split(tables, sets)
    assert found is not None and found.ids[1] == split and found.shards[1] == split // per_shard
