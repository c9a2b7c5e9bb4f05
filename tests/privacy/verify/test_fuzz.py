"""Whatever a folder from a stranger holds, verify.py ends in a verdict or in one line."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from tests.privacy.ledger_files import rechained
from tests.privacy.published import rewrite

DEEP = "[" * 100_000 + "]" * 100_000
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**63,
    10**38,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e308,
    1e-320,
    "",
    "x",
    "\x00\x1b[31m\u202e",
    "9" * 5000,
    [],
    [[]],
    {},
    {"a": 1},
    [None] * 50,
    "ab" * 32,
    ["gradient"],
    {"name": 1},
    "../../etc/passwd",
    "\ud800",
]
PLACES = [
    "ledger.jsonl",
    "config.toml",
    "metrics.jsonl",
    "report/privacy_card.json",
    "checkpoints/step-00000004/manifest.json",
    "head.json",
    "behind/ledger-1.jsonl",
]


@pytest.fixture(scope="module")
def stuffed(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published folder with every file that verify.py may look at."""
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("stuffed") / "run"))
    card = json.loads((folder / "report/privacy_card.json").read_text())
    facts = {"epsilon": card["epsilon"], "delta": card["delta"], "num_examples": 2000}
    (folder / "head.json").write_text(json.dumps(facts))
    (folder / "behind").mkdir()
    shutil.copy(folder / "ledger.jsonl", folder / "behind/ledger-1.jsonl")
    return folder


def judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    for arguments in (["--json"], []):
        code = verify.main([str(folder), *arguments])
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if not line.startswith("checking ")]
        assert code in (0, 2, 5, 6) and "Traceback" not in said.err
        if code == 2:
            assert said.out == "" and len(errors) == 1 and errors[0].startswith("error: "), said.err
        else:
            assert not errors and len(said.out) < 100_000
            assert all(letter.isprintable() or letter == "\n" for letter in said.out)
    return code


def odd_value(tree: Any, rng: random.Random) -> Any:
    """The tree with one of its values, somewhere, replaced by an odd one, left out, or put under another name."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        name = rng.choice(list(tree))
        choice = rng.random()
        if choice < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        return {**tree, name: odd_value(tree[name], rng) if choice < 0.7 else rng.choice(ODD)}
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        place = rng.randrange(len(tree))
        return [*tree[:place], odd_value(tree[place], rng), *tree[place + 1 :]]
    return rng.choice(ODD)


def disturb(folder: Path, rng: random.Random) -> None:
    place = folder / rng.choice(PLACES)
    kind = rng.randrange(8)
    if kind == 0:  # bytes
        data = bytearray(place.read_bytes())
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        place.write_bytes(
            bytes(data[: rng.randrange(1, len(data))] if rng.random() < 0.3 else data)
        )
    elif kind == 1:  # another thing than a file
        place.unlink()
        rng.choice(
            [
                lambda: place.symlink_to("/dev/zero"),
                lambda: place.symlink_to(folder / "verify.py"),
                lambda: os.mkfifo(place),
                place.mkdir,
                lambda: place.symlink_to(place),
                lambda: place.touch(),
            ]
        )()
    elif kind == 2:  # far too large, deep or long
        what = rng.randrange(3)
        if what == 0:
            os.truncate(place, 1 << 40)
        else:
            place.write_text(DEEP if what == 1 else '{"a":' * 20_000 + "1" + "}" * 20_000 + "\n")
    elif kind == 3 and place.suffix == ".json":
        place.write_text(json.dumps(odd_value(json.loads(place.read_text()), rng)))
    elif kind == 4 and place.suffix == ".toml":
        lines = place.read_text().splitlines()
        name = rng.choice(lines).partition(" = ")[0]
        value = rng.choice(
            [
                "nan",
                "inf",
                "9" * 400,
                "[[[[]]]]",
                "1979-05-27",
                '"x"',
                "true",
                "{ a = 1 }",
                DEEP[:2000],
            ]
        )
        place.write_text(
            "\n".join(f"{name} = {value}" if line.startswith(name) else line for line in lines)
        )
    else:  # records that are chained again

        def odd(records: list[dict[str, Any]]) -> None:
            number = rng.randrange(len(records))
            record = odd_value(records[number], rng)
            if (
                isinstance(record, dict)
                and isinstance(record.get("type"), str)
                and isinstance(record.get("time_utc"), str)
            ):
                records[number] = record

        if rng.random() < 0.5:
            lines = [
                json.loads(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()
            ]
            odd(lines)
            (folder / "ledger.jsonl").write_bytes(rechained(lines))
        else:
            try:
                rewrite(folder, odd)
            except (TypeError, KeyError, ValueError, OSError):
                return


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(1000, 2500), marks=pytest.mark.full)], ids=str
)
def test_a_disturbed_folder_ends_in_a_verdict_or_in_one_line(
    seeds: range, stuffed: Path, tmp_path: Path, capsys: Any
) -> None:
    codes = set()
    for seed in seeds:
        folder = tmp_path / str(seed)
        shutil.copytree(stuffed, folder)
        disturb(folder, random.Random(seed))
        try:
            codes.add(judged(folder, capsys))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {folder}") from error
        shutil.rmtree(folder)
    assert 5 in codes
