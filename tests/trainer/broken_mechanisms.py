"""Deliberate mistakes, each a small change of the product at a named seam, to be found by the audit of the mechanism."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from data.reading import loader
from privacy.clipping import ClippedSum, accumulators, clipped_sum, functions
from privacy.clipping.functions import ClippingFunction
from privacy.correlated import segment
from privacy.ledger.chain import AppendOnly
from privacy.ledger.records import LedgerState
from privacy.noise import NoiseSource, SystemNoise, add_noise
from privacy.run.ledger import RunLedger
from privacy.sampling.poisson import example_keys
from privacy.step import batches as run_batches
from privacy.step import step as loop
from privacy.step.batches import LogicalBatches
from privacy.step.reduction import reduce_to_owners
from privacy.step.step import train_step
from tests.privacy.audit.broken_samplers import SAMPLERS
from tests.trainer.broken_correlation import CORRELATED
from tests.trainer.broken_noise import SOURCES
from trainer.audit import sandbox as audit_sandbox
from trainer.ranks import distributed

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
        for target, name, value in (PATCHES | CORRELATED).get(bug, list)():
            stack.enter_context(mock.patch.object(target, name, value))
        yield SOURCES.get(bug, SystemNoise)()


Patches = list[tuple[Any, str, Any]]


# Mistakes in the step


def noise_divided_by_world_size() -> Patches:
    return [
        (segment, "add_noise", lambda values, std, source: add_noise(values, std / distributed.world_size(), source))
    ]


def sigma_of_another_recipe() -> Patches:
    return [(segment, "add_noise", lambda values, std, source: add_noise(values, 0.97 * std, source))]


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

    return [(segment, "add_noise", lambda values, std, source: None), (audit_sandbox, "train_step", step)]


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


def sum_and_noise_in_single_precision() -> Patches:
    def add(values: Tensor, std: float, source: Any) -> None:
        noise = torch.zeros_like(values)
        add_noise(noise, std, source)
        values.copy_(values.float() + noise.float())

    return [(segment, "add_noise", add)]


def noise_follows_the_realised_batch() -> Patches:
    """sigma C sqrt(batch / B): right on average."""

    def step(run: Any, number: int, micro_batches: Any) -> Any:
        kept = list(micro_batches)
        mine = torch.tensor(float(sum(int((~batch.is_padding_B).sum()) for batch in kept)))
        scale = (2 * float(distributed.all_reduce_sum(mine)) / run.plan.expected_batch_size) ** 0.5
        scaled = lambda values, std, source: add_noise(values, std * scale, source)  # noqa: E731
        with mock.patch.object(segment, "add_noise", scaled):
            return train_step(run, number, iter(kept))

    return [(audit_sandbox, "train_step", step)]


# Mistakes in the ledger


def intent_after_the_step() -> Patches:
    intend, adapt, waiting = loop._intend, loop.adapt_bound, []

    def late(*arguments: Any) -> Any:
        intend(*waiting.pop())
        return adapt(*arguments)

    return [(loop, "_intend", lambda *arguments: waiting.append(arguments)), (loop, "adapt_bound", late)]


def every_second_intent_is_not_synced() -> Patches:
    append, count = AppendOnly.append, [0]

    def lazy(self: Any, data: bytes) -> None:
        count[0] += b'"type":"intent"' in data
        if b'"type":"intent"' in data and count[0] % 2 == 0:
            with mock.patch.object(os, "fsync", return_value=None):
                return append(self, data)
        return append(self, data)

    return [(AppendOnly, "append", lazy)]


def a_retry_is_not_charged() -> Patches:
    """Neither intent nor `done` of a retry is written, and nothing checks the order of records, which would refuse that."""
    intent, done = RunLedger.intent, RunLedger.done

    def once(self: Any, step: int, *, releases: Any) -> None:
        if not self.attempts.get(step, 0):
            intent(self, step, releases=releases)

    def done_once(self: Any, step: int) -> None:
        if not self.attempts.get(step, 0):
            done(self, step)

    unchecked = (LedgerState, "_check_order", lambda self, step, attempt: None)
    return [(RunLedger, "intent", once), (RunLedger, "done", done_once), unchecked]


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


def one_bad_example_zeroes_its_micro_batch() -> Patches:
    factors = ClippedSum._factors

    def all_or_none(self: Any, *arguments: Any) -> Any:
        found = factors(self, *arguments)
        whole = found.is_finite_B.all()
        return found._replace(weights=[weight_B * whole for weight_B in found.weights])

    return [(ClippedSum, "_factors", all_or_none)]


def sums_keep_a_64th_of_the_step_before() -> Patches:
    zero = accumulators.LocalSums.zero_

    def forgetful(self: Any) -> None:
        # After logical batches alone: the self-check at the start compares small sums with autograd's.
        part = 1 / 64 if getattr(self, "_rows", 0) > 100 else 0.0
        kept = {name: total * part for name, total in self._totals.items()}
        zero(self)
        for name, total in self._totals.items():
            total += kept[name]

    return [(accumulators.LocalSums, "zero_", forgetful)]


def sums_in_single_precision() -> Patches:
    """Totals hold what fp32 can hold, as gradients of trainers do; planted behind the self-check, which finds it too."""

    def finish(self: Any) -> None:
        for total in self._totals.values():
            total.copy_(total.float())

    return [
        (accumulators.LocalSums, "finish", finish),
        (audit_sandbox, "check_against_autograd", lambda *_, **__: None),
    ]


# Mistakes in the sampling


def ragged_tail_dropped() -> Patches:
    """The loader gives whole groups of 16 only."""
    stack = loader.stack_examples

    def whole_only(examples: Any, make_example: Any, size: int, rows: Any) -> Any:
        kept = list(examples)
        whole = len(kept) // 16 * 16
        return stack(kept[:whole], make_example, size, rows[:whole])

    return [(loader, "stack_examples", whole_only)]


def keys_of_rows() -> Patches:
    """The key of an example follows from its row in the batch."""
    return [(run_batches, "example_keys", lambda key, step, ids: example_keys(key, step, np.arange(len(ids))))]


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
        sum_and_noise_in_single_precision,
        noise_follows_the_realised_batch,
        intent_after_the_step,
        every_second_intent_is_not_synced,
        a_retry_is_not_charged,
        one_bad_example_zeroes_its_micro_batch,
        sums_keep_a_64th_of_the_step_before,
        sums_in_single_precision,
        ragged_tail_dropped,
        keys_of_rows,
    )
} | SAMPLERS
ALL = (*PATCHES, *SOURCES)
