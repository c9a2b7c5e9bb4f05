"""The precision of norms and sums, whatever the model computes in (contract 6), and of underflow.

Settings of torch that reduce it are lifted (`exact`). Settings of libraries are not seen there, so
products are tried: whole numbers whose sum is the exact one in any order of additions
(`require_exact_products`). Each norm comes with a bound on what underflow hides (docs/sums.md).
"""

import functools
import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrivacyConfigError

FORCED_BY = (
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_EMUL",
    "TORCH_ALLOW_TF32",
    "ONEDNN_DEFAULT_FPMATH",
    "DNNL_DEFAULT_FPMATH",
)
"""Beginnings of variables by which a product in fp32 or fp64 becomes another."""
TERMS = 256
"""Terms of each sum in the products that are tried."""


@functools.cache
def has_fp32_products_of_bf16(device: torch.device) -> bool:
    """Returns whether matrix products of bf16 come in fp32 without fp32 copies of the matrices.

    They do on CUDA, where this torch can. It is tried once, with each form that clipping uses, on
    odd sizes and on a transposed operand; a warning says where it cannot.

    Raises:
        RuntimeError: an error of another kind, such as of memory, which is no answer.
    """
    if device.type != "cuda":
        return False
    x = torch.ones(2, 3, 5, dtype=torch.bfloat16, device=device)
    total = torch.zeros(5, 5, device=device)
    try:
        torch.bmm(x.transpose(1, 2), x, out_dtype=torch.float32)
        torch.mm(x[0].t(), x[0], out_dtype=torch.float32)
        torch.addmm(total, x[0].t(), x[0], out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        message = str(error).partition("\n")[0]
        # An older torch; a device without the operation.
        is_unsupported = isinstance(error, TypeError | NotImplementedError)
        if not is_unsupported and "not supported" not in message.lower().replace("_", " "):
            raise
        warnings.warn(
            f"no fp32 products of bf16 on {device}, so clipping makes them from fp32 copies, "
            f"several times slower ({message})",
            stacklevel=2,
        )
        return False
    return True


def require_exact_products(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[torch.Size] = ()
) -> None:
    """Refuses a device whose matrix products of whole numbers are not exact.

    They are tried once per process, device and dtype, and on accelerators, whose libraries choose
    kernels by size, for each shape; with fp32 those of bf16 too, where there are any.

    Args:
        dtype: fp32 or fp64; that of norms and sums.
        shapes: of parameters.

    Raises:
        PrivacyConfigError: they are not exact; names what may force that.
    """
    if device.type == "meta":
        return
    sizes = {(192, 160)}
    if device.type != "cpu":
        sizes |= {(shape[0], shape[1:].numel()) for shape in shapes if len(shape) > 1}
    dtypes = [dtype]
    if dtype == torch.float32 and has_fp32_products_of_bf16(device):
        dtypes.append(torch.bfloat16)
    for tried_dtype, (p, d) in itertools.product(dtypes, sorted(sizes)):
        with torch.no_grad(), exact(device):
            products = _inexact_product(device, tried_dtype, p, d)
        if products:
            variables = []
            for name, setting in os.environ.items():
                if name.startswith(FORCED_BY):
                    variables.append(f"{name}={setting}")
            cause = ", ".join(variables) or "what lets this library compute with fewer bits"
            raise PrivacyConfigError(
                f"{products} of {tried_dtype} matrices are not exact on {device} ({p} x {d}), so "
                f"norms and sums would not be what the guarantee assumes: unset {cause}"
            )


@functools.cache
def _inexact_product(device: torch.device, dtype: torch.dtype, p: int, d: int) -> str:
    """Returns the kinds of products of whole numbers that are not exact; empty where all are.

    The operands are (p, TERMS) and (TERMS, d): half as many bits as the dtype has in both, all of
    them in one, and sums of many terms. Every partial sum is below 2^24 (2^53 in fp64). Every
    second term is a large number times zero, for emulations that share an exponent.
    """
    if dtype == torch.bfloat16:
        bits = 8
        bits_of_sum = 24
    else:
        bits = 1 - round(math.log2(torch.finfo(dtype).eps))
        bits_of_sum = bits
    generator = torch.Generator().manual_seed(0)
    k = torch.arange(TERMS)[:, None]

    def odd(num_bits: int, count: int) -> Tensor:
        numbers = torch.randint(2 ** (num_bits - 1), 2**num_bits, (count,), generator=generator) | 1
        return numbers.to(device, dtype)

    half_bits = min(bits, bits_of_sum // 2)
    few_bits = min(bits, (bits_of_sum - 8) // 2)
    cases = (
        (half_bits, half_bits, 1),
        (bits, 1, 1),
        (1, bits, 1),
        (few_bits, few_bits, TERMS // 2),
    )
    for x_bits, y_bits, count in cases:
        a_p = odd(x_bits, p)
        b_d = odd(y_bits, d)
        is_term = k % 2 == 0
        if count == 1:
            is_term = k == torch.arange(p) * 2 % TERMS
        x_Np = torch.where(is_term.to(device), a_p, 0)
        x_Np[1::2] = 0.0 if dtype == torch.bfloat16 else 2.0**60
        y_Nd = b_d.repeat(TERMS, 1)
        y_Nd[1::2] = 0.0
        wide = wide_dtype(dtype)
        out: dict[str, Any] = {} if wide == dtype else {"out_dtype": wide}
        # Products of single numbers, for which no library of matrices is called.
        exact_pd = count * a_p.to(wide)[:, None] * b_d.to(wide)
        x_2np = x_Np.view(2, -1, p)
        y_2nd = y_Nd.view(2, -1, d)
        x_pN = x_Np.t()
        # One product at a time: a vocabulary times a width is large.
        is_exact: dict[str, bool] = {}
        is_exact["mm"] = torch.equal(torch.mm(x_pN.contiguous(), y_Nd, **out), exact_pd)
        is_exact["mm of transposed"] = torch.equal(torch.mm(x_pN, y_Nd, **out), exact_pd)
        bmm_pd = torch.bmm(x_2np.transpose(1, 2), y_2nd, **out).sum(0)
        is_exact["bmm"] = torch.equal(bmm_pd, exact_pd)
        del bmm_pd
        is_exact["addmm"] = not torch.addmm(-exact_pd, x_pN, y_Nd, **out).any()
        # torch.mv has no out_dtype.
        if not out:
            is_exact["mv"] = torch.equal(torch.mv(x_pN, y_Nd[:, 0]), exact_pd[:, 0])
        inexact_kinds = [name for name, is_equal in is_exact.items() if not is_equal]
        if inexact_kinds:
            return f"products ({', '.join(inexact_kinds)})"
    return ""


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Computes fp32 as fp32 inside: no autocast, no matrix product in TF32 or bf16 passes.

    Settings are put back afterwards. A norm that TF32 rounds to 10 bits may read low by 1e-3, all
    of the slack r, and no rounding bound covers it. The model's own forward and backward may use
    TF32: their gradients are summed as they are. So may cuDNN's convolutions, which no rule calls.

    Raises:
        PrivacyConfigError: reduced precision was switched on by a setting that cannot be lifted and
            put back.
    """
    try:
        precision = torch.get_float32_matmul_precision()
    # torch's answer when it was not set in this way.
    except RuntimeError as error:
        raise PrivacyConfigError(
            "fp32 matrix products were given a reduced precision through "
            "torch.backends.*.fp32_precision, under which per-example norms would not be fp32; use "
            "torch.set_float32_matmul_precision, whose setting is lifted for them"
        ) from error
    # On meta tensors shapes are counted.
    device_type = "cpu" if device.type == "meta" else device.type
    try:
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of norms, Gram matrices and per-example gradients.

    It is fp64 for fp64, else fp32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """Returns x in `wide_dtype`."""
    return x.to(wide_dtype(x.dtype))


class Norm(NamedTuple):
    """Norms of per-example gradients; tensors (B,).

    Attributes:
        squared_B: the squared norm as computed.
        gross_B: sum_t |a_t| |g_t|, the norm if no two tokens cancelled; it scales every rounding
            error.
        underflow_B: h, a bound on what underflow hides (docs/sums.md); a number where it is the
            same for all examples.
    """

    squared_B: Tensor
    gross_B: Tensor
    underflow_B: Tensor | float


def underflow_bound(num_terms: int, dtype: torch.dtype) -> float:
    """Returns sqrt(num_terms eta), the bound h for what underflow hides (docs/sums.md)."""
    return math.sqrt(num_terms * 2 * torch.finfo(dtype).tiny)
