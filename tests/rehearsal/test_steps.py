"""The rehearsal's part `steps`, at a size that shows that the program runs."""

from pathlib import Path

import pytest

from tests.processes import Forked, run_python
from tests.rehearsal import steps
from tests.rehearsal.part import Part

SIZE = steps.Size(num_steps=12, crashes=2, stops=1, window=4, noise_multiplier=16.0)


def run_command(python: str, *words: object) -> str:
    """The part's `command`, in a process that need not import everything again."""
    ended = run_python([str(word) for word in words if word != "-I"])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.full
def test_a_few_steps_and_two_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "launch", lambda words, log: Forked(words, stdout=log))
    monkeypatch.setattr(steps, "command", run_command)
    part = Part("steps", tmp_path / "steps")
    steps.rehearse(part, SIZE)
    assert part.sizes == {"num_steps": 12, "crashes": 2}
    whole = part.stages[-1]["measured"]
    assert sum(whole["killed_after"].values()) == 2 and whole["starts"] == 5
    assert whole["lines"] > 2 * 12 and 0 <= whole["attempts_lost"] <= 2
    stages = len(part.stages)
    steps.rehearse(Part("steps", tmp_path / "steps"), SIZE)
    assert len((tmp_path / "steps" / "stages.jsonl").read_text().splitlines()) == stages, (
        "a stage that was done ran again"
    )

    run, walk = steps.Run(tmp_path / "steps" / "run", SIZE), part.stages[2]["measured"]
    with pytest.raises(AssertionError, match="claims another epsilon"):
        steps.whole(run, [walk | {"epsilon": walk["epsilon"] + 1e-6}])
    with pytest.raises(AssertionError, match="at the end, and took"):
        steps.whole(
            run, [walk | {"last_step_processor_seconds": 3 * walk["first_step_processor_seconds"]}]
        )
