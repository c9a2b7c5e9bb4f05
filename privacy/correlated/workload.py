"""How far correlated noise moves the weights, and the coefficients that move them least.

What trains is not the noise of one step but its sum over steps. For running sums (a constant rate) the measure is the root mean
square, over steps and for one coordinate, of the noise in the sum of all gradients so far. A run's own workload weighs them by
its learning rates, momentum and weight decay. Nothing here touches the guarantee: the coefficients are public, and `Strategy`
checks their length whoever chose them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from ..errors import PrivacyConfigError
from .strategy import Strategy

MOST_STEPS = 10**6
"""Steps whose running sums are measured, in 8 bytes a step."""
MOST_STEPS_OF_WORKLOAD = 20_000
"""Steps of a workload: time grows with their square, to seconds."""
_NEWTON_STEPS = 60


def running_sums_error(strategy: Strategy, num_steps: int) -> float:
    """Root mean square of the noise in the running sums of steps 1, ..., num_steps, where z has variance 1.

    Row t of A C^-1 (A the lower triangular matrix of ones) has the entries d_0, ..., d_{t-1}, the running sums of the inverse.

    Raises:
        PrivacyConfigError: more than `MOST_STEPS` steps.
    """
    if num_steps > MOST_STEPS:
        raise PrivacyConfigError(
            f"the error of correlated noise is computed for up to {MOST_STEPS:,} steps, not {num_steps:,}"
        )
    rows = np.cumsum(np.cumsum(strategy.inverse(num_steps)) ** 2)
    return math.sqrt(float(rows.mean()))


@dataclass(frozen=True)
class Workload:
    """What gradients, and the noise in them, do to the weights of a linear optimizer.

    theta_t = (1 - lr_t weight_decay) theta_{t-1} - lr_t m_t and m_t = momentum m_{t-1} + (1 - momentum) g_t. This is SGD. For
    Adam it is a heuristic: its division by the root of the second moment is left out, which changes slowly.

    Attributes:
        learning_rates: of steps 1, ..., T.
    """

    learning_rates: Sequence[float]
    weight_decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.learning_rates) <= MOST_STEPS_OF_WORKLOAD:
            raise PrivacyConfigError(
                f"a workload has 1 to {MOST_STEPS_OF_WORKLOAD:,} steps, not {len(self.learning_rates):,}"
            )
        if not (all(0 <= rate < math.inf for rate in self.learning_rates) and any(self.learning_rates)):
            raise PrivacyConfigError(
                "the learning rates of a workload must be finite and not negative, and one of them positive"
            )

    def error(self, strategy: Strategy) -> float:
        """Root mean square over t of what z of variance 1 moves one coordinate of theta_t by."""
        num_steps = len(self.learning_rates)
        # m_t holds h_{t-j} of z_j, and theta_t a row of A C^-1 that follows the optimizer's own recurrence.
        decay = self.momentum ** np.arange(num_steps)
        response = (1 - self.momentum) * np.convolve(decay, strategy.inverse(num_steps))[:num_steps]
        row, total = np.zeros(num_steps), 0.0
        for t, rate in enumerate(self.learning_rates):
            row *= 1 - rate * self.weight_decay
            row[: t + 1] += rate * response[t::-1]
            total += float(row @ row)
        return math.sqrt(total / num_steps)

    def spectrum(self, size: int) -> NDArray[np.float64]:
        """(size // 2 + 1,) mean over t of |sum_r A[t, r] e^(-i omega r)|^2 at omega = 2 pi k / size."""
        frequencies = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
        turned = np.ones_like(frequencies)
        momentum, row = np.zeros_like(frequencies), np.zeros_like(frequencies)
        power = np.zeros(len(frequencies))
        for rate in self.learning_rates:
            momentum = self.momentum * momentum + (1 - self.momentum) * turned
            row = (1 - rate * self.weight_decay) * row + rate * momentum
            power += row.real**2 + row.imag**2
            turned *= frequencies
        return power / len(self.learning_rates)


def optimised(workload: Workload, bands: int) -> Strategy:
    """The strategy with little error on a workload; never more than that of the square root.

    C is found by its spectrum S(omega) = |sum_k c_k e^(-i omega k)|^2 = 1 + 2 sum_k r_k cos(k omega), in which the error of an
    endless run, the mean of P / S with P the workload's, is convex: Newton's method over r_1, ..., r_{b-1}, inside of S > 0.
    The coefficients are then the one factor of S whose inverse is stable (by its cepstrum), made positive and falling. The true
    error of the finite run decides between them and the square root.
    """
    plain = Strategy.square_root(bands)
    if bands == 1:
        return plain
    size = 1 << max(10, (2 * len(workload.learning_rates)).bit_length(), (16 * bands).bit_length())
    power = workload.spectrum(size)
    lags = np.correlate(plain.coefficients, plain.coefficients, "full")[bands:]
    spectrum = _spectrum(lags, size)
    for _ in range(_NEWTON_STEPS):
        value = _mean(power / spectrum)
        # Means over omega of cos(m omega) times a function are its Fourier coefficients.
        slopes = -2 * np.fft.irfft(power / spectrum**2)[1:bands]
        thirds = np.fft.irfft(power / spectrum**3)[: 2 * bands]
        k = np.arange(1, bands)
        curvature = 4 * (thirds[abs(k[:, None] - k)] + thirds[k[:, None] + k])
        step = linalg.solve(curvature, -slopes, assume_a="pos")
        decrease = float(-slopes @ step)
        if decrease <= 1e-12 * value:
            break
        for length in 0.5 ** np.arange(30):
            trial = _spectrum(lags + length * step, size)
            if trial.min() > 0 and _mean(power / trial) <= value - 1e-4 * length * decrease:
                break
        else:
            break
        lags, spectrum = lags + length * step, trial
    cepstrum = np.fft.irfft(np.log(spectrum))
    cepstrum[0] /= 2
    cepstrum[size // 2] /= 2
    cepstrum[size // 2 + 1 :] = 0
    factor = np.fft.irfft(np.exp(np.fft.rfft(cepstrum)))[:bands]
    falling = np.minimum.accumulate(np.maximum(factor, 1e-6 * factor[0]))
    found = Strategy.of_unit_length([float(c) for c in falling])
    return min((found, plain), key=workload.error)


def _spectrum(lags: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """(size // 2 + 1,) S on the grid."""
    padded = np.zeros(size)
    padded[0] = 1.0
    padded[1 : len(lags) + 1] = 2 * lags
    real: NDArray[np.float64] = np.fft.rfft(padded).real
    return real


def _mean(half: NDArray[np.float64]) -> float:
    """The mean over the whole circle of an even function on half of it."""
    return float((half.sum() * 2 - half[0] - half[-1]) / (2 * (len(half) - 1)))
