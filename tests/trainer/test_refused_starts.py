"""A start that is refused changes nothing in a run folder that was trained in: no byte, no name, no mode."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from privacy.card.model import LedgerFile
from privacy.card.report import read_snapshot
from privacy.errors import NotRecorded
from privacy.ledger.chain import hash_line
from tests.trainer.test_chains import run
from trainer.checkpoints.read import sealed
from trainer.errors import in_one_line
from trainer.publish import publish
from trainer.run.folder import RunFolder
from trainer.weights.open_model import open_model

pytestmark = pytest.mark.usefixtures("one_rank")
LINES = "ledger.jsonl"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, one_rank: torch.device) -> Path:
    """A run that was stopped after two of its four steps, with a checkpoint of each."""
    folder: Path = tmp_path_factory.mktemp("refused") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunFolder, "lock", lambda self: (self.private / "lock").touch(0o600))
        steps: list[int] = []
        patched.setattr("trainer.loop.stopping.StopRequests.pending", lambda self: steps.append(1) or len(steps) > 2)
        assert run(folder, "train.keep_checkpoints=3", "privacy.reserved_attempts=9", steps=4) == 7
    assert len(list((folder / "checkpoints").glob("step-*"))) == 2
    return folder


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
    kept = next(number for number, line in enumerate(lines(folder)) if b'"type":"checkpoint"' in line) + 2
    write(folder, [*lines(folder)[:kept], b'{"seq":99,"type":"int'])
    record = folder / "private/members.jsonl"
    marks = [line for line in record.read_bytes().splitlines(keepends=True) if json.loads(line)["seq"] < kept - 1]
    record.write_bytes(b"".join(marks))


def torn(folder: Path) -> None:
    with (folder / LINES).open("ab") as file:
        file.write(b'{"seq":99,"type":"int')


def of_another_run(folder: Path) -> None:
    manifest = newest(folder) / "manifest.json"
    content = json.loads(manifest.read_text()) | {"ledger": {"seq": 3, "hash": "ab" * 32}}
    manifest.write_text(json.dumps(sealed(content)))


def resealed(folder: Path, **changes: object) -> None:
    manifest = newest(folder) / "manifest.json"
    manifest.write_text(json.dumps(sealed(json.loads(manifest.read_text()) | changes)))


def called_public(folder: Path) -> None:
    resealed(folder, training_data={"provenance": "public", "shards": []})


def other_weights(folder: Path) -> None:
    part = next(newest(folder).glob("rank-*"))
    part.write_bytes(part.read_bytes()[:-400] + bytes(400))
    resealed(folder, files={part.name: hashlib.sha256(part.read_bytes()).hexdigest()})


def behind_the_last_line(folder: Path) -> None:
    """As if no record of it had been written yet, although there is one."""
    known = lines(folder)
    resealed(folder, noise_variance=9.0, ledger={"seq": len(known) - 1, "hash": hash_line(known[-1].rstrip(b"\n"))})


def no_checkpoints(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("step-*"):
        shutil.rmtree(path)


def all_damaged(folder: Path) -> None:
    for part in (folder / "checkpoints").glob("step-*/rank-*"):
        part.write_bytes(part.read_bytes()[:-1])


def newest_damaged(folder: Path) -> None:
    part = next(newest(folder).glob("rank-*"))
    part.write_bytes(part.read_bytes()[:-1])


MIRROR = "privacy.ledger_mirror={mirror}"
REFUSED: dict[str, tuple[list[Callable[[Path], object]], list[str]]] = {
    "cut behind a checkpoint": ([cut_behind_a_checkpoint], []),
    "cut, and a new mirror": ([cut_behind_a_checkpoint], [MIRROR]),
    "a checkpoint of another run": ([torn, of_another_run], []),
    "a checkpoint called public": ([torn, called_public], []),
    "other weights": ([torn, other_weights], []),
    "a checkpoint that claims to be without record": ([behind_the_last_line, torn], []),
    "all checkpoints gone": ([torn, no_checkpoints], []),
    "no folder of checkpoints": ([torn, lambda folder: shutil.rmtree(folder / "checkpoints")], []),
    "all checkpoints damaged": ([torn, all_damaged], [MIRROR]),
    "the newest damaged, another optimizer": ([torn, newest_damaged], ["optimizer.name=sgd"]),
    "another model": ([torn], ["model.overrides.decoder_width=48"]),
    "another noise": ([torn], ["privacy.noise_multiplier=9"]),
    "other steps": ([torn], ["train.num_steps=9"]),
    "other data": ([torn], ["data.shards=data/demo/train-00001.tar"]),
    "private/ is gone": ([torn, lambda folder: shutil.rmtree(folder / "private")], []),
    "no record of attempts": ([torn, lambda folder: (folder / "private/members.jsonl").unlink()], []),
    "no signing key": ([torn, lambda folder: (folder / "private/signing.key").unlink()], []),
    "no sampling key": ([torn, lambda folder: (folder / "private/sampling.key").unlink()], []),
    "a key that others may read": ([torn, lambda folder: (folder / "private/sampling.key").chmod(0o644)], []),
    "no ledger": ([lambda folder: (folder / LINES).unlink()], []),
    "a line edited": ([lambda folder: write(folder, [lines(folder)[0].replace(b"0", b"1"), *lines(folder)[1:]])], []),
    "a mirror that differs": ([torn], ["privacy.ledger_mirror={folder}/config.toml"]),
    "an owner's limit": ([torn], ["privacy.max_examples_per_owner=3"]),
    "data declared public since": ([torn], ["data.provenance=public"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_start_changes_nothing(
    name: str, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    damages, changes = REFUSED[name]
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    for damage in damages:
        damage(folder)
    (folder / "STOP").touch()
    before = image(tmp_path)
    changes = [change.format(mirror=tmp_path / "mirror.jsonl", folder=folder) for change in changes]
    with pytest.raises(Exception) as refusal:
        run(folder, "train.keep_checkpoints=3", "privacy.reserved_attempts=9", *changes, steps=4)
    assert image(tmp_path) == before, refusal.value
    assert in_one_line(refusal.value) is not None, repr(refusal.value)


def published(folder: Path, target: Path) -> None:
    snapshot = read_snapshot(folder / LINES)
    ledger = LedgerFile(
        format=1, lines=snapshot.state.num_lines, last_line_sha256=snapshot.last_hash, mirrored_sessions=0
    )
    publish(folder, target, ledger)


@pytest.mark.parametrize("damage", [called_public, other_weights, behind_the_last_line])
def test_nothing_uses_a_checkpoint_that_the_ledger_did_not_record(
    damage: Callable[[Path], None], stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal of a manifest has no key, so whoever edits a checkpoint seals it again; the ledger's record is signed."""
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    open_model(folder)
    damage(folder)
    with pytest.raises(NotRecorded, match="is not the one that the ledger recorded"):
        run(tmp_path / "new", f"init.checkpoint={folder}", steps=1)
    assert not (tmp_path / "new" / LINES).exists()
    with pytest.raises(NotRecorded, match="take it away"):  # as evaluate.py and export.py do
        open_model(folder)
    with pytest.raises(NotRecorded, match=f"^{newest(folder)}: .*--no_checkpoints"):
        published(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    alone = shutil.copytree(newest(folder), tmp_path / "alone")
    open_model(Path(alone))  # no ledger, so nothing is attested


def test_a_crash_between_a_checkpoint_and_its_record_loses_neither(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    last = max(number for number, line in enumerate(lines(folder)) if b'"type":"checkpoint"' in line)
    write(folder, lines(folder)[:last])
    record = folder / "private/members.jsonl"
    marks = [line for line in record.read_bytes().splitlines(keepends=True) if json.loads(line)["seq"] < last]
    record.write_bytes(b"".join(marks))
    open_model(folder)
    published(folder, tmp_path / "out")
    assert run(folder, "train.keep_checkpoints=3", "privacy.reserved_attempts=9", steps=4) == 0
    open_model(folder / "checkpoints/step-00000002")  # later sessions record others


def test_what_is_not_refused_is_mended_and_goes_on(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    torn(folder)
    newest_damaged(folder)
    (folder / "STOP").touch()
    assert run(folder, "train.keep_checkpoints=3", "privacy.reserved_attempts=9", steps=4) == 0
    assert not (folder / "STOP").exists() and list((folder / "checkpoints").glob("set-aside-*"))
    assert sum(b'"type":"repair"' in line for line in lines(folder)) == 1
