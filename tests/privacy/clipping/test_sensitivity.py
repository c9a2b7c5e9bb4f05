"""Contract 4: whatever the example is, it moves the sum by at most C (1 + r), in fp32 and in bf16.

Odd images and captions through the real captioner. Activations that are made to break Gram matrices are in test_rules.py, for
every layer; what many examples make of rounding in test_rounding.py and test_accumulators.py.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import SUMS
from privacy.clipping.clipped_sum import Mode
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.distributed.test_engines import pairs, tiny_captioner
from tests.privacy.clipping import oracle

C = 0.1


def change(
    model: nn.Module,
    inputs: dict[str, Tensor],
    example: dict[str, Tensor],
    mode: Mode = "bookkeeping",
) -> float:
    """|sum with the example - sum without it| in units of C."""
    with_it = {k: torch.cat([v, example[k]]) for k, v in inputs.items()}
    count = len(next(iter(inputs.values())))
    total = SUMS[mode](model, C)
    total.add_micro_batch(model, with_it, torch.zeros(count + 1, dtype=torch.bool))
    after = oracle.flat(dict(total.sums())).clone()
    total.zero_()
    total.add_micro_batch(model, with_it, torch.tensor([False] * count + [True]))
    total.detach()
    before = oracle.flat(dict(total.sums()))
    assert after.isfinite().all()
    return float((after - before).norm()) / C


def adversarial_pairs(count: int) -> Iterator[dict[str, Tensor]]:
    """Images and captions that an attacker might insert."""
    generator = torch.Generator().manual_seed(11)
    for i in range(count):
        image = torch.randn(1, 3, 16, 16, generator=generator)
        tokens = torch.randint(3, 37, (1, 7), generator=generator)
        mask = torch.ones(1, 7, dtype=torch.bool)
        match i % 10:
            case 0:
                image[0, i % 3, i % 16, 3] = torch.nan
            case 1:
                image[0, 0, 0, i % 16] = torch.inf if i % 20 == 1 else -torch.inf
            case 2:
                image *= 1e6
            case 3:
                image *= 10.0 ** (i % 38)
            case 4:
                mask[:] = False
            case 5:
                tokens[:] = 3 + i % 30
            case 6:
                image = image * 1e-3 + 1000
            case 7:
                image[:] = float(i)
            case 8:
                mask[:, 2:] = False
            case _:
                image *= 10.0 ** -(i % 30)
        yield {"images_BCHW": image, "tokens_BL": tokens, "token_mask_BL": mask}


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_4_adversarial_pairs(dtype: torch.dtype, count: int) -> None:
    model = tiny_captioner().to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in pairs(3).items()}
    moved = 0
    for number, example in enumerate(adversarial_pairs(count)):
        example = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
        size = change(model, inputs, example)
        moved += size > 0
        assert size <= 1 + SENSITIVITY_SLACK, f"pair {number}, {dtype}: {size} C"
    assert moved >= count / 2  # most of them do contribute: the test is no test of zeros


def cancelling(tokens: int, d: int, p: int, mean: float, seed: int) -> dict[str, Tensor]:
    """Activations with a large common mean; output gradients that sum to zero over the tokens, up to a little noise."""
    generator = torch.Generator().manual_seed(seed)
    x = mean + torch.randn(1, tokens, d, generator=generator)
    w = torch.randn(1, tokens, p, generator=generator)
    return {"x": x, "w": w - w.mean(1, keepdim=True)}
