"""The audit of the mechanism under adaptive clipping: the count is watched too, and mistakes with it are found."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from privacy.adaptive_clipping import AdaptiveClipping
from privacy.audit.report import AuditReport
from privacy.clipping import norms
from privacy.clipping.functions import unclipped
from privacy.correlated import segment
from privacy.noise import add_noise
from privacy.step import adaptive_bound
from tests.distributed.ranks import run_ranks
from tests.trainer.test_audit_mechanism import audit

ADAPTIVE = AdaptiveClipping(0.5, 0.2, 5.0)


def audited(device: torch.device) -> AuditReport:
    return audit(device, ("none",), clipping="flat", adaptive_clipping=ADAPTIVE)["none"]  # type: ignore[arg-type]


def rank_audit(device: torch.device) -> Any:
    return audit(device, ("none",), clipping="flat", adaptive_clipping=ADAPTIVE).get("none")  # type: ignore[arg-type]


@pytest.mark.full
def test_a_correct_mechanism_passes_on_two_ranks() -> None:
    report = run_ranks(f"{__name__}:rank_audit", 2)[0]
    assert report.verdict == "consistent", report.to_text()
    assert {"count_sensitivity", "count_draws"} <= {check.name for check in report.checks}


Values = Callable[..., Any]
MISTAKES: dict[str, tuple[Any, str, Values, set[str]]] = {
    "no noise on the count": (
        adaptive_bound, "add_noise", lambda values, std, source: None, {"count_draws"},
    ),
    "the count is not centred": (
        norms, "unclipped", lambda norm_B, bound: unclipped(norm_B, bound) + 0.5, {"count_sensitivity"},
    ),
    "less noise on the count": (
        adaptive_bound, "add_noise", lambda values, std, source: add_noise(values, std / 2, source),
        {"count_draws"},
    ),
    "the sum is noised as if there were no count": (
        segment, "add_noise", lambda values, std, source: add_noise(values, std * 0.9, source), {"noise_variance"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.full] * (n not in ("the count is not centred", "less noise on the count")))
        for n in MISTAKES
    ],
)
def test_a_mistake_is_found(one_rank: torch.device, name: str) -> None:
    owner, attribute, value, expected = MISTAKES[name]
    with mock.patch.object(owner, attribute, value):
        report = audited(one_rank)
    assert report.verdict == "violated" and expected <= set(report.failed()), report.to_text()
