"""Cyclic Poisson sampling: groups of examples take turns, which is what correlated noise is charged for.

Example i belongs to group i mod b. That depends on nothing but i, so no content decides it, and it never changes. The attempt
that follows j intents draws from group j mod b alone, with the coins, the cap and the parts of Poisson sampling at rate b B / n.
A batch still has B examples on average. R lost attempts thus cost each group at most ceil(R / b) turns. A shard holds examples of
every group, so each step reads from every shard, as without groups; groups of whole shards would read 1/b of them, and make the
examples of a batch as alike as those of a shard.
Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), algorithm 2.
"""

from dataclasses import dataclass, replace
from typing import Self

from ..errors import PrivacyConfigError
from .keys import SamplingKey
from .poisson import Decided, PoissonSampler, Sampler


@dataclass(frozen=True)
class CyclicPoissonSampler(Sampler):
    """Poisson sampling of the one of `bands` groups whose turn it is.

    Attributes:
        coins: the coins of all examples, at the rate that those of the group have.
        group: whose turn it is; None until `of_attempt` says so.
    """

    coins: PoissonSampler
    bands: int
    group: int | None = None

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return self.coins.num_examples

    @property
    def cap(self) -> int | None:
        return self.coins.cap

    def of_attempt(self, num_intents: int) -> Self:
        return replace(self, group=num_intents % self.bands)

    def coin_key(self, key: SamplingKey, session_nonce: bytes, attempt: int) -> bytes:
        """Fresh coins for every start of the program and every attempt."""
        return self.coins.coin_key(key, session_nonce, attempt)

    def decide(self, coin_key: bytes, step: int, start: int = 0, stop: int | None = None) -> Decided:
        """Decides the examples of [start, stop) for `step`; whoever is in another group is out, whatever its coin."""
        if self.group is None:
            raise PrivacyConfigError("cyclic sampling decides for the group whose turn it is: ask `of_attempt` first")
        decided = self.coins.decide(coin_key, step, start, stop)
        mine = decided.ids % self.bands == self.group
        return Decided(decided.ids[mine], decided.values[mine])
