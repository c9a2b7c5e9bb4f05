"""Warnings at the start."""

from types import SimpleNamespace

import pytest

from trainer.run.announce import _claim, warn_of_few_cpus


def test_too_few_name_the_worst_rank_and_both_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.ranks.distributed.gather_objects", lambda _: [(8, "a"), (4, "a"), (1, "b"), (8, "b")])
    warn_of_few_cpus(1)
    assert capsys.readouterr().out == ""
    warn_of_few_cpus(8)
    said = capsys.readouterr().out
    assert "rank 2 on b may use 1 CPU for its 8 data workers: give" in said and "--cpus-per-task=8" in said


@pytest.mark.parametrize(("delta", "is_useless"), [(0.0025, True), (0.002, False)])
def test_the_last_line_says_that_a_delta_of_1_over_n_protects_nobody(delta: float, is_useless: bool) -> None:
    plan = SimpleNamespace(target_delta=delta, num_examples=400)
    ledger = SimpleNamespace(claim=lambda: (0.5, delta), epsilon=lambda: 0.5)
    said = _claim(SimpleNamespace(ledger=ledger, plan=plan))  # type: ignore[arg-type]
    assert said.startswith(f"epsilon 0.5000 at delta {delta:g}") and ("protects nobody" in said) is is_useless
