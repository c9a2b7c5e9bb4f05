"""The bound of a core: operations are counted as torch counts FLOPs, and in bytes read and written once."""

from typing import Any

import pytest
import torch

from benchmarks.roofline import CORE, OperationCounter, count_operations
from models.captioner import Captioner
from models.config import captioner_config
from privacy.clipping import SUMS
from trainer.planner.probe import META, count_flops, with_fused_attention

CONFIG = captioner_config(
    "pico", image_size=32, vocab_size=100, num_tokens=9, encoder_depth=1, decoder_depth=1
)


@pytest.mark.parametrize("mode", ["non-private", "bookkeeping", "two_pass"])
def test_flops_are_those_of_torch(mode: Any) -> None:
    with META:
        model = Captioner(CONFIG)
        inputs = {
            "images_BCHW": torch.empty(3, 3, 32, 32),
            "tokens_BL": torch.empty(3, 9, dtype=torch.long),
        }
        inputs["token_mask_BL"] = torch.empty(3, 9, dtype=torch.bool)
        is_padding_B = torch.empty(3, dtype=torch.bool)

    def step() -> None:
        if mode == "non-private":
            model(**inputs).sum().backward()
        else:
            clipped.add_micro_batch(model, inputs, is_padding_B)

    if mode != "non-private":
        clipped = SUMS[mode](model, 1.0)
    with with_fused_attention():
        assert count_operations(step).total("flops") == count_flops(step) > 0


def test_every_operation_reads_and_writes_once() -> None:
    x, y = torch.empty(5, 7, device=META), torch.empty(7, device=META, dtype=torch.bfloat16)
    whole, row = 4 * 35, 2 * 7
    for work, moved in (
        (lambda: x + y.expand(5, 7), whole + row + whole),
        (lambda: x.add_(y), whole + row + whole),
        (lambda: x.copy_(y), row + whole),
        (lambda: torch.mul(x, 2, out=torch.empty_like(x)), 2 * whole),
        (lambda: torch.zeros_like(x), whole),
        (lambda: x.t()[1:].view(6, 5), 0),
        (lambda: torch._foreach_add_([x, y], 1.0), 2 * (whole + row)),
    ):
        with OperationCounter() as counter:
            work()
        found = [(row.launches, row.moved) for row in counter.rows.values()]
        assert found == ([(1, moved)] if moved else []), work


def test_a_launch_takes_the_longer_of_computing_and_moving() -> None:
    square, thin = (torch.empty(4096, n, device=META) for n in (4096, 1))
    with OperationCounter() as counter:
        square @ square
        square @ thin
    (row,) = counter.rows.values()
    computing = 2 * 4096**3 / CORE.fp32_peak
    moving = 4 * (4096**2 + 2 * 4096) / CORE.memory_bandwidth
    assert row.seconds == pytest.approx(computing + moving)
