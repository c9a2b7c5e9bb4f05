"""A condition on a whole batch is refused at the start, whatever it looks at; one on each example is none."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.errors import PrivacyConfigError
from privacy.guards.conditions import MOST_IDS, Ids
from privacy.guards.selfcheck import check_against_autograd
from privacy.loop import floats, integers
from privacy.loop.fields import Example

D, K, L, V = 6, 5, 8, 30


class Pictures(nn.Module):
    """A classifier that lets `change` work on its inputs x, activations h, logits z, losses l or on gradients g of h."""

    def __init__(self, place: str, change: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.place, self.change = (
            nn.Linear(D, 16),
            nn.Linear(16, K),
            place,
            change,
        )

    def at(self, place: str, value: Tensor, *others: Tensor) -> Tensor:
        return self.change(value, *others) if place == self.place else value

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.at("h", torch.relu(self.first(self.at("x", x))))
        if self.place == "g" and h.requires_grad:
            h.register_hook(self.change)
        return self.at("l", F.cross_entropy(self.at("z", self.last(h)), y, reduction="none"), y)


class Texts(nn.Module):
    """A classifier of texts, whose losses are scaled by a function of ids, mask, embeddings and labels."""

    def __init__(self, scale: Callable[..., float | Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places, self.last, self.scale = (
            nn.Embedding(V, D),
            nn.Embedding(L, D),
            nn.Linear(D, K),
            scale,
        )

    def forward(self, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        e = self.table(ids)
        scale = self.scale(ids, mask, e.detach(), y)
        h = torch.tanh(e + self.places(torch.arange(ids.shape[1])[None])) * mask[..., None].to(
            e.dtype
        )
        return F.cross_entropy(self.last(h.sum(1)), y, reduction="none") * scale


def examples(count: int = 4) -> dict[str, Tensor]:
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(1))
    return {"x": x, "y": torch.tensor([1, 3, 0, K - 1][:count])}


def texts(length: int = L) -> dict[str, Tensor]:
    ids = torch.randint(V, (4, length), generator=torch.Generator().manual_seed(2)).clamp(1, V - 2)
    ids[2, -1], ids[3, -1] = 0, V - 1
    mask = (torch.arange(length) < torch.tensor([[length - 1], [2], [1], [length - 2]])).long()
    return {"ids": ids, "mask": mask, "y": torch.tensor([1, 3, 0, K - 1])}


def when(
    condition: Callable[[Tensor], object], change: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    return lambda value, *_: change(value) if condition(value) else value


def weaker(value: Tensor) -> Tensor:
    return 0.1 * value


ON_NUMBERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "largest input, scaled to 1": (
        "x",
        when(lambda x: x.abs().max() > 100, lambda x: x / x.abs().max()),
    ),
    "largest input, 0 to 255": ("x", when(lambda x: x.max() > 1.5, lambda x: x / 255)),
    "largest input in a band": ("x", when(lambda x: 100 < x.abs().max() < 1000, weaker)),
    "largest input of a broken sensor": ("x", when(lambda x: x.max() > 1e12, weaker)),
    "largest finite input": (
        "x",
        when(lambda x: 1e35 < x.max() < torch.inf, lambda x: x / x.abs().max()),
    ),
    "smallest finite input": ("x", when(lambda x: -torch.inf < x.min() < -1e20, weaker)),
    "all negative": (
        "x",
        when(lambda x: x.max() < 0 and x.unique().numel() > 2 * D, lambda x: x + 1),
    ),
    "tiny inputs": ("x", when(lambda x: 0 < x.abs().max() < 1e-7, lambda x: x / x.abs().max())),
    "inputs below a tiny band": (
        "x",
        when(lambda x: 0 < x.abs().max() < 1e-20, lambda x: x / x.abs().max()),
    ),
    "any tiny number": ("x", when(lambda x: ((x != 0) & (x.abs() < 1e-28)).any(), weaker)),
    "constant": ("x", when(lambda x: x.std() < 1e-7 < x.abs().max(), lambda x: x - x.mean())),
    "all whole": (
        "x",
        when(lambda x: x.max() > 1 and bool((x == x.round()).all()), lambda x: x / 255),
    ),
    "smallest input": ("x", when(lambda x: x.min() < -50, lambda x: x + 50)),
    "any negative": ("x", when(lambda x: (x < 0).any(), lambda x: x + 1)),
    "mean": ("x", when(lambda x: x.mean() > 5, lambda x: x - x.mean())),
    "negative mean": ("x", when(lambda x: x.mean() < -5, weaker)),
    "standard deviation": ("x", when(lambda x: x.std() > 10, lambda x: x / x.std())),
    "no deviation": ("x", when(lambda x: x.std() < 1e-3, lambda x: x * 1000)),
    "norm": ("x", when(lambda x: x.norm() > 1000, lambda x: x / x.norm())),
    "sum": ("x", when(lambda x: x.sum() > 1e4, weaker)),
    "quantile": ("x", when(lambda x: torch.quantile(x, 0.9) > 50, weaker)),
    "lowest quantile": ("x", when(lambda x: torch.quantile(x, 0.02) > 50, weaker)),
    "any NaN": ("x", when(lambda x: x.isnan().any(), lambda x: weaker(x.nan_to_num()))),
    "any infinity": ("x", when(lambda x: x.isinf().any(), lambda x: weaker(x.nan_to_num(0, 1, 1)))),
    "any negative infinity": (
        "x",
        when(lambda x: x.isneginf().any(), lambda x: weaker(x.nan_to_num(0, 1, 1))),
    ),
    "one row of NaN": (
        "x",
        when(lambda x: x.isnan().any(1).sum() == 1, lambda x: weaker(x.nan_to_num())),
    ),
    "a few large rows": (
        "x",
        when(lambda x: 0 < (x.abs().amax(1) > 100).double().mean() < 0.25, weaker),
    ),
    "few different numbers": ("x", when(lambda x: x.unique().numel() < 8, weaker)),
    "the largest row": (
        "x",
        lambda x: x * (1 + (torch.arange(len(x)) == x.norm(dim=1).argmax())[:, None]),
    ),
    "sorted order": ("x", lambda x: x / x.abs().flatten().sort().values[-3].clamp(min=50)),
    "largest activation": ("h", when(lambda h: h.max() > 30, lambda h: h * (30 / h.max()))),
    "largest activation, without its gradient": (
        "h",
        when(lambda h: h.max() > 30, torch.Tensor.detach),
    ),
    "dead activations": ("h", when(lambda h: (h > 0).double().mean() < 0.2, lambda h: h + 0.1)),
    "largest logit": ("z", when(lambda z: z.abs().max() > 30, lambda z: z * (30 / z.abs().max()))),
    "smallest logit": ("z", when(lambda z: z.min() < -30, weaker)),
    "largest loss": (
        "l",
        lambda each, y: each * (20 / each.max().detach()) if each.max() > 20 else each,
    ),
    "mean loss": ("l", lambda each, y: weaker(each) if each.mean() > 5 else each),
    "any loss that is not finite": (
        "l",
        lambda each, y: each if each.isfinite().all() else 0 * each,
    ),
    "hardest half": (
        "l",
        lambda each, y: each * (each >= each.nan_to_num().topk(max(1, len(each) // 2)).values[-1]),
    ),
    "one class in all rows": (
        "l",
        lambda each, y: 2 * each if len(y.unique()) == 1 < len(y) else each,
    ),
    "the last class in any row": (
        "l",
        lambda each, y: 2 * each if (y == K - 1).any() and len(y) > 1 else each,
    ),
    "the first class in any row": (
        "l",
        lambda each, y: 2 * each if (y == 0).any() and len(y) > 1 else each,
    ),
    "a middle class in all rows": (
        "l",
        lambda each, y: 2 * each if (y == 2).all() and len(y) > 1 else each,
    ),
    "number of a middle class": (
        "l",
        lambda each, y: torch.where(y == 2, each / (y == 2).sum().clamp(min=1), each),
    ),
    "weights of classes": ("l", lambda each, y: each / y.bincount(minlength=K)[y]),
    "longest gradient": ("g", when(lambda g: g.norm(dim=1).max() > 0.7, weaker)),
}


def imputed(
    is_unusual: Callable[[Tensor], Tensor], of_others: Callable[[Tensor], Tensor]
) -> tuple[str, Callable[..., Tensor]]:
    """Numbers that are unusual become a number of the examples, which is NaN where theirs are unusual, too."""

    def change(x: Tensor) -> Tensor:
        unusual = is_unusual(x)
        return torch.where(unusual, of_others(torch.where(unusual, torch.nan, x)).nan_to_num(), x)

    return "x", change


def column(number: int, is_unusual: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: is_unusual(x) & (torch.arange(x.shape[1]) == number)


def largest(x: Tensor) -> Tensor:
    return x.nan_to_num(-9, -9, -9).amax(0)


def scaled_by_all(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (1 + x.std(0))


OF_OTHERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "NaN, by the mean": imputed(torch.isnan, lambda x: x.nanmean(0)),
    "NaN, by the median": imputed(torch.isnan, lambda x: x.nanmedian(0).values),
    "NaN, by the mean of all numbers": imputed(torch.isnan, lambda x: x.nanmean()),
    "NaN of a column, by the mean": imputed(column(3, torch.isnan), lambda x: x.nanmean(0)),
    "NaN of a column, by the median": imputed(
        column(0, torch.isnan), lambda x: x.nanmedian(0).values
    ),
    "NaN of a column, by the largest": imputed(column(D - 1, torch.isnan), largest),
    "rows that are partly NaN": imputed(
        lambda x: x.isnan() & ~x.isnan().all(1, keepdim=True), lambda x: x.nanmean(0)
    ),
    "rows of NaN": imputed(lambda x: x.isnan().all(1, keepdim=True), lambda x: x.nanmean(0)),
    "number of rows with NaN": (
        "x",
        lambda x: x.nan_to_num() / (1 + x.isnan().any(1).sum() * x.isnan().any(1))[:, None],
    ),
    "NaN left where all are": ("x", lambda x: torch.where(x.isnan(), x.nanmean(0), x)),
    "infinity, by the largest finite": imputed(torch.isposinf, largest),
    "minus infinity, by the smallest finite": imputed(torch.isneginf, lambda x: -largest(-x)),
    "infinity of a column": imputed(column(2, torch.isinf), lambda x: x.nanmean(0)),
    "below -10": imputed(lambda x: x < -10, lambda x: x.nanmean(0)),
    "below -10, in a column": imputed(column(1, lambda x: x < -10), lambda x: x.nanmean(0)),
    "above 1e5": imputed(lambda x: x > 1e5, lambda x: x.nanmean(0)),
    "from 100 to 10,000": imputed(lambda x: (x > 100) & (x < 1e4), lambda x: x.nanmean(0)),
    "from -50 to -9": imputed(lambda x: (x < -9) & (x > -50), largest),
    "rows above 1e5, standardised": (
        "x",
        lambda x: torch.where((x > 1e5).any(1, keepdim=True), scaled_by_all(x), x),
    ),
    "rows below -10, standardised": (
        "x",
        lambda x: torch.where((x < -10).any(1, keepdim=True), scaled_by_all(x), x),
    ),
}
"""An example with such numbers takes others; one without them reaches nobody and is reached by nobody."""
ON_IDS: dict[str, Callable[..., float | Tensor]] = {
    "the highest id": lambda ids, mask, e, y: 1.0 + bool(ids.max() == V - 1 and len(ids) > 1),
    "the lowest id": lambda ids, mask, e, y: 1.0 + bool(ids.min() == 0 and len(ids) > 1),
    "a middle id": lambda ids, mask, e, y: 1.0 + bool((ids == 7).all(1).any() and len(ids) > 1),
    "few different ids": lambda ids, mask, e, y: 1.0 + (len(ids) > 1 and ids.unique().numel() < 14),
    "all masks full": lambda ids, mask, e, y: 1.0 + bool(mask.all()),
    "any mask full": lambda ids, mask, e, y: 1.0 + bool(mask.all(1).any()),
    "mean of the masks": lambda ids, mask, e, y: 1.0 + bool(mask.double().mean() > 0.9),
    "longest": lambda ids, mask, e, y: 1.0 + mask.sum(1).max() * (len(mask) > 1),
    "largest embedding": lambda ids, mask, e, y: 1.0 + bool(e.abs().max() > 30),
    "any embedding NaN": lambda ids, mask, e, y: 1.0 + bool(e.isnan().any()),
    "embeddings without deviation": lambda ids, mask, e, y: 1.0 + bool(e.std() < 1e-3),
}
REFUSED = r"loss of an example changes|clipping rules do not see|gives other outputs for examples alone|vmap cannot follow"


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_a_condition_on_numbers_of_a_batch_is_refused(name: str) -> None:
    with pytest.raises(PrivacyConfigError, match=REFUSED):
        check_against_autograd(Pictures(*ON_NUMBERS[name]), examples())


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("count", [2, 4])
def test_an_example_that_takes_what_others_have_for_its_own_unusual_numbers_is_refused(
    name: str, count: int
) -> None:
    with pytest.raises(PrivacyConfigError, match=REFUSED):
        check_against_autograd(Pictures(*OF_OTHERS[name]), examples(count))


def test_numbers_of_each_input_are_unusual_by_themselves() -> None:
    """Beside an input that is NaN throughout, what another one is replaced by would not be seen."""

    def task(x: Tensor, age: Tensor, y: Tensor) -> Tensor:
        age = torch.where(age.isnan(), age.nanmean().nan_to_num(), age)
        return F.cross_entropy(model(torch.cat([x, age[:, None]], 1)), y, reduction="none")

    torch.manual_seed(0)
    model = nn.Linear(D + 1, K)
    with pytest.raises(PrivacyConfigError, match=REFUSED):
        check_against_autograd(
            model, {**examples(), "age": torch.tensor([0.1, 2.0, -0.3, 1.0])}, task
        )


@pytest.mark.parametrize("name", ON_IDS)
def test_a_condition_on_ids_masks_and_what_tables_return_is_refused(name: str) -> None:
    with pytest.raises(PrivacyConfigError, match=REFUSED):
        check_against_autograd(Texts(ON_IDS[name]), texts())


def reciprocal_spread(x: Tensor) -> Tensor:
    return x / x.float().square().square().mean(1, keepdim=True).sqrt().to(
        x.dtype
    )  # overflows at 1e10


def spectrum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A product with fixed complex numbers; in complex64 it rounds what float64 would not."""
    waves = torch.exp(1j * torch.arange(float(D)).outer(torch.arange(float(D)))).to(dtype)
    return (x.to(dtype) @ waves).abs().to(x.dtype)


OF_EACH: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "no NaN": ("x", lambda x: x.nan_to_num(0, 10, -10)),
    "largest of the dtype for infinity": ("x", torch.nan_to_num),
    "own mean for NaN": ("x", lambda x: torch.where(x.isnan(), x.nanmean(1, keepdim=True), x)),
    "a fixed mean for NaN": (
        "x",
        lambda x: torch.where(x.isnan(), torch.arange(6.0), x).to(x.dtype),
    ),
    "layer norm": ("x", lambda x: F.layer_norm(x, x.shape[1:])),
    "softmax": ("x", lambda x: x.softmax(1)),
    "own numbers clamped": ("x", lambda x: x.clamp(-3, 3)),
    "what overflows": ("x", reciprocal_spread),
    "in float32": ("x", lambda x: F.layer_norm(x.float().exp(), x.shape[1:]).to(x.dtype)),
    "in half precision": ("x", lambda x: (x.half() * 3).to(x.dtype)),
    "in complex64": ("x", partial(spectrum, dtype=torch.complex64)),
    "in complex128": ("x", partial(spectrum, dtype=torch.complex128)),
    "logarithm": ("x", lambda x: x.abs().log1p().sin()),
    "another way where something is not finite": (
        "z",
        lambda z: z * 3 if bool(z.isfinite().all()) else z + 2 * z,
    ),
    "own largest": ("x", lambda x: x / x.abs().amax(1, keepdim=True).clamp(min=100)),
    "own NaN": (
        "x",
        lambda x: torch.where(x.isfinite().all(1, keepdim=True), x, torch.zeros_like(x)),
    ),
    "clamped": ("z", lambda z: z.clamp(-30, 30)),
    "own loss": ("l", lambda each, y: torch.where(each > 20, 20 * each / each.detach(), each)),
    "own class": ("l", lambda each, y: each * torch.linspace(1, 2, K)[y]),
    "own gradient": ("g", lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1)),
}


@pytest.mark.parametrize("name", OF_EACH)
@pytest.mark.parametrize("count", [2, 4])
def test_a_condition_on_each_example_is_accepted(name: str, count: int) -> None:
    check_against_autograd(Pictures(*OF_EACH[name]), examples(count))


def test_every_id_is_tried_beside_labels_that_count_for_nothing() -> None:
    """Also where -100 is among them, from which no other negative id follows."""
    ids = texts()["ids"]
    labels = ids.roll(1, 1)
    labels[0, -1] = -100
    seen = set[int]()

    def task(ids: Tensor, labels: Tensor, model: nn.Module, marker: int) -> Tensor:
        seen.update(labels.flatten().tolist())
        logits = model(ids).transpose(1, 2)
        loss_B = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100).sum(1)
        return loss_B * (1.0 + bool((labels == marker).any()))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, D), nn.Tanh(), nn.Linear(D, V))
    check_against_autograd(
        model, {"ids": ids, "labels": labels}, partial(task, model=model, marker=V)
    )
    assert seen == {-100, *range(V)}
    absent = min({*range(V)} - {*labels.flatten().tolist()})
    with pytest.raises(PrivacyConfigError, match=REFUSED):
        check_against_autograd(
            model, {"ids": ids, "labels": labels}, partial(task, model=model, marker=absent)
        )


def test_only_ids_that_are_allowed_are_tried() -> None:
    """Others may end a process, as labels out of range do on an accelerator."""
    allowed, seen = [*range(K), 255], set[int]()

    def task(x: Tensor, y: Tensor) -> Tensor:
        seen.update(y.tolist())
        return F.cross_entropy(model(x), y, reduction="none", ignore_index=255)

    torch.manual_seed(0)
    model, x = nn.Linear(D, K), torch.randn(4, D)
    check_against_autograd(
        model,
        {"x": x, "y": torch.tensor([0, 255, 1, K - 1])},
        task,
        allowed_ids={"y": torch.tensor(allowed)},
    )
    assert seen == {*allowed}
    assert Example((floats(D), integers(K, also=[255]))).allowed_ids()["item_1"].tolist() == allowed


def test_ids_that_are_too_many_to_be_listed_are_those_of_the_made_up_examples() -> None:
    keys = torch.tensor([0, 5, 2**62, 2**63 - 1])
    assert Ids.of(keys).every.tolist() == keys.tolist()
    assert Example((integers(2**63), integers(2))).allowed_ids().keys() == {"item_1"}


def test_of_many_ids_the_ends_and_some_in_between_are_tried() -> None:
    some = Ids.of(torch.tensor([[5], [49_999], [-100]])).some(MOST_IDS).tolist()
    assert some[:16] == [-100, *range(15)] and some[-16:] == [*range(49_984, 50_000)]
    assert len({*some}) == MOST_IDS and max(b - a for a, b in pairwise(some)) < 2000


class Placed(nn.Module):
    """Patches take the places of placeholders, one after the other and whatever their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.patch, self.last = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, K)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        e = self.table(ids)
        e = e.masked_scatter((ids == V - 1)[..., None], self.patch(x).to(e.dtype))
        return self.last(torch.tanh(e) * mask[..., None]).sin().flatten(1).sum(1)


def pictures_in_texts() -> dict[str, Tensor]:
    """Two placeholders in each text, and masks of true and false."""
    ids = texts()["ids"].clamp(max=V - 2)
    ids[:, [0, 2]] = V - 1
    mask = torch.arange(L) < torch.tensor([[5], [L], [6], [7]])
    return {"x": examples(4)["x"][:, None].repeat(1, 2, 1), "ids": ids, "mask": mask}


def test_ids_that_have_to_stand_where_they_are_do_and_rows_without_an_example_hold_them() -> None:
    inputs = pictures_in_texts()
    check_against_autograd(Placed(), inputs)
    empty = {name: torch.zeros_like(x[:1]) for name, x in inputs.items()}
    with pytest.raises(
        PrivacyConfigError,
        match=r"^beside rows without an item \(declare ids .*fixed=\{id: count\}\)\), the loss",
    ):
        check_against_autograd(Placed(), inputs, padding=empty)
    empty["ids"][0, [1, 5]] = V - 1
    check_against_autograd(Placed(), inputs, padding=empty)


def refuses(ids: Tensor, mask: Tensor, e: Tensor, y: Tensor) -> float:
    if not bool(e.isfinite().all()):
        raise ValueError("what is this?")
    return 1.0


def masked_sum(ids: Tensor, mask: Tensor, e: Tensor, y: Tensor) -> Tensor:
    """In another way where nothing is masked, as attention is computed; examples differ in their last bits."""
    return 1 + 1e-3 * (
        e.sum(1) if bool(mask.all()) else torch.einsum("btd,bt->bd", e, mask.to(e.dtype))
    ).sum(1)


@pytest.mark.parametrize("scale", [lambda ids, mask, e, y: 1 + mask.sum(1), refuses, masked_sum])
@pytest.mark.parametrize("length", [3, 6, 8])
def test_texts_of_any_length_are_accepted_where_positions_are_as_many_as_rows(
    scale: Callable[..., float | Tensor], length: int
) -> None:
    check_against_autograd(Texts(scale), texts(length))
