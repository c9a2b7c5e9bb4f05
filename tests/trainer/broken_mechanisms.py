"""Deliberate mistakes, each a small change of the product at a named seam, and the checks of the audit that find each."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from data.reading import loader
from privacy.clipping import accumulators, functions, norms
from privacy.clipping.clipped_sum import ClippedSum
from privacy.clipping.functions import ClippingFunction, unclipped
from privacy.ledger import durable
from privacy.ledger.chain import AppendOnly
from privacy.ledger.records import LedgerState
from privacy.loop.engine import OwnEngine
from privacy.loop.reading import Reader
from privacy.noise import NoiseSource, SystemNoise, add_noise
from privacy.run import run
from privacy.run.ledger import RunLedger
from privacy.sampling.poisson import example_keys
from privacy.step import adaptive_bound, collectives
from privacy.step import batches as run_batches
from privacy.step import step as loop
from privacy.step.batches import LogicalBatches
from privacy.step.reduction import reduce_to_owners
from privacy.step.step import train_step
from trainer.run import start

Patches = list[tuple[Any, str, Any]]


# Mistakes in the step


def the_divisor_is_the_realised_batch() -> Patches:
    def step(made: Any, number: int, micro_batches: Any) -> Any:
        kept = list(micro_batches)
        mine = torch.tensor(float(sum(int((~batch.is_padding_B).sum()) for batch in kept)))
        realised = int(collectives.all_reduce_sum(mine))
        made.plan = dataclasses.replace(made.plan, expected_batch_size=max(1, realised))
        return train_step(made, number, iter(kept))

    return [(run, "train_step", step)]


def one_layer_gets_no_noise() -> Patches:
    def step(made: Any, number: int, micro_batches: Any) -> Any:
        take = made.engine.step

        def without(shards: Any, **rates: float) -> None:
            for shard in shards:
                if shard.name == "block.matrix.weight":
                    shard.values.zero_()
            take(shards, **rates)

        with mock.patch.object(made.engine, "step", without):
            return train_step(made, number, micro_batches)

    return [(run, "train_step", step)]


def every_rank_adds_the_whole_noise() -> Patches:
    """To its own part of the sum, before the reduction."""

    def step(made: Any, number: int, micro_batches: Any) -> Any:
        def reduce(clipped: Any, layout: Any) -> Any:
            for _, total in clipped.sums():
                draw = made.noise.standard_normal(total.numel(), total.device)
                total += made.plan.noise_multiplier * made.plan.max_grad_norm * draw.view_as(total)
            return reduce_to_owners(clipped, layout)

        with mock.patch.object(loop, "reduce_to_owners", reduce):
            return train_step(made, number, micro_batches)

    return [(loop, "add_noise", lambda values, std, source: None), (run, "train_step", step)]


def noise_is_divided_by_the_number_of_ranks() -> Patches:
    return [(loop, "add_noise", lambda values, std, source: add_noise(values, std / collectives.world_size(), source))]


def sum_and_noise_are_single() -> Patches:
    def add(values: Tensor, std: float, source: Any) -> None:
        noise = torch.zeros_like(values)
        add_noise(noise, std, source)
        values.copy_(values.float() + noise.float())

    return [(loop, "add_noise", add)]


# Mistakes in the clipping


class _EachOnItsOwn(ClippingFunction):
    """Every parameter is clipped to C by itself; the sensitivity is still said to be C."""

    @property
    def sensitivity(self) -> float:
        return self.bounds[0]


def each_layer_is_clipped_by_itself() -> Patches:
    def function(names: list[str], bound: float) -> ClippingFunction:
        return _EachOnItsOwn({name: i for i, name in enumerate(names)}, (bound,) * len(names))

    return [(functions, "function_of", lambda option: function)]


def sums_keep_a_64th_of_the_step_before() -> Patches:
    take, make = accumulators.LocalSums.take, accumulators.LocalSums._make

    def remembering(self: Any, name: str) -> accumulators.Total:
        total = take(self, name)
        self.__dict__.setdefault("before", {})[name] = total.read(slice(None)) // 64
        return total

    def forgetful(self: Any) -> None:
        missing = [name for name in self._shapes if name not in self._totals]
        make(self)
        for name in missing:
            self._totals[name].low.add_(self.__dict__.get("before", {}).pop(name, 0))

    return [(accumulators.LocalSums, "take", remembering), (accumulators.LocalSums, "_make", forgetful)]


def sums_are_single() -> Patches:
    """Totals hold what fp32 can hold, as gradients of trainers do; planted behind the self-check, which finds it too."""

    def finish(self: Any) -> None:
        for total in self._totals.values():
            total.low.copy_(total.low.float())

    return [(accumulators.LocalSums, "finish", finish), (start, "check_against_autograd", lambda *_, **__: None)]


def rows_beyond_a_part_are_forgotten() -> Patches:
    add = ClippedSum.add_micro_batch

    def first(self: Any, task: Any, inputs: Any, is_padding_B: Any) -> Any:
        return add(self, task, {name: x[:1024] for name, x in inputs.items()}, is_padding_B[:1024])

    return [(ClippedSum, "add_micro_batch", first)]


def the_last_micro_batch_replaces_the_others() -> Patches:
    add = ClippedSum.add_micro_batch

    def alone(self: Any, *arguments: Any) -> Any:
        self.zero_()
        return add(self, *arguments)

    return [(ClippedSum, "add_micro_batch", alone)]


def noise_is_that_of_the_first_bound() -> Patches:
    releases = ClippedSum.releases

    def first(self: Any, noise_multiplier: float) -> Any:
        made = releases(self, noise_multiplier)
        made[0]["std"] = made[0]["std"] / self.max_grad_norm
        return made

    return [(ClippedSum, "releases", first), (RunLedger, "intent", intent_as_planned)]


def intent_as_planned(self: Any, step: int, *, releases: Any) -> None:
    """States what the plan says, whatever was drawn."""
    stated = [{**releases[0], "std": releases[0]["std"] * releases[0]["sensitivity"]}, *releases[1:]]
    self._write(lambda ledger: ledger.intent(step, self.attempts.get(step, 0), stated))


# Mistakes in a loop of one's own


def the_optimizer_gets_more_than_the_sum() -> Patches:
    gradients = OwnEngine._gradients

    def more(self: Any, shards: Any) -> Any:
        found = gradients(self, shards)
        found["offset.weight"] += 1e-3
        return found

    return [(OwnEngine, "_gradients", more)]


def an_item_is_lost() -> Patches:
    read = Reader.__getitem__
    return [(Reader, "__getitem__", lambda self, request: read(self, request[:-1]))]


def items_are_read_with_one_key() -> Patches:
    item = Reader.item
    return [(Reader, "item", lambda self, index, key: item(self, index, 7))]


# Mistakes in the sampling


def the_ragged_tail_is_dropped() -> Patches:
    """The loader gives whole groups of 16 only."""
    stack = loader.stack_examples

    def whole_only(examples: Any, make_example: Any, size: int, rows: Any) -> Any:
        kept = list(examples)
        whole = len(kept) // 16 * 16
        return stack(kept[:whole], make_example, size, rows[:whole])

    return [(loader, "stack_examples", whole_only)]


def keys_are_those_of_rows() -> Patches:
    return [(run_batches, "example_keys", lambda key, step, ids: example_keys(key, step, np.arange(len(ids))))]


def a_retry_has_the_same_members() -> Patches:
    """Coins that forget the session and the attempt."""
    plan = LogicalBatches.plan

    def forgetful(self: Any, step: int) -> Any:
        return plan(dataclasses.replace(self, nonce=bytes(16), attempts={}), step)

    return [(LogicalBatches, "plan", forgetful)]


# Mistakes in the ledger


def the_intent_follows_the_reduction() -> Patches:
    intend, waiting = loop._intend, []

    def put_off(mechanism: Any, step: int, releases: Any) -> float:
        waiting.append((mechanism, step, releases))
        return mechanism.learning_rate(step)

    def late(*arguments: Any) -> Any:
        shards = reduce_to_owners(*arguments)
        intend(*waiting.pop())
        return shards

    return [(loop, "_intend", put_off), (loop, "reduce_to_owners", late)]


def an_intent_is_not_synced() -> Patches:
    append = AppendOnly.append

    def lazy(self: Any, data: bytes) -> None:
        with mock.patch.object(os, "fsync") if b'"type":"intent"' in data else nullcontext():
            append(self, data)

    return [(AppendOnly, "append", lazy)]


def no_name_is_synced() -> Patches:
    return [(durable, "fsync_directory", lambda directory: None)]


def a_retry_is_not_charged() -> Patches:
    """Neither intent nor `done` of a retry is written, and nothing checks the order of records, which would refuse that."""
    intent, done = RunLedger.intent, RunLedger.done

    def once(self: Any, step: int, *, releases: Any) -> None:
        if not self.attempts.get(step, 0):
            intent(self, step, releases=releases)

    def done_once(self: Any, step: int, **noised: Any) -> None:
        if not self.attempts.get(step, 0):
            done(self, step, **noised)

    unchecked = (LedgerState, "_check_order", lambda self, step, attempt: None)
    return [(RunLedger, "intent", once), (RunLedger, "done", done_once), unchecked]


# Mistakes with the count of adaptive clipping


def the_count_is_not_centred() -> Patches:
    return [(norms, "unclipped", lambda norm_B, bound: unclipped(norm_B, bound) + 0.5)]


def the_count_has_half_its_noise() -> Patches:
    return [(adaptive_bound, "add_noise", lambda values, std, source: add_noise(values, std / 2, source))]


# Mistakes in the source of noise


class OneSeed:
    """torch.manual_seed(seed) with the same seed on every rank."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(count))


class Replayed:
    """A generator that is seeded again for every step."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(np.random.default_rng((collectives.rank(), count)).standard_normal(count))

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return (self.standard_normal(count, device) * deviation).round().long()


class SinglePrecision:
    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, dtype=torch.float32).double()


class HalfReversed(SystemNoise):
    """The second half is minus the first half reversed: half of the entropy, and a sum of zero."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw = super().standard_normal(count, device)
        half = count // 2
        draw[count - half :] = -draw[:half].flip(0)
        return draw


class EndsAtThree(SystemNoise):
    """No value beyond 3 standard deviations, and the stated variance."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw = super().standard_normal(count, device)
        while (beyond := draw.abs() > 3).any():
            draw[beyond] = super().standard_normal(int(beyond.sum()), device)
        return draw / 0.98658


class SixteenBits:
    """Each draw is seeded with two bytes."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        seed = int.from_bytes(os.urandom(2), "little")
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(count))


class Mistake(NamedTuple):
    """`plant` gives what is patched, or the source of noise; `setting` is what the audited plan needs for it."""

    plant: Callable[[], Any]
    found_by: set[str]
    setting: str = "plain"
    is_quick: bool = False


MISTAKES = {
    mistake.plant.__name__: mistake
    for mistake in (
        Mistake(the_divisor_is_the_realised_batch, {"divisor"}),
        Mistake(each_layer_is_clipped_by_itself, {"sensitivity"}),
        Mistake(sums_keep_a_64th_of_the_step_before, {"whole_sums"}),
        Mistake(sums_are_single, {"whole_sums"}),
        Mistake(rows_beyond_a_part_are_forgotten, {"membership", "whole_sums"}),
        Mistake(the_last_micro_batch_replaces_the_others, {"membership", "whole_sums"}),
        Mistake(the_ragged_tail_is_dropped, {"dealt_members"}),
        Mistake(a_retry_has_the_same_members, {"dealt_members"}),
        Mistake(keys_are_those_of_rows, {"example_keys"}),
        Mistake(one_layer_gets_no_noise, {"draws_reach_the_weights"}),
        Mistake(sum_and_noise_are_single, {"added_in_double"}, is_quick=True),
        Mistake(HalfReversed, {"draws_are_new"}, is_quick=True),
        Mistake(Replayed, {"draws_are_new"}),
        Mistake(SinglePrecision, {"double_precision"}),
        Mistake(EndsAtThree, {"noise_tails"}),
        Mistake(SixteenBits, {"fresh_entropy"}),
        Mistake(the_intent_follows_the_reduction, {"charge_before_release"}, is_quick=True),
        Mistake(an_intent_is_not_synced, {"charge_before_release"}),
        Mistake(no_name_is_synced, {"ledger_name_durable"}),
        Mistake(a_retry_is_not_charged, {"charged_attempts"}),
        Mistake(noise_is_divided_by_the_number_of_ranks, {"noise_variance"}, "several ranks"),
        Mistake(OneSeed, {"draws_are_new"}, "several ranks", is_quick=True),
        Mistake(every_rank_adds_the_whole_noise, {"noise_variance", "one_draw_per_coordinate"}, "several ranks"),
        Mistake(the_count_is_not_centred, {"count_sensitivity"}, "adaptive", is_quick=True),
        Mistake(the_count_has_half_its_noise, {"count_draws"}, "adaptive"),
        Mistake(noise_is_that_of_the_first_bound, {"noise_variance"}, "adaptive"),
        Mistake(the_optimizer_gets_more_than_the_sum, {"weights_follow"}, "loop", is_quick=True),
        Mistake(an_item_is_lost, {"dealt_members"}, "loop"),
        Mistake(items_are_read_with_one_key, {"example_keys"}, "loop"),
    )
}
"""At least one for each check; `make test` plants the quick ones, one or more of every setting."""


@contextmanager
def broken(name: str) -> Iterator[NoiseSource]:
    """Inside, the sandbox's mechanism has the named mistake; yields the noise source to use. "none" breaks nothing."""
    planted = MISTAKES[name].plant() if name != "none" else []
    with ExitStack() as stack:
        for target, attribute, value in planted if isinstance(planted, list) else []:
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield SystemNoise() if isinstance(planted, list) else planted
