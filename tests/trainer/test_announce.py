"""The last words of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from privacy.errors import DONE
from trainer.run.announce import conclude


@pytest.mark.parametrize(("delta", "is_useless"), [(0.0025, True), (0.002, False)])
def test_the_last_line_says_that_a_delta_of_1_over_n_protects_nobody(
    delta: float, is_useless: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = SimpleNamespace(target_delta=delta, num_examples=400, num_steps=4, max_intents=6)
    ledger = SimpleNamespace(
        claim=lambda: (0.5, delta), epsilon=lambda: 0.5, position=lambda: {"hash": "f00"}
    )
    conclude(
        SimpleNamespace(
            ledger=ledger,
            plan=plan,
            folder=SimpleNamespace(root=Path("run"), stop=Path("run/STOP")),
        ),
        DONE,
    )  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert (
        said.startswith(f"done: 4 steps, epsilon 0.500 at delta {delta:g}")
        and ("protects nobody" in said) is is_useless
    )
