"""The searches for an example that moves the sum by more than C, on this device's kernels."""

from collections.abc import Iterator

from privacy.releases import SENSITIVITY_SLACK
from tests.gpu.checks import Check, Setting
from tests.privacy.clipping import neighbours, test_rounding

LIMIT = f"at most C (1 + {SENSITIVITY_SLACK:g})"


def checks(setting: Setting) -> Iterator[Check]:
    for case in setting.choose(test_rounding.CASES, test_rounding.CASES[:2]):
        size = test_rounding.moved(case, setting.device)
        yield Check(f"neighbours, {case}", size <= 1 + SENSITIVITY_SLACK, size, LIMIT)
    count = setting.choose(20_000, 200)
    for search in (neighbours.sums, neighbours.climb):
        found = list(search(setting.device, "gpu", count))
        worst, pairs = max(found, key=lambda one: one.size), sum(one.pairs for one in found)
        title = f"neighbours, {search.__name__}, {pairs:,} pairs"
        yield Check(title, worst.size <= 1 + SENSITIVITY_SLACK, [worst.size, str(worst.construction)], LIMIT)
    found = list(test_rounding.norms(setting.device, "gpu", count))
    worst, pairs = max(found, key=lambda one: one.size), sum(one.pairs for one in found)
    title = f"norms at any magnitude, {pairs:,} examples"
    yield Check(title, worst.size <= 1 + SENSITIVITY_SLACK, [worst.size, str(worst.construction)], LIMIT)
