"""verify.py against folders that an adversary made: nothing in them speaks for verify.py, hides a file or ends it."""

from pathlib import Path

import pytest

from privacy import verify
from tests.privacy.published import publish
from tests.privacy.verify.judging import KEY, Judge, sentences


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
    assert verify.main([str(publish(tmp_path / "run", KEY, steps=2))]) == 0
    assert "the ledger is open" in capsys.readouterr().out
