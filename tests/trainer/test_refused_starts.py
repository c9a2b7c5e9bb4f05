"""A start that is refused changes nothing in a run folder that was trained in: no byte, no name, no mode."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from privacy import verify
from privacy.card.ledger_card import read_snapshot
from privacy.card.model import LedgerFile
from privacy.checkpoints.read import with_seal
from privacy.errors import NotRecorded, PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.chain import hash_line
from privacy.ledger.shared import SharedLedger
from privacy.step.run_folder import RunFolder
from privacy.sums.totals import SumTarget
from tests.distributed.ranks import ROOT
from tests.privacy.loop.own import make
from tests.trainer.test_chains import run
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.errors import ConfigError, in_one_line
from trainer.publish import publish
from trainer.ranks.discovery import Ranks
from trainer.run.start import TrainerStart, train
from trainer.weights.open_model import open_model

pytestmark = pytest.mark.usefixtures("trusted_models", "one_rank")
LINES = "ledger.jsonl"
OPTIONS = ("train.keep_checkpoints=3", "privacy.reserved_attempts=9")


def stop_after(num_steps: int, folder: Path, *options: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunFolder, "lock", lambda self: (self.private / "lock").touch(0o600))
        steps: list[int] = []
        stops = "trainer.loop.stopping.StopRequests.pending"
        patched.setattr(stops, lambda self: steps.append(1) or len(steps) > num_steps)
        assert run(folder, *OPTIONS, *options, steps=4) == 7
    assert len(list((folder / "checkpoints").glob("step-*"))) == num_steps


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, one_rank: torch.device) -> Path:
    """A run that was stopped after two of its four steps, with a checkpoint of each."""
    folder: Path = tmp_path_factory.mktemp("refused") / "run"
    stop_after(2, folder)
    return folder


@pytest.fixture(autouse=True)
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has locked it holds until it ends."""
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def image(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> mode and hash of everything there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, content)
    return found


def lines(folder: Path) -> list[bytes]:
    return (folder / LINES).read_bytes().splitlines(keepends=True)


def write(folder: Path, content: list[bytes]) -> None:
    (folder / LINES).write_bytes(b"".join(content))


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def cut_behind_a_checkpoint(folder: Path) -> None:
    """Ledger and record of attempts brought back together, a torn line at the end."""
    kept = (
        next(number for number, line in enumerate(lines(folder)) if b'"type":"checkpoint"' in line)
        + 2
    )
    write(folder, [*lines(folder)[:kept], b'{"seq":99,"type":"int'])
    record = folder / "private/members.jsonl"
    marks = [
        line
        for line in record.read_bytes().splitlines(keepends=True)
        if json.loads(line)["seq"] < kept - 1
    ]
    record.write_bytes(b"".join(marks))


def torn(folder: Path) -> None:
    with (folder / LINES).open("ab") as file:
        file.write(b'{"seq":99,"type":"int')


def resealed(folder: Path, **changes: object) -> None:
    manifest = newest(folder) / "manifest.json"
    manifest.write_text(json.dumps(with_seal(json.loads(manifest.read_text()) | changes)))


def called_public(folder: Path) -> None:
    resealed(folder, training_data={"provenance": "public", "shards": []})


def other_weights(folder: Path) -> None:
    part = next(newest(folder).glob("rank-*"))
    part.write_bytes(part.read_bytes()[:-400] + bytes(400))
    resealed(folder, files={part.name: hashlib.sha256(part.read_bytes()).hexdigest()})


def behind_the_last_line(folder: Path) -> None:
    """As if no record of it had been written yet, although there is one."""
    known = lines(folder)
    resealed(
        folder,
        charged_attempts=9,
        ledger={"seq": len(known) - 1, "hash": hash_line(known[-1].rstrip(b"\n"))},
    )


def no_checkpoints(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("step-*"):
        shutil.rmtree(path)


def damaged(folder: Path, steps: str = "step-00000002") -> None:
    for part in (folder / "checkpoints").glob(f"{steps}/rank-*"):
        part.write_bytes(part.read_bytes()[:-1])


def renamed(folder: Path) -> None:
    (folder / "checkpoints/step-00000001").rename(folder / "checkpoints/step-00000005")
    (folder / "checkpoints/LATEST").write_text("step-00000005\n")


MIRROR = "privacy.ledger_mirror={mirror}"
REFUSED: dict[str, tuple[list[Callable[[Path], object]], list[str]]] = {
    "cut behind a checkpoint": ([cut_behind_a_checkpoint], []),
    "cut, and a new mirror": ([cut_behind_a_checkpoint], [MIRROR]),
    "a checkpoint of another run": (
        [torn, lambda folder: resealed(folder, ledger={"seq": 3, "hash": "ab" * 32})],
        [],
    ),
    "a renamed checkpoint": ([torn, renamed], []),
    "a checkpoint called public": ([torn, called_public], []),
    "other weights": ([torn, other_weights], []),
    "a checkpoint that claims to be without record": ([behind_the_last_line, torn], []),
    "all checkpoints gone": ([torn, no_checkpoints], []),
    "no folder of checkpoints": ([torn, lambda folder: shutil.rmtree(folder / "checkpoints")], []),
    "all checkpoints damaged": ([torn, lambda folder: damaged(folder, "step-*")], [MIRROR]),
    "the newest damaged, another optimizer": ([torn, damaged], ["optimizer.name=sgd"]),
    "another model": ([torn], ["model.overrides.decoder_width=48"]),
    "another noise": ([torn], ["privacy.noise_multiplier=9"]),
    "other steps": ([torn], ["train.num_steps=9"]),
    "other data": ([torn], ["data.shards=data/demo/train-00001.tar"]),
    "private/ is gone": ([torn, lambda folder: shutil.rmtree(folder / "private")], []),
    "no record of attempts": (
        [torn, lambda folder: (folder / "private/members.jsonl").unlink()],
        [],
    ),
    "no sampling key": ([torn, lambda folder: (folder / "private/sampling.key").unlink()], []),
    "a key that others may read": (
        [torn, lambda folder: (folder / "private/sampling.key").chmod(0o644)],
        [],
    ),
    "no ledger": ([lambda folder: (folder / LINES).unlink()], []),
    "a line edited": (
        [lambda folder: write(folder, [lines(folder)[0].replace(b"0", b"1"), *lines(folder)[1:]])],
        [],
    ),
    "a mirror that differs": (
        [
            torn,
            lambda folder: shutil.copy(folder / "config.toml", folder.with_name("mirror.jsonl")),
        ],
        [MIRROR],
    ),
    "an owner's limit": ([torn], ["privacy.max_examples_per_owner=3"]),
    "data declared public since": ([torn], ["data.provenance=public"]),
}

ALSO_DRY = (
    "a mirror that differs",
    "another model",
    "another noise",
    "no ledger",
    "all checkpoints gone",
)
"""Refused in the same words by a dry run, which changes nothing either."""


TWINS = (
    "cut, and a new mirror",
    "no folder of checkpoints",
    "a renamed checkpoint",
    "a checkpoint called public",
)
"""Refused as the row before them is, or as below."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in TWINS)) for n in REFUSED]
)
def test_a_refused_start_changes_nothing(name: str, stopped: Path, tmp_path: Path) -> None:
    damages, changes = REFUSED[name]
    words = set()
    for is_dry in (False, True) if name in ALSO_DRY else (False,):
        place = tmp_path / ("dry" if is_dry else "real")
        folder = Path(shutil.copytree(stopped, place / "run"))
        for damage in damages:
            damage(folder)
        (folder / "STOP").touch()
        before = image(place)
        given = [change.format(mirror=place / "mirror.jsonl", folder=folder) for change in changes]
        with pytest.raises(Exception) as refusal:
            run(folder, *OPTIONS, *given, steps=4, is_dry=is_dry)
        assert image(place) == before, refusal.value
        assert in_one_line(refusal.value) is not None, repr(refusal.value)
        words.add((type(refusal.value), str(refusal.value).replace(str(place), "")))
    assert len(words) == 1, words


KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a file": lambda path: path.write_bytes(b"x"),
    "a pipe": os.mkfifo,
    "a link that leads nowhere": lambda path: path.symlink_to("gone"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


def in_place_of(path: Path, kind: str) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def written(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Name of everything that a resume writes, and whether it is a folder; found by looking at one."""
    folder = Path(shutil.copytree(stopped, tmp_path_factory.mktemp("written") / "run"))
    before = {name: (folder / name).lstat() for name in names_in(folder)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunFolder, "lock", lambda self: None)
        assert run(folder, *OPTIONS, steps=4) == 0
    after = {name: (folder / name).lstat() for name in names_in(folder)}
    changed = {
        name
        for name, now in after.items()
        if name not in before or now.st_mtime_ns != before[name].st_mtime_ns
    }
    numbered = (
        "tensorboard/events",
        "checkpoints/step-",
        "checkpoints/.step-",
    )  # the next free number is taken
    found = {
        name: (folder / name).is_dir()
        for name in changed
        if not any(part in name for part in numbered)
    }
    assert {
        LINES,
        "metrics.jsonl",
        "private/members.jsonl",
        "checkpoints",
        "checkpoints/LATEST",
    } <= found.keys()
    return found | {"STOP": False}


def test_what_a_run_writes_is_looked_at_before_the_first_write(
    stopped: Path, written: dict[str, bool], tmp_path: Path
) -> None:
    for name, is_folder in sorted(written.items()):
        for kind in KINDS:
            if kind == ("a folder" if is_folder else "a file"):
                continue
            folder = Path(shutil.copytree(stopped, tmp_path / "run"))
            (folder / "STOP").touch()
            in_place_of(folder / name, kind)
            before = image(folder)
            with pytest.raises((ConfigError, PrivacyStateRefused), match="move it away") as refusal:
                run(folder, *OPTIONS, steps=4)
            assert image(folder) == before and str(folder) in str(refusal.value), (
                f"{name} as {kind}: {refusal.value}"
            )
            shutil.rmtree(folder)


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "resumed"])
def test_mirror_and_shared_ledger_are_files_of_their_own_elsewhere(
    is_new: bool, stopped: Path, tmp_path: Path
) -> None:
    folder, links = tmp_path / "run", tmp_path / "links"
    if not is_new:
        shutil.copytree(stopped, folder)
    links.mkdir()
    owner = SharedLedger.create(
        tmp_path / "owner.jsonl", epsilon=9.0, delta=1e-4, mirror=tmp_path / "second.jsonl"
    ).path
    inside = [folder / name for name in (LINES, "private/sampling.key", "private/members.jsonl")]
    inside += [folder / "x.jsonl", folder / "private/x.jsonl", folder / "checkpoints/x.jsonl"]
    places: list[Path] = []
    for target in (*inside, owner, tmp_path / "second.jsonl"):
        number = len(places)
        places += [
            target,
            target.parent / ".." / target.parent.name / target.name,
            links / f"{number}",
        ]
        places[-1].symlink_to(target)
        if target.exists():
            places.append(links / f"{number} hard")
            os.link(target, places[-1])
    for kind in ("a folder", "a pipe", "a link that leads nowhere", "a link to itself"):
        places.append(links / kind)
        KINDS[kind](places[-1])
    places += [tmp_path / "gone/mirror.jsonl", tmp_path / "gone/too/mirror.jsonl"]
    before = image(tmp_path)
    shared, mirror = f"privacy.shared_ledger={owner}", "privacy.ledger_mirror"
    cases = [[f"{mirror}={place}", shared] for place in places]
    not_shared = {*places} - {path for path in places if path.exists() and path.samefile(owner)}
    cases += [[f"privacy.shared_ledger={place}"] for place in sorted(not_shared)]
    for options in cases:
        with pytest.raises((PrivacyConfigError, PrivacyStateRefused)) as refusal:
            run(folder, *OPTIONS, *options, steps=4)
        said = in_one_line(refusal.value)
        assert said is not None and said.exit_code == (
            2 if options[0].startswith(mirror) else said.exit_code
        ), options
        assert image(tmp_path) == before, f"{options}: {refusal.value}"


def published(folder: Path, target: Path) -> None:
    snapshot = read_snapshot(folder / LINES)
    ledger = LedgerFile(lines=snapshot.state.num_lines, last_line_sha256=snapshot.last_hash)
    publish(folder, target, ledger)


NOT_THE_ONE = "is not the one that the ledger recorded"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (called_public, NOT_THE_ONE),
        pytest.param(other_weights, NOT_THE_ONE, marks=pytest.mark.full),
        pytest.param(behind_the_last_line, NOT_THE_ONE, marks=pytest.mark.full),
        (renamed, "of step 1, so it was renamed"),
    ],
)
def test_nothing_uses_a_checkpoint_that_the_ledger_did_not_record(
    damage: Callable[[Path], None], words: str, folder: Path, tmp_path: Path
) -> None:
    """The seal of a manifest has no key, so whoever edits a checkpoint seals it again; the ledger recorded its hash."""
    open_model(folder)
    damage(folder)
    with pytest.raises(NotRecorded, match=words):
        run(tmp_path / "new", f"init.checkpoint={folder}", steps=1)
    assert not (tmp_path / "new" / LINES).exists()
    with pytest.raises(NotRecorded, match="take it away"):  # as evaluate.py and export.py do
        open_model(folder)
    with pytest.raises(NotRecorded, match=f"^{newest(folder)}: .*--no_checkpoints"):
        published(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    alone = shutil.copytree(newest(folder), tmp_path / "alone")
    open_model(Path(alone))  # no ledger, so nothing is attested


@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_crash_between_a_checkpoint_and_its_record_loses_neither(
    steps: int, stopped: Path, tmp_path: Path
) -> None:
    """Of step 2, which is the last or one in the middle: the next session records the checkpoint that it goes on from."""
    folder = tmp_path / "run"
    if steps == 2:
        assert run(tmp_path / "ended", *OPTIONS, steps=steps) == 0
    shutil.copytree(
        stopped if steps == 4 else tmp_path / "ended", folder
    )  # a file that no program has locked
    last = max(
        number for number, line in enumerate(lines(folder)) if b'"type":"checkpoint"' in line
    )
    write(folder, lines(folder)[:last])
    record = folder / "private/members.jsonl"
    marks = [
        line
        for line in record.read_bytes().splitlines(keepends=True)
        if json.loads(line)["seq"] < last
    ]
    record.write_bytes(b"".join(marks))
    open_model(folder)
    published(folder, tmp_path / "out")
    assert run(folder, *OPTIONS, steps=steps) == 0
    open_model(folder / "checkpoints/step-00000002")
    ledger = verify.read_ledger(folder / LINES)
    assert ledger.close_reason and "are those that the ledger recorded" in verify.check_checkpoints(
        verify.Folder(folder, ledger, None)
    )


def test_what_is_not_refused_is_mended_and_goes_on(folder: Path) -> None:
    torn(folder)
    damaged(folder)
    assert run(folder, *OPTIONS, steps=4) == 0
    assert list((folder / "checkpoints").glob("set-aside-*"))
    assert sum(b'"type":"repair"' in line for line in lines(folder)) == 1


@pytest.mark.parametrize("is_new", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_file_stop_that_is_there_before_a_start_is_said_and_obeyed(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_new: bool
) -> None:
    """Once: the same command then goes on, unless somebody asks again."""
    folder = tmp_path / "run"
    if is_new:
        folder.mkdir()
    else:
        shutil.copytree(stopped, folder)
    charges = sum(b'"type":"intent"' in line for line in lines(folder)) if not is_new else 0
    (folder / "STOP").touch()
    for _ in range(2):
        assert run(folder, *OPTIONS, steps=4) == 7
        assert f"{folder}/STOP is there already" in " ".join(capsys.readouterr().out.split())
        assert sum(b'"type":"intent"' in line for line in lines(folder)) == charges
        (folder / "STOP").touch()
    os.utime(folder / "STOP", (0, 0))  # as when the last of these starts had stopped
    with pytest.MonkeyPatch.context() as torchrun:
        torchrun.setenv(
            "TORCHELASTIC_RESTART_COUNT", "1"
        )  # it starts ranks again whatever their exit code is
        assert run(folder, *OPTIONS, steps=4) == 7
    os.utime(folder / "STOP", (0, 0))
    assert run(folder, *OPTIONS, steps=4) == 0
    assert not (folder / "STOP").exists()


def test_a_ledger_behind_the_start_that_is_gone_or_edited_is_missed_before_the_first_write(
    stopped: Path, tmp_path: Path
) -> None:
    folder, start = tmp_path / "run", f"init.checkpoint={stopped}"
    stop_after(1, folder, start)
    copy = folder / "behind/ledger-1.jsonl"
    whole = copy.read_bytes()
    (folder / "STOP").touch()
    for content in (None, whole.replace(b"0", b"1"), whole[: whole.rfind(b"\n", 0, -1) + 1]):
        copy.unlink()
        if content is not None:
            copy.write_bytes(content)
        before = image(folder)
        with pytest.raises(PrivacyStateRefused, match=r"ledger-1\.jsonl"):
            run(folder, *OPTIONS, start, steps=4)
        assert image(folder) == before
        copy.write_bytes(whole)
    (folder / "STOP").unlink()
    assert run(folder, *OPTIONS, start, steps=4) == 0


def test_the_checks_alone_write_nothing_and_a_start_refused_at_last_leaves_no_ledger(
    tmp_path: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, new = load_machine_settings(ROOT / "ds_configs/zero1.json"), tmp_path / "new"

    def refuse(*_: object) -> None:
        raise PrivacyConfigError("refused at last")

    config = load_config(
        ROOT / "recipes/tiny.toml",
        ["heldout.num_captions=0", f"privacy.ledger_mirror={tmp_path}/mirror"],
    )
    arguments = (config, settings, "local", RunFolder(new), ROOT, Ranks(), one_rank, None)
    for check in TrainerStart(*arguments, may_restart=False).checks():  # type: ignore[arg-type]
        check()
        assert check.__doc__, "a check says why it is there"
    monkeypatch.setattr("trainer.run.start.require_neighbours_apart", refuse)
    with pytest.raises(PrivacyConfigError, match="refused at last"):
        train(config, settings, "local", new, ROOT, Ranks(), one_rank)
    assert not (new / "ledger.jsonl").exists() and not (tmp_path / "mirror").exists()
    assert not list((new / "private").glob("*.key*"))


def test_a_loop_that_was_killed_before_its_end_is_ended_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    with monkeypatch.context() as patch:
        patch.setattr(
            "privacy.run.run_ledger.RunLedger.close_run",
            lambda self: (_ for _ in ()).throw(KeyboardInterrupt()),
        )
        with pytest.raises(KeyboardInterrupt), make(own) as loop:
            for _ in loop:
                pass
    with make(own) as loop:
        assert loop.steps_done == 6 and b'"type":"close"' in (own / "ledger.jsonl").read_bytes()


def test_a_new_run_beside_a_checkpoint_that_was_set_aside_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with make(own, save_every=1) as loop:
        loop.step()
    for path in (own / "checkpoints").glob("step-*"):
        path.rename(path.with_name(f"set-aside-{path.name}"))
    (own / "ledger.jsonl").unlink()
    shutil.rmtree(own / "private")
    with pytest.raises(
        PrivacyStateRefused, match=r"is gone, and a checkpoint of step 1 remembers it"
    ):
        make(own)
    assert not (own / "ledger.jsonl").exists()


def test_a_run_without_a_premise_of_its_guarantee_is_refused_before_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One premise of many: tests/privacy/test_premises.py."""
    monkeypatch.setattr(SumTarget, "examples", 65)
    with pytest.raises(
        PrivacyConfigError, match=r"a premise of the guarantee does not hold: a sum of 65 examples"
    ):
        run(tmp_path / "run", *OPTIONS, steps=1)
    assert not (tmp_path / "run" / LINES).exists() and not list(tmp_path.rglob("sampling.key"))
