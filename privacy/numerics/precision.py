"""Norms and sums keep their own precision, whatever the model computes in (contract 6); what underflow hides is bounded.

Squares of small numbers are nothing: with inputs of 3e17 and output gradients of 2e-23 the Gram matrix of the gradients is all
zeros in fp32, and the example, whose gradient is long, would pass unclipped. So each norm comes with h such that what underflow
took from the squared norm of a sum of contributions i is at most (sum_i h_i)^2.

Let eta = 2 tiny, twice the smallest normal number (2^-126 in fp32). An underflowing operation is wrong by at most tiny, even
where subnormal results are flushed to zero, so a dot product of k terms (k products, k additions) is wrong by at most k eta
beyond its relative error. (Subnormal inputs that are flushed as well cost tiny sqrt(k) (|x| + |y|), which is below that, or
below the relative error.) For Gram matrices A of a (width d) and G of g (width p), sum_{s,t} A_st G_st is then wrong by at most

    sum_{s,t} (|a_s| |a_t| p eta + |g_s| |g_t| d eta + d p eta^2 + eta)
        <= (sqrt(p eta) sum_t |a_t|' + sqrt(d eta) sum_t |g_t|' + T sqrt(eta))^2 = h^2,

where |a_t|' = sqrt(A_tt + d eta) is an upper bound of |a_t| that cannot be zero. For two contributions to one parameter the
same sum runs over s of one and t of the other, which gives h_i h_j. Embeddings are the case |a_t| = 1 with an exact A, and a
written-out gradient of n numbers has h = sqrt(n eta); its products with other contributions are within h_i h_j too, or within
their relative error. The lengths |a_t|' |g_t|' also replace the gross norm, which must not be zero either.

Where a length is above 1.8e19, its square overflows: to infinity or NaN, which gives the example the weight zero.

Settings of torch are lifted (`exact`). What libraries read from the environment is not seen there, so products are tried
(`require_exact_products`): whole numbers that have no other sum, in any order of additions, than the exact one.
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
    """Whether matrix products of bf16 come in fp32 without fp32 copies of the matrices: on CUDA, where this torch can.

    Tried once, with each form that clipping uses, on odd sizes and on a transposed operand. A fall-back is said.

    Raises:
        RuntimeError: of another kind than that there is no such product, such as no memory, which is no answer.
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
        said = str(error).partition("\n")[0]
        known = isinstance(
            error, TypeError | NotImplementedError
        )  # an older torch; a device without the operation
        if not known and "not supported" not in said.lower().replace("_", " "):
            raise
        slow = "clipping makes them from fp32 copies, several times slower"
        warnings.warn(f"no fp32 products of bf16 on {device}, so {slow} ({said})", stacklevel=2)
        return False
    return True


def require_exact_products(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[torch.Size] = ()
) -> None:
    """Tries matrix products once per process, device and dtype, and on accelerators, whose libraries choose kernels by size, for
    each shape; with fp32 those of bf16 too, where there are any.

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
    for tried, (p, d) in itertools.product(dtypes, sorted(sizes)):
        with torch.no_grad(), exact(device):
            wrong = _inexact_product(device, tried, p, d)
        if wrong:
            forced = [
                f"{name}={value}"
                for name, value in os.environ.items()
                if name.startswith(FORCED_BY)
            ]
            raise PrivacyConfigError(
                f"{wrong} of {tried} matrices are not exact on {device} ({p} x {d}), so norms and sums would not be what the "
                f"guarantee assumes: unset {', '.join(forced) or 'what lets this library compute with fewer bits'}"
            )


@functools.cache
def _inexact_product(device: torch.device, dtype: torch.dtype, p: int, d: int) -> str:
    """The kind of product of whole numbers (p, TERMS) and (TERMS, d) that is not exact; empty where all are.

    Half as many bits as the dtype has in both operands, all of them in one, and sums of many terms; every partial sum is below
    2^24 (2^53 in fp64). Every second term is a large number times zero, for emulations that share an exponent.
    """
    bits, kept = (
        (8, 24) if dtype == torch.bfloat16 else (1 - round(math.log2(torch.finfo(dtype).eps)),) * 2
    )
    generator, k = torch.Generator().manual_seed(0), torch.arange(TERMS)[:, None]

    def odd(num_bits: int, count: int) -> Tensor:
        numbers = torch.randint(2 ** (num_bits - 1), 2**num_bits, (count,), generator=generator) | 1
        return numbers.to(device, dtype)

    half, few = min(bits, kept // 2), min(bits, (kept - 8) // 2)
    for x_bits, y_bits, count in (
        (half, half, 1),
        (bits, 1, 1),
        (1, bits, 1),
        (few, few, TERMS // 2),
    ):
        a_p, b_d = odd(x_bits, p), odd(y_bits, d)
        is_term = (k % 2 == 0) if count > 1 else (k == torch.arange(p) * 2 % TERMS)
        x_Np = torch.where(is_term.to(device), a_p, 0)
        x_Np[1::2] = 0.0 if dtype == torch.bfloat16 else 2.0**60
        y_Nd = b_d.repeat(TERMS, 1)
        y_Nd[1::2] = 0.0
        wide = wide_dtype(dtype)
        out: dict[str, Any] = {} if wide == dtype else {"out_dtype": wide}
        right_pd = (
            count * a_p.to(wide)[:, None] * b_d.to(wide)
        )  # single numbers: no library of matrices
        x_2np, y_2nd = x_Np.view(2, -1, p), y_Nd.view(2, -1, d)
        is_right = {  # one at a time: a vocabulary times a width is large
            "mm": torch.equal(torch.mm(x_Np.t().contiguous(), y_Nd, **out), right_pd),
            "mm of transposed": torch.equal(torch.mm(x_Np.t(), y_Nd, **out), right_pd),
            "bmm": torch.equal(torch.bmm(x_2np.transpose(1, 2), y_2nd, **out).sum(0), right_pd),
            "addmm": not torch.addmm(-right_pd, x_Np.t(), y_Nd, **out).any(),
            "mv": bool(out) or torch.equal(torch.mv(x_Np.t(), y_Nd[:, 0]), right_pd[:, 0]),
        }
        if not all(is_right.values()):
            return f"products ({', '.join(name for name, right in is_right.items() if not right)})"
    return ""


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Inside, fp32 is fp32: no autocast, and no matrix product in TF32 or bf16 passes. Settings are put back afterwards.

    A norm that TF32 rounds to 10 bits may read low by 1e-3, all of the slack r, and no rounding bound here knows of it. The
    model's own forward and backward may use TF32: what is summed is what they gave. So may cuDNN's convolutions, which no rule
    calls.

    Raises:
        PrivacyConfigError: reduced precision was switched on by a setting that cannot be lifted and put back.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:  # torch's answer when it was not set in this way
        raise PrivacyConfigError(
            "fp32 matrix products were given a reduced precision through torch.backends.*.fp32_precision, under which "
            "per-example norms would not be fp32; use torch.set_float32_matmul_precision, whose setting is lifted for them"
        ) from error
    try:
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(
            "cpu" if device.type == "meta" else device.type, enabled=False
        ):  # meta: shapes are counted
            yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 whatever the compute dtype, and fp64 for fp64: what norms, Gram matrices and per-example gradients are in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


class Norm(NamedTuple):
    """Norms of per-example gradients; tensors (B,).

    Attributes:
        squared_B: the squared norm as computed.
        gross_B: sum_t |a_t| |g_t|, the norm if no two tokens cancelled; it scales every rounding error.
        hidden_B: h of the module docstring; a number where it is the same for all examples.
    """

    squared_B: Tensor
    gross_B: Tensor
    hidden_B: Tensor | float


def hidden(num_terms: int, dtype: torch.dtype) -> float:
    """sqrt(num_terms eta)."""
    return math.sqrt(num_terms * 2 * torch.finfo(dtype).tiny)
