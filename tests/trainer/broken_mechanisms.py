"""Deliberate mistakes, each one that has been made in real trainers, to be found by the audit of the mechanism."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from privacy.clipping import ClippedSum, clipped_sum, functions
from privacy.clipping.functions import ClippingFunction
from privacy.noise import NoiseSource, SystemNoise, add_noise
from trainer.audit import sandbox as audit_sandbox
from trainer.engines.reduction import reduce_to_owners
from trainer.loop import step as loop
from trainer.loop.step import train_step
from trainer.ranks import distributed
from trainer.run.batches import LogicalBatches

NEED_TWO_RANKS = (
    "noise_divided_by_world_size",
    "same_seed_on_all_ranks",
    "noise_before_the_reduction",
    "reduction_averages",
)


@contextmanager
def broken(bug: str) -> Iterator[NoiseSource]:
    """Inside, the sandbox's mechanism has the named mistake; yields the noise source to use. "none" breaks nothing."""
    with ExitStack() as stack:
        for target, name, value in PATCHES.get(bug, list)():
            stack.enter_context(mock.patch.object(target, name, value))
        yield SOURCES.get(bug, SystemNoise)()


Patches = list[tuple[Any, str, Any]]


# Noise sources


class OneSeed:
    """torch.manual_seed(seed) with the same seed on every rank."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(count))


class Replayed:
    """A generator that is seeded again for every step."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(np.random.default_rng((distributed.rank(), count)).standard_normal(count))

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return (self.standard_normal(count, device) * deviation).round().long()


class SinglePrecision:
    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, dtype=torch.float32).double()


SOURCES: dict[str, Any] = {
    "same_seed_on_all_ranks": OneSeed,
    "replayed_noise": Replayed,
    "single_precision_noise": SinglePrecision,
}


# Mistakes in the step


def noise_divided_by_world_size() -> Patches:
    return [(loop, "add_noise", lambda values, std, source: add_noise(values, std / distributed.world_size(), source))]


def sigma_of_another_recipe() -> Patches:
    return [(loop, "add_noise", lambda values, std, source: add_noise(values, 0.97 * std, source))]


def noise_before_the_reduction() -> Patches:
    """Every rank adds the whole noise to its own part of the sum."""

    def step(run: Any, number: int, micro_batches: Any) -> Any:
        def reduce(clipped: Any, layout: Any) -> Any:
            for _, total in clipped.sums():
                draw = run.noise.standard_normal(total.numel(), total.device)
                total += run.plan.noise_multiplier * run.plan.max_grad_norm * draw.view_as(total)
            return reduce_to_owners(clipped, layout)

        with mock.patch.object(loop, "reduce_to_owners", reduce):
            return train_step(run, number, micro_batches)

    return [(loop, "add_noise", lambda values, std, source: None), (audit_sandbox, "train_step", step)]


def reduction_averages() -> Patches:
    def reduce(clipped: Any, layout: Any) -> Any:
        shards = reduce_to_owners(clipped, layout)
        for shard in shards:
            shard.values.div_(distributed.world_size())
        return shards

    return [(loop, "reduce_to_owners", reduce)]


def divisor_is_the_realised_batch() -> Patches:
    def step(run: Any, number: int, micro_batches: Any) -> Any:
        kept = list(micro_batches)
        mine = torch.tensor(float(sum(int((~batch.is_padding_B).sum()) for batch in kept)))
        realised = int(distributed.all_reduce_sum(mine))
        run.plan = dataclasses.replace(run.plan, expected_batch_size=max(1, realised))
        return train_step(run, number, iter(kept))

    return [(audit_sandbox, "train_step", step)]


def one_layer_without_noise() -> Patches:
    def step(run: Any, number: int, micro_batches: Any) -> Any:
        take = run.engine.step

        def without(shards: Any, **rates: float) -> None:
            for shard in shards:
                if shard.name == "matrix.weight":
                    shard.values.zero_()
            take(shards, **rates)

        with mock.patch.object(run.engine, "step", without):
            return train_step(run, number, micro_batches)

    return [(audit_sandbox, "train_step", step)]


# Mistakes in the clipping


class _OneLayerUnclipped(ClippedSum):
    """conv.weight gets the whole gradient; the sensitivity is still said to be C."""

    def __init__(self, model: torch.nn.Module, max_grad_norm: float, **more: Any) -> None:
        super().__init__(model, max_grad_norm, **more)
        self._unclipped = ClippedSum(model, float("inf"), **more)

    def zero_(self) -> None:
        super().zero_()
        self._unclipped.zero_()

    def add_micro_batch(self, task: Any, inputs: Any, is_padding_B: Tensor) -> Any:
        self._unclipped.add_micro_batch(task, inputs, is_padding_B)
        return super().add_micro_batch(task, inputs, is_padding_B)

    def sums(self) -> Any:
        loose = dict(self._unclipped.sums())
        for name, total in super().sums():
            yield name, loose[name] if name == "conv.weight" else total


def clip_forgotten_for_one_layer() -> Patches:
    return [(clipped_sum, "ClippedSum", _OneLayerUnclipped)]


class _EachOnItsOwn(ClippingFunction):
    """Every parameter is clipped to C by itself; the sensitivity is still said to be C."""

    @property
    def sensitivity(self) -> float:
        return self.bounds[0]


def clip_each_layer_by_itself() -> Patches:
    def function(names: list[str], bound: float) -> ClippingFunction:
        return _EachOnItsOwn({name: i for i, name in enumerate(names)}, (bound,) * len(names))

    return [(functions, "FUNCTIONS", {"flat": function})]


# Mistakes in the sampling


def members_reused_at_a_retry() -> Patches:
    """Coins that forget the session and the attempt."""
    plan = LogicalBatches.plan

    def forgetful(self: Any, step: int) -> Any:
        return plan(dataclasses.replace(self, nonce=bytes(16), attempts={}), step)

    return [(LogicalBatches, "plan", forgetful)]


def members_of_the_first_step_again() -> Patches:
    plan = LogicalBatches.plan
    return [(LogicalBatches, "plan", lambda self, step: plan(self, 1)._replace(step=step))]


def twice_the_sample_rate() -> Patches:
    decide = audit_sandbox.LogicalBatches.plan

    def generous(self: Any, step: int) -> Any:
        sampler = dataclasses.replace(self.sampler, threshold=2 * self.sampler.threshold, cap=None)
        return decide(dataclasses.replace(self, sampler=sampler), step)

    return [(LogicalBatches, "plan", generous)]


PATCHES: dict[str, Any] = {
    function.__name__: function
    for function in (
        noise_divided_by_world_size,
        sigma_of_another_recipe,
        noise_before_the_reduction,
        reduction_averages,
        divisor_is_the_realised_batch,
        one_layer_without_noise,
        clip_forgotten_for_one_layer,
        clip_each_layer_by_itself,
        members_reused_at_a_retry,
        members_of_the_first_step_again,
        twice_the_sample_rate,
    )
}
ALL = (*PATCHES, *SOURCES)
