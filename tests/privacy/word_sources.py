"""Sources of bits that tests know."""

import numpy as np


class Words:
    """The bits of a fixed Philox stream."""

    def __init__(self, seed: int) -> None:
        self._philox = np.random.Philox(seed)
        self.asked: list[int] = []

    def uniform_words(self, count: int) -> np.ndarray:
        self.asked.append(count)
        return self._philox.random_raw(count)


class Repeated:
    """The same word again and again, but not forever."""

    def __init__(self, word: int) -> None:
        self._word = word
        self._calls = 0

    def uniform_words(self, count: int) -> np.ndarray:
        self._calls += 1
        assert self._calls < 10_000
        return np.full(count, self._word, np.uint64)
