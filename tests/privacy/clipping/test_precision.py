"""Contract 6: norms and sums are fp32 although the model may compute in TF32; the setting's logic, which needs no GPU."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from privacy.clipping import SUMS, ClippedSum
from privacy.clipping.norms import NormTally
from privacy.errors import PrivacyConfigError
from privacy.gradients.per_example_gradients import OuterProducts
from privacy.numerics import precision
from privacy.numerics.precision import exact, has_fp32_products_of_bf16, require_exact_products

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
    monkeypatch.setattr(
        OuterProducts, "add_weighted", lambda *args: (note("sums"), add_weighted(*args))[1]
    )
    model = nn.Linear(40, 50)

    def task(x: torch.Tensor) -> torch.Tensor:
        note("model")
        return model(x).square().sum((1, 2))

    total = SUMS[mode](model, 1.0)  # type: ignore[arg-type]
    torch.set_float32_matmul_precision(precision)
    total.add_micro_batch(task, {"x": torch.randn(3, 4, 40)}, torch.zeros(3, dtype=torch.bool))
    assert torch.get_float32_matmul_precision() == precision
    assert seen == {"model": {precision}, "norms": {"highest"}, "sums": {"highest"}}


def test_settings_are_lifted_and_put_back_after_an_error_too() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_tf32 = True
    with pytest.raises(ZeroDivisionError), exact(CPU):  # noqa: PT012  # the setting inside is looked at first
        assert not torch.backends.cuda.matmul.allow_tf32
        raise ZeroDivisionError
    assert torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("place", ["cuda.matmul", "mkldnn.matmul"])
def test_a_setting_that_cannot_be_put_back_is_refused(place: str) -> None:
    owner = torch.backends
    for name in place.split("."):
        owner = getattr(owner, name)
    owner.fp32_precision = "tf32"  # type: ignore[attr-defined]
    model = nn.Linear(4, 5)
    with pytest.raises(PrivacyConfigError, match="set_float32_matmul_precision"):
        ClippedSum(model, 1.0).add_micro_batch(
            lambda x: model(x).sum(1), {"x": torch.ones(2, 4)}, torch.zeros(2, dtype=torch.bool)
        )


# What no setting of torch shows: libraries that read the environment, and whatever comes next.


def tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def pieces(x: Tensor, narrow: Callable[[Tensor], Tensor], count: int) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in range(count):
        found.append(narrow(x))
        x = x - found[-1]
    return found


def fixed_point(x: Tensor) -> Tensor:
    """One exponent for the whole matrix."""
    unit = 2.0 ** (x.abs().max().log2().ceil() - 24)
    return (x / unit).round() * unit


class Emulated(TorchDispatchMode):
    """Products of sums of pieces; the first `kept` products of pieces, the largest first."""

    def __init__(self, narrow: Callable[[Tensor], Tensor], count: int, kept: int) -> None:
        super().__init__()
        self.pieces, self.kept = functools.partial(pieces, narrow=narrow, count=count), kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func not in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default):
            return func(*args, **(kwargs or {}))
        *total, x, y = args
        pairs = [
            (i + j, i, j) for i in range(len(self.pieces(x))) for j in range(len(self.pieces(y)))
        ]
        product = {aten.bmm.default: torch.bmm, aten.mv.default: torch.mv}.get(func, torch.mm)
        found = [
            product(self.pieces(x)[i], self.pieces(y)[j]) for _, i, j in sorted(pairs)[: self.kept]
        ]
        return functools.reduce(torch.add, [*total, *found])


EMULATED = {
    "TF32": (tf32, 1, 1, torch.float32),
    "bf16": (bf16, 1, 1, torch.float32),
    "bf16x3": (bf16, 2, 3, torch.float32),
    "TF32x3": (tf32, 2, 3, torch.float32),
    "one exponent": (fixed_point, 1, 1, torch.float32),
    "fp64 by fp32": (lambda x: x.float().double(), 1, 1, torch.float64),
}


@pytest.fixture
def _unproven() -> Iterator[None]:
    precision._inexact_product.cache_clear()
    yield
    precision._inexact_product.cache_clear()


@pytest.mark.usefixtures("_unproven")
@pytest.mark.parametrize("way", EMULATED)
def test_contract_6_products_with_fewer_bits_are_refused_whatever_forces_them(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *emulation, dtype = EMULATED[way]
    model = nn.Linear(4, 5, dtype=dtype)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with (
        Emulated(*emulation),
        pytest.raises(PrivacyConfigError, match=r"not exact on cpu.*unset NVIDIA_TF32_OVERRIDE=1"),
    ):
        ClippedSum(model, 1.0)


@pytest.mark.usefixtures("_unproven")
def test_products_that_are_exact_are_accepted_and_tried_once() -> None:
    """All 24 bits in three pieces of bf16 are fp32, as cuBLAS' emulation by nine products is meant."""
    with Emulated(bf16, 3, 9):
        require_exact_products(CPU, torch.float32)
    for dtype in (torch.float32, torch.float64):
        require_exact_products(CPU, dtype)
    with Emulated(tf32, 1, 1):
        require_exact_products(CPU, torch.float32)  # known by now


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotImplementedError("Could not run 'aten::bmm.dtype'"), "falls back"),
        (TypeError("bmm() got an unexpected keyword argument 'out_dtype'"), "falls back"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx"),
            "falls back",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "raises"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "raises"),
    ],
)
def test_a_fall_back_from_products_of_bf16_is_said_and_no_other_error_is_one(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    for name in ("ones", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, device, make=make, **how: make(*size, **how))
    monkeypatch.setattr(torch, "bmm", raises)
    ask = functools.partial(has_fp32_products_of_bf16.__wrapped__, torch.device("cuda"))
    if outcome == "raises":
        with pytest.raises(type(error)):
            ask()
    else:
        with pytest.warns(UserWarning, match="no fp32 products of bf16 on cuda"):
            assert not ask()
