import pytest

from trainer.loop import reporting
from trainer.loop.reporting import ProgressLine


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reporting, "time", clock)
    return clock


def test_plain_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """At most one every ten seconds, and the last step always."""
    line = ProgressLine(0, 100)
    for step in range(1, 101):
        clock.now += 1
        line.update(step, {"eps": f"{step / 10:.1f}", "lr": "1e-3"})
    line.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[0] == "step 1/100  1.0%  eps 0.1  lr 1e-3  eta 0:01:39"
    assert lines[-1] == "step 100/100  100.0%  eps 10.0  lr 1e-3  eta 0:00:00"


def test_the_time_left_counts_this_start_only(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(90, 100)
    clock.now += 3600
    line.update(91, {})
    assert capsys.readouterr().out.strip().endswith("eta 9:00:00")
