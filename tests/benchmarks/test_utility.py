"""The comparison with other libraries: all systems take the same steps, and what a wiring comes to is told apart."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.peers import wirings
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.torch_run import SYSTEMS, network
from privacy.noise import SystemNoise

EVERYBODY = Job("", "", 8.0, 1e-5, 40, 40, 3, 0.5, 0.9, 0.05, noise_multiplier=0.0)
"""Three steps with all forty examples, most of them clipped, and no noise."""


def trained(system: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    torch.manual_seed(0)
    model = network()
    train = torch.randn(40, 1, 28, 28), torch.randint(0, 10, (40,))
    job = EVERYBODY
    if system == "ours":  # plans with so little noise are refused, so a plan's noise is left out
        monkeypatch.setattr(SystemNoise, "standard_normal", lambda *_: torch.zeros((), dtype=torch.float64))
        job = dataclasses.replace(job, noise_multiplier=1.0)
    SYSTEMS[system][1](model, train, job, Clock())
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.filterwarnings("ignore")
def test_all_systems_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("by_hand", monkeypatch)
    for system in ("ours", "opacus", "opacus_ghost"):
        found = trained(system, monkeypatch)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, msg=lambda text, s=system: f"{s}: {text}")
    assert (trained("non_private", monkeypatch) - expected).abs().max() > 1e-3, "clipping shows"


@pytest.mark.filterwarnings("ignore")
def test_ours_is_exact_or_refuses_and_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for wiring in wirings.WIRINGS:
        said = wirings.verdict("ours", wiring)
        assert said == "exact" if wiring.is_sound else said.startswith("refused"), (wiring.name, said)
    plain = wirings.WIRINGS[0]
    exact = wirings.SYSTEMS["by_hand"]

    def twice(model: nn.Module, x: torch.Tensor) -> wirings.Sum:
        return [2 * g for g in exact(copy.deepcopy(model), x)]

    monkeypatch.setitem(wirings.SYSTEMS, "planted", twice)
    assert wirings.verdict("planted", plain).startswith("wrong by")
