"""The check of a secret micro-batch in two halves: what it finds, what it leaves behind, and what its alarm does to a run."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from privacy import verify
from privacy.card.run_card import build_card
from privacy.clipping.clip_factors import FUNCTIONS
from privacy.errors import MixedExamples, PrivacyConfigError, PrivacyStateRefused, StepDropped
from privacy.guards.isolation import WINDOW, Isolation
from privacy.guards.unchanged import MOST_FORCED, Part
from privacy.noise.source import SystemNoise
from privacy.plan.numbers import make_plan
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives
from privacy.run.mechanism import clipper_of
from privacy.sampling.sampler import sampler_of
from privacy.step.batches import max_rows
from privacy.step.step import Mechanism
from tests.distributed.ranks import run_ranks
from tests.privacy.loop.own import cross_entropy, ledger_of, make, net, quick, rows

Mix = Callable[["Net", Tensor], Tensor]
WIDTH = 12


class Net(nn.Module):
    """Embeds ids, attends to tokens of one example, and has a place in its middle where examples may meet.

    Attributes:
        is_mixing: what a program may switch on late.
    """

    def __init__(self, mix: Mix | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 5)
        self.mix = mix
        self.is_mixing = True
        self.num_calls = 0

    def forward(self, ids_BL: Tensor, x_BW: Tensor) -> Tensor:
        self.num_calls += 1
        tokens_BLW = self.table(ids_BL)
        h_BLW = F.scaled_dot_product_attention(tokens_BLW, tokens_BLW, tokens_BLW)
        h_BW = self.norm(self.first(h_BLW.mean(1) + x_BW))
        if self.mix is not None and self.is_mixing:
            h_BW = self.mix(self, h_BW)
        return self.last(h_BW).float().square().mean(1)


class OfNeighbour(torch.autograd.Function):
    """Gives each example a part of its neighbour's gradient; losses stay as they are."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + 0.1 * g.roll(1, 0)


class Sign(torch.autograd.Function):
    """Turns the gradients of all examples around where one of them is large; their norms stay as they are."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        is_large = (h.abs().amax(1) > h.abs().amax(1).median()).float()
        return g * (1 - 2 * (is_large.cumsum(0)[:, None] % 2))


def capacity(model: Net, h: Tensor) -> Tensor:
    """Eight examples alone have a place at an expert."""
    wants_B = h[:, 0] > 0
    has_place_B = wants_B & (wants_B.cumsum(0) <= 8)
    return torch.where(has_place_B[:, None], 2 * h, h)


WAYS: dict[str, Mix] = {
    "mean": lambda m, h: h - 0.1 * h.mean(0),
    "largest": lambda m, h: h / h.detach().abs().max(),
    "largest of real values": lambda m, h: h / h.abs().max() if h.abs().max() > 1 else h,
    "neighbour": lambda m, h: h + 1e-4 * h.roll(1, 0),
    "standard deviation": lambda m, h: h / (h.std(0) + 1),
    "capacity": capacity,
    "order": lambda m, h: h + 0.1 * h[h[:, 0].argsort()],
    "attention over examples": lambda m, h: F.softmax(h @ h.t(), 1) @ h,
    "gradient of a neighbour": lambda m, h: OfNeighbour.apply(h),
    "gradients of equal norms": lambda m, h: Sign.apply(h),
    "by size": lambda m, h: h - h.mean(0) if len(h) == 32 else h,
    "by the number of calls": lambda m, h: h - h.mean(0) if m.num_calls >= 3 else h,
    "number of unlike rows": lambda m, h: h * (1 + 0.01 * len(h.detach().unique(dim=0))),
}


def micro_batch(size: int = 32, seed: int = 0, *, padded: int = 3) -> Part:
    """Random rows, the last of which are padding."""
    generator = torch.Generator().manual_seed(seed)
    is_padding_B = torch.arange(size) >= size - padded
    ids_BL = torch.randint(1, 50, (size, 7), generator=generator)
    x_BW = torch.randn(size, WIDTH, generator=generator)
    ids_BL[is_padding_B] = 0
    x_BW[is_padding_B] = 0.0
    return Part({"ids_BL": ids_BL, "x_BW": x_BW}, is_padding_B, 0)


PADDING = {"ids_BL": torch.zeros(1, 7, dtype=torch.long), "x_BW": torch.zeros(1, WIDTH)}


class Checked:
    """A mechanism of a model whose every micro-batch is checked."""

    def __init__(
        self, model: nn.Module, *, mode: Any = "bookkeeping", dtype: Any = None, **asked: Any
    ) -> None:
        numbers: dict[str, Any] = {
            "num_examples": 1700,
            "expected_batch_size": 70,
            "num_steps": 5,
            "noise_multiplier": 1.1,
            "max_grad_norm": 0.05,
            "sensitivity_slack": SENSITIVITY_SLACK,
        }
        plan = make_plan(PlanRequest(**numbers | asked))
        room = max_rows(sampler_of(plan), 64, (), 70)
        self.model = model
        self.clipped = clipper_of(plan, model, mode=mode, rows=room)
        engine: Any = SimpleNamespace(
            device=torch.device("cpu"),
            compute_dtype=dtype,
            module=model,
            shapes={name: p.shape for name, p in model.named_parameters()},
        )
        mechanism = Mechanism(plan, sampler_of(plan), self.clipped, SystemNoise(), engine, model)
        self.isolation = Isolation(mechanism, PADDING, list(model.modules()))

    def start(self) -> None:
        self.isolation.require(micro_batch(padded=0).inputs)
        self.isolation.begin(1)  # windows of one

    def add(self, *micro_batches: Part) -> None:
        """Adds micro-batches as one logical batch."""
        self.clipped.zero_()
        for part in self.isolation.watched(iter(micro_batches)):
            self.clipped.add_micro_batch(self.model, part.inputs, part.is_padding_B)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_mix_is_found_in_one_micro_batch(way: str) -> None:
    """It begins after the start, so nothing but the check can see it."""
    torch.manual_seed(0)
    model = Net(WAYS[way])
    model.is_mixing = False
    checked = Checked(model)
    checked.start()
    model.is_mixing = True
    with pytest.raises(StepDropped):
        checked.add(*(micro_batch(seed=seed) for seed in range(4)))
    with pytest.raises(MixedExamples, match="its earlier steps included"):
        checked.isolation.require_apart()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "by the number of calls"])
def test_what_mixes_made_up_examples_does_not_start(way: str) -> None:
    checked = Checked(Net(WAYS[way]))
    with pytest.raises(PrivacyConfigError, match="change each other's losses or gradients"):
        checked.start()


def test_mixing_under_autocast_alone_is_found() -> None:
    model = Net(lambda m, h: h - h.mean(0) if torch.is_autocast_enabled("cpu") else h)
    checked = Checked(model)
    checked.start()
    checked.add(micro_batch())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StepDropped):
        checked.add(micro_batch())


SETTINGS: dict[str, dict[str, Any]] = {
    "bookkeeping": {},
    "two passes": {"mode": "two_pass"},
    **{function: {"clipping_function": function} for function in FUNCTIONS},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
    "half precision": {"dtype": torch.bfloat16},
    "double precision": {"dtype": torch.float64},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_honest_examples_pass_whatever_they_hold(setting: str) -> None:
    """Large, tiny, equal and non-finite numbers, few rows and none: bits of losses and norms stay, sums add up."""
    torch.manual_seed(0)
    settings = SETTINGS[setting]
    model = Net().to(settings.get("dtype") or torch.float32)
    checked = Checked(model, **settings)
    checked.start()
    for seed, scale in enumerate((1.0, 1e-6, 1e4, 1e18, 0.0)):
        part = micro_batch(seed=seed, padded=seed)
        part.inputs["x_BW"].mul_(scale)
        part.inputs["x_BW"][5, 0] = (1.0, torch.nan, torch.inf, -torch.inf, 0.0)[seed]
        checked.add(part)
    checked.add(micro_batch(padded=32), micro_batch(1, padded=0), micro_batch(64, padded=60))
    assert checked.isolation.num_passed == 8
    assert checked.isolation._kinds_that_keep_bits


def test_a_check_leaves_no_trace() -> None:
    """Sums to the bit, statistics, generators and counters of calls are those of a run that checks nothing."""
    parts = [micro_batch(seed=seed) for seed in range(3)]
    ends = []
    for is_checked in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # foreign models use it
        model = Net()
        checked = Checked(model)
        if is_checked:
            checked.start()
            checked.add(*parts)
        else:
            for part in parts:
                checked.clipped.add_micro_batch(model, part.inputs, part.is_padding_B)
        numbers = torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002
        sums = {name: total.clone() for name, total in checked.clipped.sums()}
        ends.append((sums, numbers[0].tolist(), numbers[1:], model.num_calls))
    (sums, *others), (same_sums, *same_others) = ends
    assert others == same_others
    assert all(torch.equal(total, same_sums[name]) for name, total in sums.items())


def chosen(isolation: Isolation, count: int) -> list[int]:
    return [number for number in range(count) if isolation._is_chosen()]


def test_each_window_has_one_secret_place_and_a_short_run_has_one() -> None:
    """Two of three hundred places are dealt as by chance; none is left out over many runs."""
    isolation = Checked(Net()).isolation
    places = []
    for _ in range(300):
        isolation.begin(3 * WINDOW)
        numbers = chosen(isolation, 3 * WINDOW)
        assert [number // WINDOW for number in numbers] == [0, 1, 2]
        places += [number % WINDOW for number in numbers]
    assert len(set(places)) == WINDOW, "900 draws of 100 places"
    short = set()
    for _ in range(60):
        isolation.begin(3)
        (place,) = chosen(isolation, 3)
        short.add(place)
    assert short == {0, 1, 2}


class Late(nn.Module):
    """Mixes examples when a number of it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.strength = 0.0
        self.progress = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y + self.strength * y.mean(0) if self.strength else y


def mixing_loop(run_dir: Path) -> tuple[Any, Late]:
    """A loop that has taken two steps and is about to mix."""
    model = Late()
    loop = make(run_dir, model, expected_batch_size=40)
    loop._run.parts.isolation.begin(1)  # type: ignore[union-attr]  # every micro-batch is checked
    loop.step()
    loop.step()
    model.strength = 0.01
    return loop, model


def test_an_alarm_takes_the_claim_of_the_whole_run_back(tmp_path: Path) -> None:
    """A changed number has the next micro-batch checked. Nothing of the step is charged or released."""
    run_dir = tmp_path / "run"
    loop, model = mixing_loop(run_dir)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(MixedExamples, match="no guarantee holds"):
        loop.step()
    assert all(map(torch.equal, before, model.parameters()))
    state = ledger_of(run_dir)
    assert (state.closed, state.num_charged) == ("mixed_examples", 2)
    assert state.epsilon() is None and not state.plan.formal_guarantee
    for claim in ("epsilon", "delta", "claim"):
        with pytest.raises(MixedExamples, match="no step of this run has a guarantee"):
            getattr(loop, claim)
    loop.close()
    with pytest.raises(PrivacyStateRefused, match="does not go on") as refused:
        make(run_dir, Late(), expected_batch_size=40)
    assert refused.value.exit_code == 4
    with pytest.raises(PrivacyConfigError, match="guarantee"):
        make(tmp_path / "next", Late(), starts_from=run_dir)


def test_the_verifier_and_the_card_of_a_void_run_print_no_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    loop, _ = mixing_loop(run_dir)
    with pytest.raises(MixedExamples):
        loop.step()
    loop.close()
    card = build_card(run_dir)
    assert not card.formal_guarantee and card.epsilon is None and card.accounting.epsilon is None
    assert any("depended on other examples" in reason for reason in card.reasons)
    code = verify.main([str(run_dir), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["formal_guarantee"] is False and report["epsilon"] is None
    assert "no epsilon is claimed" in report["line"]


def test_a_number_that_moves_at_every_step_forces_three_checks(tmp_path: Path) -> None:
    model = Late()
    with quick():
        loop = make(tmp_path / "run", model, num_steps=12)
        isolation = loop._run.parts.isolation  # type: ignore[union-attr]
        isolation.begin(10**6)  # the one secret place of a window comes on top
        for number in range(8):
            model.progress = number + 1  # as a schedule that a program follows
            loop.step()
    assert MOST_FORCED <= isolation.num_passed <= MOST_FORCED + 2


def test_an_alarm_in_a_step_that_is_dropped_counts(tmp_path: Path) -> None:
    """A request to stop comes after the check of a micro-batch failed: the alarm is recorded all the same."""
    loop, _ = mixing_loop(tmp_path / "run")

    def dropping(micro_batches: Iterator[Any]) -> Iterator[Any]:
        yield from loop._start.self_checked.watched(
            micro_batches, torch.device("cpu"), torch.float32
        )
        raise StepDropped("asked to stop")

    loop._watched = dropping  # type: ignore[method-assign]
    with pytest.raises(MixedExamples):
        loop.step()
    assert ledger_of(tmp_path / "run").closed == "mixed_examples"


def test_an_alarm_is_recorded_before_anything_else_of_the_step(tmp_path: Path) -> None:
    """A crash, a signal or an error later in the step finds it in the ledger."""
    loop, _ = mixing_loop(tmp_path / "run")
    yielded = []

    def counting(micro_batches: Iterator[Any]) -> Iterator[Any]:
        for part in loop._start.self_checked.watched(
            micro_batches, torch.device("cpu"), torch.float32
        ):
            yielded.append(part)
            yield part
        raise OSError("an item is lost at the end of the step")

    loop._watched = counting  # type: ignore[method-assign]
    with pytest.raises(MixedExamples):
        loop.step()
    assert len(yielded) < 4 and ledger_of(tmp_path / "run").closed == "mixed_examples"


def test_halves_meet_the_numbers_that_the_whole_has_met() -> None:
    """A temperature that follows a counter of calls is no mixing."""

    def by_calls(m: Net, h: Tensor) -> Tensor:
        return h / (1 + 0.1 * m.num_calls)

    model = Net(by_calls)
    checked = Checked(model)
    checked.start()
    checked.add(*(micro_batch(seed=seed) for seed in range(4)))
    assert checked.isolation.num_passed == 4


def rank_mixes(device: torch.device, run_dir: Path) -> str:
    """Says how a loop ends whose model mixes on rank 1 alone."""
    model = Late()
    data = rows()
    try:
        with make(run_dir, model, data, loss=cross_entropy(model), expected_batch_size=40) as loop:
            loop.step()
            model.strength = 0.01 * dist.get_rank()
            loop._run.parts.isolation.begin(1)  # type: ignore[union-attr]
            loop.step()
    except MixedExamples as error:
        return str(error)
    return "no alarm"


def test_an_alarm_of_one_rank_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(f"{__name__}:rank_mixes", 2, run_dir=tmp_path / "run")
    assert "no guarantee holds" in first and first == second
    state = ledger_of(tmp_path / "run")
    assert (state.closed, state.num_charged) == ("mixed_examples", 1)


def rank_drops(device: torch.device, run_dir: Path) -> str:
    """Says how a step ends that rank 1 drops before its first micro-batch, as after a signal."""
    model = Late()
    with make(run_dir, model, rows(), loss=cross_entropy(model)) as loop:
        watched = loop._watched

        def droppable(micro_batches: Iterator[Any]) -> Iterator[Any]:
            for part in watched(micro_batches):
                if dist.get_rank() == 1:
                    collectives.agree(ready=False)
                yield part

        loop._watched = droppable  # type: ignore[method-assign]
        loop._run.parts.isolation.begin(1)  # type: ignore[union-attr]
        try:
            loop.step()
        except StepDropped:
            return "dropped"
    return "taken"


def test_a_rank_may_drop_a_step_while_others_check_it(tmp_path: Path) -> None:
    """No collective of the check stands between the ranks before the intent, which costs nothing then."""
    assert run_ranks(f"{__name__}:rank_drops", 2, run_dir=tmp_path / "run") == ["dropped"] * 2
    state = ledger_of(tmp_path / "run")
    assert (state.closed, state.num_charged) == (None, 0)
