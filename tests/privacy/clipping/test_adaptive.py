"""The count that adaptive clipping releases: each example moves it by at most 1/2, and sum and count together keep sigma."""

import math

import pytest
import torch
from torch import Tensor

from privacy.adaptive_clipping import AdaptiveClipping
from privacy.clipping import ClippedSum, MicroBatchStats
from privacy.clipping.accumulators import EXAMPLES_PER_PART
from privacy.clipping.functions import RAMP, automatic, flat, grouped, per_layer, unclipped
from privacy.errors import PrivacyConfigError
from privacy.releases import SENSITIVITY_SLACK
from tests.distributed.test_engines import double, pairs, tiny_captioner
from tests.privacy.clipping import oracle
from tests.privacy.clipping.neighbours import Product
from tests.privacy.clipping.test_sensitivity import adversarial_pairs

ADAPTIVE = AdaptiveClipping(0.5, 0.2, 2.0)
SIGMA = 1.3


def summed(
    model: torch.nn.Module,
    inputs: dict[str, Tensor],
    padding: Tensor,
    c: float,
    mode: str = "bookkeeping",
) -> tuple[Tensor, float, MicroBatchStats, ClippedSum]:
    """(flat clipped sum, centred count, statistics, clipper)."""
    total = ClippedSum(model, c, mode=mode, adaptive=ADAPTIVE, self_check=False)  # type: ignore[arg-type]
    stats = total.add_micro_batch(model, inputs, padding)
    total.detach()
    return oracle.flat(dict(total.sums())), float(stats.centred_unclipped), stats, total


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_the_count_is_that_of_a_loop(mode: str) -> None:
    model, inputs = tiny_captioner(torch.float64), double(pairs())
    norms = [oracle.norm(g) for g in oracle.per_example_gradients(model, model, inputs)]
    for c in (sorted(norms)[2] * 1.02, sorted(norms)[4] * 1.02, 1e9, 1e-9):
        padding = torch.tensor([False] * 6 + [True])
        _, count, stats, _ = summed(model, inputs, padding, c, mode)
        expected = sum(norm <= c for norm in norms[:6])
        assert count == pytest.approx(expected - 6 / 2, abs=1e-9)
        assert expected == 6 - int(stats.num_clipped)


def test_the_step_from_unclipped_to_clipped() -> None:
    norm_B = torch.tensor([0.0, 1 - RAMP, 1.0, 1 + RAMP, math.inf])
    assert unclipped(norm_B, 1.0).tolist() == pytest.approx([1, 1, 0.5, 0, 0], abs=1e-5)
    assert unclipped(3 * norm_B, 3.0).dtype == torch.float64
    # The last bit of a norm must not decide about a whole count.
    near = torch.tensor([1.0, 1.0 + 2**-23])
    assert float((unclipped(near, 1.0)[0] - unclipped(near, 1.0)[1]).abs()) <= 2**-22 / RAMP


@pytest.mark.parametrize("number", [10, pytest.param(120, marks=pytest.mark.full)])
def test_contract_4_leaving_an_example_out_moves_sum_and_count_by_less_than_one_over_sigma(
    number: int,
) -> None:
    """In units of their noise, jointly: the sensitivity that the accountant is charged for is that of the pair."""
    model, worst, counts = tiny_captioner(), 0.0, []
    inputs, c = pairs(3), 0.1
    for example in adversarial_pairs(number):
        with_it = {k: torch.cat([v, example[k]]) for k, v in inputs.items()}
        after, count_after, _, total = summed(model, with_it, torch.zeros(4, dtype=torch.bool), c)
        before, count_before, _, _ = summed(model, with_it, torch.tensor([False] * 3 + [True]), c)
        gradient, count = total.releases(SIGMA)
        moved = (
            float((after - before).norm()) / gradient["std"],
            (count_after - count_before) / count["std"],
        )
        assert math.isfinite(count_after) and abs(count_after - count_before) <= 0.5
        worst = max(worst, math.hypot(*moved))
        counts.append(count_after - count_before)
    assert worst <= (1 + SENSITIVITY_SLACK) / SIGMA
    assert worst >= 0.999 / SIGMA  # the bound is met: the test is no test of small examples
    assert {-0.5, 0.0, 0.5} <= set(counts)  # clipped; non-finite; unclipped


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_contract_5_padding_and_nonfinite_examples_count_as_exactly_nothing(bad: float) -> None:
    model, inputs = tiny_captioner(), pairs(3)
    none = torch.ones(3, dtype=torch.bool)
    assert summed(model, inputs, none, 0.1)[1] == 0.0
    inputs["images_BCHW"][1, 0, 0, 0] = bad
    _, count, stats, _ = summed(model, inputs, torch.tensor([True, False, True]), 0.1)
    assert count == 0.0 and int(stats.num_nonfinite) == 1


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_a_bound_that_moves_up_and_down_clips_gradients_of_every_size(mode: str) -> None:
    """Real gradients from a 100th of the bound to 100 times it; sum, count and noise are those of the bound of the moment."""
    model, inputs, scale_B = (
        tiny_captioner(torch.float64),
        double(pairs()),
        10.0 ** torch.linspace(-2, 2, 7),
    )

    def task(**inputs: Tensor) -> Tensor:
        return model(**inputs) * scale_B

    gradients = oracle.per_example_gradients(model, model, inputs)
    norms_B = torch.tensor([oracle.norm(g) for g in gradients]) * scale_B
    middle, none = float(norms_B.median()) * 1.02, torch.zeros(7, dtype=torch.bool)
    total = ClippedSum(model, middle, mode=mode, adaptive=ADAPTIVE, self_check=False)  # type: ignore[arg-type]
    total.add_micro_batch(task, inputs, none)  # what was summed under another bound is gone
    for factor in (8, 1 / 8, 1, 64, 1 / 64):
        total.max_grad_norm = c = middle * factor
        assert not oracle.flat(dict(total.sums())).any() and total.sensitivity == c
        stats = total.add_micro_batch(task, inputs, none)
        weights = scale_B * (c / norms_B).clamp(max=1)
        expected = sum(w * oracle.flat(g) for w, g in zip(weights, gradients, strict=True))
        moved = oracle.flat(dict(total.sums())) - expected
        assert (
            float(moved.norm()) <= 1e-3 * c
        )  # the largest examples are a hundred times the smallest
        assert float(stats.centred_unclipped) == pytest.approx(
            int((norms_B <= c).sum()) - 3.5, abs=1e-6
        )
        assert total.releases(SIGMA)[0]["std"] == pytest.approx(
            ADAPTIVE.gradient_noise_multiplier(SIGMA) * c
        )
    total.detach()
    with pytest.raises(PrivacyConfigError, match="between 1e-12, "):
        total.max_grad_norm = 0.0


@pytest.mark.parametrize("function", [automatic, per_layer, grouped])
def test_adaptive_clipping_is_flat_or_refused(function: object) -> None:
    with pytest.raises(PrivacyConfigError, match="flat clipping only"):
        ClippedSum(tiny_captioner(), 1.0, function=function, adaptive=ADAPTIVE, self_check=False)  # type: ignore[arg-type]
    ClippedSum(tiny_captioner(), 1.0, function=flat, adaptive=ADAPTIVE, self_check=False).detach()


def test_a_huge_micro_batch_is_taken_in_parts() -> None:
    """1.0001 half ulps each would all round up in fp32."""
    width, rows = 8, 40 * EXAMPLES_PER_PART + 3
    model = Product(torch.nn.Linear(1, width)).requires_grad_(False)
    model.layer.bias.requires_grad_(True)  # type: ignore[union-attr]
    scale = 63.51 / (1 << 23)
    inputs = {"x": torch.zeros(rows, 1, 1), "w": torch.full((rows, 1, width), scale)}
    padding = torch.arange(rows) % 7 == 6
    total = ClippedSum(model, 1e3, self_check=False)
    sizes = []
    count_rows = total._in_one_pass
    total._in_one_pass = lambda task, part, padded: (
        sizes.append(len(padded)),
        count_rows(task, part, padded),
    )[1]  # type: ignore[method-assign]
    stats = total.add_micro_batch(model, inputs, padding)
    total.detach()
    assert max(sizes) == EXAMPLES_PER_PART and sum(sizes) == rows
    kept = int((~padding).sum())
    assert int(stats.num_examples) == kept and float(stats.centred_unclipped) == kept / 2
    (bias,) = dict(total.sums()).values()
    assert bias.dtype == torch.float64
    assert float((bias / (kept * float(torch.tensor(scale))) - 1).abs().max()) <= 1e-4
