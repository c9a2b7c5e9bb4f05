"""`clipping_mode = "auto"`: bookkeeping where it fits, two_pass where it does not, the same on every rank."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import ClippedSum
from privacy.step.engine import Piece, ShardLayout
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import build, pairs
from tests.privacy.clipping.test_modes import Blocks
from trainer.ranks import distributed
from trainer.run import clipping_mode
from trainer.run.clipping_mode import USABLE, ModeChoice, better_mode, choose_mode
from trainer.run.memory_estimate import MemoryTimeline

ROWS = 16


class PlainEngine:
    """As much of an engine as the choice needs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.device, self.compute_dtype = torch.device("cpu"), torch.float32
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.layout = ShardLayout((tuple(Piece(n, 0, s.numel()) for n, s in self.shapes.items()),))


def inputs(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 9, 16)}


def choose(available: int | None, *, checkpointed: bool = True) -> tuple[ModeChoice, ClippedSum]:
    engine: Any = PlainEngine(Blocks(checkpointed=checkpointed))
    clipped = ClippedSum(engine.module, 1.0, self_check=False)
    choice = choose_mode(clipped, engine, inputs, ROWS, available=lambda device: available)
    clipped.detach()
    assert clipped.mode == choice.mode
    assert not any(total.any() for _, total in clipped.sums()), "made-up examples must not stay in the sums"
    return choice, clipped


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
    plenty, _ = choose(2**40)
    assert plenty.mode == "bookkeeping" and plenty.needed_in_two_passes is None
    just = round(plenty.needed / USABLE) + 1
    assert choose(just)[0].mode == "bookkeeping"
    tight, _ = choose(just - 10)
    assert tight.mode == "two_pass" and tight.needed_in_two_passes is not None
    assert tight.needed_in_two_passes < 0.6 * tight.needed == 0.6 * plenty.needed
    assert choose(None)[0].mode == "bookkeeping"


WORDS, CAPTION = 1999, 12
"""More of both than pixels, so that the scores decide what a micro-batch takes."""


def captions(count: int) -> dict[str, Tensor]:
    return {
        "images_BCHW": torch.randn(count, 3, 8, 8),
        "tokens_BL": torch.randint(3, WORDS, (count, CAPTION)),
        "token_mask_BL": torch.ones(count, CAPTION, dtype=torch.bool),
    }


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("captions_in_one_piece", [1, 6, 100])
def test_the_vocabulary_is_cut_as_in_the_real_micro_batch(
    one_rank: torch.device, captions_in_one_piece: int, mode: Any
) -> None:
    """Where the probes' two and four captions have their scores in one piece and the real micro-batch has not, too."""
    config = captioner_config(
        "pico", image_size=8, patch_size=4, encoder_width=8, encoder_depth=1, encoder_num_heads=2, decoder_width=8,
        decoder_depth=1, decoder_num_heads=2, vocab_size=WORDS, num_tokens=CAPTION,
        max_logits=captions_in_one_piece * (CAPTION - 1) * WORDS,
    )  # fmt: skip
    engine: Any = PlainEngine(build_captioner(config))
    clipped = ClippedSum(engine.module, 1.0, mode=mode, self_check=False)
    with MemoryTimeline() as timeline:
        clipped.add_micro_batch(engine.module, captions(ROWS), torch.zeros(ROWS, dtype=torch.bool))
    clipped.zero_()
    predicted = clipping_mode._peak(clipped, engine, captions, mode, ROWS)
    clipped.detach()
    assert predicted == pytest.approx(max(timeline.live_bytes), rel=0.03)


@pytest.mark.parametrize("place", [0, 1])
def test_the_host_with_the_least_room_decides(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Another host, before or after this one in the order of ranks, has 1,000 bytes free."""

    def with_another_host(mine: Any) -> list[Any]:
        other = mine if not isinstance(mine, tuple) else ("elsewhere", *mine[1:]) if len(mine) == 3 else (mine[0], 1000)
        return [mine, other] if place else [other, mine]

    monkeypatch.setattr(distributed, "gather_objects", with_another_host)
    choice, _ = choose(2**40)
    assert choice.mode == "two_pass" and choice.available == 1000


def rank_choices(device: torch.device, name: str, stage: int) -> list[dict[str, Any]]:
    engine = build(device, name, stage)
    clipped = ClippedSum(engine.module, 1.0, shapes=engine.shapes, self_check=False)
    return [
        asdict(choose_mode(clipped, engine, pairs, 8, available=lambda device, rooms=rooms: rooms[distributed.rank()]))  # type: ignore[misc]
        for rooms in ((2**40, 2**41), (2**40, 1000))
    ]


@pytest.mark.parametrize(("name", "stage"), [pytest.param("local", 1, marks=pytest.mark.full), ("deepspeed", 3)])
def test_every_rank_makes_the_choice_of_the_tightest(name: str, stage: int) -> None:
    first, second = run_ranks(f"{__name__}:rank_choices", 2, name=name, stage=stage)
    assert first == second
    plenty, tight = first
    # They share a machine, so each has half of what the one that sees least sees.
    assert plenty["mode"] == "bookkeeping" and plenty["available"] == 2**39
    assert tight["needed_in_two_passes"] is not None and tight["available"] == 500
