"""The self-check cannot pass for want of a gradient. ClippedSum wants a model that has passed, and has not changed since."""

import copy
import enum
import math
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.norms import NormTally
from privacy.errors import PrivacyConfigError, StepDropped
from privacy.gradients import recorder
from privacy.gradients.per_example_gradients import Contribution, Dense, OuterProducts
from privacy.gradients.rules import RULES
from privacy.guards import selfcheck
from privacy.guards.selfcheck import check_against_autograd, check_at_size
from privacy.sums import totals
from tests.self_check import Guarded


class Net(nn.Module):
    """Two layers with a factor between them; `wrong` adds a part that the rules cannot see."""

    def __init__(self, factor: float = 1.0, wrong: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.wrong = nn.Linear(4, 5), nn.Linear(5, 3), wrong
        self.scale = nn.Parameter(torch.full((1, 5), factor))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.wrong:
            h = h + self.wrong * nn.functional.linear(x, self.a.weight).tanh()
        return self.b(h * self.scale + x[:, :1]).square().sum(1)


def made_up(count: int = 2) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 4, generator=torch.Generator().manual_seed(1))}


def add(total: ClippedSum, task: Callable[..., Tensor], **inputs: Tensor) -> None:
    total.add_micro_batch(task, inputs, torch.zeros(3, dtype=torch.bool))


# What has not passed.


def test_the_first_micro_batch_is_refused_until_the_check_has_passed() -> None:
    model, x = Net(), torch.randn(3, 4)
    total = Guarded(ClippedSum(model, 1.0))
    with pytest.raises(
        PrivacyConfigError, match=r"Net has not passed the self-check: .*check_against_autograd"
    ):
        add(total, model, x=x)
    assert all(not value.any() for _, value in total.sums())
    check_against_autograd(model, made_up())
    add(total, model, x=x)
    add(Guarded(ClippedSum(model, 1.0)), model, x=x)
    with pytest.raises(PrivacyConfigError, match="has not passed"):
        add(Guarded(ClippedSum(twin := copy.deepcopy(model), 1.0)), twin, x=x)
    add(ClippedSum(twin, 1.0), twin, x=x)


def test_the_task_and_the_names_and_kinds_of_its_inputs_are_those_of_the_check() -> None:
    """A loss outside the model may mix examples too; another input may take another way."""
    model, x = nn.Linear(4, 3), torch.randn(3, 4)

    def task(x: Tensor, shift: float | Tensor = 0.0) -> Tensor:
        return (model(x.to(model.weight.dtype)) + shift).square().flatten(1).sum(1)

    check_against_autograd(model, made_up(), task)
    total = Guarded(ClippedSum(model, 1.0))
    add(total, task, x=x)
    with pytest.raises(PrivacyConfigError, match="is not the one that passed"):
        add(total, lambda x: task(x) - task(x).mean(), x=x)
    with pytest.raises(PrivacyConfigError, match=r"inputs named shift .*, x"):
        add(total, task, x=x, shift=torch.zeros(3, 1))
    for other in (x.double(), x[:, None], x.long()):
        with pytest.raises(PrivacyConfigError, match=r"inputs named x \("):
            add(total, task, x=other)


# What has changed since: from ids and flags, beside what the model's own forward changes. A bound method is one task.


class Words(nn.Module):
    """Keeps things, some of which its forward moves; attributes of layers decide what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 4), nn.Embedding(3, 4).requires_grad_(False)
        self.drop, self.norm, self.last = nn.Dropout(0.0), nn.LayerNorm(4), nn.Linear(4, 3)
        self.config, self.calls, self.cache, self.seen = (
            SimpleNamespace(calls=0),
            0,
            {},
            deque[int](maxlen=1),
        )  # type: ignore[var-annotated]

    def forward(self, ids: Tensor) -> Tensor:
        self.calls, self.config.calls = self.calls + 1, self.config.calls + 1
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        if not self.seen:
            self.norm.register_forward_hook(lambda m, args, y: self.seen.append(len(y)))
        shift = self.cache.setdefault("shift", torch.ones(4, dtype=self.last.weight.dtype))
        h = self.table(ids) + self.positions(torch.arange(ids.shape[1])[None]) + shift
        return self.last(self.norm(self.drop(h))).sin().sum((1, 2))


class Loss(nn.Module):
    """A task that is a module of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.drop = model, nn.Dropout(0.0)

    def forward(self, **inputs: Tensor) -> Tensor:
        y: Tensor = self.drop(self.model(*inputs.values()))
        return y.square().view(len(y), -1).sum(1)


def adapter(m: Any) -> None:
    m.last = nn.Sequential(m.last, nn.Linear(3, 3))


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.eval(), r"training has changed .*model\.train\(\) or model\.eval"),
    (lambda m: m.norm.eval(), r"norm\.training"),
    (lambda m: m.last.bias.requires_grad_(False), r"last\.bias has changed .*frozen or unfrozen"),
    (lambda m: m.positions.requires_grad_(True), r"positions\.weight"),
    (lambda m: setattr(m, "last", nn.Linear(4, 3)), r"last has.*layers were exchanged"),
    (adapter, "last"),
    (lambda m: m.add_module("beside", nn.Identity()), "beside"),
    (lambda m: setattr(m.last, "__class__", type("Other", (nn.Linear,), {})), "last"),
    (lambda m: setattr(m.last, "weight", nn.Parameter(torch.ones(3, 4))), r"last\.weight"),
    (lambda m: setattr(m.last, "extra", nn.Parameter(torch.ones(3))), r"last\.extra"),
    (lambda m: setattr(m.last, "forward", lambda x: x[..., :3]), r"last\.forward"),
    (lambda m: m.last.register_forward_hook(lambda m, args, y: 2 * y), r"last\._forward_hooks"),
    (lambda m: m.last.register_forward_pre_hook(lambda m, args: args), r"last\._forward_pre_hooks"),
    (lambda m: m.norm.register_full_backward_hook(lambda m, g, h: None), r"norm\._"),
    (lambda m: m.last.weight.register_hook(lambda g: 2 * g), r"last\.weight"),
    (lambda m: m.last.weight.register_post_accumulate_grad_hook(lambda p: None), r"last\.weight"),
]


@pytest.mark.parametrize(("change", "line"), CHANGES)
def test_the_model_must_be_what_it_was_when_it_passed(
    change: Callable[[Any], object], line: str
) -> None:
    model, ids = Words(), torch.tensor([[1, 2], [3, 4], [5, 6]])
    check_against_autograd(model, {"ids": ids})
    assert model.calls == 0 and not model.cache
    total = Guarded(ClippedSum(model, 1.0))
    for _ in range(2):
        add(total, model, ids=ids)
        with torch.no_grad():  # which is training
            model.last.weight.sub_(0.1)
    change(model)
    with pytest.raises(PrivacyConfigError, match=f"since the self-check.*{line}"):
        add(total, model, ids=ids)


FORWARDS: list[int] = []


class Scheduled(nn.Module):
    """A program may set its rate and temperature between steps; its forward counts, here and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.rate, self.temperature, self.calls = nn.Linear(4, 3), 0.0, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        FORWARDS.append(len(x))
        return F.dropout(self.last(x) / self.temperature, self.rate).sin().sum(1)


def test_numbers_of_a_module_may_change_where_examples_stay_apart() -> None:
    model, x = Scheduled(), torch.randn(3, 4)
    check_against_autograd(model, {"x": x})
    total, calls = Guarded(ClippedSum(model, 1.0)), []
    for temperature in (1.0, 1.0, 2.0, 2.0):
        model.temperature = temperature
        FORWARDS.clear()
        add(total, model, x=x)
        calls.append(len(FORWARDS))
    assert calls[1:] == [1, 3, 1]  # after a new value a micro-batch is computed again in two halves
    model.rate = 0.5
    with pytest.raises(StepDropped):
        add(total, model, x=x)


class Strength(enum.Enum):
    NONE, SOME = 0, 1


class Switched(nn.Module):
    """Its examples influence one another where `k` (or `_k`) says so."""

    k: Any = 0.0
    _k: Any = None

    def __init__(self, *names_and_values: Any) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        for name, value in zip(names_and_values[::2], names_and_values[1::2], strict=True):
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x).square().sum(1)
        is_on = (
            type(self.k) is bool
            or self.k is Strength.SOME
            or self._k
            or (type(self.k) is not Strength and self.k == 0.5)
        )
        return (y - y.mean()).square() if is_on else y


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("k", 0.0), ("k", 0.5)),
        ((), ("k", 0.5)),
        (("k", None), ("k", 0.5)),
        (("k", math.nan), ("k", 0.5)),
        ((), ("_k", "on")),
        (("k", 1), ("k", True)),
        (("k", np.float64(0)), ("k", np.float64(0.5))),
        (("k", Strength.NONE), ("k", Strength.SOME)),
        (("k", 0.0), ("k", torch.tensor(0.5))),
    ],
)
def test_a_number_or_word_by_which_examples_meet_is_found(
    before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    """Also where the class alone has it, or its type alone changes; and where it passes through a tensor without effect."""
    model, x = Switched(*before), torch.randn(3, 4)
    check_against_autograd(model, {"x": x})
    total = Guarded(ClippedSum(model, 1.0))
    add(total, model, x=x)
    if isinstance(after[1], Tensor):
        model.k = torch.tensor(0.25)
        add(total, model, x=x)
    setattr(model, *after)
    with pytest.raises(StepDropped):
        add(total, model, x=x)


@pytest.mark.parametrize(
    "change", ["global hook", "hook at a reused address", "mode of the task", "child named task"]
)
def test_changes_outside_of_the_model_are_noticed_too(change: str) -> None:
    model, ids = Words(), torch.tensor([[1, 2], [3, 4], [5, 6]])
    model.add_module("task", nn.Identity())
    task, first = Loss(model), model.last.register_forward_hook(lambda m, args, y: None)
    check_against_autograd(model, {"ids": ids}, task)
    add(Guarded(ClippedSum(model, 1.0)), task, ids=ids)
    if change == "global hook":
        first = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    elif change == "mode of the task":
        task.eval()
    elif change == "child named task":
        model.task = nn.Tanh()
    else:
        first.remove()
        model.last.register_forward_hook(lambda m, args, y: 2 * y)
    try:
        with pytest.raises(PrivacyConfigError, match="since the self-check"):
            add(Guarded(ClippedSum(model, 1.0)), task, ids=ids)
    finally:
        first.remove()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.a.bias.requires_grad_(False),
        lambda m: m.double(),
        lambda m: setattr(m, "a", nn.Linear(4, 5)),
    ],
)
def test_a_sum_is_for_the_parameters_that_it_was_made_for(change: Callable[[Any], object]) -> None:
    model = Net()
    total = Guarded(ClippedSum(model, 1.0))
    change(model)
    x = torch.randn(3, 4, dtype=model.b.weight.dtype)
    check_against_autograd(model, {"x": x})
    with pytest.raises(PrivacyConfigError, match="since this sum was made"):
        add(total, model, x=x)


def test_the_check_leaves_everything_as_it_was() -> None:
    model, inputs = Net(factor=1e-8), made_up()
    model.register_buffer("seen", torch.tensor([0.0, torch.nan]))
    state = copy.deepcopy(model.state_dict())
    generators = torch.get_rng_state(), random.getstate()
    x = inputs["x"].clone()
    check_against_autograd(model, inputs)
    assert all(
        torch.equal(value.nan_to_num(7), state[name].nan_to_num(7))
        for name, value in model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert torch.equal(inputs["x"], x) and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# A check that could pass vacuously.


def ignores_scale(model: Net) -> Callable[..., Tensor]:
    return lambda x: model.b(model.a(x)).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("inputs", "task", "line"),
    [
        ({"x": torch.ones(3, 4)}, None, "examples 0 and 1 are equal"),
        (made_up(1), None, "two or more"),
        ({**made_up(2), "other": torch.zeros(3)}, None, "the same number"),
        (
            {"x": torch.eye(4)[:2] * 0 + torch.tensor([[0.0], [float("nan")]])},
            None,
            "one finite number",
        ),
        (made_up(), ignores_scale, "gives scale a gradient"),
        (
            made_up(),
            lambda model: lambda x: model(x) * 0,
            r"gives scale, a\.weight, a\.bias, .* a gradient",
        ),
        (made_up(), lambda model: lambda x: model(x).detach(), "was it detached"),
        (
            made_up(),
            lambda model: lambda x: model(x).mean(),
            'reduction="none"|one loss per example',
        ),
    ],
)
def test_what_the_check_cannot_exercise_is_refused_by_name(
    inputs: dict[str, Tensor],
    task: Callable[[Net], Callable[..., Tensor]] | None,
    line: str,
    dtype: torch.dtype,
) -> None:
    model = Net().to(dtype)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    with pytest.raises(PrivacyConfigError, match=line):
        check_against_autograd(model, inputs, task(model) if task is not None else None)
    with pytest.raises(PrivacyConfigError, match="has not passed"):
        add(Guarded(ClippedSum(model, 1.0)), model, x=torch.randn(3, 4))


def test_parameters_that_are_named_need_no_gradient() -> None:
    model = Net()
    check_against_autograd(model, made_up(), task := ignores_scale(model), unreached=["scale"])
    add(Guarded(ClippedSum(model, 1.0)), task, x=torch.randn(3, 4))
    with pytest.raises(PrivacyConfigError, match="gives scale a gradient"):
        check_against_autograd(model, made_up(), task, unreached=["a.weight"])


def in_autocast(model: nn.Module) -> Callable[..., Tensor]:
    def task(**inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs)

    return task


@pytest.mark.parametrize(
    ("factor", "size", "dtype", "task", "wrong"),
    [
        # The layer scale of ConvNeXt starts at 1e-6: a wrong gradient behind it would be lost in the rounding.
        *(
            (factor, 1.0, dtype, None, 1.0)
            for factor in (0.0, 1e-7, 1e-4)
            for dtype in (torch.float32, torch.float64)
        ),
        (
            1.0,
            1e-3,
            torch.float32,
            None,
            0.05,
        ),  # a layer whose gradient is a thousandth of the largest one
        (1.0, 1.0, torch.bfloat16, None, 1e-6),  # half precision is checked in double precision
        (1.0, 1.0, torch.bfloat16, in_autocast, 1e-6),
        (
            1.0,
            1.0,
            torch.float32,
            lambda model: lambda x: model(x.float()),
            1.0,
        ),  # one that runs in float32 alone
    ],
)
def test_a_wrong_part_is_found_however_small_and_in_every_precision(
    factor: float, size: float, dtype: torch.dtype, task: Callable[[Net], Any] | None, wrong: float
) -> None:
    torch.manual_seed(0)
    inputs = {"x": (made_up()["x"] * size).to(dtype)}
    right = Net(factor).to(dtype)
    check_against_autograd(right, inputs, task and task(right))
    assert (
        all(p.dtype == dtype for p in right.parameters())
        and torch.get_default_dtype() == torch.float32
    )
    broken_one = Net(factor, wrong).to(dtype)
    with pytest.raises(PrivacyConfigError, match=r"gradient of a\.(weight|bias)"):
        check_against_autograd(broken_one, inputs, task and task(broken_one), fallback=False)


def test_half_precision_that_cannot_be_widened_is_refused() -> None:
    model = Net().bfloat16()
    with pytest.raises(PrivacyConfigError, match="before it is cast"):
        check_against_autograd(
            model, {"x": made_up()["x"].bfloat16()}, lambda x: model(x.bfloat16())
        )


@pytest.mark.parametrize("factor", [1e25, 1e160, 1e-60])
def test_gradients_that_overflow_or_underflow_cannot_be_compared(factor: float) -> None:
    """In float32 all are infinite or zero; at 1e160 the norms overflow in float64 too."""
    for model in (Net(), Net(wrong=1.0)):
        with pytest.raises(
            PrivacyConfigError,
            match=r"nothing can be compared: scale the loss|gradient of a\.weight",
        ):
            check_against_autograd(model, made_up(), lambda x, net=model: net(x) * factor)


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e-45, 1e-13, 1e21, float("nan"), -float("inf")])
def test_bounds_at_which_norms_underflow_or_overflow_are_refused(bound: float) -> None:
    with pytest.raises(PrivacyConfigError, match="between 1e-12, "):
        ClippedSum(Net(), bound)


def test_no_noise_is_worth_anything_without_clipping() -> None:
    total = ClippedSum(Net(), float("inf"))
    assert total.release(0.0)
    with pytest.raises(PrivacyConfigError, match="not clipped"):
        total.release(1.0)


def test_a_model_in_float32_and_float64_is_refused() -> None:
    """A product of the float64 layer may overflow a sum in fp32."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(PrivacyConfigError, match="dtypes whose sums have different precision"):
        ClippedSum(model, 1.0)


# Every way in which a rule can be wrong, in a rule.

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def broken(change: Change) -> Callable[[nn.Module, Tensor, Tensor], dict[str, Contribution]]:
    def rule(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
        x, g = change(x, g)
        return {"weight": OuterProducts(x[:, None], g[:, None]), "bias": Dense(g)}

    return rule


def swapped(count: int) -> list[int]:
    return [*range(count - 2), count - 1, count - 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_broken_rule_is_found(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, inputs = Net().to(dtype), {name: x.to(dtype) for name, x in made_up(count).items()}
    monkeypatch.setitem(RULES, nn.Linear, broken(lambda x, g: (x, g)))
    check_against_autograd(model, inputs)
    changes: list[Change] = [
        lambda x, g: (x.flip(0), g.flip(0)),
        lambda x, g: (x.roll(1, 0), g.roll(1, 0)),
        lambda x, g: (x[swapped(len(x))], g[swapped(len(x))]),
        lambda x, g: (x, g * 1.01),
        lambda x, g: (x.sum(0, keepdim=True).expand_as(x) / len(x), g),
        lambda x, g: (x, g.mean(0, keepdim=True).expand_as(g)),
        lambda x, g: (x, torch.cat([g[:-1], 0 * g[-1:]])),
        lambda x, g: (x * 0, g),
        lambda x, g: (x, g / 0),
    ]
    for change in changes:
        monkeypatch.setitem(RULES, nn.Linear, broken(change))
        with pytest.raises(PrivacyConfigError, match="do not see the gradient"):
            check_against_autograd(model, inputs, fallback=False)


@pytest.mark.parametrize("returned", [None, [1.0], 2.0])
def test_a_task_that_returns_no_tensor_is_told_so(returned: object) -> None:
    model = Net()
    with pytest.raises(PrivacyConfigError, match=f"alone gave {type(returned).__name__}"):
        check_against_autograd(model, made_up(), lambda **inputs: returned)  # type: ignore[arg-type, return-value]
    with pytest.raises(PrivacyConfigError, match=f"the task returned {type(returned).__name__}"):
        add(ClippedSum(model, 1.0), lambda **inputs: returned, **made_up(3))  # type: ignore[arg-type, return-value]


# What begins at the run's own size, with the second micro-batch, in half precision or under a compiler.


class Tokens(nn.Module):
    """Layers of several rules; wide enough for matrix products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 40), nn.LayerNorm(40)
        self.inner, self.last = (
            nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 40)),
            nn.Linear(40, 36),
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return self.last(self.norm(h + self.inner(h))).sin().sum((1, 2))


IDS = torch.randint(0, 50, (5, 6), generator=torch.Generator().manual_seed(2))


def compiled(model: nn.Module) -> nn.Module:
    model.inner.compile(backend="eager")  # type: ignore[union-attr, operator]
    return model


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp32": lambda: {"model": Tokens()},
    "two_pass": lambda: {"model": Tokens(), "mode": "two_pass"},
    "bf16": lambda: {"model": Tokens().bfloat16()},
    "autocast": lambda: {"model": (model := Tokens()), "task": in_autocast(model)},
    "compiled": lambda: {"model": compiled(Tokens())},
    "compiled bf16": lambda: {"model": compiled(Tokens().bfloat16())},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "size", [70, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 2, 200))]
)
def test_a_right_model_passes_at_the_size_of_the_run(run: str, size: int) -> None:
    check_at_size(inputs={"ids": IDS}, size=size, **RUNS[run]())


def weights(
    change: Callable[[OuterProducts, Tensor], Tensor],
) -> Callable[[pytest.MonkeyPatch], None]:
    """Contributions count with other weights than those of their norms."""
    add = OuterProducts.add_weighted
    return lambda patch: patch.setattr(
        OuterProducts,
        "add_weighted",
        lambda self, weight_B, slot: add(self, change(self, weight_B), slot),
    )


def late_rows(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    return weights(lambda _, weight_B: torch.cat([weight_B[:64], change(weight_B[64:])]))


def rounded_in_bf16(part: OuterProducts, weight_B: Tensor) -> Tensor:
    """To a power of two."""
    rounded_B = weight_B.log2().round().exp2().masked_fill(weight_B == 0, 0)
    return rounded_B if part.a_BTd.dtype == torch.bfloat16 else weight_B


def late_norms(patch: pytest.MonkeyPatch) -> None:
    """Rows beyond 64 are not clipped as their norms ask."""
    norm = NormTally.safe_norm
    patch.setattr(
        NormTally, "safe_norm", lambda self: torch.cat([norm(self)[:64], 0.5 * norm(self)[64:]])
    )


def second_sum_alone(patch: pytest.MonkeyPatch) -> None:
    """What an fp32 sum beyond the first holds is lost."""
    reduce = totals.functools.reduce
    patch.setattr(
        totals.functools,
        "reduce",
        lambda f, parts, *first: first[0] if first and [*parts] else reduce(f, parts, *first),
    )


def later_micro_batches(
    change: Callable[[totals.ParameterSum], object],
) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        add, seen = totals.ParameterSum.add, list[totals.ParameterSum]()

        def wrong(self: totals.ParameterSum, *args: Any) -> None:
            if any(total is self for total in seen):
                change(self)
            seen.append(self)
            add(self, *args)

        patch.setattr(totals.ParameterSum, "add", wrong)

    return plant


def under_a_compiler(patch: pytest.MonkeyPatch) -> None:
    """A tap in a compiled block reports half of the gradient."""
    call = recorder.Call
    patch.setattr(
        recorder,
        "Call",
        lambda claim, name, x, g, *kept, **how: call(
            claim, name, x, g / 2 if how.get("is_borrowed") else g, *kept, **how
        ),
    )


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "rows beyond 64 are lost": (late_rows(lambda w_B: 0 * w_B), "fp32"),
    "rows beyond 64 count twice": (late_rows(lambda w_B: 2 * w_B), "fp32"),
    "factors beyond 64 are those of other rows": (late_rows(lambda w_B: w_B.flip(0)), "fp32"),
    "norms beyond 64": (late_norms, "fp32"),
    "the second fp32 sum is lost": (second_sum_alone, "fp32"),
    "a second micro-batch replaces the first": (
        later_micro_batches(lambda t: t.low.zero_()),
        "fp32",
    ),
    "a second micro-batch doubles the first": (
        later_micro_batches(lambda t: t.low.mul_(2)),
        "two_pass",
    ),
    "in bf16": (weights(rounded_in_bf16), "bf16"),
    "under a compiler": (under_a_compiler, "compiled"),
    "under a compiler in bf16": (under_a_compiler, "compiled bf16"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_that_small_batches_do_not_have_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, run = PLANTED[name]
    plant(monkeypatch)
    settings = RUNS[run]()
    check_against_autograd(Tokens(), {"ids": IDS[:2]})
    with pytest.raises(
        PrivacyConfigError, match=r"in micro-batches of 70 examples, in the precision of the run"
    ):
        check_at_size(inputs={"ids": IDS}, size=70, **settings)


@pytest.mark.parametrize("together", [1, 6, 100])
def test_a_large_model_is_checked_part_by_part(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is compared, what a failed check leaves behind included, and all parameters are trained afterwards."""
    monkeypatch.setattr(selfcheck, "TOGETHER", together)
    for model in (Net(), Net(wrong=1.0)):
        with (
            nullcontext()
            if model.wrong == 0
            else pytest.raises(PrivacyConfigError, match=r"gradient of a\.weight")
        ):
            check_against_autograd(model, made_up(), fallback=False)
        assert all(p.requires_grad for p in model.parameters())
    check_at_size(model := Net(), made_up(), 4)
    linear = RULES[nn.Linear]
    monkeypatch.setitem(RULES, nn.Linear, lambda *of: {**linear(*of), "bias": Dense(0.9 * of[2])})
    with pytest.raises(PrivacyConfigError, match=r"norm of row|gradient of \w\.bias"):
        check_at_size(model, made_up(), 4)
