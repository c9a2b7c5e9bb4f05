"""What a session keeps of dp-accounting's results is what dp-accounting computes."""

from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from tests.loss_distributions import CONSTRUCTORS, shared

ANEW = {name: getattr(getattr(pld, name), "__wrapped__", getattr(pld, name)) for name in CONSTRUCTORS}
ARGUMENTS = {"standard_deviation": 1.3, "sampling_prob": 0.02, "value_discretization_interval": 1e-3}


def test_the_same_numbers_and_each_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.loss_distributions.SLOW", 0.0)
    make = ANEW["from_gaussian_mechanism"]
    calls = []
    counted = shared(lambda **named: calls.append(named) or make(**named), tmp_path)
    exact = make(**ARGUMENTS)
    for _ in range(2):
        found = counted(**ARGUMENTS)
        for count in (1, 7):
            composed, expected = found.self_compose(count), exact.self_compose(count)
            assert composed.get_epsilon_for_delta(1e-5) == expected.get_epsilon_for_delta(1e-5)
        assert np.array_equal(composed.get_delta_for_epsilon([0.1, 1.0]), expected.get_delta_for_epsilon([0.1, 1.0]))
        for first, second in ((composed, exact), (exact, composed)):
            anew = tuple(expected if one is composed else one for one in (first, second))
            assert first.compose(second).get_epsilon_for_delta(1e-6) == anew[0].compose(anew[1]).get_epsilon_for_delta(
                1e-6
            )
    assert len(calls) == 1
    assert counted(**ARGUMENTS | {"standard_deviation": 1.4}).get_epsilon_for_delta(1e-5) < found.get_epsilon_for_delta(
        1e-5
    )
    assert len(calls) == 2


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_this_process_and_its_forks_share_them(name: str) -> None:
    assert getattr(pld, name) is not ANEW[name]
