"""Small functions of clipping that torch.compile makes few kernels of on CUDA.

Run as they are, they are the reference, and all that a CPU runs. Compiled, they keep bf16
intermediates in fp32 and may add up in another order, so a function is fused only where that does
no harm: its result is exact in any order (rounding to whole numbers and adding them), a norm whose
bound holds in any order, or a gradient that is stored, so that norm and sum read the same numbers.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused(
    *, for_all_sizes: bool
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Returns a decorator that compiles a function where its first argument is on CUDA.

    That argument is a tensor or a list of tensors. Arguments are positional.

    Args:
        for_all_sizes: one graph, or else one for each shape, so that two passes over one
            micro-batch have equal bits: with graphs for some sizes and a graph for all, earlier
            calls would decide which of them runs.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def run(*arguments: Arguments.args, **_: Arguments.kwargs) -> Result:
            output: Result = launch(function, arguments, for_all_sizes)
            return output

        return run

    return decorate


def launch(function: Callable[..., Any], arguments: tuple[Any, ...], for_all_sizes: bool) -> Any:
    """Runs a fused function.

    Programs that count kernels, or compile on a CPU, put a stand-in in its place.
    """
    tensor = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
    if tensor.is_cuda and can_compile(tensor.device):
        function = compiled(function, for_all_sizes)
    return function(*arguments)


@functools.cache
def compiled(function: Callable[..., Any], for_all_sizes: bool) -> Callable[..., Any]:
    """Returns the compiled function.

    Where torch gives up compiling, after many kinds of arguments, it runs the function as it is,
    and says so.
    """
    return torch.compile(function, dynamic=for_all_sizes)


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Returns whether torch.compile works on this device.

    It is tried once, because it needs Triton, a C compiler and a place to write.
    """
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"torch.compile does not work on {device}, so clipping takes more and slower kernels "
            f"({type(error).__name__}: {reason}); it needs triton, which CUDA builds of torch "
            "bring, and a C compiler (apt-get install gcc)",
            stacklevel=2,
        )
        return False
    return True
