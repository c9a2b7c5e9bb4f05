"""The searches for an example that moves the sum by more than C, on this device's kernels."""

from collections.abc import Iterator

from privacy.plan.releases import SENSITIVITY_SLACK
from tests.gpu.checks import Check, Setting
from tests.privacy.clipping import neighbours, test_rounding

SEARCHES = {
    "neighbours, sums, {:,} pairs": neighbours.sums,
    "neighbours, climb, {:,} pairs": neighbours.climb,
    "norms at any magnitude, {:,} examples": test_rounding.norms,
}


def checks(setting: Setting) -> Iterator[Check]:
    limit = f"at most C (1 + {SENSITIVITY_SLACK:g})"
    for case in setting.choose(test_rounding.CASES, test_rounding.CASES[:2]):
        size = test_rounding.moved(case, setting.device)
        yield Check(f"neighbours, {case}", size <= 1 + SENSITIVITY_SLACK, size, limit)
    for title, search in SEARCHES.items():
        found = list(search(setting.device, "gpu", setting.choose(20_000, 200)))
        worst, pairs = max(found, key=lambda one: one.size), sum(one.pairs for one in found)
        measured = [worst.size, str(worst.construction)]
        yield Check(title.format(pairs), worst.size <= 1 + SENSITIVITY_SLACK, measured, limit)
