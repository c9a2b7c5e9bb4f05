"""docs/own_pictures.md, command by command, on a made-up folder of pictures.

Afterwards every byte of what may be published is searched for the private pictures: their files, their pixels, their captions,
and whatever can be decoded as a picture.
"""

import base64
import io
import json
import re
import shlex
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from tests.docs.pages import ROOT, blocks, commands
from tests.processes import quiet_environment, run_python
from trainer.noise_to_signal import NoiseToSignal

PAGE = "docs/own_pictures.md"


def made_up_pictures(folder: Path, count: int) -> None:
    """Red pictures of noise, each with its caption, some text that belongs to no picture, and a drawing."""
    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = rng.integers(0, 90, (10, 10, 3)) + np.array([150, 20, 10])
        place = folder / f"album{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse.astype(np.uint8)).resize((80, 80)).save(place / f"{number:03d}.png")
        (place / f"{number:03d}.txt").write_text(
            f"my very own picture number {number}\nja.utf8=another language\n"
        )
    (folder / "notes.txt").write_text("of no picture\n")
    (folder / "drawing.svg").write_text("<svg/>\n")


def pictures_in(data: bytes) -> Iterator[np.ndarray]:
    """(H, W, 3) of every raster picture that begins anywhere in `data`, also in base64."""
    for match in re.finditer(
        rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", data, re.DOTALL
    ):
        try:
            with Image.open(io.BytesIO(data[match.start() :])) as opened:
                yield np.asarray(opened.convert("RGB"))
        except (OSError, ValueError, SyntaxError, struct.error, UnidentifiedImageError):
            continue  # three bytes of something else
    for text in re.findall(rb"[A-Za-z0-9+/]{200,}={0,2}", data):
        yield from pictures_in(base64.b64decode(text + b"=" * (-len(text) % 4)))


def traces_of(shards: list[Path], originals: list[Path]) -> set[bytes]:
    """What would betray a private picture in any file: parts of its files and of its pixels, and its caption."""
    found = set()
    for path in originals:
        data = path.read_bytes()
        found |= {
            data[len(data) // 2 :][:48],
            data[-60:-12],
            path.with_suffix(".txt").read_bytes().splitlines()[0],
        }
    for path in shards:
        with tarfile.open(path) as tar:
            members = [
                (member.name, file.read())
                for member in tar
                if (file := tar.extractfile(member)) is not None
            ]
        found |= {
            data if name.endswith(".txt") else data[len(data) // 2 :][:48] for name, data in members
        }
        for pixels_HWC in (
            picture
            for name, data in members
            if name.endswith(".jpg")
            for picture in pictures_in(data)
        ):
            seen_HWC = np.asarray(Image.fromarray(pixels_HWC).resize((64, 64)))
            for one_HWC in (pixels_HWC, seen_HWC, seen_HWC.astype(np.float32) / 255):
                found |= {
                    one_HWC[len(one_HWC) // 2].tobytes()[:96],
                    one_HWC[len(one_HWC) // 2, :, 0].tobytes()[:96],
                }
    return {trace for trace in found if len(set(trace)) > 8}  # not a row of a single colour


def search(folder: Path, traces: set[bytes]) -> tuple[list[str], list[np.ndarray]]:
    """Files of a folder that hold a trace, and all pictures that its files hold."""
    marked, pictures = [], []
    for path in sorted(
        p for p in folder.rglob("*") if p.is_file() and "private" not in p.relative_to(folder).parts
    ):
        data = path.read_bytes()
        marked += [f"{path}: {trace[:48]!r}" for trace in traces if trace in data]
        pictures += pictures_in(data)
    return marked, pictures


def of_the_head(words: list[str]) -> bool:
    return "runs/encoder" in words or "runs/public" in words


@pytest.mark.full
def test_every_command_of_the_page_runs_and_no_private_picture_leaves(tmp_path: Path) -> None:
    """On 40 pictures, at an epsilon that is quicker to account for; in private/ the same search finds them."""
    made_up_pictures(tmp_path / "pictures", 40)
    outputs = []
    changes = {
        "/usr/share/tuxpaint/stamps": str(tmp_path / "pictures"),
        "data.num_examples=691": "data.num_examples=36",
        "privacy.expected_batch_size=256": "privacy.expected_batch_size=8",
        "train.num_steps=60": "train.num_steps=2 privacy.target_epsilon=0.5",
        "--num_gpus": "",
        "-q": "",
    }
    found = [
        list(c.words) for block in blocks(PAGE) if block.language == "bash" for c in commands(block)
    ]
    # TensorBoard serves until it is stopped; an encoder has a test of its own.
    for words in (words for words in found if words[0] != "tensorboard" and not of_the_head(words)):
        train = words[0] == "deepspeed"
        words = " ".join(
            changes.get(word, word.replace("runs/", f"{tmp_path}/")) for word in words
        ).split()
        words = words[next(number for number, word in enumerate(words) if word.endswith(".py")) :]
        words += ["--workers", "1"] if "import" in words else []
        if train:
            words = [word.replace("zero3.json", "zero1.json") for word in words]
            words += [
                "--engine",
                "local",
                "--run_dir",
                f"{tmp_path}/own_pictures",
                "train.micro_batch_size=16",
            ]
            words += ["data.num_workers=0"]
        done = run_python(words, timeout=200, env=quiet_environment())
        assert done.returncode == 0, (
            f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
        outputs.append(done.stdout)
    assert (
        re.search(r"held out of these +│ +[1-9]", outputs[0])
        and "files with suffix .svg" in outputs[0]
    )
    assert (
        json.loads((tmp_path / "own_pictures/report/privacy_card.json").read_text())[
            "formal_guarantee"
        ]
        is True
    )
    assert outputs[-1].splitlines()[-1].startswith("verify: consistent: epsilon ")
    assert {(path.stat().st_mode & 0o777) for path in (tmp_path / "mine").rglob("*.tar")} == {0o600}
    assert "\nprivate: held-out data" in outputs[2] and "public: " not in [
        line[:8] for line in outputs[2].splitlines()
    ]
    traces = traces_of(
        sorted((tmp_path / "mine").rglob("*.tar")), sorted((tmp_path / "pictures").rglob("*.png"))
    )
    assert len(traces) > 100
    for folder in (tmp_path / "own_pictures", tmp_path / "published"):
        assert search(folder, traces) == ([], [])
    marked, shown = search(tmp_path / "own_pictures" / "private", traces)
    assert any("heldout.jsonl" in line for line in marked) and len(shown) >= 4, (
        "captions, and sheets of samples"
    )
    for folder in (tmp_path / "mine", tmp_path / "pictures"):
        found_in = {line.split(":")[0] for line in search(folder, traces)[0]}
        assert found_in >= set(map(str, folder.rglob("*.tar")))


@pytest.mark.full
def test_a_few_thousand_labelled_pictures_train_a_private_head_on_an_encoder(
    tmp_path: Path,
) -> None:
    """By the commands of the page."""
    pytest.importorskip("transformers")
    made_up_pictures(tmp_path / "pictures", 40)
    for number, path in enumerate(sorted((tmp_path / "pictures").rglob("*.png"))):
        path.with_suffix(".cls").write_text(str(number % 2))
    imported = [
        "launch_scripts/prepare.py",
        "import",
        "--from",
        "folder",
        str(tmp_path / "pictures"),
        "--workers",
        "1",
    ]
    found = [
        list(c.words) for block in blocks(PAGE) if block.language == "bash" for c in commands(block)
    ]
    shown = [[*imported, "--heldout_share", "0.1", "--output", str(tmp_path / "mine")]]
    shown += [
        [word.replace("runs/", f"{tmp_path}/").replace("2000", "100") for word in words[1:]]
        for words in found
        if of_the_head(words)
    ]
    for words in shown:
        done = run_python(words, timeout=200, env=quiet_environment())
        assert done.returncode == 0, (
            f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    assert len(shown) == 4 and "weights of a dp-fc head, epsilon 4.000 at delta" in done.stdout
    assert list((tmp_path / "heads/private_heads").glob("*/ledger.jsonl"))


def test_what_to_expect_is_what_the_planner_says() -> None:
    """From the numbers of the table alone: sigma sqrt(P) / B and the steps are all that the sentence looks at."""
    for line in (ROOT / PAGE).read_text().splitlines():
        if re.match(r"\| [\d,]+( million)? \|", line):
            *_, steps, _, ratio, expect = (cell.strip(" `") for cell in line.strip("|").split("|"))
            said = NoiseToSignal(1, float(ratio), 1, int(steps.replace(",", ""))).sentence
            assert said.startswith(expect.strip("*").partition("**")[0]) and expect.startswith(
                "**"
            ), line
