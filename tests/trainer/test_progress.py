"""Commands that take longer than two seconds say what they do, on stderr alone."""

import io
import re
import sys
import time

import pytest

from trainer import progress
from trainer.loop.reporting import ProgressLine
from trainer.progress import track, working


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("counting"):
        assert list(track(range(5), "numbers", 5)) == [0, 1, 2, 3, 4]
    time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_what_is_slow_says_what_it_does_and_for_how_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("counting"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "counting ...\n")
    with working("counting"):
        time.sleep(0.5)
    time.sleep(0.2)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "counting ..." and 2 <= len(others) <= 4
    assert set(others) <= {"counting: 0 s so far", "counting: 1 s so far"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FACTS = {
    "eps": "4.792",
    "loss": "0.361",
    "lr": "5.9e-03",
    "ex/s": "166",
    "data": "32%",
    "gradients": "91%",
}
FACTS |= {
    "intent": "1%",
    "reduction": "2%",
    "noise": "3%",
    "update": "3%",
    "TFLOP/s": "0.0009",
    "mem": "0.4G",
}


@pytest.mark.parametrize(
    ("width", "seen"), [(40, ()), (80, ("eta", "loss", "lr")), (240, ("eta", *FACTS))]
)
def test_a_narrow_terminal_shows_what_matters(
    width: int, seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    for step, facts in ((45, FACTS), (45, FACTS | {"eps": "none (no formal guarantee)"})):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        line = ProgressLine(0, 120)
        line.update(step, facts)
        line.close()
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
        lines = [one for one in re.split(r"[\r\n]+", text) if one]
        assert all(len(one) <= width for one in lines), lines
        assert lines[-1].startswith("step 45/120 [###       ] 37.5%  eps " + facts["eps"][:3])
        assert facts is not FACTS or all(word in lines[-1] for word in seen), lines[-1]
