"""Deliberate mistakes of a mechanism, each a small change of the product at a named seam, and all checks that see each.

These are what a tape shows only if the recording is right. test_every_field_of_a_tape.py changes what is on a tape.
"""

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
from privacy.clipping import clip_factors as functions
from privacy.clipping.clip_factors import ClippingFunction
from privacy.clipping.clipped_sum import ClippedSum
from privacy.ledger import run_state
from privacy.ledger.chain import AppendOnly
from privacy.ledger.records import LedgerState
from privacy.noise.rounded_normal import deviation_in_units
from privacy.noise.source import NoiseSource, SystemNoise, add_noise
from privacy.ranks import collectives
from privacy.run import run
from privacy.run.run_ledger import RunLedger
from privacy.step import step as loop
from privacy.step.batches import LogicalBatches
from privacy.step.loop_engine import LoopEngine
from privacy.sums import local, reduction, totals
from trainer.run import start

Seam = tuple[Any, str]


class Mistake(NamedTuple):
    """What is wrong: a source of noise, or what is patched, with functions that get the one that they replace first.

    Attributes:
        found_by: every check whose claim it breaks, and no other.
        setting: what the audited plan needs for it.
    """

    source: type | None
    patched: list[tuple[Seam, Callable[..., Any]]]
    found_by: set[str]
    setting: str
    is_quick: bool


MISTAKES: dict[str, Mistake] = {}
"""`make test` makes the quick ones of a setting in one sandbox, since no two of them have a check in common."""


def mistake(
    *found_by: str,
    at: Seam | None = None,
    setting: str = "plain",
    is_quick: bool = False,
    **also: Any,
) -> Callable[[Any], Any]:
    """Adds a function that replaces the one at a seam, or a source of noise; `also` are further pairs of seam and function."""

    def add(planted: Any) -> Any:
        patched = [(at, planted), *also.values()] if at is not None else []
        source = planted if at is None else None
        MISTAKES[planted.__name__] = Mistake(source, patched, set(found_by), setting, is_quick)
        return planted

    return add


@contextmanager
def broken(*names: str) -> Iterator[NoiseSource]:
    """Inside, the sandbox's mechanism has the named mistakes; yields the noise source to use. "none" breaks nothing."""
    planted = [MISTAKES[name] for name in names if name != "none"]

    def replacing(seam: Seam, function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(*seam)
        return lambda *arguments, **named: function(original, *arguments, **named)

    with ExitStack() as stack:
        for seam, function in (pair for mistake in planted for pair in mistake.patched):
            stack.enter_context(mock.patch.object(*seam, replacing(seam, function)))
        (source,) = [mistake.source for mistake in planted if mistake.source] or [SystemNoise]
        yield source()


def nothing(*_: Any, **__: Any) -> None:
    """In place of what is forgotten."""


# Mistakes in the step


@mistake(
    # All that is released is larger, canaries, crowd and noise, and no whole number of steps over the public batch size.
    "divisor",
    "sensitivity",
    "whole_sums",
    "whole_steps",
    "noise_variance",
    "noise_tails",
    "added_exactly",
    "draws_reach_the_weights",
    at=(run, "train_step"),
)
def the_divisor_is_the_realised_batch(
    step: Any, made: Any, charge: Any, number: int, micro_batches: Any
) -> Any:
    """Counted in every second row: by chance the whole realised batch is near the public one."""
    kept = list(micro_batches)
    mine = torch.tensor(float(sum(int((~batch.is_padding_B[::2]).sum()) for batch in kept)))
    realised = int(collectives.all_reduce_sum(mine))
    plan = dataclasses.replace(made.plan, expected_batch_size=max(1, realised))
    return step(dataclasses.replace(made, plan=plan), charge, number, iter(kept))


@mistake(
    "noise_variance",
    "noise_tails",
    "one_draw_per_coordinate",
    at=(run, "train_step"),
    setting="several ranks",
    owners=((loop, "add_noise"), nothing),
)
def every_rank_adds_the_whole_noise(
    step: Any, made: Any, charge: Any, number: int, micro_batches: Any
) -> Any:
    """To its own part of the sum, before the reduction."""

    def reduce(sums: Any, exponent: Any, layout: Any) -> Any:
        deviation = deviation_in_units(
            made.plan.noise_multiplier * made.plan.max_grad_norm, exponent
        )
        for total in sums._totals.values():
            total.low += made.noise.rounded_normal(deviation, total.low.numel(), total.low.device)
        return reduction.reduce_to_owners(sums, exponent, layout)

    with mock.patch.object(loop, "reduce_to_owners", reduce):
        return step(made, charge, number, micro_batches)


@mistake(
    "noise_variance",
    "noise_tails",
    "stated_deviation",
    at=(loop, "add_noise"),
    setting="several ranks",
)
def noise_is_divided_by_the_number_of_ranks(
    add: Any, values: Tensor, deviation: float, source: Any
) -> None:
    add(values, deviation / collectives.world_size(), source)


@mistake("noise_variance", "noise_tails", "stated_deviation", at=(loop, "deviation_in_units"))
def noise_is_not_scaled_by_the_bound(units: Any, deviation: float, exponent: int) -> Any:
    return units(deviation / 0.8, exponent)


@mistake(  # silent steps show that the sum is rounded, noisy ones that sum and noise are
    "whole_sums", "added_exactly", "draws_reach_the_weights", at=(loop, "add_noise"), is_quick=True
)
def sum_and_noise_are_single(add: Any, values: Tensor, deviation: float, source: Any) -> None:
    noise = torch.zeros_like(values)
    add_noise(noise, deviation, source)
    values.copy_(values.float() + noise.float())


# Mistakes in the clipping


class _EachOnItsOwn(ClippingFunction):
    """Every parameter is clipped to C by itself; the sensitivity is still said to be C."""

    @property
    def sensitivity(self) -> float:
        return self.bounds[0]


@mistake("sensitivity", "divisor", "draws_reach_the_weights", at=(functions, "function_of"))
def each_layer_is_clipped_by_itself(
    of: Any, option: str
) -> Callable[[list[str], float], ClippingFunction]:
    return lambda names, bound: _EachOnItsOwn(
        {name: i for i, name in enumerate(names)}, (bound,) * len(names)
    )


def forgetful(make: Any, sums: Any) -> None:
    missing = [name for name in sums.shapes if name not in sums._totals]
    make(sums)
    for name in missing:
        sums._totals[name].low.add_(sums.__dict__.get("before", {}).pop(name, 0))


@mistake(  # who is in two steps running contributes more than C
    "sensitivity",
    "divisor",
    "whole_sums",
    "draws_reach_the_weights",
    at=(local.LocalSums, "take"),
    beginning=((local.LocalSums, "_make"), forgetful),
)
def sums_keep_a_64th_of_the_step_before(take: Any, sums: Any, name: str) -> totals.ParameterSum:
    total: totals.ParameterSum = take(sums, name)
    sums.__dict__.setdefault("before", {})[name] = total.read(slice(None)) // 64
    return total


@mistake(
    "whole_sums",
    "draws_reach_the_weights",
    at=(local.LocalSums, "finish"),
    check=((start, "check_against_autograd"), nothing),
)
def sums_are_single(finish: Any, sums: Any) -> None:
    """Totals hold what fp32 can hold, as gradients of trainers do; planted behind the self-check, which finds it too."""
    for total in sums._totals.values():
        total.low.copy_(total.low.float())


@mistake(
    "membership",
    "divisor",
    "whole_sums",
    "draws_reach_the_weights",
    at=(ClippedSum, "add_micro_batch"),
    check=((start, "check_against_autograd"), nothing),
    coarse=((start, "check_at_size"), nothing),
)
def the_last_micro_batch_replaces_the_others(add: Any, sums: Any, *arguments: Any) -> Any:
    sums.zero_()
    return add(sums, *arguments)


@mistake(
    "membership",
    "divisor",
    "whole_sums",
    "draws_reach_the_weights",
    at=(ClippedSum, "add_micro_batch"),
)
def rows_beyond_a_part_are_forgotten(
    add: Any, sums: Any, task: Any, inputs: Any, is_padding_B: Tensor
) -> Any:
    return add(sums, task, {name: x[:1024] for name, x in inputs.items()}, is_padding_B[:1024])


# Mistakes in a loop of one's own


@mistake("weights_follow", at=(LoopEngine, "_gradients"), setting="loop", is_quick=True)
def the_optimizer_gets_more_than_the_sum(gradients: Any, engine: Any, shards: Any) -> Any:
    found = gradients(engine, shards)
    found["offset.weight"] += 1e-3
    return found


# Mistakes in the sampling


@mistake("dealt_members", at=(loader, "stack_examples"))
def the_ragged_tail_is_dropped(
    stack: Any, examples: Any, make_example: Any, size: int, rows: Any
) -> Any:
    """The loader gives whole groups of 16 only."""
    kept = list(examples)
    whole = len(kept) // 16 * 16
    return stack(kept[:whole], make_example, size, rows[:whole])


@mistake("dealt_members", "example_keys", at=(LogicalBatches, "plan"))
def coins_forget_session_and_attempt(plan: Any, batches: Any, step: int) -> Any:
    return plan(dataclasses.replace(batches, nonce=bytes(16), attempts={}), step)


# Mistakes in the ledger


def late(reduce: Any, *arguments: Any) -> Any:
    shards = reduce(*arguments)
    intend, *intent = the_intent_follows_the_reduction.waiting.pop()
    intend(*intent)
    return shards


@mistake(
    "charge_before_release",
    at=(loop, "_intend"),
    is_quick=True,
    afterwards=((loop, "reduce_to_owners"), late),
)
def the_intent_follows_the_reduction(intend: Any, mechanism: Any, step: int, release: Any) -> float:
    the_intent_follows_the_reduction.waiting = [(intend, mechanism, step, release)]
    return float(mechanism.learning_rate(step))


@mistake("charge_before_release", at=(AppendOnly, "append"))
def an_intent_is_not_synced(append: Any, file: Any, data: bytes) -> None:
    with mock.patch.object(os, "fsync") if b'"type":"intent"' in data else nullcontext():
        append(file, data)


def once(write: Any, ledger: Any, step: int, **said: Any) -> None:
    if not ledger.attempts.get(step, 0):
        write(ledger, step, **said)


@mistake(  # of an attempt without an intent none is durable before its noise
    "charged_attempts",
    "charge_before_release",
    at=(RunLedger, "intent"),
    done=((RunLedger, "done"), once),
    order=((LedgerState, "_check_order"), nothing),
    record=((run_state, "ledger_gap"), nothing),
)
def a_retry_is_not_charged(intent: Any, ledger: Any, step: int, **said: Any) -> None:
    """Neither intent nor `done` of a retry is written, and nothing looks at orders and at attempts, which would refuse that."""
    once(intent, ledger, step, **said)


# Mistakes in the source of noise


@mistake("draws_are_new", "fresh_entropy", setting="several ranks")
class OneSeed:
    """torch.manual_seed(seed) with the same seed on every rank."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(count) * deviation).round().long()


@mistake("fresh_entropy", is_quick=True)
class EightBytes:
    """Each draw is seeded with eight bytes."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        seed = int.from_bytes(os.urandom(8), "little")
        return (
            torch.from_numpy(np.random.default_rng(seed).standard_normal(count) * deviation)
            .round()
            .long()
        )
