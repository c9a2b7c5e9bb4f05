"""`clipping_mode = "auto"`: bookkeeping where it fits, two_pass where it does not, the same on every rank."""

from typing import Any

import pytest
import torch

from privacy.step import collectives
from trainer.planner.memory import USABLE, RankMemory, better_mode
from trainer.run.clipping_mode import ModeChoice, choose_mode

PEAKS = {"bookkeeping": 10_000, "two_pass": 5_000}


def choose(available: int | None) -> ModeChoice:
    memory = RankMemory(
        owned=50,
        weights=100,
        masters=200,
        gradient_buffer=0,
        moments=40,
        average=20,
        sums=300,
        bucket=7,
        gathered=13,
        step=0,
        host=0,
    )
    return choose_mode(
        memory, PEAKS.__getitem__, torch.device("cpu"), 16, available=lambda device: available
    )


@pytest.mark.parametrize(
    ("usable", "two_passes", "expected"),
    [
        (None, 1, ("bookkeeping", None)),
        (1000.0, 1, ("bookkeeping", None)),
        (999.5, 899, ("two_pass", 899)),
        (999.5, 900, ("bookkeeping", 900)),
        (0.0, 1, ("two_pass", 1)),
    ],
)
def test_two_passes_are_taken_where_they_save_a_tenth_of_what_does_not_fit(
    usable: float | None, two_passes: int, expected: tuple[str, int | None]
) -> None:
    assert better_mode(1000, usable, lambda: two_passes) == expected


def test_bookkeeping_where_it_fits_and_two_passes_where_it_does_not(one_rank: torch.device) -> None:
    """With what the first micro-batch and the first step make: sums, moments, gathered weights, a bucket, an average."""
    plenty = choose(2**40)
    assert (plenty.mode, plenty.needed, plenty.needed_in_two_passes) == (
        "bookkeeping",
        10_380,
        None,
    )
    just = round(plenty.needed / USABLE) + 1
    assert choose(just).mode == "bookkeeping"
    tight = choose(just - 10)
    assert (tight.mode, tight.needed, tight.needed_in_two_passes) == ("two_pass", 10_380, 5_380)
    assert choose(None).mode == "bookkeeping"
    assert "that may be too much" in choose(1000).sentence and "two_pass" in choose(1000).sentence


@pytest.mark.parametrize(("place", "others"), [(0, "elsewhere"), (1, "elsewhere"), (1, None)])
def test_the_rank_with_the_least_room_decides(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, place: int, others: str | None
) -> None:
    """Another rank, before or after this one, sees 1,000 bytes free; on the same host each has half of what it sees."""

    def with_another(mine: Any) -> list[Any]:
        other = (others or mine[0], mine[1], 1000)
        return [mine, other] if place else [other, mine]

    monkeypatch.setattr(collectives, "gather_objects", with_another)
    choice = choose(2**40)
    assert choice.mode == "two_pass" and choice.available == (1000 if others else 500)
