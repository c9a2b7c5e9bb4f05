"""Whatever a run folder holds, report.py ends in a card or in one line, and reads nothing outside of the folder's own files."""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from launch_scripts import audit, report
from privacy.accounting import accountants
from privacy.card import ledger_card as card_report
from privacy.card.run_card import write_card
from privacy.command import main as library
from tests.privacy.published import publish
from tests.privacy.verify.test_fuzz import disturb
from trainer.card_of_run import build_card
from trainer.config.cli import run_command
from trainer.errors import in_one_line


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = publish(tmp_path_factory.mktemp("reported") / "run")
    (folder / "head.json").write_text("{}")
    (folder / "behind").mkdir()
    shutil.copy(folder / "ledger.jsonl", folder / "behind/ledger-1.jsonl")
    (folder / "evaluation").mkdir()
    (folder / "evaluation/heldout.jsonl").write_text('{"step": 4, "loss": 1.5}\n')
    (folder / "report/audit-ledger.json").write_text(
        json.dumps({"audit": "ledger", "verdict": "consistent"})
    )
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what surrounds the claim, which takes most of a card's time."""
    monkeypatch.setattr(
        card_report, "risk_of", lambda *_: {"advantage": 0.0, "true_positive_rates": []}
    )
    monkeypatch.setattr(card_report, "epsilon_of_several", lambda *_: None)
    monkeypatch.setattr(accountants, "epsilon_prv", lambda *_: (None, None, None))
    monkeypatch.setattr(accountants, "epsilon_replace_one", lambda *_: None)


def reported(folder: Path) -> str | None:
    """The line that ends it; None where a card was written."""
    raised = None
    try:
        write_card(folder, build_card(folder))
    except Exception as error:
        raised = error
    if raised is None:
        return None
    said = in_one_line(raised)
    assert said is not None and "\n" not in said.line, repr(raised)
    return said.line


def test_a_disturbed_folder_ends_in_a_card_or_in_one_line(
    original: Path, tmp_path: Path, quick: None
) -> None:
    ends = set()
    for seed in range(10):
        folder = tmp_path / str(seed)
        shutil.copytree(original, folder)
        disturb(folder, random.Random(seed))
        try:
            ends.add(reported(folder) is None)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {folder}") from error
        shutil.rmtree(folder)
    assert ends == {True, False}


LOUD = "\x1b]0;t\x07\x1b[2Ja\r\nverify: consistent\n\x00\x7f\x9b1m\u0085\u061c\u200b\u202e\u2028\u2066\U000e0041[red]\ud800"
"""Escape sequences, ends of lines, NUL, DEL, C1, what turns or hides text, and half of a character."""


def require_quiet(shown: str, where: object) -> None:
    assert shown and all(letter.isprintable() or letter == "\n" for letter in shown), (where, shown)
    assert "\nverify: consistent\n" not in shown, where


def test_no_text_of_the_other_files_reaches_the_console_raw(
    original: Path,
    tmp_path: Path,
    quick: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings, audits, manifest, metrics and the names of files and of the folder itself."""
    loud = LOUD[:-1].replace("\x00", "")  # neither stands in a name
    folder = Path(shutil.copytree(original, tmp_path / f"run{loud}"))
    (folder / f"report/audit-{loud}.json").write_text(json.dumps({"audit": LOUD, "verdict": LOUD}))
    (folder / loud).write_text("what nobody publishes")
    text = "".join(f"\\U{ord(letter):08X}" for letter in loud)
    config = (folder / "config.toml").read_text().replace('"private"', f'"{text}"')
    (folder / "config.toml").write_text(f'{config}\ndataset_name = "{text}"\n')
    manifest = folder / "checkpoints/step-00000004/manifest.json"
    facts = json.loads(manifest.read_text())
    facts |= {name: value + LOUD for name, value in facts.items() if isinstance(value, str)}
    manifest.write_text(json.dumps(facts | {LOUD: LOUD}))

    def said(script: Any, *words: str) -> Any:
        monkeypatch.setattr(sys, "argv", [*words, "--run_dir", str(folder)])
        with pytest.raises(SystemExit):
            run_command(script.main)
        return capsys.readouterr()

    for script, words in ((report, ["report.py"]), (audit, ["audit.py", "ledger"])):
        for more in ([], ["--json"]):
            shown = said(script, *words, *more)
            require_quiet(shown.out + shown.err, words)
    for command in ("report", "audit ledger", "verify"):
        for more in ([], ["--json"]):
            library.main([*command.split(), str(folder), *more])
            shown = capsys.readouterr()
            require_quiet(shown.out + shown.err, command)
    shown = said(report, "report.py", "--publish", str(tmp_path / f"out{loud}"), "--no_checkpoints")
    assert "left out: " in shown.out
    require_quiet(shown.out + shown.err, folder)
