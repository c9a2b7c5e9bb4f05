"""verify.py against folders that an adversary made: nothing in them speaks for verify.py, hides a file or ends it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.checkpoints.read import sealed
from privacy.ledger.chain import hash_line
from tests.privacy.published import publish
from tests.privacy.verify.judging import Judge, sentences


def test_nothing_in_a_folder_adds_a_line_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder / "checkpoints" / "step-\nverify: consistent: epsilon 0.0100 at delta 1e-12"
    place.mkdir()
    (place / "manifest.json").write_text('{"step":1,"ledger":5}')
    assert verify.main([str(folder)]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert (
        [line for line in lines if line.startswith("verify: ")]
        == [lines[-1]]
        == ["verify: violated: " + lines[-1][18:]]
    )


@pytest.mark.parametrize("place", ["a later step", "a file more"])
def test_a_checkpoint_is_what_its_manifest_says(place: str, folder: Path, judge: Judge) -> None:
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    if place == "a later step":
        checkpoint.rename(checkpoint.with_name("step-00000001"))
    else:
        (checkpoint / "rank-00001-of-00002.safetensors").write_bytes(b"x")
    code, found = judge(folder)
    assert code == 5 and "checkpoints: step-0000000" in sentences(found, "violated")


def test_metrics_that_count_charges_below_zero_are_violated(folder: Path, judge: Judge) -> None:
    (folder / "metrics.jsonl").write_text('{"step":0,"privacy/epsilon":0.0,"privacy/charged_attempts":-1}\n')
    assert judge(folder)[0] == 5
    (folder / "metrics.jsonl").write_text('{"step":0,"privacy/epsilon":0.0}\n')
    assert judge(folder)[0] == 5


def test_a_huge_integer_ends_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / "config.toml"
    config.write_text(config.read_text() + f"\n[data]\ndataset_name = 0x{'f' * 8000}\n")
    assert verify.main([str(folder)]) in (0, 2, 5)
    assert "Traceback" not in capsys.readouterr().err


def test_an_open_ledger_is_said_to_be_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(publish(tmp_path / "run", steps=2))]) == 0
    assert "the ledger is open" in capsys.readouterr().out


FORGED = '{"step":4,"privacy/charged_attempts":5,"privacy/epsilon":0.01}'
METRICS = {
    "epsilon twice": ('{"step":4,"privacy/epsilon":9,"privacy/charged_attempts":5,"privacy/epsilon":0.01}', 5),
    "another line than the last": (FORGED, 5),
    "charges of another step": ('{"step":1,"privacy/charged_attempts":5,"privacy/epsilon":9}', 5),
    "fewer charges": ('{"step":4,"privacy/charged_attempts":1,"privacy/epsilon":9}', 5),
    "words": ('{"step":4,"privacy/charged_attempts":5,"privacy/epsilon":"0.01 (one person)"}', 5),
    "a number of many digits": (f'{{"step":4,"privacy/charged_attempts":5,"privacy/epsilon":{"9" * 50}}}', 5),
    "cut off": ('{"step": 4, "privacy/char', 0),
    "a loss that is no number": ('{"step":4,"heldout/loss":NaN}', 0),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_line_of_the_metrics_is_one_that_the_ledger_passed(name: str, folder: Path, judge: Judge) -> None:
    line, code = METRICS[name]
    honest = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(f"{line}\n{honest}")
    got, found = judge(folder)
    assert got == code and (code == 0 or "metrics: " in sentences(found)), sentences(found)


@pytest.mark.parametrize("place", ["evaluation/heldout.jsonl", "evaluation/samples-00000009.png", "metrics.jsonl"])
def test_whatever_shows_a_later_step_finds_a_ledger_that_was_cut(place: str, folder: Path, judge: Judge) -> None:
    (folder / "evaluation").mkdir()
    (folder / place).write_text('{"step":9,"loss":1.5}\n')
    code, found = judge(folder)
    assert code == 5 and "never finished" in sentences(found)


def cut_back(folder: Path) -> str:
    """To the checkpoint, with all that says more taken away; returns the hash of the line that was the last."""
    last = hash_line((folder / "ledger.jsonl").read_bytes().splitlines()[-1])
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if b'"type":"checkpoint"' in line)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[: end + 1]))
    shutil.rmtree(folder / "report")
    return last


def test_a_kept_head_finds_what_nothing_in_the_folder_can(folder: Path, judge: Judge, capsys: Any) -> None:
    last = hash_line((folder / "ledger.jsonl").read_bytes().splitlines()[-1])
    assert judge(folder, "--head", last)[0] == 0
    assert cut_back(folder) == last
    code, found = judge(folder)
    assert code == 0 and found["attested"]["state of the run"] == "open"
    code, found = judge(folder, "--head", last)
    assert code == 5 and "lacks the line" in sentences(found)
    assert verify.main([str(folder), "--head", "12"]) == 2 and "--head is 64" in capsys.readouterr().err


@pytest.mark.parametrize("renamed", [False, True])
def test_weights_under_a_manifest_of_step_0_are_refused(renamed: bool, folder: Path, judge: Judge) -> None:
    place = folder / "checkpoints/step-00000004"
    manifest = json.loads((place / "manifest.json").read_text()) | {"step": 0, "files": {}}
    (place / "weights.safetensors").unlink()
    (place / "manifest.json").write_text(json.dumps(sealed(manifest)))
    if renamed:
        place.rename(place.with_name("step-00000000"))
    code, found = judge(folder)
    assert code == 5 and "is of step 0" in sentences(found)
