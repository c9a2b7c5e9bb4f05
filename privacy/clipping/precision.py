"""Norms and sums keep their own precision, whatever the model computes in (contract 6)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from privacy.errors import PrivacyConfigError


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Inside, fp32 is fp32: no autocast, and no matrix product in TF32 or bf16 passes. Settings are put back afterwards.

    A norm that TF32 rounds to 10 bits may read low by 1e-3, all of the slack r, and no rounding bound here knows of it. The
    model's own forward and backward may use TF32: what is summed is what they gave.

    Raises:
        PrivacyConfigError: reduced precision was switched on by a setting that cannot be lifted and put back.
    """
    before = _matmul_precision()
    try:
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
        with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):  # meta: shapes are counted
            yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:  # torch's answer when it was not set in this way
        raise PrivacyConfigError(
            "fp32 matrix products were given a reduced precision through torch.backends.*.fp32_precision, under which "
            "per-example norms would not be fp32; use torch.set_float32_matmul_precision, whose setting is lifted for them"
        ) from error
