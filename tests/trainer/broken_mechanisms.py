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
from privacy.clipping.functions import ClippingFunction
from privacy.ledger import durable, run_state
from privacy.ledger.chain import AppendOnly
from privacy.ledger.records import LedgerState
from privacy.loop.engine import OwnEngine
from privacy.loop.reading import Reader
from privacy.noise import NoiseSource, SystemNoise, add_noise
from privacy.rounded_normal import deviation_in_units
from privacy.run import run
from privacy.run.ledger import RunLedger
from privacy.step import adaptive_bound, batches, collectives, reduction
from privacy.step import step as loop
from privacy.step.batches import LogicalBatches
from trainer.run import start

Seam = tuple[Any, str]


class Mistake(NamedTuple):
    """What is wrong: a source of noise, or what is patched, with functions that get the one that they replace first."""

    source: type | None
    patched: list[tuple[Seam, Callable[..., Any]]]
    found_by: set[str]
    setting: str
    is_quick: bool


MISTAKES: dict[str, Mistake] = {}
"""At least one for each check; `make test` plants the quick ones, one or more of every setting."""


def mistake(
    *found_by: str, at: Seam | None = None, setting: str = "plain", is_quick: bool = False, **also: Any
) -> Callable[[Any], Any]:
    """Adds a function that replaces the one at a seam, or a source of noise.

    Args:
        setting: what the audited plan needs for it.
        also: further pairs of seam and function.
    """

    def add(planted: Any) -> Any:
        patched = [(at, planted), *also.values()] if at is not None else []
        source = planted if at is None else None
        MISTAKES[planted.__name__] = Mistake(source, patched, set(found_by), setting, is_quick)
        return planted

    return add


@contextmanager
def broken(name: str) -> Iterator[NoiseSource]:
    """Inside, the sandbox's mechanism has the named mistake; yields the noise source to use. "none" breaks nothing."""
    planted = MISTAKES.get(name, Mistake(None, [], set(), "", False))
    assert name == "none" or name in MISTAKES

    def replacing(seam: Seam, function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(*seam)
        return lambda *arguments, **named: function(original, *arguments, **named)

    with ExitStack() as stack:
        for seam, function in planted.patched:
            stack.enter_context(mock.patch.object(*seam, replacing(seam, function)))
        yield (planted.source or SystemNoise)()


def nothing(*_: Any, **__: Any) -> None:
    """In place of what is forgotten."""


# Mistakes in the step


@mistake("divisor", at=(run, "train_step"))
def the_divisor_is_the_realised_batch(step: Any, made: Any, number: int, micro_batches: Any) -> Any:
    kept = list(micro_batches)
    mine = torch.tensor(float(sum(int((~batch.is_padding_B).sum()) for batch in kept)))
    realised = int(collectives.all_reduce_sum(mine))
    made.plan = dataclasses.replace(made.plan, expected_batch_size=max(1, realised))
    return step(made, number, iter(kept))


@mistake("draws_reach_the_weights", at=(run, "train_step"))
def one_layer_gets_no_noise(step: Any, made: Any, number: int, micro_batches: Any) -> Any:
    take = made.engine.step

    def without(shards: Any, **rates: float) -> None:
        for shard in shards:
            if shard.name == "block.matrix.weight":
                shard.values.zero_()
        take(shards, **rates)

    with mock.patch.object(made.engine, "step", without):
        return step(made, number, micro_batches)


@mistake(
    "noise_variance", "one_draw_per_coordinate",
    at=(run, "train_step"), setting="several ranks", owners=((loop, "add_noise"), nothing),
)  # fmt: skip
def every_rank_adds_the_whole_noise(step: Any, made: Any, number: int, micro_batches: Any) -> Any:
    """To its own part of the sum, before the reduction."""

    def reduce(clipped: Any, layout: Any) -> Any:
        deviation = deviation_in_units(made.plan.noise_multiplier * made.plan.max_grad_norm, clipped.exponent)
        for total in clipped.accumulator._totals.values():
            total.low += made.noise.rounded_normal(deviation, total.low.numel(), total.low.device)
        return reduction.reduce_to_owners(clipped, layout)

    with mock.patch.object(loop, "reduce_to_owners", reduce):
        return step(made, number, micro_batches)


@mistake("added_exactly", at=(loop, "add_noise"), is_quick=True)
def sum_and_noise_are_single(add: Any, values: Tensor, deviation: float, source: Any) -> None:
    noise = torch.zeros_like(values)
    add_noise(noise, deviation, source)
    values.copy_(values.float() + noise.float())


@mistake("whole_steps", "added_exactly", at=(loop, "real_"))
def a_double_is_added_to_the_noised_sum(convert: Any, values: Tensor, exponent: int) -> Tensor:
    """A quarter of a step, of either sign: what noise in double precision leaves behind the last step."""
    noised: Tensor = convert(values, exponent)
    return noised.add_(torch.rand_like(noised).sub_(0.5).mul_(2.0 ** (-exponent - 1)))


# Mistakes in the clipping


class _EachOnItsOwn(ClippingFunction):
    """Every parameter is clipped to C by itself; the sensitivity is still said to be C."""

    @property
    def sensitivity(self) -> float:
        return self.bounds[0]


def _each_alone(names: list[str], bound: float) -> ClippingFunction:
    return _EachOnItsOwn({name: i for i, name in enumerate(names)}, (bound,) * len(names))


def forgetful(make: Any, sums: Any) -> None:
    missing = [name for name in sums.shapes if name not in sums._totals]
    make(sums)
    for name in missing:
        sums._totals[name].low.add_(sums.__dict__.get("before", {}).pop(name, 0))


@mistake(
    "whole_sums", at=(accumulators.LocalSums, "take"), beginning=((accumulators.LocalSums, "_make"), forgetful)
)  # fmt: skip
def sums_keep_a_64th_of_the_step_before(take: Any, sums: Any, name: str) -> accumulators.Total:
    total: accumulators.Total = take(sums, name)
    sums.__dict__.setdefault("before", {})[name] = total.read(slice(None)) // 64
    return total


@mistake("whole_sums", at=(accumulators.LocalSums, "finish"), check=((start, "check_against_autograd"), nothing))
def sums_are_single(finish: Any, sums: Any) -> None:
    """Totals hold what fp32 can hold, as gradients of trainers do; planted behind the self-check, which finds it too."""
    for total in sums._totals.values():
        total.low.copy_(total.low.float())


@mistake(
    "membership", "whole_sums", at=(ClippedSum, "add_micro_batch"),
    check=((start, "check_against_autograd"), nothing), coarse=((start, "check_at_size"), nothing),
)  # fmt: skip
def the_last_micro_batch_replaces_the_others(add: Any, sums: Any, *arguments: Any) -> Any:
    sums.zero_()
    return add(sums, *arguments)


def intent_as_planned(intent: Any, ledger: Any, step: int, *, releases: Any) -> None:
    """States what the plan says, whatever was drawn."""
    intent(
        ledger, step, releases=[{**releases[0], "std": releases[0]["std"] * releases[0]["sensitivity"]}, *releases[1:]]
    )


@mistake(
    "noise_variance", at=(ClippedSum, "releases"), setting="adaptive", stated=((RunLedger, "intent"), intent_as_planned)
)
def noise_is_that_of_the_first_bound(releases: Any, sums: Any, noise_multiplier: float) -> Any:
    made = releases(sums, noise_multiplier)
    made[0]["std"] = made[0]["std"] / sums.max_grad_norm
    return made


# Mistakes in a loop of one's own


@mistake("weights_follow", at=(OwnEngine, "_gradients"), setting="loop", is_quick=True)
def the_optimizer_gets_more_than_the_sum(gradients: Any, engine: Any, shards: Any) -> Any:
    found = gradients(engine, shards)
    found["offset.weight"] += 1e-3
    return found


# Mistakes in the sampling


@mistake("dealt_members", at=(loader, "stack_examples"))
def the_ragged_tail_is_dropped(stack: Any, examples: Any, make_example: Any, size: int, rows: Any) -> Any:
    """The loader gives whole groups of 16 only."""
    kept = list(examples)
    whole = len(kept) // 16 * 16
    return stack(kept[:whole], make_example, size, rows[:whole])


# Mistakes in the ledger


def late(reduce: Any, *arguments: Any) -> Any:
    shards = reduce(*arguments)
    intend, *intent = the_intent_follows_the_reduction.waiting.pop()
    intend(*intent)
    return shards


@mistake(
    "charge_before_release", at=(loop, "_intend"), is_quick=True, afterwards=((loop, "reduce_to_owners"), late)
)  # fmt: skip
def the_intent_follows_the_reduction(intend: Any, mechanism: Any, step: int, releases: Any) -> float:
    the_intent_follows_the_reduction.waiting = [(intend, mechanism, step, releases)]
    return float(mechanism.learning_rate(step))


@mistake("charge_before_release", at=(AppendOnly, "append"))
def an_intent_is_not_synced(append: Any, file: Any, data: bytes) -> None:
    with mock.patch.object(os, "fsync") if b'"type":"intent"' in data else nullcontext():
        append(file, data)


def once(write: Any, ledger: Any, step: int, **said: Any) -> None:
    if not ledger.attempts.get(step, 0):
        write(ledger, step, **said)


@mistake(
    "charged_attempts", at=(RunLedger, "intent"),
    done=((RunLedger, "done"), once), order=((LedgerState, "_check_order"), nothing),
    record=((run_state, "not_in_ledger"), nothing),
)  # fmt: skip
def a_retry_is_not_charged(intent: Any, ledger: Any, step: int, **said: Any) -> None:
    """Neither intent nor `done` of a retry is written, and nothing looks at orders and at attempts, which would refuse that."""
    once(intent, ledger, step, **said)


@mistake("count_sensitivity", at=(norms, "unclipped"), setting="adaptive", is_quick=True)
def the_count_is_not_centred(unclipped: Any, norm_B: Tensor, bound: float) -> Any:
    return unclipped(norm_B, bound) + 0.5


# Mistakes of one line


PLAIN, LOOP, ADAPTIVE, RANKS = "plain", "loop", "adaptive", "several ranks"
for name, found, setting, at, planted in [
    ("each_layer_is_clipped_by_itself", "sensitivity", PLAIN, (functions, "function_of"), lambda of, option: _each_alone),
    ("rows_beyond_a_part_are_forgotten", "membership whole_sums", PLAIN, (ClippedSum, "add_micro_batch"),
     lambda add, sums, task, inputs, is_padding_B: add(
         sums, task, {name: x[:1024] for name, x in inputs.items()}, is_padding_B[:1024])),
    ("noise_is_divided_by_the_number_of_ranks", "noise_variance stated_deviation", RANKS, (loop, "add_noise"),
     lambda add, values, deviation, source: add(values, deviation / collectives.world_size(), source)),
    ("a_retry_has_the_same_members", "dealt_members", PLAIN, (LogicalBatches, "plan"),  # coins forget session and attempt
     lambda plan, run, step: plan(dataclasses.replace(run, nonce=bytes(16), attempts={}), step)),
    ("keys_are_those_of_rows", "example_keys", PLAIN, (batches, "example_keys"),
     lambda keys, key, step, ids: keys(key, step, np.arange(len(ids)))),
    ("an_item_is_lost", "dealt_members", LOOP, (Reader, "__getitem__"), lambda read, reader, ids: read(reader, ids[:-1])),
    ("items_are_read_with_one_key", "example_keys", LOOP, (Reader, "item"),
     lambda item, reader, index, key: item(reader, index, 7)),
    ("no_name_is_synced", "ledger_name_durable", PLAIN, (durable, "fsync_directory"), nothing),
    ("names_are_synced_before_the_ledger_has_its_own", "ledger_name_durable", PLAIN, (durable, "fsync_directory"),
     lambda sync, folder: None if (folder / "ledger.jsonl").exists() else sync(folder)),
    ("the_count_has_half_its_noise", "count_draws", ADAPTIVE, (adaptive_bound, "add_noise"),
     lambda add, values, deviation, source: add(values, deviation / 2, source)),
]:  # fmt: skip
    MISTAKES[name] = Mistake(None, [(at, planted)], set(found.split()), setting, is_quick=False)


# Mistakes in the source of noise


def rounded(normals: Any, deviation: float) -> Tensor:
    return torch.as_tensor(normals).double().mul(deviation).round().long()


@mistake("draws_are_new", setting="several ranks", is_quick=True)
class OneSeed:
    """torch.manual_seed(seed) with the same seed on every rank."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return rounded(self._generator.standard_normal(count), deviation)


@mistake("draws_are_new")
class Replayed:
    """A generator that is seeded again for every step."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return rounded(np.random.default_rng((collectives.rank(), count)).standard_normal(count), deviation)


@mistake("more_than_single_precision")
class SinglePrecision:
    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return (torch.randn(count, dtype=torch.float32) * deviation).round().long()


@mistake("draws_are_new", is_quick=True)
class HalfReversed(SystemNoise):
    """The second half is minus the first half reversed: half of the entropy, and a sum of zero."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        draw = super().rounded_normal(deviation, count, device)
        half = count // 2
        draw[count - half :] = -draw[:half].flip(0)
        return draw


@mistake("noise_tails")
class EndsAtThree(SystemNoise):
    """No value beyond 3 standard deviations, and the stated variance."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        draw = super().rounded_normal(deviation, count, device)
        while (beyond := draw.abs() > 3 * deviation).any():
            draw[beyond] = super().rounded_normal(deviation, int(beyond.sum()), device)
        return (draw / 0.98658).round().long()


@mistake("fresh_entropy")
class SixteenBits:
    """Each draw is seeded with two bytes."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        seed = int.from_bytes(os.urandom(2), "little")
        return rounded(np.random.default_rng(seed).standard_normal(count), deviation)
