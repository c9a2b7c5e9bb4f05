"""The comparison with other libraries: all systems take the same steps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.utility import SYSTEMS, Clock, Job, network
from privacy.noise.source import SystemNoise

EVERYBODY = Job("", "", 0, 8.0, 40, 40, 3, noise_multiplier=0.0, max_grad_norm=0.05)
"""Three steps with all forty examples, most of them clipped, and no noise."""


def trained(system: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    torch.manual_seed(0)
    model = network()
    train = torch.randn(40, 1, 28, 28), torch.randint(0, 10, (40,))
    job = EVERYBODY
    if system == "ours":  # plans with so little noise are refused, so a plan's noise is left out
        monkeypatch.setattr(
            SystemNoise, "rounded_normal", lambda *_: torch.zeros((), dtype=torch.int64)
        )
        job = replace(job, noise_multiplier=1.0)
    SYSTEMS[system][1](model, train, job, Clock())
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.filterwarnings("ignore")
def test_all_systems_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("by_hand", monkeypatch)
    for system in ("ours", "opacus", "opacus_ghost"):
        found = trained(system, monkeypatch)
        torch.testing.assert_close(
            found, expected, atol=2e-5, rtol=1e-4, msg=lambda text, s=system: f"{s}: {text}"
        )
    assert (trained("non_private", monkeypatch) - expected).abs().max() > 1e-3, "clipping shows"
