"""The two rules of accumulators.py on their own: short fp32 sums of products, fp64 for everything else."""

import random

import pytest
import torch

from privacy.clipping.accumulators import EXAMPLES_PER_SUM, LocalSums, Slot, require_resolution
from privacy.clipping.contributions import Dense, OuterProducts, Rows
from privacy.clipping.norms import SENSITIVITY_SLACK
from privacy.errors import PrivacyConfigError

CPU = torch.device("cpu")


def test_contract_4_the_parts_of_the_slack_are_within_r() -> None:
    """Half for norms; n^2 u for fp32 sums; 2^-13 for fp64 totals of the most rows that are taken."""
    require_resolution(1 << 20, 1 << 20)
    assert SENSITIVITY_SLACK / 2 + EXAMPLES_PER_SUM**2 * 2**-24 + 2**-53 * 2**40 <= 0.9 * SENSITIVITY_SLACK


@pytest.mark.parametrize("seed", range(20))
def test_contract_4_no_fp32_sum_holds_more_than_64_examples(seed: int) -> None:
    """Values that fp32 drops next to a larger one, and fp64 does not, whatever the sizes of micro-batches.

    One example of 1 comes first; then each adds a quarter of its last place. In one fp32 sum all of them would be lost.
    """
    rng = random.Random(seed)
    sums = LocalSums({"w": torch.Size([1, 1])}, torch.float32, CPU)
    value, count, size = 2.0**-25, 0, 1
    while count < 2000:
        sums.start(size)
        slot = sums.slot("w", of_products=True)
        g_B11 = torch.full((size, 1, 1), value)
        if count == 0:
            g_B11[0] = 1
        OuterProducts(torch.ones(size, 1, 1), g_B11).add_weighted(torch.ones(size), slot)
        count, size = count + size, rng.choice([1, 2, 7, 8, 31, 32, 33, 64, 200])
    total = float(dict(sums.sums())["w"]) - 1
    assert abs(total / value - (count - 1)) <= EXAMPLES_PER_SUM


def test_contract_4_tokens_of_one_row_round_a_large_total_once() -> None:
    """At every token, 64 examples of 197 would be lost next to a million, or count double."""
    last_place = 2.0**-33  # below 2^20
    for start in (2.0**20, 2.0**20 - 1):
        total = torch.tensor([[0.0], [start]], dtype=torch.float64)
        ids_BT, g_BTp = torch.ones(64, 197, dtype=torch.long), torch.full((64, 197, 1), 0.75 * last_place)
        Rows(ids_BT, g_BTp).add_weighted(torch.ones(64), Slot(total))
        assert abs(float(total[1]) - start - 64 * 197 * 0.75 * last_place) <= 2 * last_place
        assert float(total[0]) == 0


@pytest.mark.parametrize("kind", ["rows", "dense", "dense_matrix", "product"])
@pytest.mark.parametrize("has_window", [False, True])
def test_slots_hold_the_weighted_sum(kind: str, has_window: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 20 if has_window else 150
    weight_B, g_BTp = torch.rand(size, generator=generator), torch.randn(size, 5, 6, generator=generator)
    ids_BT, a_BTd = torch.randint(0, 4, (size, 5), generator=generator), torch.randn(size, 5, 4, generator=generator)
    part = {
        "rows": Rows(ids_BT, g_BTp),
        "dense": Dense(g_BTp[:, :4]),
        "dense_matrix": Dense(g_BTp[:, :4], is_product=True),
        "product": OuterProducts(g_BTp, a_BTd),
    }[kind]
    one_hot_BTV = torch.nn.functional.one_hot(ids_BT, 4).double()
    per_example_BVp = {
        "rows": torch.einsum("btv,btp->bvp", one_hot_BTV, g_BTp.double()),
        "product": torch.einsum("btd,btp->bdp", a_BTd.double(), g_BTp.double()),
    }.get(kind, g_BTp[:, :4].double())
    sums = LocalSums({"w": torch.Size([4, 6])}, torch.float32, CPU)
    sums.start(size)
    slot = sums.slot("w", of_products=part.is_product)
    assert (slot.window is not None) == (has_window and part.is_product)
    part.add_weighted(weight_B, slot)
    expected = torch.einsum("b,bvp->vp", weight_B.double(), per_example_BVp)
    exact = kind in ("rows", "dense")
    torch.testing.assert_close(dict(sums.sums())["w"], expected, rtol=0, atol=1e-13 if exact else 1e-4)


def test_contract_4_batches_beyond_the_resolution_of_fp64_are_refused() -> None:
    sums = LocalSums({"b": torch.Size([1])}, torch.float32, CPU)
    for _ in range(8):
        sums.start(1 << 20)  # as 16,384 sums of 64
    with pytest.raises(PrivacyConfigError, match=r"larger train\.micro_batch_size"):
        sums.start(1 << 20)
    sums.zero_()
    sums.start(1 << 20)
    with pytest.raises(PrivacyConfigError):
        require_resolution((1 << 20) + 1, 1 << 20)
