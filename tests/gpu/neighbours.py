"""The searches for an example that moves the sum by more than C, on this device's kernels."""

from collections.abc import Iterator

import torch

from privacy.clipping.accumulators import LocalSums
from privacy.releases import SENSITIVITY_SLACK
from tests.gpu.checks import Check, Setting
from tests.gpu.sums import kernel_runs, triton
from tests.privacy.clipping import test_rounding

LIMIT = f"at most C (1 + {SENSITIVITY_SLACK:g})"


def checks(setting: Setting) -> Iterator[Check]:
    with setting.device:  # the searches make their tensors on the default device
        for case in setting.choose(test_rounding.CASES, test_rounding.CASES[:2]):
            size = test_rounding.moved(case)
            yield Check(f"neighbours, {case}", size <= 1 + SENSITIVITY_SLACK, size, LIMIT)
        found = test_rounding.rank_draws(setting.device, LocalSums, setting.choose(60, 2))
    largest = max(found, key=lambda case: case[2])
    title = f"neighbours drawn at random, {len(found)}"
    yield Check(title, largest[2] <= 1 + SENSITIVITY_SLACK, [str(part) for part in largest], LIMIT)
    for kernel in [False, True] if kernel_runs(setting.device) else [False]:
        for name in test_rounding.MODELS:
            for dtype in (torch.float32, torch.bfloat16):
                with triton(kernel):
                    sizes = test_rounding.contributions_drawn(name, dtype, setting.choose(300, 5), setting.device)
                title = f"norms at any magnitude, {name}, {dtype}{', triton' if kernel else ''}".replace("torch.", "")
                yield Check(title, max(sizes) <= 1 + SENSITIVITY_SLACK, max(sizes), LIMIT)
