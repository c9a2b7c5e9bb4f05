"""Micro-batches of a size, shape, dtype or autocast that the self-check has not met are tried when they come."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.checked import require_apart
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from privacy.lattice import Lattice


def made_up(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def centred(h: Tensor) -> Tensor:
    return h - h.detach().mean(0)


def spread(h: Tensor) -> Tensor:
    """Of two rows that lie apart, or of all, as minibatch standard deviation has it."""
    groups = len(h) // 2 if len(h) % 2 == 0 else 1
    return h * h.view(-1, groups, h.shape[1]).std(0, correction=0).repeat(len(h) // groups, 1).detach()


def previous(h: Tensor) -> Tensor:
    return h + 1e-3 * h.detach().roll(1, 0)


class Net(nn.Module):
    """Mixes where `mixes` says so."""

    def __init__(self, mixes: Callable[[Tensor], bool], mix: Callable[[Tensor], Tensor] = centred) -> None:
        super().__init__()
        self.a, self.b, self.mixes, self.mix = nn.Linear(4, 5), nn.Linear(5, 3), mixes, mix

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.mixes(x):
            h = self.mix(h)
        return self.b(h).sin().flatten(1).sum(1)


def add(total: ClippedSum, model: nn.Module, x: Tensor) -> None:
    total.add_micro_batch(model, {"x": x}, torch.zeros(len(x), dtype=torch.bool))


@pytest.mark.parametrize("mix", [centred, spread, previous, lambda h: h.flip(0)])
def test_every_size_at_which_a_model_mixes_is_found(mix: Callable[[Tensor], Tensor]) -> None:
    """Also where the model raises an error on what is hostile."""
    for seed, mixes in enumerate((lambda x: len(x) > 24, lambda x: len(x) in (2, 12, 26))):
        torch.manual_seed(seed)
        model = Net(mixes, mix)

        def guarded(x: Tensor, model: nn.Module = model) -> Tensor:
            if not bool(x.abs().amax() < 100):
                raise ValueError("what is this?")
            return model(x)

        for size in (1, 2, 3, 12, 24, 25, 26, 27, 40):
            for task in (model, guarded):
                found = pytest.raises(PrivacyConfigError, match=f"in micro-batches of {size} examples")
                with found if mixes(torch.empty(size, 1)) else contextlib.nullcontext():
                    require_apart(task, {"x": made_up(3, 4)}, size)


@pytest.mark.parametrize("certified", [False, True])
@pytest.mark.parametrize("count", [2, 8, 40])
def test_a_sum_tries_every_size_before_it_adds(count: int, certified: bool) -> None:
    """However many examples the self-check had, its own batches are small."""
    model = Net(lambda x: len(x) > 60)
    check_against_autograd(model, {"x": made_up(count, 4)})
    total = CertifiedSum(model, Lattice.of(1.0, 64, 1.0)) if certified else ClippedSum(model, 1.0)
    for size in (1, 3, 60):
        add(total, model, made_up(size, 4, seed=1))
    for _ in range(2):
        before = {name: value.clone() for name, value in total.sums()}
        with pytest.raises(PrivacyConfigError, match="in micro-batches of 64 examples"):
            add(total, model, made_up(64, 4, seed=1))
        assert all(torch.equal(value, before[name]) for name, value in total.sums())


def test_weights_of_zero_hide_no_mixing() -> None:
    def is_nine(x: Tensor) -> bool:
        if not bool(x.abs().amax() < 100):  # NaN would come through zeros
            raise ValueError("what is this?")
        return len(x) == 9

    model = Net(is_nine)
    nn.init.zeros_(model.b.weight)
    check_against_autograd(model, {"x": made_up(2, 4)})
    with pytest.raises(PrivacyConfigError, match="in micro-batches of 9 examples"):
        add(ClippedSum(model, 1.0), model, made_up(9, 4))


def test_longer_examples_are_tried_too() -> None:
    model = Net(lambda x: x.shape[1] > 6)
    check_against_autograd(model, {"x": made_up(3, 5, 4)})
    total = ClippedSum(model, 1.0)
    add(total, model, made_up(3, 6, 4))
    with pytest.raises(PrivacyConfigError, match="in micro-batches of 3 examples"):
        add(total, model, made_up(3, 7, 4))


def test_autocast_is_tried_when_it_is_entered() -> None:
    model = Net(lambda x: torch.is_autocast_enabled("cpu"))
    check_against_autograd(model, {"x": made_up(3, 4)})
    total = ClippedSum(model, 1.0)
    add(total, model, made_up(4, 4))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PrivacyConfigError, match="in micro-batches of 4 examples"),
    ):
        add(total, model, made_up(4, 4))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PrivacyConfigError, match=r"clipping rules|loss of an example"),
    ):
        check_against_autograd(model, {"x": made_up(3, 4)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_branch_on_the_dtype_of_the_run_is_found(dtype: torch.dtype) -> None:
    for mixing in (dtype, torch.float64):
        model = Net(lambda x: x.dtype == mixing).to(dtype)  # noqa: B023
        with pytest.raises(PrivacyConfigError, match=r"clipping rules|loss of an example"):
            check_against_autograd(model, {"x": made_up(3, 4).to(dtype)})


class Halting(nn.Module):
    """Goes on while any example does; those that have stopped stay what they are."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.a, self.b, self.most = nn.Linear(4, 4), nn.Linear(4, 3), most

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for step in range(4):
            goes_on = (x.abs().amax(1) > self.most * step)[:, None]
            if not bool(goes_on.any()):
                break
            h = torch.where(goes_on, h + self.a(h).tanh(), h)
        return self.b(h).sin().sum(1)


def test_layers_that_are_called_as_often_as_the_longest_example_asks_are_refused_at_the_start() -> None:
    with pytest.raises(PrivacyConfigError, match="called more or less often among other examples"):
        check_against_autograd(Halting(most=10.0), {"x": made_up(3, 4)})


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass", "certified"])
def test_or_at_the_micro_batch_that_asks(mode: str) -> None:
    model = Halting(most=10.0)
    lattice = Lattice.of(1.0, 64, 1.0)
    total = (
        CertifiedSum(model, lattice, self_check=False)
        if mode == "certified"
        else ClippedSum(model, 1.0, mode=mode, self_check=False)  # type: ignore[arg-type]
    )
    for size in (2, 3):
        add(total, model, made_up(size, 4))
    with pytest.raises(PrivacyConfigError, match=r"the layer of a\.\w+ was called 2 times .* and 1 times"):
        add(total, model, made_up(3, 4) + 11)


# What one kind of neighbour finds and no other does.


class Reading(nn.Module):
    """Reads what `read` makes of all inputs; the rest of it does not see what is not finite."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.read = nn.Linear(4, 3), read

    def forward(self, x: Tensor) -> Tensor:
        mine = self.a(torch.where(x.isfinite(), x, 0.0)).sin().sum(1)
        return mine + 1e-30 * self.read(x).sum()


@pytest.mark.parametrize("hidden", [torch.isnan, torch.isinf])
def test_a_model_that_removes_one_kind_of_what_is_not_finite_is_found_by_the_other(
    hidden: Callable[[Tensor], Tensor],
) -> None:
    model = Reading(lambda x: torch.where(hidden(x), 0.0, x))
    with pytest.raises(PrivacyConfigError, match="in micro-batches of 9 examples"):
        require_apart(model, {"x": made_up(3, 4)}, 9)
    require_apart(Reading(lambda x: torch.where(x.isfinite(), 0.0, 0.0)), {"x": made_up(3, 4)}, 9)


def test_the_last_bit_counts() -> None:
    """Equal shapes give equal bits, so that a share of a ten-millionth is seen where nothing hostile comes through."""

    def task(x: Tensor) -> Tensor:
        if not bool(x.abs().amax() < 100):
            raise ValueError("what is this?")
        return (1 + 3e-7 * x.mean()) * (2 + x.sin().sum(1))

    with pytest.raises(PrivacyConfigError, match="in micro-batches of 64 examples"):
        require_apart(task, {"x": made_up(4, 4)}, 64)


def test_chance_in_a_size_that_the_self_check_has_not_met_is_named() -> None:
    """Even where the losses of the examples that are compared do not show it."""

    def task(x: Tensor) -> Tensor:
        if len(x) == 9:
            torch.rand(1)
        return x.sin().sum(1)

    require_apart(task, {"x": made_up(3, 4)}, 8)
    with pytest.raises(PrivacyConfigError, match="draws random numbers"):
        require_apart(task, {"x": made_up(3, 4)}, 9)


def test_one_loss_for_each_example_is_asked_for_at_every_size() -> None:
    for wrong in (lambda x: x.sin().sum(), lambda x: x.sin(), lambda x: x.sin().sum(1)[:-1]):
        with pytest.raises(PrivacyConfigError, match="for 9 examples, not one loss for each"):
            require_apart(wrong, {"x": made_up(3, 4)}, 9)


def test_a_limit_that_only_a_crowd_of_one_kind_reaches_is_found() -> None:
    """Such as the capacity of an expert: hostile numbers do not count, and the made-up examples are spread evenly."""

    def task(x: Tensor) -> Tensor:
        is_ordinary = x.abs().amax(1) < 100
        taken = is_ordinary & (x[:, 0] > 0)
        is_full = taken.sum() > 0.6 * is_ordinary.sum()
        return x.nan_to_num(0, 0, 0).clamp(-9, 9).sin().sum(1) * (1 + 1e-3 * is_full)

    inputs = {"x": torch.tensor([[1.0, 2, 3, 4], [-1, 2, 5, 3]])}
    with pytest.raises(PrivacyConfigError, match="in micro-batches of 64 examples"):
        require_apart(task, inputs, 64)


# Models whose inputs fit together only as they are given: placeholders among ids, which a picture replaces.


class Placeholders(nn.Module):
    """Raises an error where the ids have another number of placeholders than the pictures have patches."""

    def __init__(self, error: type[Exception], mix: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.table, self.patch, self.last = nn.Embedding(9, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.error, self.mix = error, mix

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        is_patch, patches = ids == 8, self.patch(picture)
        if int(is_patch.sum()) != patches[..., 0].numel():
            raise self.error("features and placeholders do not match,\n really")
        h = self.table(ids).masked_scatter(is_patch[..., None], patches)
        return self.last(self.mix(h)).sin().flatten(1).sum(1)


def prompts(count: int, *, length: int = 6) -> dict[str, Tensor]:
    """Four placeholders, the last behind the middle, and words."""
    ids = torch.randint(1, 8, (count, length), generator=torch.Generator().manual_seed(count))
    ids[:, [0, 1, 2, 4]] = 8
    return {"ids": ids, "picture": made_up(count, 4, 3)}


ERRORS = [ValueError, RuntimeError, IndexError]


@pytest.mark.parametrize("error", ERRORS)
def test_a_model_that_refuses_made_up_neighbours_is_tried_on_whole_examples(error: type[Exception]) -> None:
    torch.manual_seed(0)
    model = Placeholders(error)
    check_against_autograd(model, prompts(3))
    total = ClippedSum(model, 1.0)
    for size, length in ((1, 6), (5, 6), (8, 6), (8, 9)):
        inputs = prompts(size, length=length)
        total.add_micro_batch(model, inputs, torch.zeros(size, dtype=torch.bool))
    for mix in (centred, previous, lambda h: h + 1e-6 * h.mean()):
        with pytest.raises(PrivacyConfigError, match=r"loss of an example changes|clipping rules do not see"):
            check_against_autograd(Placeholders(error, mix), prompts(3))
        with pytest.raises(PrivacyConfigError, match="in micro-batches of 9 examples"):
            require_apart(Placeholders(error, mix), prompts(3), 9)


@pytest.mark.parametrize("error", ERRORS)
def test_a_model_that_refuses_made_up_examples_is_named_in_one_line(error: type[Exception]) -> None:
    line = (
        rf"^the model raises {error.__name__} on made-up .*\({{}}\): features and placeholders .*, really; .*made_up="
    )
    wrong = {**prompts(3), "ids": torch.randint(1, 8, (3, 6))}
    with pytest.raises(PrivacyConfigError, match=line.format("one alone")):
        check_against_autograd(Placeholders(error), wrong)
    with pytest.raises(PrivacyConfigError, match=line.format("9 examples together")):
        require_apart(Placeholders(error), wrong, 9)

    with pytest.raises(PrivacyConfigError, match=line.format("4 examples together")):
        check_against_autograd(
            model := Placeholders(error), prompts(3), lambda ids, picture: alone_of(model, error, ids, picture)
        )


def alone_of(model: nn.Module, error: type[Exception], ids: Tensor, picture: Tensor) -> Tensor:
    if len(ids) > 1:
        raise error("features and placeholders do not match, really")
    loss_B: Tensor = model(ids, picture)
    return loss_B


def test_certified_rows_are_tried_without_what_a_model_refuses() -> None:
    class Guarded(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not bool(x.isfinite().all()):
                raise ValueError("what is this?")
            return super().forward(x)

    lattice = Lattice.of(1.0, 64, 1.0)
    right, wrong = Guarded(lambda x: False), Guarded(lambda x: True)
    CertifiedSum(right, lattice, self_check=False).check_rows(right, {"x": made_up(4, 4)})
    with pytest.raises(PrivacyConfigError, match="of one and the same example is another"):
        CertifiedSum(wrong, lattice, self_check=False).check_rows(wrong, {"x": made_up(4, 4)})
