"""The comparison with other libraries: all systems take the same steps, and what a wiring comes to is told apart."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.peers import wirings
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.torch_run import SYSTEMS, network
from benchmarks.utility import JAX, judged, why_no_jax
from privacy.accounting.accountants import ReleaseGroup, epsilon_pld
from privacy.noise import SystemNoise
from tests.docs.pages import ROOT

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


@pytest.mark.full
def test_the_judge_agrees_with_our_accountant() -> None:
    """Two programs of others and ours, for a plain Poisson-sampled Gaussian."""
    said = judged(0.9, 0.05, 50)
    ours = epsilon_pld([ReleaseGroup(0.05, 0.9, 50)], 1e-5)
    assert said["pld"] == pytest.approx(ours, rel=1e-3) and said["opacus_prv"] == pytest.approx(ours, rel=1e-2)


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


def test_no_environment_for_jax_is_one_line(tmp_path: Path) -> None:
    assert "--jax names no Python" in str(why_no_jax(None))
    assert "is no Python" in str(why_no_jax(tmp_path / "python"))
    assert "has no jax_privacy: ModuleNotFoundError" in str(why_no_jax(Path(sys.executable)))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_one_round_and_a_second_run_that_keeps_it(tmp_path: Path) -> None:
    told = [
        "--seeds",
        "1",
        "--steps",
        "1",
        "--data",
        "digits",
        "--epsilons",
        "8",
        "--systems",
        "ours",
        "by_hand",
        "non_private",
    ]
    told += [JAX, "--output", str(tmp_path / "made.json")]
    done, again = (
        subprocess.run(
            [sys.executable, "benchmarks/utility.py", *told],
            cwd=ROOT, capture_output=True, text=True, timeout=440, check=False,
        )
        for _ in range(2)
    )  # fmt: skip
    assert done.returncode == again.returncode == 0, done.stderr + again.stderr
    record = json.loads(done.stdout)
    assert "seed 0" in done.stderr and "seed 0" not in again.stderr
    assert json.loads(again.stdout)["cells"] == record["cells"]
    assert JAX in record["not_run"] and f"{JAX}: not run" in done.stderr
    (cell,) = record["cells"]
    assert not cell["refused"] and list(cell["systems"]) == ["ours", "by_hand", "non_private"]
    judge = {name: cell["systems"][name]["epsilon_judged"]["pld"] for name in ("ours", "by_hand")}
    # By hand one step spends all; ours keeps two attempts in reserve, which are two thirds of so short a run.
    assert judge["by_hand"] == pytest.approx(8, abs=0.1) and 5 < judge["ours"] < 7
