"""`clipping_mode = "auto"`: bookkeeping where it fits, two_pass where it does not, the same on every rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from privacy.clipping.clipped_sum import ClippedSum, Mode
from privacy.plan.numbers import make_plan
from privacy.ranks import collectives
from tests.trainer.conftest import ROOT
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.engines import build_engine
from trainer.memory import USABLE
from trainer.run import clipping_mode
from trainer.run.clipping_mode import (
    UNCERTAIN,
    ModeChoice,
    better_mode,
    choose_by_trial,
    choose_mode,
    needed_memory,
)
from trainer.tasks import make_task

GIB = 2**30
SIZE = 16


def taken(mode: Mode, size: int) -> int:
    """Sums and gathered weights of a gibibyte, and for each example two gibibytes, or one."""
    return GIB + size * {"bookkeeping": 2 * GIB, "two_pass": GIB}[mode]


def choose(available: int | None, later: int = GIB) -> ModeChoice:
    return choose_mode(taken, later, torch.device("cpu"), SIZE, available=lambda device: available)


@pytest.mark.parametrize(
    ("usable", "two_passes", "expected"),
    [
        (None, 1, ("bookkeeping", None)),
        (1000.0, 1, ("bookkeeping", None)),
        (999.5, 899, ("two_pass", 899)),
        (999.5, 900, ("bookkeeping", 900)),
        (0.0, 1, ("two_pass", 1)),
    ],
)
def test_two_passes_are_taken_where_they_save_a_tenth_of_what_does_not_fit(
    usable: float | None, two_passes: int, expected: tuple[str, int | None]
) -> None:
    assert better_mode(1000, usable, lambda: two_passes) == expected


def test_bookkeeping_where_it_fits_and_two_passes_where_it_does_not(one_rank: torch.device) -> None:
    """With what the first step makes besides."""
    plenty, needed = choose(2**40), 34 * GIB
    assert plenty == ModeChoice("bookkeeping", SIZE, needed, None, 2**40)
    assert plenty.sentence == (
        "clipping mode bookkeeping (auto): a micro-batch takes 34 GiB of 1e+03 GiB a rank"
    )
    just = round((needed + UNCERTAIN) / USABLE)
    assert choose(just).mode == "bookkeeping"
    tight = choose(round(needed / USABLE) - 10)
    assert tight.mode == "two_pass" and tight.needed_in_two_passes == 18 * GIB
    assert "takes 18 GiB of 42 GiB a rank; bookkeeping would need 34 GiB" in tight.sentence
    tighter = choose(8 * GIB)
    assert tighter.mode == "two_pass" and tighter.needed == pytest.approx(needed, rel=0.05)
    assert "that may be too much" in tighter.sentence
    unknown = choose(None)
    assert unknown == ModeChoice("bookkeeping", SIZE, None, None, None)
    assert "does not say" in unknown.sentence


@pytest.mark.parametrize(
    "memory",
    [
        lambda n: n << 22,
        lambda n: (6 << 30) + (n << 22),
        lambda n: (n << 22) + (n << 27) // (1 + n // 40),  # the head works by chunks
        lambda n: n << 30,
    ],
    ids=["in proportion", "mostly weights", "bent", "large examples"],
)
@pytest.mark.parametrize("usable", [2**28, 2**31, 7 << 30, 2**36])
def test_no_trial_takes_more_than_there_is(memory: Callable[[int], int], usable: int) -> None:
    tried = []

    def measure(size: int) -> int:
        tried.append(size)
        return memory(size) + UNCERTAIN // 2 * (-1) ** len(tried)

    size = 512
    needed = needed_memory(measure, size, usable)
    assert tried[0] == 1 and len(tried) < 8
    assert all(memory(number) <= usable + UNCERTAIN for number in tried if number > 2)
    if memory(size) + UNCERTAIN <= usable and memory(2) < usable:
        assert tried[-1] == size and abs(needed - memory(size)) <= UNCERTAIN
    assert needed >= memory(size) - UNCERTAIN or size in tried


@pytest.mark.parametrize(("place", "others"), [(0, "elsewhere"), (1, "elsewhere"), (1, None)])
def test_the_rank_with_the_least_room_decides(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, place: int, others: str | None
) -> None:
    """Another rank, before or after this one, has 32 GiB free; on the same host each has half of what it sees."""

    def with_another(mine: Any) -> list[Any]:
        if isinstance(mine, int):
            return [mine, mine - GIB]
        other = (others or mine[0], mine[1], 32 * GIB)
        return [mine, other] if place else [other, mine]

    monkeypatch.setattr(collectives, "gather_objects", with_another)
    choice = choose(2**40)
    assert choice.mode == "two_pass" and choice.available == (32 * GIB if others else 16 * GIB)


def test_a_trial_leaves_nothing_behind(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both modes clip made-up examples of the model; then weights, buffers, hooks and random numbers are what they were."""
    config = load_config(ROOT / "tests/trainer/clip_art.toml")
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    request = config.privacy.request(config.train.num_steps, 3000)
    plan = make_plan(replace(request, noise_multiplier=100.0, target_epsilon=None))
    task = make_task(config, ROOT)
    module = task.build(torch.Generator().manual_seed(0))
    engine = build_engine("local", module, config.optimizer, machine, one_rank, 16)
    modes = []
    add = ClippedSum.add_micro_batch

    def noting(self: ClippedSum, *arguments: Any) -> Any:
        modes.append((self.mode, len(arguments[2])))
        return add(self, *arguments)

    monkeypatch.setattr(ClippedSum, "add_micro_batch", noting)
    monkeypatch.setattr(choose_mode, "__defaults__", (lambda device: 2**26,))
    monkeypatch.setattr(clipping_mode, "UNCERTAIN", 1)

    def state() -> list[Any]:
        hooks = [
            list(hooks)
            for part in engine.module.modules()
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
        ]
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        values = [x.detach().clone().tolist() for x in tensors]
        gradients = [x.grad for x in tensors]
        return [hooks, values, gradients, torch.get_rng_state().tolist()]

    before = state()
    choice = choose_by_trial(config, machine, "local", plan, task, engine, ())
    assert state() == before
    assert modes[0] == ("bookkeeping", 1) and "two_pass" in dict(modes)
    assert choice.needed is not None and choice.needed_in_two_passes is not None
