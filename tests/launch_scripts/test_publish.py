"""What `report.py` reads and `report.py --publish` copies: public files by a list, never through a link, without times."""

import fcntl
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from evaluation.results import DataUse, ModelFacts, Results
from evaluation.results import publish as publish_results
from launch_scripts.report import ReportOptions, report
from launch_scripts.shared_ledger import ShowOptions, show
from privacy.card.ledger_card import read_snapshot
from privacy.card.model import LedgerFile
from privacy.card.run_card import write_card
from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.shared import SharedLedger
from tests.trainer.trained_runs import SECRET, recipe, trained
from trainer.card_of_run import build_card
from trainer.errors import ConfigError
from trainer.publish import FIXED_TIME, publish

PLAIN = [
    "config.toml",
    "ds_config.json",
    "environment.json",
    "metrics.jsonl",
    "tensorboard/events.out.tfevents.0000000001",
    "evaluation/heldout.jsonl",
    "evaluation/samples-00000003.png",
    "evaluation/answers.png",
    "report/audit-ledger.json",
    "evaluation/linear-probe-step-00000003-0123abcd.json",
    "evaluation/tensorboard/events.out.tfevents.0000000002",
]
CARD = [f"report/privacy_card.{kind}" for kind in ("json", "md", "html")]
CARD += [f"report/fingerprint.{kind}" for kind in ("txt", "tsq")]
CHECKPOINT = "checkpoints/step-00000003"
WHOLE = [
    f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/rank-00000-of-00001.safetensors",
    "checkpoints/LATEST",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one of each public file, and secrets in private/."""
    run = tmp_path_factory.mktemp("publish") / "run"
    trained(run, recipe())
    for name in PLAIN:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        if name != "config.toml":
            (run / name).write_text("{}\n")
    (run / "private/samples-00000003.png").write_text(SECRET)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def published(
    run: Path, target: Path, *, card: bool = False, no_checkpoints: bool = False
) -> dict[str, tuple[bytes, int, float]]:
    """Path -> (content, mode, modification time) of every file and folder; by the command where there shall be a card."""
    if card:
        report(ReportOptions(run_dir=run, publish=target, no_checkpoints=no_checkpoints))
    else:
        print(*publish(run, target, ledger_of(run), checkpoints=not no_checkpoints), sep="\n")
    found = {}
    for path in (target, *target.rglob("*")):
        status = path.lstat()
        content = b"" if path.is_dir() else path.read_bytes()
        found[path.relative_to(target).as_posix()] = (
            content,
            status.st_mode & 0o7777,
            status.st_mtime,
        )
    return found


def ledger_of(run: Path) -> LedgerFile:
    snapshot = read_snapshot(run / "ledger.jsonl")
    return LedgerFile(lines=snapshot.state.num_lines, last_line_sha256=snapshot.last_hash)


def files(found: dict[str, tuple[bytes, int, float]]) -> list[str]:
    return sorted(name for name, (_, mode, _) in found.items() if mode == 0o644)


def test_what_is_on_the_list_is_copied_with_fixed_modes_and_times(
    run: Path, tmp_path: Path
) -> None:
    found = published(run, tmp_path / "out", card=True)
    assert files(found) == sorted([*PLAIN, *CARD, *WHOLE, "ledger.jsonl"])
    assert {(mode, time) for _, mode, time in found.values()} == {
        (0o644, FIXED_TIME),
        (0o755, FIXED_TIME),
    }
    for name in (*PLAIN, "ledger.jsonl", *WHOLE[:2]):
        assert found[name][0] == (run / name).read_bytes()
    assert not [name for name, (content, *_) in found.items() if SECRET.encode() in content]
    again = published(run, tmp_path / "out2", no_checkpoints=True)
    assert files(again) == sorted([*PLAIN, *CARD, "ledger.jsonl"]) and "checkpoints" not in again


def test_no_file_says_where_anything_lies(run: Path, tmp_path: Path) -> None:
    """Folders name users, hosts and customers."""
    config = (run / "config.toml").read_text()
    places = '[extra]\na = "/home/alice/x/train-{0..9}.tar,~bob/y"\nb = "$HOME/z"\nc = "runs/one"\nd = "s3://bucket/e"\n'
    (run / "config.toml").write_text(config + places)
    found = published(run, tmp_path / "out", card=True)
    expected = (
        '[extra]\na = "train-{0..9}.tar,y"\nb = "$HOME/z"\nc = "runs/one"\nd = "s3://bucket/e"\n'
    )
    assert found["config.toml"][0].decode() == config + expected
    for name, (content, *_) in found.items():
        assert b"alice" not in content and str(tmp_path).encode() not in content, name


@pytest.mark.parametrize("is_public", [True, False])
def test_public_results_hold_no_arguments(is_public: bool, tmp_path: Path) -> None:
    data = [DataUse("test", "shards:/home/alice/x.tar", 3)]
    results = Results("linear-probe", {"accuracy": 0.5}, data, ModelFacts("/home/alice/run"))
    arguments = ["linear-probe", "--checkpoint", "/home/alice/run"]
    publish_results(
        results, output=tmp_path, data_is_public=is_public, as_json=False, arguments=arguments
    )
    (file,) = tmp_path.rglob("linear-probe-step-*.json")
    assert ("alice" in file.read_text()) != is_public and (
        "--checkpoint" in file.read_text()
    ) != is_public
    assert "private" in file.relative_to(tmp_path).parts or is_public


def test_equal_folders_are_published_alike(run: Path, tmp_path: Path) -> None:
    """Whatever their times, modes and the order in which their files were made."""
    one = published(run, tmp_path / "one")
    other = tmp_path / "elsewhere" / "run"
    paths = [path for path in run.rglob("*") if path.is_file()]
    random.Random(0).shuffle(paths)
    for number, path in enumerate(paths):
        copy = other / path.relative_to(run)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        os.utime(copy, (1e9 + number, 1e9 + number))
        copy.chmod(0o600)
    shutil.move(run, tmp_path / "away")
    shutil.move(other, run)  # the card names the folder
    assert published(run, tmp_path / "two") == one


def test_nothing_else_is_copied_and_all_of_it_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = run / "private/metrics.jsonl"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "samples-00000009.png").write_text(SECRET)
    planted = [
        "notes.txt",
        "STOP",
        "evaluation/heldout.jsonl.bak",
        "evaluation/.hidden",
        "report/audit ü.txt",
        "report/a\nb.json",
        "evaluation/samples-00000001.png.tmp",
        "core",
        ".private",
        "tensorboard/events.out.tfevents.1.host",
    ]
    for name in planted:
        (run / name).write_text(SECRET)
    (run / "old").mkdir()
    (run / "old/metrics.jsonl").write_text(SECRET)
    links = {
        "evaluation/samples-00000007.png": secret,
        "report/audit-run.json": secret,
        "evaluation/metrics.jsonl": outside,
    }
    for name, goal in links.items():
        (run / name).symlink_to(goal)
    os.link(secret, run / "evaluation/samples-00000008.png")
    os.mkfifo(run / "evaluation/captions-step-00000003-0123abcd.json")
    shutil.rmtree(run / "evaluation/tensorboard")
    (run / "evaluation/tensorboard").symlink_to(run / "private")
    found = published(run, tmp_path / "out")
    assert files(found) == sorted({*PLAIN, *WHOLE, "ledger.jsonl"} - {PLAIN[-1]})
    assert not [name for name, (content, *_) in found.items() if SECRET.encode() in content]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    named = [
        *(name.replace("\n", "\\n") for name in planted),
        "old",
        *links,
        "evaluation/samples-00000008.png",
    ]
    others = [
        "evaluation/captions-step-00000003-0123abcd.json",
        "evaluation/tensorboard",
        "private",
        "checkpoints",
    ]
    for name in [*named, *others]:
        assert [line for line in said if name in line], name
    assert len(said) == len(named) + len(others)


def test_the_newest_whole_checkpoint_is_published(run: Path, tmp_path: Path) -> None:
    """Newer ones that are damaged, half written, links or under other names are not."""
    folder = run / "checkpoints"
    for name in ("step-00000004", ".step-00000005.tmp", "set-aside-step-00000006"):
        shutil.copytree(folder / "step-00000003", folder / name)
    (folder / "step-00000004" / "rank-00000-of-00001.safetensors").write_bytes(b"damaged")
    (folder / "step-00000007").symlink_to(folder / "step-00000003")
    shutil.copytree(folder / "step-00000003", folder / "step-00000008")
    (folder / "step-00000008/rank-00000-of-00001.safetensors").unlink()
    (folder / "step-00000008/rank-00000-of-00001.safetensors").symlink_to(
        run / "private/metrics.jsonl"
    )
    (folder / "step-00000009").write_text("a file")
    shutil.copytree(folder / "step-00000003", folder / "step-00000010")
    (folder / "step-00000010/rank-00001-of-00001.safetensors").write_text(
        SECRET
    )  # its manifest does not know it
    (folder / "step-00000003/notes.txt").write_text(SECRET)
    found = published(run, tmp_path / "out")
    assert [name for name in files(found) if name.startswith("checkpoints/")] == sorted(WHOLE)
    assert found["checkpoints/LATEST"][0] == b"step-00000003\n"
    shutil.rmtree(folder)
    folder.symlink_to(run / "private")
    assert not [
        name for name in published(run, tmp_path / "out2") if name.startswith("checkpoints")
    ]


def test_only_a_new_folder_elsewhere_is_filled(run: Path, tmp_path: Path) -> None:
    ledger = ledger_of(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine").write_text("mine")
    (tmp_path / "linked").symlink_to(run)
    before = sorted(tmp_path.rglob("*"))
    inside = [run, run / "out", run / "private/out", run / "checkpoints", tmp_path / "linked/out"]
    for target in [*inside, tmp_path / "mine", tmp_path / "mine/mine"]:
        with pytest.raises(ConfigError):
            publish(run, target, ledger)
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(
        ConfigError, match="not empty"
    ):  # before the card is computed, and the run is looked at
        report(ReportOptions(run_dir=tmp_path / "none", publish=tmp_path / "mine"))
    (tmp_path / "empty").mkdir()
    publish(run, tmp_path / "empty", ledger)
    assert (tmp_path / "empty/ledger.jsonl").exists()


def test_a_run_that_goes_on_is_not_published(run: Path, tmp_path: Path) -> None:
    """Card and ledger would be of two moments."""
    before = ledger_of(run)
    with Ledger.open(run / "ledger.jsonl") as ledger:
        ledger.start_session({"commit": "abc"})
    with pytest.raises(ConfigError, match="being trained"):
        publish(run, tmp_path / "out", before)
    assert not list(tmp_path.glob("*out*"))


def test_links_are_not_read_for_the_card_and_are_named(run: Path, tmp_path: Path) -> None:
    (run / "private/heldout.jsonl").write_text(json.dumps({"step": 1, "loss": int(SECRET)}))
    (run / "private/audit.json").write_text(json.dumps({"audit": SECRET, "verdict": "consistent"}))
    linked = {"evaluation/heldout.jsonl": "heldout.jsonl", "report/audit-run.json": "audit.json"}
    others = ("evaluation/samples-00000009.png", "config.toml", "behind/ledger-1.jsonl", WHOLE[0])
    linked |= dict.fromkeys(others, "metrics.jsonl")
    (run / "behind").mkdir()
    for name, goal in linked.items():
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(run / "private" / goal)
    card = build_card(run)
    pages = [path.read_text() for path in write_card(run, card)]
    assert not [page for page in pages if SECRET in page or "metrics.jsonl" in page]
    for name in linked.keys() - {WHOLE[0]}:  # checkpoints are chosen apart
        assert [
            line for line in card.warnings if f"does not read {name}: it is a symbolic link" in line
        ]
    (run / "evaluation/heldout.jsonl").unlink()
    os.mkfifo(run / "evaluation/heldout.jsonl")
    assert build_card(run).utility.heldout_loss == (), (
        "and nobody waits for the other end of a pipe"
    )
    shutil.rmtree(run / "report")
    (run / "report").symlink_to(run / "private")
    with pytest.raises(ConfigError, match="symbolic link"):
        write_card(run, build_card(run))
    shutil.move(run / "ledger.jsonl", run / "private/ledger.jsonl")
    (run / "ledger.jsonl").symlink_to(run / "private/ledger.jsonl")
    with pytest.raises(Exception, match="is a symbolic link, and none is followed"):
        build_card(run)


@pytest.mark.parametrize(
    "text",
    [
        "privacy = 5",
        "train = []",
        "data = 'x'",
        "optimizer = [[1]]",
        "privacy = 1979-05-27",
        "[[privacy]]\nx = 1",
        "[privacy]\nshared_ledger = 5",
        '[privacy]\nshared_ledger = "\\u0000"',
        "[data]\ndeduplication = [1]",
        "[train]\nema_decay = { x = 1 }",
        "[privacy]\nsampling = [1]",
        "a = " + "[" * 5000,
        "[privacy]\nnoise_multiplier = nan",
    ],
)
def test_a_changed_configuration_is_no_traceback(run: Path, text: str) -> None:
    """A card, or exit 4 in one line."""
    (run / "config.toml").write_text(text + "\n")
    try:
        said = build_card(run).to_json()
    except PrivacyStateRefused as refused:
        said = f"refused: {refused}"
    assert (
        "config.toml" in said and "\n" not in said
        if said.startswith("refused")
        else json.loads(said)
    )


def test_a_report_takes_no_lock_and_repairs_nothing(tmp_path: Path) -> None:
    """A shared ledger whose last line is torn, or being written, stays as it is; another program has its lock."""
    owner = SharedLedger.create(tmp_path / "owner.jsonl", epsilon=5.0, delta=1e-4)
    whole = owner.summary()
    with owner.path.open("ab") as file:
        file.write(b'{"seq":1,"type":"res')
    torn = owner.path.read_bytes()
    with owner.path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert owner.summary() == whole
        show(ShowOptions(path=owner.path))
    assert owner.path.read_bytes() == torn
    mirror = tmp_path / "mirror.jsonl"
    mirrored = SharedLedger.create(tmp_path / "other.jsonl", epsilon=5.0, delta=1e-4, mirror=mirror)
    assert mirrored.summary()["runs"] == [] and mirror.read_bytes() == b""
    mirror.write_bytes(mirrored.path.read_bytes() + b"more")
    with pytest.raises(PrivacyStateRefused, match="mirror"):
        mirrored.summary()
