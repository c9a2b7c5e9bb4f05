"""docs/own_pictures.md, command by command: on a made-up folder, and in test-all on the pictures that the page is about.

Afterwards every byte of what may be published is searched for the private pictures: their files, their pixels, their captions,
and whatever can be decoded as a picture.
"""

import base64
import io
import json
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, UnidentifiedImageError

from data.index.tar_writer import write_shard
from tests.distributed.ranks import free_port
from tests.docs.copies import copy_project
from tests.docs.pages import ROOT, blocks, commands
from tests.docs.test_numbers import rows
from tests.processes import quiet_environment, run_python
from trainer.planner.signal import NoiseToSignal

PAGE = "docs/own_pictures.md"
STAMPS = Path("/usr/share/tuxpaint/stamps")
COLOURS = {"red": (220, 30, 30), "orange": (230, 120, 20), "brown": (150, 70, 20)}
"""Of made-up private pictures: every one has much more red than blue."""
NOT_RUN = ("tensorboard",)  # it serves until it is stopped


def lines_of_the_page() -> list[list[str]]:
    """Its commands in their order."""
    found = [list(c.words) for block in blocks(PAGE) if block.language == "bash" for c in commands(block)]
    return [words for words in found if words[0] not in NOT_RUN]


def outputs_of_the_page() -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == "text"]


def made_up_pictures(folder: Path, count: int) -> None:
    """Coloured shapes, each with its caption, some text that belongs to no picture, and a drawing."""
    for number in range(count):
        rng = np.random.default_rng(number)
        name, colour = list(COLOURS.items())[number % 3]
        shade = np.clip(np.array(colour) + rng.integers(-15, 16, 3), 0, 255)
        picture = Image.new("RGB", (80, 80), tuple(shade.tolist()))
        draw = ImageDraw.Draw(picture)
        for _ in range(6):  # darker shapes of the same colour, so that no two pictures look alike
            left, top, width, height = rng.integers(0, 50, 4).tolist()
            draw.rectangle(
                (left, top, left + width, top + height), fill=tuple((shade * rng.uniform(0.3, 0.9)).astype(int))
            )
        place = folder / f"album{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{number:03d}.png")
        (place / f"{number:03d}.txt").write_text(
            f"my very own {name} picture number {number}\nja.utf8=another language\n"
        )
    (folder / "notes.txt").write_text("of no picture\n")
    (folder / "drawing.svg").write_text("<svg/>\n")


def pictures_in(data: bytes) -> Iterator[np.ndarray]:
    """(H, W, 3) of every raster picture that begins anywhere in `data`, also in base64."""
    for match in re.finditer(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", data, re.DOTALL):
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
        found |= {data[len(data) // 2 :][:48], data[-60:-12]}
        if path.with_suffix(".txt").exists():
            found.add(path.with_suffix(".txt").read_bytes().splitlines()[0])
    for path in shards:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                data = file.read()
                if member.name.endswith(".txt"):
                    found.add(data)
                elif member.name.endswith(".jpg"):
                    found.add(data[len(data) // 2 :][:48])
                    pixels_HWC = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
                    seen_HWC = np.asarray(Image.fromarray(pixels_HWC).resize((64, 64)))
                    for one_HWC in (pixels_HWC, seen_HWC, seen_HWC.astype(np.float32) / 255):
                        found.add(one_HWC[len(one_HWC) // 2].tobytes()[:96])
                        found.add(one_HWC[len(one_HWC) // 2, :, 0].tobytes()[:96])
    plain = {
        trace for trace in found if len(set(trace)) > 8
    }  # not a row of a single colour, nor a caption of two letters
    assert plain
    return plain


def search(folder: Path, traces: set[bytes]) -> tuple[list[str], list[np.ndarray]]:
    """Files of a folder that hold a trace, and all pictures that its files hold."""
    marked, pictures = [], []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "private" not in p.relative_to(folder).parts):
        data = path.read_bytes()
        marked += [f"{path}: {trace[:48]!r}" for trace in traces if trace in data]
        pictures += pictures_in(data)
    return marked, pictures


def is_reddish(picture_HWC: np.ndarray) -> bool:
    """Whether it shows the made-up private pictures: many pixels with much more red than blue."""
    red, blue = (picture_HWC[..., channel].astype(int) for channel in (0, 2))
    return bool(((red - blue) > 60).mean() > 0.01)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The page's commands on 40 made-up pictures, at an epsilon that is quicker to account for; what they said."""
    place = tmp_path_factory.mktemp("own")
    made_up_pictures(place / "pictures", 40)
    said = {}
    changes = {
        str(STAMPS): str(place / "pictures"), "data.num_examples=691": "data.num_examples=36",
        "privacy.expected_batch_size=256": "privacy.expected_batch_size=8",
        "train.num_steps=60": "train.num_steps=2 privacy.target_epsilon=0.5",
        "--num_gpus": "", "-q": "",
    }  # fmt: skip
    for words in lines_of_the_page():
        words = " ".join(changes.get(word, word.replace("runs/", f"{place}/")) for word in words).split()
        script = next(number for number, word in enumerate(words) if word.endswith(".py"))
        more = []
        if words[0] == "deepspeed":
            more = [
                "--engine",
                "local",
                "--run_dir",
                str(place / "own_pictures"),
                "train.micro_batch_size=16",
                "data.num_workers=0",
            ]
            words = ["zero1.json".join(word.split("zero3.json")) for word in words]
        if "import" in words:
            more = ["--workers", "1"]
        done = run_python([*words[script:], *more], timeout=200, env=quiet_environment())
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        said[shlex.join(words[script:])] = done.stdout
    return place, said


@pytest.mark.full
def test_every_command_of_the_page_runs(small: tuple[Path, dict[str, str]]) -> None:
    place, said = small
    outputs = list(said.values())
    assert re.search(r"held out of these +│ +[1-9]", outputs[0]) and "files with suffix .svg" in outputs[0]
    assert json.loads((place / "own_pictures" / "report" / "privacy_card.json").read_text())["formal_guarantee"] is True
    assert outputs[-1].splitlines()[-1].startswith("verify: consistent: epsilon ")
    assert {(path.stat().st_mode & 0o777) for path in (place / "mine").rglob("*.tar")} == {0o600}
    assert "held-out data" in outputs[2].splitlines()[0] and "public: no data" in outputs[2].splitlines()[0]


@pytest.mark.full
def test_no_private_picture_leaves(small: tuple[Path, dict[str, str]]) -> None:
    """With private held-out pictures no public file holds any picture; in private/ the same search finds them."""
    place, _ = small
    originals = sorted((place / "pictures").rglob("*.png"))
    traces = traces_of(sorted((place / "mine").rglob("*.tar")), originals)
    for folder in (place / "own_pictures", place / "published"):
        assert search(folder, traces) == ([], [])
    found, shown = search(place / "own_pictures" / "private", traces)
    assert any("heldout.jsonl" in line for line in found), "captions"
    assert sum(map(is_reddish, shown)) >= 4, "two sheets of samples, as files and in TensorBoard"
    for folder in ("mine", "pictures"):
        assert {line.split(":")[0] for line in search(place / folder, traces)[0]} >= set(
            map(str, (place / folder).rglob("*.tar"))
        )


@pytest.mark.full
def test_public_held_out_pictures_leave_alone(small: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Blue pictures that are declared public are in the published page, sheet and events; the red private ones are not."""
    place, _ = small

    def blue(number: int) -> bytes:
        pixels = np.random.default_rng(number).integers(0, 60, (40, 40, 3)) + np.array([0, 60, 190])
        file = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
        return file.getvalue()

    write_shard(tmp_path / "public.tar", ((f"{n}", {"png": blue(n), "txt": b"a blue picture"}) for n in range(8)))
    run_dir = tmp_path / "run"
    arguments = [
        "--engine", "local", "--ds_config", "ds_configs/zero1.json", "--recipe", "recipes/own_pictures.toml", "--run_dir",
        str(run_dir), f"data.shards={place / 'mine'}", f"heldout.shards={tmp_path / 'public.tar'}", "heldout.is_public=true",
        "data.num_workers=0", "privacy.expected_batch_size=8", "train.num_steps=1",
        "privacy.target_epsilon=0.5", "train.micro_batch_size=16",
    ]  # fmt: skip
    for command in (["train.py", *arguments], ["report.py", "--run_dir", run_dir, "--publish", tmp_path / "published"]):
        done = run_python([f"launch_scripts/{command[0]}", *command[1:]], env=quiet_environment())
        assert done.returncode == 0, done.stdout + done.stderr
    marked, pictures = search(tmp_path / "published", traces_of(sorted((place / "mine").glob("*.tar")), []))
    assert marked == [] and len(pictures) >= 5, "two sheets as files and as events, and the last one in the card"
    assert not any(map(is_reddish, pictures))
    assert all((picture[..., 2].astype(int) - picture[..., 0] > 60).mean() > 0.01 for picture in pictures)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not STAMPS.is_dir(), reason="Debian's tuxpaint-stamps-default is not installed")
def test_the_page_on_its_own_pictures(tmp_path: Path) -> None:
    """What the commands print is what the page shows, but for what noise decides; and no stamp is in a public file."""
    copy_project(tmp_path / "project")
    project, said = tmp_path / "project", ""
    environment = quiet_environment(PATH=f"{project / '.venv/bin'}:{os.environ['PATH']}", COLUMNS="200")
    for words in lines_of_the_page():
        if words[0] == "deepspeed":
            words[1:1] = ["--num_gpus", "2", "--master_port", str(free_port())]
        done = subprocess.run(
            words,
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        said += done.stdout

    def plain(line: str) -> str:
        return " ".join(re.sub(r"[│┃]", " ", line).split())

    printed = {plain(line) for line in said.replace(f"{project}/", "").splitlines()}  # the page is in its own project
    decided_by_noise = re.compile(
        r"held-out|without looking|another example|model:|#\d|files, [\d,]+ bytes|^\[\.\.\.\]$"
    )
    shown = [plain(line) for text in outputs_of_the_page() for line in text.splitlines()]
    missing = [
        line
        for line in shown
        if not decided_by_noise.search(line) and not any(known.startswith(line) for known in printed)
    ]
    assert missing == []
    assert "the model has not learned anything" in said
    traces = traces_of(sorted((project / "runs/mine").rglob("*.tar")), sorted(STAMPS.rglob("*.png")))
    assert search(project / "runs/published", traces) == ([], [])
    assert search(project / "runs/own_pictures", traces) == ([], [])
    shutil.rmtree(project)


@pytest.mark.full
@pytest.mark.parametrize("row", range(5))
def test_what_to_expect_is_calibrated(row: int) -> None:
    """Sigma and sigma sqrt(P) / B of the table, as plan.py has them for this many pairs."""
    from privacy.plan import make_plan
    from trainer.config.recipe import load_config
    from trainer.tasks import make_task

    lines = [line for line in (ROOT / PAGE).read_text().splitlines() if re.match(r"\| [\d,]+( million)? \|", line)]
    assert len(lines) == 5 and rows(PAGE, "pairs")
    pairs, name, batch, steps, sigma, ratio, expect = (cell.strip(" `") for cell in lines[row].strip("|").split("|"))
    config = load_config(ROOT / f"recipes/{name}.toml")
    privacy = config.privacy.model_copy(
        update={
            "noise_multiplier": None, "target_epsilon": 8.0, "reserved_attempts": None,
            "target_delta": config.privacy.target_delta if name == "quickstart" else None,
            "expected_batch_size": int(batch.replace(",", "")),
        }
    )  # fmt: skip
    number, _, million = pairs.partition(" ")
    plan = make_plan(
        privacy.request(int(steps.replace(",", "")), int(number.replace(",", "")) * (10**6 if million else 1))
    )
    assert plan.noise_multiplier == pytest.approx(float(sigma), abs=6e-3)
    count = sum(parameter.numel() for parameter in make_task(config, ROOT).skeleton().parameters())
    assert plan.noise_multiplier * math.sqrt(count) / plan.expected_batch_size == pytest.approx(float(ratio), rel=0.05)
    signal = NoiseToSignal.of(plan, count, config.model.kind)
    assert signal is not None and expect.startswith("**")
    assert signal.sentence.startswith(expect.strip("*").partition("**")[0])


def test_what_to_expect_is_what_the_planner_says() -> None:
    """From the numbers of the table alone: sigma sqrt(P) / B and the steps are all that the sentence looks at."""
    for line in (ROOT / PAGE).read_text().splitlines():
        if re.match(r"\| [\d,]+( million)? \|", line):
            *_, steps, _, ratio, expect = (cell.strip(" `") for cell in line.strip("|").split("|"))
            said = NoiseToSignal(1, float(ratio), 1, int(steps.replace(",", ""))).sentence
            assert said.startswith(expect.strip("*").partition("**")[0]) and expect.startswith("**"), line
