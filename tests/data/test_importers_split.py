"""Held-out data split off by an import, and what a folder of pictures holds apart from pictures."""

import io
import stat
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from data.importers.convert import Settings, perceptual_hash
from data.importers.pipeline import HELDOUT, import_examples
from data.importers.selection import ALIKE
from data.importers.sources import Columns, ListedPart, Source, folder_source, table_source
from data.index.shards import expand_shards
from data.reading.pool import worker_pool
from tests.data.conftest import picture
from tests.data.test_importers_pipeline import captions, members, pictures, rows_of, write_csv


def alike(folder: Path, families: int, members: int) -> list[str]:
    """Families of pictures that differ by their size and quality alone; names are FAMILY-MEMBER.jpg."""
    folder.mkdir(parents=True)
    names = []
    for family in range(families):
        original = Image.open(io.BytesIO(picture(1000 + family, width=160, height=120)))
        for member in range(members):
            names.append(f"{family:03d}-{member}.jpg")
            original.resize((160 - 2 * member, 120)).save(folder / names[-1], quality=95 - member)
    return names


def sides(output: Path) -> tuple[set[str], set[str]]:
    """Captions of the training shards, and those held out."""
    return set(captions(output)), set(captions(output / HELDOUT))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_pictures_that_look_alike_are_on_one_side(seed: int, tmp_path: Path) -> None:
    names = alike(tmp_path / "in", 60, 3)
    rows = [{"image": name, "caption": f"a {name}", "owner": ""} for name in names]
    source = table_source(write_csv(tmp_path / "in" / "t.csv", rows), Columns(), None)
    settings = Settings("csv", size=160, image_format="png", duplicate_distance=None, heldout_share=0.3, seed=seed)
    report = import_examples(source, tmp_path / "out", settings)
    trained, held_out = sides(tmp_path / "out")
    assert report["held_out"] == len(held_out) and len(trained) + len(held_out) == report["written"] == 180
    hashes = {name: perceptual_hash(Image.open(tmp_path / "in" / name)) for name in names}
    near = [(a, b) for a, b in combinations(names, 2) if (hashes[a] ^ hashes[b]).bit_count() <= ALIKE]  # type: ignore[operator]
    assert len(near) > 100
    assert not [pair for pair in near if len({f"a {name}" in held_out for name in pair}) == 2]
    assert 18 <= len(held_out) <= 90  # 54 expected, in about 60 groups of three


def test_an_owner_is_on_one_side_and_nobody_is_no_owner(tmp_path: Path) -> None:
    names = pictures(tmp_path / "in", 60)
    rows = [{**row, "owner": f"o{n // 3}" if n < 45 else ""} for n, row in enumerate(rows_of(names))]
    source = table_source(write_csv(tmp_path / "in" / "t.csv", rows), Columns(owner="owner"), None)
    import_examples(source, tmp_path / "out", Settings("csv", size=64, heldout_share=0.4))
    trained, held_out = sides(tmp_path / "out")
    owner = {row["caption"]: row["owner"] for row in rows}
    both = {owner[caption] for caption in trained} & {owner[caption] for caption in held_out}
    assert both <= {""} and held_out and trained
    assert {owner[c] for c in trained} >= {""} and {owner[c] for c in held_out} >= {
        ""
    }  # 15 without an owner: not one group


def test_share_is_what_was_asked_for_whatever_the_groups_are() -> None:
    from data.importers.convert import Converted, owner_digest
    from data.importers.selection import held_out

    rng, count = np.random.default_rng(0), 20_000
    owners = [owner_digest(f"{number // 10}" if number < count // 2 else "") for number in range(count)]
    part = Converted(
        rng.integers(0, 256, (count, 16), dtype=np.uint8), np.zeros(count, np.uint64), np.zeros(count, bool),
        np.frombuffer(b"".join(owners), np.uint8).reshape(count, -1), {}, {}, count,
    )  # fmt: skip
    for share in (0.01, 0.1, 0.5):
        chosen = held_out([part], share, seed=1)
        for half, groups in ((chosen[: count // 2], count // 20), (chosen[count // 2 :], count // 2)):
            assert abs(half.mean() - share) < 5 * (share * (1 - share) / groups) ** 0.5


def test_training_shards_are_what_the_folder_names_and_all_is_private(tmp_path: Path) -> None:
    source = folder_source(folder_with_texts(tmp_path / "in", 20), Columns())
    import_examples(source, tmp_path / "out", Settings("folder", shard_examples=4, heldout_share=0.3))
    assert all(path.parent == tmp_path / "out" for path in expand_shards(str(tmp_path / "out"), tmp_path))
    assert expand_shards(str(tmp_path / "out" / HELDOUT), tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("out/**/*.tar")} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out", tmp_path / "out" / HELDOUT)} == {0o700}


def test_workers_change_nothing_about_the_split(tmp_path: Path) -> None:
    source = folder_source(folder_with_texts(tmp_path / "in", 16), Columns())
    source = Source([ListedPart((item,)) for item in source.parts[0].items()], source.fingerprint)
    settings = Settings("folder", size=40, heldout_share=0.4)
    import_examples(source, tmp_path / "plain", settings)
    with worker_pool(2) as pool:
        import_examples(source, tmp_path / "parallel", settings, executor=pool.executor)
    for folder in (".", HELDOUT):
        assert members(tmp_path / "plain" / folder) == members(tmp_path / "parallel" / folder) != {}


@pytest.mark.parametrize("share", [-0.1, 0.51, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(DataError, match="held-out share"):
        Settings("folder", heldout_share=share)


def test_every_file_of_a_folder_is_counted(tmp_path: Path) -> None:
    folder = folder_with_texts(tmp_path / "in", 3)
    for name in ("drawing.svg", "raw.CR2", "README", "orphan.txt", ".hidden", "000.txt.bak"):
        (folder / name).write_text("<svg/>")
    report = import_examples(folder_source(folder, Columns()), tmp_path / "out", Settings("folder"))
    others = {".svg": 1, ".cr2": 1, "none": 2, ".txt": 1, ".bak": 1}
    assert report["other_files"] == others and (report["read"], report["written"]) == (3, 3)


def test_a_text_holds_one_caption_or_one_per_line(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    pictures(folder, 2)
    (folder / "000.txt").write_text("A red chair.\nde.utf8=Ein roter Stuhl.\n")
    (folder / "001.txt").write_text("\n  \nA long\ndress.")
    for lines, expected in ((False, ["A red chair. de.utf8=Ein roter Stuhl.", "A long dress."]),
                            (True, ["A red chair.", "A long"])):  # fmt: skip
        source = folder_source(folder, Columns(), lines_are_captions=lines)
        import_examples(source, tmp_path / f"out-{lines}", Settings("folder"))
        assert captions(tmp_path / f"out-{lines}") == expected


def folder_with_texts(folder: Path, count: int) -> Path:
    for row in rows_of(pictures(folder, count)):
        (folder / row["image"]).with_suffix(".txt").write_text(row["caption"])
    return folder
