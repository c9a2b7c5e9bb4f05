"""Commands that take longer than two seconds say what they do, on stderr alone."""

import time

import pytest

from trainer import progress
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


def test_what_is_slow_says_what_it_does_and_for_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    with working("counting"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "counting ...\n")
    with working("counting"):
        time.sleep(0.5)
    time.sleep(0.2)
    first, *others = capsys.readouterr().err.splitlines()
    assert (
        first == "counting ..."
        and 2 <= len(others) <= 4
        and set(others) <= {"counting: 0 s so far", "counting: 1 s so far"}
    )


def test_a_bar_speaks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with working("counting"):
        for _ in track(range(20), "numbers", 20):
            time.sleep(0.02)
    assert {line.split(":")[0] for line in capsys.readouterr().err.splitlines()} == {"counting ...", "numbers"}


def test_a_slow_loop_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for number in track(range(30), "numbers", 30):
        seen.append(number)
        time.sleep(0.02)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and seen == list(range(30)) and 2 <= len(lines) <= 7
    done = [int(line.removeprefix("numbers: ").removesuffix(" of 30 done")) for line in lines]
    assert done == sorted(done) and 0 < done[0] < 30


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with working("counting", shows=False):
        for _ in track(range(3), "numbers", 3, shows=False):
            time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_the_announcement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="bad"), working("counting"):
        raise ValueError("bad")
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
