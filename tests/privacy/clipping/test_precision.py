"""Contract 6: norms and sums are fp32 although the model may compute in TF32; the setting's logic, which needs no GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from privacy.clipping import ClippedSum
from privacy.clipping.contributions import OuterProducts
from privacy.clipping.norms import NormTally
from privacy.clipping.precision import exact
from privacy.errors import PrivacyConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("precision", ["high", "medium", "highest"])
def test_contract_6_norms_and_sums_are_fp32_and_the_model_keeps_its_setting(
    mode: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[str]] = {"model": set(), "norms": set(), "sums": set()}
    add, add_weighted = NormTally.add, OuterProducts.add_weighted

    def note(where: str) -> None:
        seen[where].add(torch.get_float32_matmul_precision())

    monkeypatch.setattr(NormTally, "add", lambda *args: (note("norms"), add(*args))[1])
    monkeypatch.setattr(OuterProducts, "add_weighted", lambda *args: (note("sums"), add_weighted(*args))[1])
    model = nn.Linear(40, 50)

    def task(x: torch.Tensor) -> torch.Tensor:
        note("model")
        return model(x).square().sum((1, 2))

    total = ClippedSum(model, 1.0, mode=mode, self_check=False)  # type: ignore[arg-type]
    torch.set_float32_matmul_precision(precision)
    total.add_micro_batch(task, {"x": torch.randn(3, 4, 40)}, torch.zeros(3, dtype=torch.bool))
    assert torch.get_float32_matmul_precision() == precision
    assert seen == {"model": {precision}, "norms": {"highest"}, "sums": {"highest"}}


def test_allow_tf32_is_lifted_too() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    with exact(CPU):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32


def test_the_setting_is_put_back_after_an_error() -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), exact(CPU):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("place", ["cuda.matmul", "mkldnn.matmul"])
def test_a_setting_that_cannot_be_put_back_is_refused(place: str) -> None:
    owner = torch.backends
    for name in place.split("."):
        owner = getattr(owner, name)
    owner.fp32_precision = "tf32"  # type: ignore[attr-defined]
    model = nn.Linear(4, 5)
    with pytest.raises(PrivacyConfigError, match="set_float32_matmul_precision"):
        ClippedSum(model, 1.0, self_check=False).add_micro_batch(
            lambda x: model(x).sum(1), {"x": torch.ones(2, 4)}, torch.zeros(2, dtype=torch.bool)
        )
