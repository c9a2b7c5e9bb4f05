"""The paper bound: operations are counted as torch counts FLOPs, in bytes read and written once, and as inductor fuses them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.captioner import Captioner
from models.config import captioner_config
from privacy.clipping import ClippedSum
from trainer.planner.hardware import GPUS
from trainer.planner.inductor import kernels_of
from trainer.planner.probe import META, count_flops, with_fused_attention
from trainer.planner.roofline import OperationCounter, count_operations

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
        clipped = ClippedSum(model, 1.0, mode=mode, self_check=False)
    with with_fused_attention():
        assert count_operations(step, on_cuda=False).total("flops") == count_flops(step) > 0


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
    square, thin = (torch.empty(4096, n, device=META, dtype=torch.bfloat16) for n in (4096, 1))
    with OperationCounter(GPUS["h100-80gb"]) as counter:
        square @ square
        square @ thin
    (row,) = counter.rows.values()
    assert row.seconds == pytest.approx(2 * 4096**3 / 700e12 + 2 * (4096**2 + 2 * 4096) / 3.0e12)
    with OperationCounter() as counter:
        square.float() @ square.float()
    (product,) = (row for row in counter.rows.values() if row.operation == "mm")
    assert product.seconds == pytest.approx(2 * 4096**3 / 50e12)


def layer_norm(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    normalised = F.layer_norm(x.float(), x.shape[2:])
    return (normalised * g).sum(1), g.sum(1, dtype=torch.float32)


def add_rounded(parts: list[Tensor], low: Tensor, high: Tensor, scale: float) -> None:
    x = (parts[0].double() + parts[1]).mul_(scale).round_()
    more = (x * 2.0**-30).round_()
    high.add_(more.to(torch.int16))
    low.add_(x.sub_(more, alpha=2.0**30).to(torch.int32))


def test_a_compiled_function_is_as_many_kernels_as_inductor_makes_of_it_for_cuda() -> None:
    """This one fails where torch changes what trainer/planner/inductor.py needs of it."""
    n = 1 << 20
    parts, sums = (
        [torch.empty(n, device=META)] * 2,
        (torch.empty(n, device=META, dtype=d) for d in (torch.int32, torch.int16)),
    )
    one = kernels_of(
        add_rounded, (parts, *sums, 2.0**20)
    )  # one pass: what meets, low and high read and written
    assert (one.launches, one.moved) == (1, n * (2 * 4 + 2 * 4 + 2 * 2))
    assert "tl.float64" in one.code and "cpp_fused" not in one.code
    x = torch.empty(16, 197, 1024, device=META, dtype=torch.bfloat16)
    two = kernels_of(layer_norm, (x, x))
    # A row's mean and variance, then sums over rows: the second one reads x again, and means and deviations in fp32.
    assert two.launches == 2
    assert two.moved == 3 * x.nbytes + 2 * 2 * 4 * 16 * 197 + 2 * 4 * 16 * 1024
    assert two.code.count("def triton_") == 2

    def step() -> None:
        counter.launch_fused(layer_norm, (x, x), False)

    counter = OperationCounter()
    with counter:
        step()
    (row,) = counter.rows.values()
    assert (row.operation, row.launches, row.moved) == ("compiled layer_norm", 2, two.moved)
