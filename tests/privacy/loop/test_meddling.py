"""What a program does to model, optimizer, loop and process between two steps is harmless or refused before a charge."""

import contextlib
import itertools
import math
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from privacy.boundary import Private
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.guards.fingerprints import fingerprint
from privacy.guards.isolation import Isolation
from privacy.guards.watched_engine import WatchedEngine
from privacy.loop import WeightAverage
from privacy.ranks.engine import GradShard
from tests.privacy.loop.own import D, K, cross_entropy, ledger_of, make, net, quick, rows, weights
from tests.self_check import trusted_models


def test_no_exchange_and_no_changes_that_cancel_keep_a_fingerprint() -> None:
    generator = torch.Generator().manual_seed(3)
    for trial in range(300):
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8)[trial % 5]
        x = (torch.randn(4, 5, generator=generator) * 50).to(dtype)
        y, flat = x.clone(), x.view(-1)
        i, j, k = torch.randperm(20, generator=generator)[:3].tolist()
        kind = (trial // 5) % 4
        if kind == 0:  # two values change places
            y.view(-1)[[i, j]] = flat[[j, i]]
        elif kind == 1:
            y = x.flip(trial % 2)
        elif kind == 2:  # what one gains another loses, in bits
            size = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()]
            words = y.view(-1).view(size)
            words[i], words[j], words[k] = words[i] + 1, words[j] - 2, words[k] + 1
        else:
            y.view(-1)[i] = -flat[i] if flat[i] != 0 else 1
        is_same = torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        assert (fingerprint({"x": x}) == fingerprint({"x": y})) is is_same
        assert fingerprint({"x": x}) == fingerprint({"x": x.t().contiguous().t()})


class Shifted(nn.Module):
    """A frozen layer and a buffer before a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.head = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, K)
        self.register_buffer("mean", torch.zeros(D))
        self.fixed.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fixed(x - self.mean))


WRITES: dict[str, tuple[Callable[[Any], object], str]] = {
    "frozen weights": (lambda m: m.fixed.weight.add_(1), "frozen weights or buffers changed"),
    "frozen weights, exchanged": (
        lambda m: m.fixed.weight.copy_(m.fixed.weight.flip(0)),
        "frozen weights or buffers",
    ),
    "a buffer": (lambda m: m.mean.add_(1), "frozen weights or buffers changed"),
    "another buffer": (
        lambda m: setattr(m.mean, "data", torch.ones(D)),
        "frozen weights or buffers changed",
    ),
    "a buffer of a layer": (
        lambda m: m.fixed.seen.add_(1),
        "frozen weights or buffers changed",
    ),
    "weights, exchanged": (
        lambda m: m.head.weight.data.copy_(m.head.weight.flip(0)),
        "the weights changed",
    ),
    "a gradient of frozen weights": (
        lambda m: setattr(m.fixed.weight, "grad", torch.ones(D, D)),
        "not the loop's",
    ),
    "a backward": (
        lambda m: m(torch.zeros(1, D)).sum().backward(),
        "a gradient that is not the loop's",
    ),
    "another optimizer": (lambda m: by_hand(m), "the weights changed"),
    "another mode": (lambda m: m.eval(), "has changed"),
    "less to train": (lambda m: m.head.bias.requires_grad_(False), "frozen, unfrozen or exchanged"),
}


def by_hand(model: Any) -> None:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, D)).sum().backward()
    other.step()
    other.zero_grad()


def test_what_is_written_to_the_model_between_steps_is_found_before_a_charge(
    tmp_path: Path,
) -> None:
    with quick():
        for number, (change, said) in enumerate(WRITES.values()):
            model = Shifted()
            optimizer = torch.optim.AdamW(
                model.parameters()
            )  # frozen ones are in it, as many programs have it
            loop = make(tmp_path / str(number), model, optimizer=optimizer)
            loop.step()
            change(model)
            with pytest.raises(PrivacyConfigError, match=said):
                loop.step()
            loop.close()
            assert ledger_of(tmp_path / str(number)).num_charged == 1


@pytest.mark.parametrize("is_a_rate", [True, False])
def test_a_rate_or_a_scheduler_that_writes_to_the_weights_reaches_no_checkpoint(
    tmp_path: Path, is_a_rate: bool
) -> None:
    """A rate is asked for before the charge; a scheduler moves on after its step, and the checkpoint is refused."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def rate(step: int) -> float:
        if step == 3:
            by_hand(model)
        return 0.1

    more = {"learning_rate": rate} if is_a_rate else {}
    with quick(), make(tmp_path, model, optimizer=optimizer, save_every=1, **more) as loop:
        if not is_a_rate:
            loop.register(torch.optim.lr_scheduler.LambdaLR(optimizer, rate))
        with pytest.raises(PrivacyConfigError, match="the weights changed"):
            list(loop)
    assert ledger_of(tmp_path).num_charged == (2 if is_a_rate else 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000002"


def test_a_rate_is_asked_for_behind_the_gradients_so_that_they_go_through_nothing_that_it_writes(
    tmp_path: Path,
) -> None:
    told: list[int] = []
    model = net()
    plain = cross_entropy(model)
    more = {
        "loss": lambda x, y: (told.append(0), plain(x, y))[1],
        "learning_rate": lambda step: (told.append(step), 0.1)[1],
    }
    with quick(), make(tmp_path, model, **more) as loop:
        told.clear()
        list(loop)
    assert [step for step in told if step] == [1, 2, 3, 4, 5, 6] and told[0] == 0 and told[-1] == 6
    assert all(before == 0 for before, step in itertools.pairwise(told) if step)


class Raising(float):
    def __float__(self) -> float:
        raise ArithmeticError("what is this?")


class Unprinted(float):
    def __repr__(self) -> str:
        raise ArithmeticError("what is this?")


class Spent(float):
    """A rate for so many looks, and then no more."""

    def __init__(self, value: float) -> None:
        self.left = 0

    def __float__(self) -> float:
        self.left -= 1
        return 0.1 if self.left >= 0 else math.nan


NO_RATES: dict[str, Any] = {
    "None": None,
    "NaN": math.nan,
    "NaN of numpy": np.float64("nan"),
    "NaN of torch": torch.tensor(math.nan),
    "infinity": math.inf,
    "a negative one": -5.0,
    "minus infinity": -math.inf,
    "a truth": True,
    "a truth of numpy": np.True_,
    "a truth of torch": torch.tensor(True),
    "text": "0.1",
    "a complex one": 0.1j,
    "a list": [0.1],
    "a pair": (0.1, 0.2),
    "an array": np.array([0.1]),
    "a tensor": torch.tensor([0.1]),
    "a complex tensor": torch.tensor(0.1j),
    "a tensor without numbers": torch.zeros((), device="meta"),
    "a private value": Private(0.1),
    "an object": object(),
    "above float32": 1e39,
    "above float32, of torch": torch.tensor(1e300, dtype=torch.float64),
    "above float64": 10**400,
    "a number that raises": Raising(0.1),
    "a NaN that nobody can print": Unprinted("nan"),
    "a time": np.timedelta64(1, "s"),
    "above what Python prints": 10**5000,
    "a fraction above float64": Fraction(10**400),
    "a NaN that signals": Decimal("sNaN"),
}
RATES: dict[str, Any] = {
    "0": 0,
    "-0": -0.0,
    "1": 1,
    "what nobody can print": Unprinted(0.25),
    "0.25": 0.25,
    "a fraction": Fraction(1, 4),
    "a decimal": Decimal("0.25"),
    "of numpy": np.float32(0.25),
    "an integer of numpy": np.int64(1),
    "an array": np.array(0.25),
    "of torch": torch.tensor(0.25),
    "in half precision": torch.tensor(0.25, dtype=torch.bfloat16),
    "with a gradient": torch.tensor(0.25, requires_grad=True),
    "in a byte": torch.tensor(1, dtype=torch.uint8),
    "without a sign": torch.tensor(1, dtype=torch.uint16),
    "in eight bits": torch.tensor(0.25).to(torch.float8_e4m3fn),
    "sparse": torch.tensor(0.25).to_sparse(),
}


@pytest.mark.parametrize("place", ["a function", "an argument", "the optimizer"])
def test_a_learning_rate_is_a_number_or_is_refused_before_the_charge(
    place: str, tmp_path: Path
) -> None:
    """Whatever a function of the caller returns at a step, and whatever a program writes into the optimizer's groups."""

    def run(name: str, value: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        rates = {"a function": lambda step: value if step == 2 else 0.25, "an argument": value}
        more = {"learning_rate": rates[place]} if place in rates else {}
        with make(tmp_path / name, model, optimizer=optimizer, num_steps=2, **more) as loop:
            loop.step()
            if place == "the optimizer":
                optimizer.param_groups[0]["lr"] = value
            taken = loop.step().lr
            assert taken == float(value.detach() if isinstance(value, Tensor) else value)
            assert math.copysign(1, taken) == 1

    with quick(), trusted_models():
        for number, (name, value) in enumerate(NO_RATES.items()):
            if place == "an argument" and value is None:
                continue
            with pytest.raises(
                PrivacyConfigError, match="learning rate is a finite number from 0 on"
            ) as refused:
                run(f"no {number}", value)
            assert "\n" not in str(refused.value), name
            ledger = tmp_path / f"no {number}/ledger.jsonl"
            assert (
                (ledger_of(ledger.parent).num_charged == 1)
                if place != "an argument"
                else not ledger.exists()
            ), name
        for number, value in enumerate(RATES.values()):
            run(f"yes {number}", value)


def test_an_optimizer_whose_rate_nobody_can_print_takes_its_steps(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=Unprinted(0.25))
    with quick(), make(tmp_path, model, optimizer=optimizer) as loop:
        assert [step.lr for step in loop] == [0.25] * 6


@pytest.mark.parametrize("looks", range(6))
def test_a_rate_that_changes_from_look_to_look_is_refused_before_a_charge_or_not_at_all(
    looks: int, tmp_path: Path
) -> None:
    rate = Spent(0.1)
    with quick(), contextlib.suppress(PrivacyConfigError), make(tmp_path) as loop:
        for _ in range(3):
            loop._engine.optimizer.param_groups[0]["lr"], rate.left = rate, looks
            assert loop.step().lr == 0.1
    assert ledger_of(tmp_path).num_charged == loop.steps_done


SCHEDULES: dict[str, tuple[Any, str]] = {
    "raises": (
        lambda step: 1 / (2 - step),
        "the last step is charged and done, .*ZeroDivisionError.*mend the scheduler",
    ),
    "text": (
        lambda step: 1 if step < 2 else "x",
        "the last step is charged and done, .*TypeError.*mend the scheduler",
    ),
    "NaN": (
        lambda step: 1 if step < 2 else math.nan,
        "is nan, and a learning rate is a finite number",
    ),
    "a negative one": (
        lambda step: 1 if step < 2 else -1,
        "is -0.5, and a learning rate is a finite number",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_that_fails_after_a_step_leaves_the_step_done_and_saved(
    name: str, tmp_path: Path
) -> None:
    schedule, line = SCHEDULES[name]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with quick(), make(tmp_path, model, optimizer=optimizer, save_every=1) as loop:
        loop.register(torch.optim.lr_scheduler.LambdaLR(optimizer, schedule))
        assert [loop.step().number for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(PrivacyConfigError, match=line) as refused:
                loop.step()
            assert "\n" not in str(refused.value)
    assert ledger_of(tmp_path).num_charged == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000002"


class Unready(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode of torch that takes no tensor."""

    def __torch_dispatch__(self, *_: object) -> Any:
        raise LookupError("what is\nthis?")


LEFT_ON: dict[str, tuple[Callable[[Any, contextlib.ExitStack], object], str]] = {
    "a device without numbers": (
        lambda loop, left: left.enter_context(torch.device("meta")),
        r"set_default_device\(.meta.\) is on",
    ),
    "fake tensors": (
        lambda loop, left: left.enter_context(FakeTensorMode()),
        "nothing is charged .*AssertionError",
    ),
    "a mode that raises": (
        lambda loop, left: left.enter_context(Unready()),
        "nothing is charged .*LookupError",
    ),
    "another class of the optimizer": (
        lambda loop, left: setattr(loop._engine.optimizer, "__class__", torch.optim.Adam),
        "nothing is charged .*KeyError",
    ),
}


@pytest.mark.parametrize("name", LEFT_ON)
def test_what_raises_at_the_look_before_a_step_is_said_in_one_line(
    name: str, tmp_path: Path
) -> None:
    leave_on, line = LEFT_ON[name]
    optimizer = torch.optim.SGD((model := net()).parameters(), lr=0.5, momentum=0.9)
    with (
        quick(),
        make(tmp_path, model, optimizer=optimizer) as loop,
        contextlib.ExitStack() as left,
    ):
        loop.step()
        leave_on(loop, left)
        with pytest.raises(PrivacyConfigError, match=line) as refused:
            loop.step()
        assert "\n" not in str(refused.value)
        assert (refused.value.__cause__ is None) == ("device" in name)  # the traceback stays
    assert ledger_of(tmp_path).num_charged == 1


def test_a_loop_whose_files_somebody_has_closed_ends_in_the_error_of_its_step(
    tmp_path: Path,
) -> None:
    with (  # noqa: PT012
        quick(),
        pytest.raises(PrivacyStateRefused, match="Bad file descriptor"),
        make(tmp_path) as loop,
    ):
        loop.step()
        for descriptor in (
            loop._run.folder._lock,
            *(file._descriptor for file in loop._ledger._on_main.ledger._chain._files),
        ):
            os.close(descriptor)
        loop.step()
    assert ledger_of(tmp_path).num_charged == 1


def stepped(engine: WatchedEngine, noised: Tensor) -> None:
    """One step of an engine from the first of these noised coordinates."""
    pieces = engine.layout.owned_by(0)
    values = noised.double()[: engine.layout.count(0)].split([piece.length for piece in pieces])
    engine.step(
        [GradShard(p.name, p.offset, x.clone()) for p, x in zip(pieces, values, strict=True)],
        lr=0.1,
    )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_rate_is_the_number_that_it_says_whatever_it_is_made_of_and_stays_the_callers(
    kind: Any,
) -> None:
    def ends(rate: Any) -> Tensor:
        model = net()
        engine = WatchedEngine(model, optimizer := kind(model.parameters(), lr=0.5))
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(2):
            engine.require_untouched()
            stepped(engine, torch.ones(200))
        assert not isinstance(rate, Tensor) or optimizer.param_groups[0]["lr"] is rate
        return weights(model)

    for rate in RATES.values():
        assert torch.equal(
            ends(float(rate.detach() if isinstance(rate, Tensor) else rate)), ends(rate)
        )


CHANGED: dict[str, tuple[dict[str, Any], str | None]] = {
    "above float32": ({"weight_decay": 1e39}, "takes no step"),
    "text": ({"weight_decay": "0.1"}, "takes no step"),
    "none": ({"eps": None}, "takes no step"),
    "three of two": ({"betas": (0.9, 0.99, 0.9)}, "takes no step"),
    "what the state lacks": ({"amsgrad": True}, "takes no step|keeps 'max_exp_avg_sq'"),
    "for another device": ({"capturable": True}, "takes no step"),
    "no parameters": ({"params": []}, "has to hold the model's trainable parameters"),
    "other parameters": (
        {"params": [nn.Parameter(torch.zeros(2))]},
        "has to hold the model's trainable parameters",
    ),
    "a list of two": ({"betas": [0.8, 0.9]}, None),
    "an integer": ({"weight_decay": 1}, None),
    "a tensor": ({"weight_decay": torch.tensor(0.5)}, None),
    "another kernel": ({"foreach": True}, None),
    "one kernel": ({"fused": True, "foreach": False}, None),
    "uphill": ({"maximize": True}, None),
    "a key of a scheduler": ({"initial_lr": 0.1}, None),
}


def test_settings_with_which_a_step_would_fail_are_refused_before_the_charge(
    tmp_path: Path,
) -> None:
    """Before the first step, when the state is empty, and after it; one loop goes on through all of them."""
    with (
        quick(),
        make(
            tmp_path, model := net(), optimizer=torch.optim.Adam(model.parameters()), num_steps=9
        ) as loop,
    ):
        groups = loop._engine.optimizer.param_groups
        group, taken = groups[0], 0
        for _ in range(2):
            for name, (change, said) in CHANGED.items():
                before = dict(group)
                group.update(change)
                if said is None and taken > 0:
                    taken = loop.step().number
                elif said is not None:
                    with pytest.raises(PrivacyConfigError, match=said) as refused:
                        loop.step()
                    assert "\n" not in str(refused.value), name
                group.clear()
                group.update(before)
            for break_it, said in (
                (lambda: group.pop("lr"), "takes no step"),
                (lambda: groups.clear(), "has to hold"),
            ):
                before = dict(group)
                break_it()
                with pytest.raises(PrivacyConfigError, match=said):
                    loop.step()
                groups[:] = [group]
                group.update(before)
            taken = loop.step().number
    assert taken == ledger_of(tmp_path).num_charged == 9


def test_momentum_that_checkpoints_have_no_place_for_is_refused_before_the_charge(
    tmp_path: Path,
) -> None:
    with quick(), make(tmp_path) as loop:
        loop._engine.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(PrivacyConfigError, match="keeps 'momentum_buffer' with it"):
            loop.step()
    assert ledger_of(tmp_path).num_charged == 0


def transposed(p: Tensor) -> None:
    p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)


def with_gaps(p: Tensor) -> None:
    p.data = torch.cat([p.data, torch.full_like(p.data, 7.0)], -1)[..., : p.shape[-1]]


LAYOUTS: dict[str, Callable[[nn.Module], object]] = {
    "channels last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "transposed": lambda model: [transposed(p) for p in model.parameters()],
    "with gaps": lambda model: [with_gaps(p) for p in model.parameters()],
}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, K))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_noised_sums_reach_weights_moments_and_checkpoints_by_logical_index_whatever_the_strides(
    layout: str, kind: str
) -> None:
    """To the bit, whether the layout is changed before the first step or between two, and from a state to a new engine."""
    noised = [
        torch.randn(200, generator=torch.Generator().manual_seed(step)).double()
        for step in range(3)
    ]

    def run(*, change_at: int | None) -> tuple[Tensor, dict[Any, Any], WatchedEngine]:
        model = convolution()
        if change_at == 0:
            LAYOUTS[layout](model)
        engine = WatchedEngine(model, KINDS[kind](model.parameters()))
        for number in range(3):
            if number == change_at:
                LAYOUTS[layout](model)
            engine.require_untouched()
            stepped(engine, noised[number])
        return weights(model), {piece: dict(tensors) for piece, tensors in engine.state()}, engine

    if (layout, kind) == ("with gaps", "fused"):
        with pytest.raises(
            PrivacyConfigError,
            match=r"^0\.weight is a part of other memory, .* leave fused=True out",
        ):
            run(change_at=0)
        with pytest.raises(PrivacyConfigError, match="leave fused=True out"):
            run(change_at=1)
        return
    ends, state, _ = run(change_at=None)
    for change_at in (0, 1):
        strided_ends, strided_state, engine = run(change_at=change_at)
        assert not all(p.is_contiguous() for p in engine.module.parameters())
        assert torch.equal(ends, strided_ends)
        assert all(
            torch.equal(x, strided_state[piece][key])
            for piece, xs in state.items()
            for key, x in xs.items()
        )
    model = convolution()
    LAYOUTS[layout](model)
    again = WatchedEngine(model, KINDS[kind](model.parameters()))
    again.load_state(state, num_steps=3)
    assert torch.equal(weights(model), ends)
    assert all(
        torch.equal(x, state[piece][key]) for piece, xs in again.state() for key, x in xs.items()
    )


@pytest.mark.parametrize("layout", ["transposed", "with gaps"])
def test_a_loop_trains_and_resumes_weights_of_any_strides(layout: str, tmp_path: Path) -> None:
    def run(name: str, *changes_at: int) -> Tensor:
        for last in (3, 6):
            model, average = net(), WeightAverage(0.5)
            if 0 in changes_at:
                LAYOUTS[layout](model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            with make(tmp_path / name, model, optimizer=optimizer) as loop:
                loop.register(average)
                for step in loop:
                    if step.number in changes_at:
                        LAYOUTS[layout](model)
                    if step.number == last:
                        break
                with average.in_use():
                    averaged = weights(model)
        return torch.cat([weights(model), averaged])

    with quick(silent=True, same_coins=True):
        plain = run("plain")
        assert torch.allclose(plain, run("from the start", 0), atol=1e-6)
        assert torch.allclose(plain, run("between turns", 2, 5), atol=1e-6)


def test_trained_weights_that_share_a_place_in_memory_are_refused_before_a_charge(
    tmp_path: Path,
) -> None:
    def expand(model: Any) -> None:
        model[2].bias.data = torch.zeros(1).expand(K)

    said = r"^2\.bias is expanded: .* give the module a copy"
    with quick():
        model = net()
        expand(model)
        with pytest.raises(PrivacyConfigError, match=said):
            make(tmp_path / "start", model)
        assert not (tmp_path / "start/ledger.jsonl").exists()
        model = net()
        nn.init.zeros_(model[2].bias)  # type: ignore[index]
        with make(tmp_path / "between", model) as loop:
            expand(model)
            with pytest.raises(PrivacyConfigError, match=said):
                loop.step()
    assert ledger_of(tmp_path / "between").num_charged == 0


def nested() -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


FIXED: dict[str, tuple[Callable[[], Tensor], str | None]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "is sparse"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "is sparse"),
    "nested": (nested, "is nested"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "is quantized",
    ),
    "bits": (lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8), "is of torch.bits8"),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), None),
    "negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, None),
    "complex": (lambda: torch.ones(3, dtype=torch.complex128), None),
    "expanded": (lambda: torch.ones(1).expand(4), None),
    "expanded zeros": (lambda: torch.zeros(3, 1).expand(3, 4), None),
    "transposed": (lambda: torch.ones(2, 3).t(), None),
    "eight bits": (lambda: torch.ones(3).to(torch.float8_e4m3fn), None),
    "unsigned": (lambda: torch.ones(3, dtype=torch.uint16), None),
    "truths": (lambda: torch.ones(3, dtype=torch.bool), None),
    "nothing": (lambda: torch.zeros(0), None),
}


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_fixed_tensor_that_nobody_can_compare_is_refused_by_its_name_and_any_other_is_taken(
    is_buffer: bool, tmp_path: Path
) -> None:
    """What torch compares in no way would be a traceback in the self-check, and a quantized one ended Python itself."""

    def give(model: nn.Module, name: str, tensor: Tensor) -> None:
        if is_buffer:
            model.register_buffer(name, tensor)
        else:
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    refused = {name: case for name, case in FIXED.items() if case[1] is not None}
    with quick():
        for name, (make_tensor, said) in refused.items():
            give(model := net(), "fixed", make_tensor())
            with pytest.raises(
                PrivacyConfigError, match=f"^fixed {said}, .* keep it dense"
            ) as error:
                make(tmp_path / "refused", model)
            assert "\n" not in str(error.value), name
        model = net()
        for number, name in enumerate(FIXED.keys() - refused.keys()):
            give(model, f"fixed_{number}", FIXED[name][0]())
        give(model, "fixed", dense := torch.ones(3))
        with make(tmp_path / "run", model, num_steps=2) as loop:
            loop.step()
            for make_tensor, said in refused.values() if is_buffer else ():
                model.fixed = make_tensor()
                with pytest.raises(PrivacyConfigError, match=f"^fixed {said}"):
                    loop.step()
                model.fixed = dense
            loop.step()
    assert not (tmp_path / "refused/ledger.jsonl").exists()
    assert ledger_of(tmp_path / "run").num_charged == 2


def test_a_setting_that_is_no_number_is_refused_before_the_charge(tmp_path: Path) -> None:
    with (
        quick(),
        make(tmp_path, model := net(), optimizer=torch.optim.AdamW(model.parameters())) as loop,
    ):
        loop.step()
        loop._engine.optimizer.param_groups[0]["weight_decay"] = math.nan
        with pytest.raises(PrivacyConfigError, match=r"NaN in param_groups\.0\.weight_decay"):
            loop.step()
    assert ledger_of(tmp_path).num_charged == 1


def test_frozen_weights_are_hashed_where_torch_saw_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(
        "privacy.guards.watched_engine.fingerprint", lambda x: (hashed.extend(x), fingerprint(x))[1]
    )
    with quick(), make(tmp_path / "run", model := Shifted(), num_steps=12) as loop:
        fixed = {"fixed.weight", "fixed.bias", "mean", "fixed.seen"}
        hashed.clear()
        loop.step()
        assert not fixed & set(hashed)
        with torch.no_grad():
            model.mean.add_(1)
        with pytest.raises(PrivacyConfigError, match=r"changed since the loop was made \(mean\)"):
            loop.step()
        assert fixed & set(hashed) == {"mean"}
        with torch.no_grad():
            model.mean.sub_(1)
        loop.step()


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def test_weights_of_somebody_else_are_never_saved_as_the_runs(tmp_path: Path) -> None:
    """At the end of a with that is left early, after close, and after a step that was not taken to its end."""
    with quick():
        left = make(tmp_path / "left", save_every=6)
        left.step()
        next(left.module.parameters()).data += 100.0
        with pytest.raises(PrivacyConfigError, match="the weights changed"):
            left.__exit__(None)
        closed = make(tmp_path / "closed", save_every=6)
        closed.step()
        closed.close()
        with pytest.raises(PrivacyConfigError, match="it was closed"):
            closed.save()
        with make(tmp_path / "broken", save_every=6) as loop:
            loop.step()
            loop.save()
            loop._ledger.done = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                loop.step()
            loop._run.step = 2  # type: ignore[union-attr]
            with pytest.raises(PrivacyConfigError, match="not taken to its end"):
                loop.save()
    assert checkpoints(tmp_path / "left") == checkpoints(tmp_path / "closed") == []
    assert checkpoints(tmp_path / "broken") == ["step-00000001"]


class Remembers(torch.optim.SGD):
    """A rate of 0 leaves the weights as they are, and the momentum keeps the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0, momentum=0.9)


@pytest.mark.parametrize("kind", [pytest.param(torch.optim.SGD, marks=pytest.mark.full), Remembers])
@pytest.mark.parametrize(
    "place", ["between", "before the end", "saved", "at the end", "finished", "in the loss"]
)
def test_a_step_by_hand_is_refused_before_it_changes_anything(
    kind: Any, place: str, tmp_path: Path
) -> None:
    """Also where no other look at the weights would come: after the last step, and beside a checkpoint that is written."""
    model, is_late = net(), [False]
    optimizer = kind(model.parameters())

    def by_hand() -> None:
        before = fingerprint(dict(model.named_parameters())), str(optimizer.state_dict())
        model(torch.ones(1, D)).sum().backward()
        with pytest.raises(
            PrivacyConfigError, match=r"^optimizer\.step\(\) was called by hand: [^\n]*$"
        ):
            optimizer.step()
        optimizer.zero_grad()
        assert before == (fingerprint(dict(model.named_parameters())), str(optimizer.state_dict()))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if is_late[0]:
            is_late[0] = False
            optimizer.step()
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    with quick():
        if place == "finished":
            with make(tmp_path / "run", model, optimizer=optimizer) as loop:
                list(loop)
            optimizer = kind(model.parameters())
        with make(tmp_path / "run", model, optimizer=optimizer, loss=loss, save_every=6) as loop:
            if place in ("between", "before the end", "saved"):
                loop.step()
            if place == "saved":
                loop.save()
            if place == "at the end":
                list(loop)
            if place == "in the loss":
                is_late[0] = True
                with pytest.raises(PrivacyConfigError, match="called by hand"):
                    loop.step()
            else:
                by_hand()
            if place == "between":
                loop.step()
        saved = loop.steps_done
        optimizer.step()  # given back
    assert checkpoints(tmp_path / "run")[-1:] == [f"step-{saved:08d}"][: saved > 0]


def test_two_threads_never_share_a_step(tmp_path: Path) -> None:
    """One waits inside its step or looks at the weights before it, and another asks for a step; so does an item."""
    said: list[str] = []

    def asks_in_a_thread() -> None:
        thread = threading.Thread(target=lambda: said.append(problem(loop.step)))
        thread.start()
        thread.join()

    def nosy(item: Any) -> Any:
        if len(said) == 1:
            asks_in_a_thread()
            asks_in_a_thread()
            said.append(problem(loop.step))
        return item

    def looks() -> object:
        if not said:
            asks_in_a_thread()
        return look()

    data = rows()
    with quick(), make(tmp_path / "run", dataset=data, num_steps=2) as loop:
        data.change, look = nosy, loop._engine.require_untouched
        loop._engine.require_untouched = looks  # type: ignore[method-assign]
        assert [step.number for step in loop] == [1, 2]
    assert len(said) == 4 and all("a step is under way" in one for one in said)
    assert ledger_of(tmp_path / "run").num_charged == 2


def problem(act: Callable[[], object]) -> str:
    try:
        return f"gave {act()}"
    except PrivacyConfigError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_takes_no_step_with_the_same_coins(tmp_path: Path) -> None:
    with quick(), make(tmp_path / "run") as loop:
        loop.step()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put((problem(loop.step), loop.__exit__(None))))
        child.start()
        child.join()
        assert "was forked" in queue.get()[0]
        loop.step()
    assert ledger_of(tmp_path / "run").num_charged == 2


COUNTS: list[Callable[[Any], object]] = [
    lambda optimizer: setattr(optimizer, "taken", getattr(optimizer, "taken", 0) + 1),
    lambda optimizer: optimizer.param_groups[0].update(k=optimizer.param_groups[0].get("k", 0) + 1),
    lambda optimizer: optimizer.state.update(n=optimizer.state.get("n", 0) + 1),
]
"""Where a checkpoint does not look."""


@pytest.mark.parametrize("count", COUNTS, ids=["attribute", "group", "state"])
def test_optimizers_that_a_resume_would_not_restore_are_refused(
    count: Callable[[Any], object], tmp_path: Path
) -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            count(self)
            super().step()

    with quick(), pytest.raises(PrivacyConfigError, match="outside of the state of its parameters"):
        make(tmp_path / "run", model := net(), optimizer=Counts(model.parameters(), lr=0.1))
    assert not (tmp_path / "run/ledger.jsonl").exists()


def mixed_by_a_hook(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda _layer, _inputs, output: output + output.mean(0))  # type: ignore[index,operator]


@pytest.mark.parametrize(
    "change",
    [mixed_by_a_hook, lambda model: model.eval(), lambda model: model[0].requires_grad_(False)],
    ids=["a hook", "a mode", "a frozen layer"],
)
@pytest.mark.parametrize("in_the_last", [False, True], ids=["between parts", "in the last part"])
def test_a_change_in_the_middle_of_a_micro_batch_is_refused_before_the_charge(
    change: Callable[[nn.Module], object], in_the_last: bool, tmp_path: Path
) -> None:
    """Clipping goes through 2,100 rows in three parts: the model is looked at before each, and after the last."""
    model, calls = net(), list[int]()
    plain = cross_entropy(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) == 1003 - (not in_the_last):
            change(model)
        return plain(x, y)

    with (
        quick() as patch,
        make(tmp_path / "run", model, loss=loss, micro_batch_size=2100) as loop,
    ):
        patch.setattr(Isolation, "_is_chosen", lambda _self: False)  # it would call the loss, too
        loop.step()
        calls[:] = [0] * 1000
        with pytest.raises(PrivacyConfigError, match=r"since the self-check|were frozen"):
            loop.step()
    assert calls[1000:] == [1024, 1024, 52][: 2 + in_the_last]
    assert ledger_of(tmp_path / "run").num_charged == 1
