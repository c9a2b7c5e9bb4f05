"""Phi of DP-AdamBC: the variance that our own noise adds to an optimizer's second moment (trainer/optimizers)."""


class NoiseVariance:
    """Phi at each step: the moving average, with the second moment's own weights, of the variances of the noise drawn so far.

    With a constant clipping bound it is that constant. One float per run; checkpoints keep it in their manifest.
    """

    def __init__(self, beta2: float, average: float = 0.0) -> None:
        self._beta2 = beta2
        self.average = average
        """The average after the last step, before bias correction."""

    def after(self, step: int, std: float) -> float:
        """Phi of step 1, 2, ..., whose noise had standard deviation `std` per coordinate of the averaged gradient."""
        self.average = self._beta2 * self.average + (1 - self._beta2) * std**2
        return self.average / (1 - self._beta2**step)
