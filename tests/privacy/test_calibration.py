import time

import pytest

from privacy.accounting.accountants import ReleaseGroup, effective_noise_multiplier, epsilon
from privacy.accounting.calibration import calibrate_noise_multiplier
from privacy.errors import PrivacyConfigError
from privacy.sampling.poisson import usual_cap

N, B, T, DELTA = 233_000_000, 1_310_720, 5708, 4.2918e-9


@pytest.mark.full
def test_dpcap_point_with_cap_reserve_and_slack_within_the_time_limit():
    group, start = ReleaseGroup(B / N, 0, T + 58, N, usual_cap(B)), time.process_time()
    result = calibrate_noise_multiplier(group, DELTA, 8, sensitivity_slack=1e-4)
    assert time.process_time() - start < 15
    assert 0.708 < result.noise_multiplier < 0.710


@pytest.mark.parametrize(
    ("group", "delta", "target", "slack"),
    [
        (ReleaseGroup(0.05, 0, 100), 1e-5, 3.0, 1e-3),
        (ReleaseGroup(0.02, 0, 40), 1e-6, 0.5, 0.0),
        pytest.param(ReleaseGroup(0.01, 0, 6, 3000, 80), 1e-5, 0.5, 1e-4, marks=pytest.mark.full),
        (ReleaseGroup(0.05, 0, 100), 1e-14, 8.0, 0.0),
        (ReleaseGroup(1.0, 0, 3), 1e-5, 0.05, 0.0),
    ],
)
def test_smallest_sigma_below_the_target(group, delta, target, slack):
    result = calibrate_noise_multiplier(group, delta, target, sensitivity_slack=slack)
    sigma = effective_noise_multiplier(result.noise_multiplier, slack)
    value = epsilon([ReleaseGroup(group.sample_rate, sigma, group.count, group.num_examples, group.cap)], delta)
    assert value == result.epsilon
    assert target - 1e-3 <= value <= target
    assert not result.clamped


@pytest.mark.full
def test_small_noise_is_clamped_unless_allowed():
    group = ReleaseGroup(0.001, 0, 1)
    result = calibrate_noise_multiplier(group, 1e-5, 10.0)
    assert result.clamped and result.noise_multiplier == 0.3 and result.epsilon < 10
    allowed = calibrate_noise_multiplier(group, 1e-5, 10.0, allow_small_noise=True)
    assert not allowed.clamped and 0.2 < allowed.noise_multiplier < 0.3


def test_impossible_targets_are_refused():
    for target in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(PrivacyConfigError, match="positive"):
            calibrate_noise_multiplier(ReleaseGroup(0.1, 0, 1), 1e-5, target)
    with pytest.raises(PrivacyConfigError, match="no noise multiplier"):
        calibrate_noise_multiplier(ReleaseGroup(0.05, 0, 100, 2000, 110), 1e-13, 8.0)
