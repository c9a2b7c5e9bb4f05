"""Two passes give what one gives, checkpointed or not; other clipping functions keep the sensitivity that they report."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import SUMS, TwoPassSum
from privacy.clipping.clip_factors import FUNCTIONS, ClippingFunction
from privacy.errors import PrivacyConfigError
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_oracle import tiny


def test_a_partly_unused_shared_layer_is_summed_in_both_modes() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4).double()

    def task(x: Tensor) -> Tensor:
        shared(x * 2)  # called, but the loss does not see it
        return shared(x).square().sum(1)

    inputs = {"x": torch.randn(3, 4, dtype=torch.float64)}
    assert all(
        oracle.error(shared, inputs, task=task, mode=mode) < 1e-10
        for mode in ("bookkeeping", "two_pass")
    )


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_contract_6_two_pass_refuses_a_model_that_does_not_repeat(keeps_graph: bool) -> None:
    model = nn.Linear(4, 4)
    noise = itertools.count()

    def task(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda g: g * (1 + next(noise)))  # another gradient in every backward
        return y.sum(1)

    inputs = {"x": torch.randn(3, 4)}
    total = TwoPassSum(model, 1.0)
    assert total.keeps_graph
    total.keeps_graph = keeps_graph
    with pytest.raises(PrivacyConfigError, match="two_pass"):
        total.check_repeatable(task, inputs)
    total.check_repeatable(lambda x: model(x).sum(1), inputs)


@pytest.mark.parametrize("keeps_graph", [True, False])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("ratio_4", [(2.0, 2.0, 2.0, 2.0), (1.0, -1.0, 1.0, -1.0)])
def test_contract_6_no_later_micro_batch_makes_up_for_one_that_did_not_repeat(
    keeps_graph: bool, number: int, ratio_4: tuple[float, ...]
) -> None:
    """The sums of the whole logical batch are refused; the next one begins anew. Other signs leave every norm as it is."""
    model, count = nn.Linear(4, 4), itertools.count()
    total = TwoPassSum(model, 1.0)
    total.keeps_graph = keeps_graph

    def add(*, repeats: bool) -> None:
        def task(x: Tensor) -> Tensor:
            y = model(x)
            y.register_hook(lambda g: g if repeats else g * torch.tensor(ratio_4) ** next(count))
            return y.sum(1)

        total.add_micro_batch(task, {"x": torch.randn(3, 4)}, torch.zeros(3, dtype=torch.bool))

    for place in range(3):
        add(repeats=place != number)
    with pytest.raises(PrivacyConfigError, match="different gradients the second time"):
        dict(total.sums())
    total.zero_()
    add(repeats=True)
    assert dict(total.sums())


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_each_function_is_the_loop_and_keeps_the_sensitivity_it_reports(
    function: Callable[[list[str], float], ClippingFunction], mode: str
) -> None:
    c = 0.3
    model, inputs = tiny(tied=False)
    expected = oracle.clipped_sum(model, model, inputs, c, function=function)
    assert (
        oracle.relative_error(
            oracle.summed(model, inputs, c, function=function, mode=mode), expected
        )
        < 1e-9
    )
    assert function(list(expected), c).sensitivity == pytest.approx(c)
    for i in range(7):
        one = {k: v[i : i + 1] for k, v in inputs.items()}
        assert oracle.norm(oracle.summed(model, one, c, function=function, mode=mode)) <= c * (
            1 + SENSITIVITY_SLACK
        )


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_contract_6_autocast_does_not_reach_norms_and_sums(mode: str) -> None:
    """Around the whole call or inside the task: the same bf16 activations, the same fp32 sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    inputs = {"x": torch.randn(5, 40, 64)}

    def task(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean((1, 2))

    sums = []
    for outside in (False, True):
        total = SUMS[mode](model, 0.01)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            total.add_micro_batch(task, inputs, torch.zeros(5, dtype=torch.bool))
        total.detach()
        sums.append(dict(total.sums()))
        assert all(value.dtype == torch.float64 for value in sums[-1].values())
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])
