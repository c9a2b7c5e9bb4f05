"""Deliberate mistakes that only correlated noise can have, to be found by the audit of the mechanism."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from privacy.correlated.segment import Segment
from privacy.correlated.strategy import Strategy
from privacy.sampling.poisson import CyclicPoissonSampler, Decided
from privacy.step import step as loop
from trainer.ranks import distributed

Patches = list[tuple[Any, str, Any]]


def _segment(make: Callable[[Strategy, torch.device | None], Any]) -> Patches:
    return [(loop, "Segment", make)]


def _with_coefficients(strategy: Strategy, coefficients: tuple[float, ...]) -> Any:
    """A strategy that `Strategy` would refuse."""
    made = object.__new__(Strategy)
    object.__setattr__(made, "coefficients", coefficients)
    assert len(coefficients) == strategy.bands
    return made


def coefficients_reversed() -> Patches:
    def make(strategy: Strategy, keep_on: torch.device | None) -> Any:
        first, *later = strategy.coefficients
        return Segment(_with_coefficients(strategy, (first, *later[::-1])), keep_on)

    return _segment(make)


def past_noise_is_added() -> Patches:
    def make(strategy: Strategy, keep_on: torch.device | None) -> Any:
        first, *later = strategy.coefficients
        return Segment(_with_coefficients(strategy, (first, *(-c for c in later))), keep_on)

    return _segment(make)


def past_noise_is_forgotten() -> Patches:
    def make(strategy: Strategy, keep_on: torch.device | None) -> Any:
        first, *later = strategy.coefficients
        return Segment(_with_coefficients(strategy, (first, *(0.0 for _ in later))), keep_on)

    return _segment(make)


def past_noise_is_forgotten_on_one_rank() -> Patches:
    def make(strategy: Strategy, keep_on: torch.device | None) -> Any:
        first, *later = strategy.coefficients
        forgets = distributed.rank() == distributed.world_size() - 1
        return Segment(_with_coefficients(strategy, (first, *(0.0 if forgets else c for c in later))), keep_on)

    return _segment(make)


def coefficients_of_another_band() -> Patches:
    def make(strategy: Strategy, keep_on: torch.device | None) -> Any:
        more = Strategy.square_root(strategy.bands + 1).coefficients[:-1]
        return Segment(_with_coefficients(strategy, more), keep_on)

    return _segment(make)


def past_noise_is_kept_over_a_start() -> Patches:
    kept: list[Segment] = []

    def make(strategy: Strategy, keep_on: torch.device | None) -> Any:
        kept[:] = kept or [Segment(strategy, keep_on)]
        return kept[0]

    return _segment(make)


def past_noise_is_rounded() -> Patches:
    class Rounding(Segment):
        def add_row(self, *arguments: Any) -> None:
            super().add_row(*arguments)
            self._past = [past.float().double() for past in self._past]

    return _segment(Rounding)


def the_group_after_the_next() -> Patches:
    """Drawn from, and the ledger is told that it was its turn."""
    decide = CyclicPoissonSampler.decide

    def other(self: CyclicPoissonSampler, *arguments: Any) -> Any:
        assert self.group is not None
        return decide(dataclasses.replace(self, group=(self.group + 1) % self.bands), *arguments)

    return [(CyclicPoissonSampler, "decide", other)]


def two_groups_in_a_step() -> Patches:
    """Each at half the rate, so that batches have their size."""
    decide = CyclicPoissonSampler.decide

    def both(self: CyclicPoissonSampler, *arguments: Any) -> Any:
        assert self.group is not None
        half = dataclasses.replace(self.coins, threshold=self.coins.threshold // 2)
        groups = (self.group, (self.group + 1) % self.bands)
        one, two = (decide(dataclasses.replace(self, coins=half, group=group), *arguments) for group in groups)
        order = np.argsort(ids := np.concatenate([one.ids, two.ids]))
        return Decided(ids[order], np.concatenate([one.values, two.values])[order])

    return [(CyclicPoissonSampler, "decide", both)]


def groups_by_content() -> Patches:
    """By a hash of the example in place of its number."""

    def hashed(self: CyclicPoissonSampler, *arguments: Any) -> Any:
        decided = self.coins.decide(*arguments)
        mine = np.array([hash(f"caption {i}") % self.bands == self.group for i in decided.ids], dtype=bool)
        return Decided(decided.ids[mine], decided.values[mine])

    return [(CyclicPoissonSampler, "decide", hashed)]


CORRELATED: dict[str, Any] = {
    function.__name__: function
    for function in (
        coefficients_reversed,
        past_noise_is_added,
        past_noise_is_forgotten,
        past_noise_is_forgotten_on_one_rank,
        coefficients_of_another_band,
        past_noise_is_kept_over_a_start,
        past_noise_is_rounded,
        the_group_after_the_next,
        two_groups_in_a_step,
        groups_by_content,
    )
}
"""Mistakes that only correlated noise can have."""
