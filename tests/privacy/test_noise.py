import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from privacy import noise
from privacy.accounting.group_privacy import EDGE, MOST_PARAMETERS, noise_tail_delta
from privacy.noise import SystemNoise, add_noise, box_muller, philox_words

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def _check_normal(draw):
    values = draw.cpu().numpy()
    assert values.dtype == np.float64
    edges = stats.norm.ppf(np.linspace(0, 1, 65))
    counts = np.histogram(values, edges)[0]
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    for moment, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((values**moment).mean() - expected) < 5 * math.sqrt(variance / len(values))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) * math.sqrt(len(values)) < 5


def test_contract_7_draws_are_standard_normal():
    _check_normal(SystemNoise().standard_normal(1_000_001, CPU))


@pytest.mark.gpu
def test_contract_7_draws_are_standard_normal_on_cuda():
    draw = SystemNoise().standard_normal(20_000_001, torch.device("cuda"))
    assert draw.device.type == "cuda" and draw.shape == (20_000_001,)
    _check_normal(draw)


def test_contract_7_words_drawn_on_a_device_are_uniform_and_keyed_by_128_bits(monkeypatch):
    """The code that runs on CUDA, on CPU: 63 uniform bits, and either half of the key changes every word."""
    words = philox_words(CPU)(200_000).numpy()
    assert words.min() >= 0
    for bit in range(63):
        assert abs(((words >> bit) & 1).mean() - 0.5) * 2 * math.sqrt(len(words)) < 5
    drawn = []
    for keys in ((1, 2), (1, 3), (4, 2)):
        entropy = iter(key.to_bytes(8, "little") for key in keys)
        monkeypatch.setattr(os, "urandom", lambda size, entropy=entropy: next(entropy))
        drawn.append(philox_words(CPU)(1000))
    assert not any((a == b).any() for a, b in itertools.combinations(drawn, 2))


def test_contract_7_no_two_draws_are_equal_and_nothing_is_seeded():
    torch.manual_seed(0)
    first = SystemNoise().standard_normal(64, CPU)
    torch.manual_seed(0)
    assert not torch.equal(first, SystemNoise().standard_normal(64, CPU))
    assert [len(SystemNoise().standard_normal(count, CPU)) for count in (0, 1, 2, 7)] == [0, 1, 2, 7]


def test_contract_7_the_edge_of_the_box_muller_source():
    def words(number):
        """The smallest radius uniform, and the angle zero."""
        return torch.zeros(number, dtype=torch.int64)

    assert float(box_muller(words, 1, CPU)[0]) == pytest.approx(EDGE, rel=1e-12)
    assert float(box_muller(lambda number: torch.full((number,), 2**63 - 1), 1, CPU)[0]) == 0.0


def test_aes_source_is_aes_256_ctr_under_a_fresh_key(monkeypatch):
    asked = []

    def urandom(count):
        asked.append(count)
        return bytes(range(count))

    monkeypatch.setattr(noise.os, "urandom", urandom)
    draw = SystemNoise().standard_normal(6, CPU)
    assert asked == [32]
    stream = Cipher(algorithms.AES(bytes(range(32))), modes.CTR(bytes(16))).encryptor().update(bytes(48))
    drawn = torch.from_numpy((np.frombuffer(stream, "<u8") >> 0 & (2**63 - 1)).astype(np.int64))
    assert torch.equal(draw, box_muller(lambda number: drawn.clone(), 6, CPU))


def test_contract_7_the_tail_is_small_and_grows_as_it_should():
    assert noise_tail_delta(0.728, 32.1) < 1e-4 / 233e6
    assert noise_tail_delta(0.3, 32.1) > noise_tail_delta(0.728, 32.1)
    assert noise_tail_delta(1.0, 20.0) == pytest.approx(2 * noise_tail_delta(1.0, 10.0))
    assert noise_tail_delta(0.1, 0.5) == 0.5  # the shift is beyond the edge: no bound but one


@pytest.mark.parametrize("spread", [1, 10, 10_000])
def test_contract_7_the_tail_bounds_every_direction(spread):
    """The excess beyond the edge of one release moved by 1 / sqrt(spread) in `spread` coordinates."""
    sigma, edge = 0.7, EDGE
    shift = 1 / (sigma * math.sqrt(spread))
    excess = spread * (stats.norm.sf(edge - shift) - stats.norm.sf(edge))
    assert spread <= MOST_PARAMETERS and excess <= noise_tail_delta(sigma, 1.0)


def test_contract_7_single_precision_is_refused():
    with pytest.raises(TypeError, match="float64"):
        add_noise(torch.zeros(3), 1.0, SystemNoise())
    values = torch.zeros(3, dtype=torch.float64)
    add_noise(values, 0.0, SystemNoise())
    assert torch.equal(values, torch.zeros(3, dtype=torch.float64))
    add_noise(values, 2.0, SystemNoise())
    assert values.abs().min() > 0


def test_contract_7_a_large_shard_is_noised_in_bounded_draws(monkeypatch):
    monkeypatch.setattr(noise, "MOST_DRAWN", 1000)
    drawn = []

    class Recording(noise.SystemNoise):
        def standard_normal(self, count, device):
            drawn.append(super().standard_normal(count, device))
            return drawn[-1]

    values = torch.zeros(7, 500, dtype=torch.float64)
    add_noise(values, 2.0, Recording())
    assert [len(draw) for draw in drawn] == [1000, 1000, 1000, 500]
    assert torch.equal(values.flatten(), 2 * torch.cat(drawn)) and len(values.unique()) == 3500


@pytest.mark.parametrize("std", [float("nan"), -1.0, float("inf")])
def test_contract_7_what_is_no_standard_deviation_is_refused(std):
    values = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="standard deviation"):
        add_noise(values, std, SystemNoise())
    assert not values.any()
