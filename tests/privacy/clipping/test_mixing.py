"""Models that mix examples: refused at the start at any strength, at a new size or shape when it comes; others are accepted.

Each mechanism adds strength * mix(model, h) to activations h (B, T, D) and may do something else in the forward. The strengths
range over ten orders of magnitude, because a part of 1e-6 on made-up inputs is one of 1 where an example is a thousand times as
large. A mechanism over the tokens of each example is right, at any strength.
"""

import array
import collections
import contextlib
import copy
import ctypes
import dataclasses
import decimal
import io
import itertools
import logging
import mmap
import queue as queues
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping import SUMS, ClippedSum, TwoPassSum
from privacy.errors import PrivacyConfigError
from privacy.gradients.module_state import COPIED
from privacy.guards.certified_rows import check_rows
from privacy.guards.holders import DEPTH
from privacy.guards.neighbours import require_apart
from privacy.guards.selfcheck import check_against_autograd
from privacy.plan.lattice import Lattice
from tests.self_check import Guarded

D, T, V, LONG = 6, 5, 24, 3000
STRENGTHS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4)


class Around(nn.Module):
    """Two linear layers around a mechanism; words instead of images, if `words`."""

    running: Tensor

    def __init__(
        self, mix: Callable[..., Tensor], strength: float, *, words: bool, narrow: bool = False
    ) -> None:
        super().__init__()
        self.mix, self.strength, self.narrow, self.memory = mix, strength, narrow, 0.0
        self.cache: dict[Any, Tensor] = {}
        self.rows, self.ring, self.filled = list[Tensor](), torch.zeros(LONG, T, D), 0
        self.table = nn.Embedding(V, D) if words else None
        self.before, self.norm, self.after = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.frozen = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.register_buffer("running", torch.zeros(D))
        for p in self.experts.parameters():
            p.requires_grad_(mix in (capacity, experts_of_tokens, sorted_by_length))

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        h = self.table(x) if self.table is not None else x
        h = self.norm(self.before(h).tanh() + h)
        h = h + self.strength * self.mix(self, h)
        if self.narrow:
            h = (h.float() * 1.5).to(h.dtype)
        return self.after(h).sin().flatten(1).sum(1)


def batch(count: int, *, words: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    if words:
        return {"x": torch.randint(1, V, (count, T), generator=generator)}
    return {"x": torch.randn(count, T, D, generator=generator).to(dtype)}


class GradientOfNeighbour(torch.autograd.Function):
    """Only the backward mixes."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.roll(1, 0)


def normalised(h: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return (h - h.mean(dim, keepdim=True)) / (h.std(dim, keepdim=True, correction=0) + 1e-3)


def attention(h: Tensor) -> Tensor:
    """Over the second to last dimension."""
    return F.scaled_dot_product_attention(h, h, h)


def lengths(x: Tensor) -> Tensor:
    return ((x.abs().flatten(2).sum(2) > 0) if x.dim() > 2 else x > 0).sum(1)


def capacity(m: Around, h: Tensor) -> Tensor:
    """Experts take half of the micro-batch at most."""
    chosen, most = h[:, 0, 0] > 0, len(h) // 2
    y = torch.zeros_like(h)
    for i, expert in enumerate(m.experts):
        mine = chosen == bool(i)
        kept = mine & (mine.cumsum(0) <= most)
        y = y + torch.where(kept[:, None, None], expert(h), 0)
    return y


def trimmed(m: Around, h: Tensor) -> Tensor:
    """Mean over as many tokens as the longest example has."""
    return h[:, : max(1, int(lengths(m.x).max()))].mean(1, keepdim=True)


def sorted_by_length(m: Around, h: Tensor) -> Tensor:
    """Losses are right, and the layer sees the examples in another order."""
    order = lengths(m.x).argsort(descending=True, stable=True)
    y: Tensor = m.experts[0](h[order])
    return y[order.argsort()] + m.experts[1](h)


def rounded_by_batch(m: Around, h: Tensor) -> Tensor:
    """8-bit numbers with one scale for the whole tensor."""
    scale = h.detach().abs().max() / 127
    return (h / scale).round() * scale


def remembered(m: Around, h: Tensor) -> Tensor:
    m.running.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h


def frozen_average(m: Around, h: Tensor) -> Tensor:
    m.frozen.data.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h


def new_buffer(m: Around, h: Tensor) -> Tensor:
    m.register_buffer("last", h.detach().mean((0, 1)))
    return h


def python_memory(m: Around, h: Tensor) -> Tensor:
    before, m.memory = m.memory, float(h.detach().mean())
    return h * before


def calibrated_by_shape(m: Around, h: Tensor) -> Tensor:
    """Statistics of the first call of a shape are kept."""
    return h * m.cache.setdefault(h.shape, h.detach().abs().amax())


def queue(m: Around, h: Tensor) -> Tensor:
    """Of features, which is used once it is longer than all batches of a check."""
    m.rows.extend(h.detach())
    return h * torch.stack(m.rows[-LONG:]).mean(0) if len(m.rows) > LONG else h


def ring(m: Around, h: Tensor) -> Tensor:
    """The same, written in place into a tensor that is no buffer."""
    m.ring[m.filled % LONG : m.filled % LONG + len(h)] = h.detach()[: LONG - m.filled % LONG]
    m.filled += len(h)
    return h * m.ring.mean(0).to(h.dtype) if m.filled > LONG else h


def rolled(m: Around, h: Tensor) -> Tensor:
    """The same in a tensor that is made anew and never grows."""
    m.ring, m.filled = torch.cat([m.ring.to(h.dtype), h.detach()])[-LONG:], m.filled + len(h)
    return h * m.ring.mean(0) if m.filled > LONG else h


def late_average(m: Around, h: Tensor) -> Tensor:
    m.memory, m.filled = 0.9 * m.memory + 0.1 * float(h.detach().mean()), m.filled + len(h)
    return h * m.memory if m.filled > LONG else h


def guarded(m: Around, h: Tensor) -> Tensor:
    """Raises on what is not finite or large, so that only rows of other examples are left to find what mixes."""
    if not bool(h.isfinite().all()) or float(m.x.abs().amax()) > 1e3:
        raise ValueError("what is this?")
    return h


def narrow_only(m: Around, h: Tensor) -> Tensor:
    """As code does that guards against overflow, where double precision needs no guard."""
    return h if h.dtype == torch.float64 else h / h.detach().abs().amax().clamp_min(1)


def hooked(m: Around, h: Tensor) -> Tensor:
    y = h * 1
    if y.requires_grad:
        y.register_hook(lambda g: g + g.mean(0))
    return y


WRONG: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "mean_of_detached": lambda m, h: h.detach().mean(0) * h,
    "batch_norm": lambda m, h: normalised(h, (0, 1)),
    "attention": lambda m, h: attention(h.transpose(0, 1)).transpose(0, 1),
    "softmax": lambda m, h: h.softmax(0),
    "previous": lambda m, h: h.roll(1, 0),
    "nan_ignored": lambda m, h: h * h.detach().nan_to_num(0, 0, 0).mean(0),
    "all_or_nothing": lambda m, h: h if h.isfinite().all() else torch.zeros_like(h),
    "scale_of_the_tensor": rounded_by_batch,
    "capacity": capacity,
    "trimmed": trimmed,
    "sorted_by_length": sorted_by_length,
    "remembered": remembered,
    "frozen_average": frozen_average,
    "new_buffer": new_buffer,
    "python_memory": python_memory,
    "calibrated_by_shape": calibrated_by_shape,
    "queue": queue,
    "ring": ring,
    "rolled": rolled,
    "late_average": late_average,
    "guarded": lambda m, h: guarded(m, h) * h.detach().mean(0),
    "narrow_only": narrow_only,
    "gradient_of_neighbour": lambda m, h: GradientOfNeighbour.apply(h),
    "gradient_hook": hooked,
}
LIMITS = ("capacity", "trimmed")
"""What they do is seen in losses only, to 1e-3 where values are narrowed to float32."""


def experts_of_tokens(m: Around, h: Tensor) -> Tensor:
    """Every token goes through both, and counts for one."""
    return torch.where(h[..., :1] > 0, m.experts[0](h), m.experts[1](h))


def keeps_the_last(m: Around, h: Tensor) -> Tensor:
    """For whoever looks; no forward reads it."""
    m.memory, m.cache["last"] = m.memory + 1, h.detach()
    return h


RIGHT: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "token_mean": lambda m, h: h.detach().mean((1, 2), keepdim=True) * h,
    "norm_by_hand": lambda m, h: normalised(h, 2),
    "attention": lambda m, h: attention(h),
    "experts": experts_of_tokens,
    "own_scale": lambda m, h: h / h.detach().abs().amax((1, 2), keepdim=True),
    "own_copy_in_place": lambda m, h: (h * 1).add_(1),
    "cached_table": lambda m, h: (
        h * m.cache.setdefault(h.shape, torch.linspace(0, 1, D)).to(h.dtype)
    ),
    "last_seen": keeps_the_last,
    "guarded": guarded,
}


def cases(names: Iterable[str], seed: int, *, every: bool) -> list[tuple[str, float, bool, bool]]:
    """(mechanism, strength, words or not, fp32 inside or not): all of them, or each in one way with one strength."""
    draw = random.Random(seed)
    if every:
        ways = itertools.product((False, True), repeat=2)
        return [
            (name, strength, *way)
            for name, strength, way in itertools.product(names, STRENGTHS, ways)
        ]
    return [(name, draw.choice(STRENGTHS), i % 2 == 1, i % 3 == 1) for i, name in enumerate(names)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_mixes_examples_is_refused_at_any_strength(every: bool) -> None:
    passed = []
    for mix, strength, words, narrow in cases(WRONG, 1, every=every):
        if narrow and mix in LIMITS:
            continue
        torch.manual_seed(0)
        model = Around(WRONG[mix], strength, words=words, narrow=narrow)
        for fallback in (False, True):
            try:
                check_against_autograd(model, batch(6, words=words), fallback=fallback)
            except PrivacyConfigError:
                continue
            # A hook that mixes gradients alone reaches nothing where every example is replayed by itself.
            if mix != "gradient_hook" or not fallback:
                passed.append((mix, strength, words, narrow))
    assert not passed, passed


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_keeps_examples_apart_is_accepted_at_any_strength(every: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for mix, strength, words, narrow in cases(RIGHT, 2, every=every):
            torch.manual_seed(0)
            model = Around(RIGHT[mix], strength, words=words, narrow=narrow).to(dtype)
            check_against_autograd(model, batch(3, words=words, dtype=dtype))


# What a forward gathers for much later calls is found wherever an attribute of a module leads, to a stated depth.


class Bank:
    """Holds what it is told to; `shared` is the class's own."""

    shared: ClassVar[list[Tensor]] = []

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@dataclasses.dataclass(frozen=True)
class Record:
    keys: list[Tensor] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Pair(NamedTuple):
    keys: list[Tensor]
    other: int = 0


class Hidden:
    """Slots that no name of the class's own leads to."""

    __slots__ = ("__keys", "mean")

    def __init__(self) -> None:
        self.__keys: list[Tensor] = []

    def take(self, h: Tensor) -> None:
        self.__keys.extend(h)


class Rows(list[Any]):
    """A list with attributes, which nobody may go through."""

    def __iter__(self) -> Any:
        raise RuntimeError("what is this?")


class Shadowed(Slotted):
    @property
    def keys(self) -> list[Tensor]:  # type: ignore[override]
        return []

    @keys.setter
    def keys(self, value: list[Tensor]) -> None:
        raise AttributeError("what is this?")


class Mean(ctypes.Structure):
    """A number as C has it."""

    _fields_: ClassVar[Any] = [("value", ctypes.c_double)]


class Named(dict[str, Any]):
    """A mapping whose keys are its attributes."""

    __getattr__ = dict.__getitem__


def mean_of(h: Tensor) -> float:
    return float(h.mean())


def beside_the_time(q: dict[str, Any], h: Tensor) -> None:
    q.update(seconds=time.perf_counter_ns(), mean=0.5 * q["mean"] + mean_of(h))


def timed(q: dict[str, Any], h: Tensor) -> None:
    q.update(seconds=time.perf_counter_ns(), calls=q["calls"] + 1)


def to_key(q: dict[Any, int], key: Any) -> None:
    q.clear()
    q[key] = 1


def to_bytes(q: bytearray, h: Tensor) -> None:
    q[:] = np.float64(np.frombuffer(bytes(q))[0] + mean_of(h)).tobytes()


def to_memory(q: Any, h: Tensor) -> None:
    memory = np.frombuffer(q, np.float64)
    memory += mean_of(h)


def to_gradient(q: Tensor, h: Tensor) -> None:
    q.grad = torch.full_like(q, mean_of(h) + (0.0 if q.grad is None else float(q.grad)))


def to_stream(q: io.BytesIO, h: Tensor) -> None:
    before = np.frombuffer(q.getvalue())[0]
    q.seek(0)
    q.write(np.float64(0.9 * before + mean_of(h)).tobytes())


def to_default(q: list[Callable[[], float]], h: Tensor) -> None:
    mean = q[0]() + mean_of(h)
    q[0] = lambda value=mean: value


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def closed() -> io.BytesIO:
    stream = io.BytesIO()
    stream.close()
    return stream


def nested(depth: int) -> Any:
    """A list inside so many mappings."""
    return [] if depth == 0 else {"inside": nested(depth - 1)}


def innermost(x: Any) -> list[Tensor]:
    return innermost(x["inside"]) if isinstance(x, dict) else x


def written(x: Any, start: int, rows: Any) -> None:
    x[start : start + len(rows)] = rows


def teacher() -> nn.Module:
    return nn.Linear(D, 2).requires_grad_(False)


Gathers = tuple[Callable[[], Any], Callable[[Any, Tensor], object]]
GATHERS: dict[str, Gathers] = {
    "a list": (list, lambda q, h: q.extend(h)),
    "a list in a mapping": (lambda: {"keys": []}, lambda q, h: q["keys"].extend(h)),
    "a deque in a mapping in a list": (
        lambda: [{"keys": collections.deque()}],
        lambda q, h: q[0]["keys"].extend(h),
    ),
    "a list in a tuple": (lambda: ([],), lambda q, h: q[0].extend(h)),
    "a named tuple": (lambda: Pair([]), lambda q, h: q.keys.extend(h)),
    "a set in a mapping": (lambda: {"keys": set()}, lambda q, h: q["keys"].update(h)),
    "a mapping with defaults": (
        lambda: collections.defaultdict(list),
        lambda q, h: q["keys"].extend(h),
    ),
    "a mapping of a user": (collections.UserDict, lambda q, h: q.update({len(q): h})),
    "a data class": (Record, lambda q, h: q.keys.extend(h)),
    "slots": (Slotted, lambda q, h: q.keys.extend(h)),
    "an object": (lambda: Bank(keys=[]), lambda q, h: q.keys.extend(h)),
    "an object in an object": (
        lambda: Bank(bank=Bank(keys={"k": []})),
        lambda q, h: q.bank.keys["k"].extend(h),
    ),
    "a class": (Bank, lambda q, h: q.shared.extend(h)),
    "a queue": (queues.Queue, lambda q, h: [q.put(x) for x in h]),
    "a chain": (
        lambda: Bank(head=None),
        lambda q, h: setattr(q, "head", Bank(mean=h.mean(0), rest=q.head)),
    ),
    "a tensor that grows": (
        lambda: {"t": torch.zeros(0, D)},
        lambda q, h: q.update(t=torch.cat([q["t"].to(h), h])),
    ),
    "a ring": (
        lambda: Bank(t=torch.zeros(LONG, D), n=0),
        lambda q, h: (written(q.t, q.n, h), setattr(q, "n", q.n + 2)),
    ),
    "a ring of numpy": (
        lambda: [np.zeros((LONG, D))],
        lambda q, h: written(q[0], int((q[0] != 0).any(1).sum()), h.numpy()),
    ),
    "an array that grows": (
        lambda: Bank(a=np.zeros((0, D))),
        lambda q, h: setattr(q, "a", np.concatenate([q.a, h.numpy()])),
    ),
    "a mean": (
        lambda: [{"mean": 0.0}],
        lambda q, h: q[0].update(mean=0.9 * q[0]["mean"] + 0.1 * float(h.mean())),
    ),
    "bytes": (lambda: {"b": b""}, lambda q, h: q.update(b=q["b"] + h.numpy().tobytes())),
    "a module in a list": (
        lambda: [teacher()],
        lambda q, h: q[0].weight.data.mul_(0.9).add_(0.1 * h.mean()),
    ),
    "a key": (lambda: {0.0: 1}, lambda q, h: to_key(q, next(iter(q)) + mean_of(h))),
    "a key of an object": (
        lambda: {(0.0,): 1},
        lambda q, h: to_key(q, (next(iter(q))[0] + mean_of(h),)),
    ),
    "beside the time": (lambda: {"seconds": 0, "mean": 0.0}, beside_the_time),
    "the middle of a list": (
        lambda: [0.0] * 3000,
        lambda q, h: written(q, 1500, [q[1500] + mean_of(h)]),
    ),
    "the middle of lists": (
        lambda: [[0.0] for _ in range(3000)],
        lambda q, h: written(q[1500], 0, [q[1500][0] + mean_of(h)]),
    ),
    "the middle of a mapping": (
        lambda: dict.fromkeys(range(3000), 0.0),
        lambda q, h: q.update({1500: q[1500] + mean_of(h)}),
    ),
    "an attribute of a list": (
        lambda: Rows([1]),
        lambda q, h: vars(q).setdefault("seen", []).extend(h),
    ),
    "an attribute of a mapping": (
        Named,
        lambda q, h: vars(q).update(mean=vars(q).get("mean", 0) + mean_of(h)),
    ),
    "an attribute of a tensor": (
        lambda: torch.zeros(3),
        lambda q, h: vars(q).setdefault("seen", []).extend(h),
    ),
    "a slot of another name": (Hidden, lambda q, h: q.take(h)),
    "a slot that is filled": (
        Hidden,
        lambda q, h: setattr(q, "mean", getattr(q, "mean", 0) + mean_of(h)),
    ),
    "a number of numpy": (
        lambda: [np.float32(0)],
        lambda q, h: written(q, 0, [q[0] + np.float32(mean_of(h))]),
    ),
    "a complex number": (lambda: {"mean": 0j}, lambda q, h: q.update(mean=q["mean"] + mean_of(h))),
    "a decimal number": (
        lambda: [decimal.Decimal(0)],
        lambda q, h: written(q, 0, [q[0] + decimal.Decimal(mean_of(h))]),
    ),
    "bytes in place": (lambda: bytearray(8), to_bytes),
    "an array of Python": (
        lambda: array.array("d", [0]),
        lambda q, h: written(q, 0, array.array("d", [q[0] + mean_of(h)])),
    ),
    "a sparse tensor": (
        lambda: [torch.eye(1).to_sparse()],
        lambda q, h: written(q, 0, [(q[0] * h.mean()).to_sparse()]),
    ),
    "a partial function": (
        lambda: [partial(float, 0.0)],
        lambda q, h: written(q, 0, [partial(float, q[0]() + mean_of(h))]),
    ),
    "a default of a function": (lambda: [lambda value=0.0: value], to_default),
    "a gradient": (lambda: torch.zeros(()), to_gradient),
    "a gradient of a tensor in a list": (
        lambda: [torch.zeros(())],
        lambda q, h: to_gradient(q[0], h),
    ),
    "bytes of a stream": (lambda: io.BytesIO(bytes(8)), to_stream),
    "words of a stream": (io.StringIO, lambda q, h: q.write(f"{mean_of(h)} ")),
    "the place in a stream": (
        lambda: io.BytesIO(),
        lambda q, h: q.seek(int(q.tell() / 2 + 1e6 * abs(mean_of(h)))),
    ),
    "a map of memory": (lambda: mmap.mmap(-1, 8), to_memory),
    "an array of C": (lambda: (ctypes.c_double * 1)(), to_memory),
    "a number of C": (lambda: [ctypes.c_double(0)], lambda q, h: to_memory(q[0], h)),
    "a structure of C": (lambda: Mean(0.0), to_memory),
    "memory of others": (lambda: memoryview(bytearray(8)), to_memory),
    "an array of objects": (lambda: np.array([None, []], object), lambda q, h: q[1].extend(h)),
    "the last depth": (lambda: nested(DEPTH - 1), lambda q, h: innermost(q).extend(h)),
}
GATHERS_NOTHING: dict[str, Gathers] = {
    "the last one": (lambda: Bank(last=None), lambda q, h: setattr(q, "last", h)),
    "a count": (lambda: {"calls": [0]}, lambda q, h: q["calls"].__setitem__(0, q["calls"][0] + 1)),
    "by shape": (
        lambda: Bank(tables={}),
        lambda q, h: q.tables.setdefault(h.shape, torch.arange(3)),
    ),
    "much": (lambda: [(i, [i]) for i in range(50_000)], lambda q, h: None),
    "the time beside a count": (lambda: {"seconds": 0, "calls": 0}, timed),
    "a list that nobody may go through": (lambda: Rows([1]), lambda q, h: None),
    "a slot behind a property": (lambda: object.__new__(Shadowed), lambda q, h: None),
    "a mapping of names": (lambda: Named(a=Named(b=1)), lambda q, h: q.a.update(b=h.shape[1])),
    "what is printed": (lambda: collections.Counter(), lambda q, h: q.update([h.shape[1]])),
    "a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda q, h: None,
    ),
    "a quantized tensor": (quantized, lambda q, h: None),
    "others' objects": (
        lambda: [logging.getLogger("a"), threading.Lock(), queues.Queue(), random.Random(0)],
        lambda q, h: None,
    ),
    "a stream that counts": (
        lambda: io.BytesIO(bytes(8)),
        lambda q, h: q.getbuffer().__setitem__(0, q.getvalue()[0] + 1),
    ),
    "memory that counts": (lambda: mmap.mmap(-1, 8), lambda q, h: q.__setitem__(0, q[0] + 1)),
    "a closed stream": (closed, lambda q, h: None),
    "in a circle": (lambda: (lambda x: [x.append(x), x][1])([]), lambda q, h: None),
}


class Gathering(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        make, self.gather = (GATHERS | GATHERS_NOTHING)[name]
        self.first, self.last, self.state = nn.Linear(D, D), nn.Linear(D, 2), make()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.gather(self.state, h.detach())
        return self.last(h).sin().sum(1)


def picture(state: Any) -> str:
    """What a state holds, where a representation tells it."""
    return "" if isinstance(state, Rows) else repr(state)


def rows_of(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, D, generator=torch.Generator().manual_seed(count))}


@pytest.mark.parametrize("name", GATHERS)
def test_state_that_gathers_is_refused_wherever_an_attribute_leads(name: str) -> None:
    model = Gathering(name)
    before = picture(model.state)
    with pytest.raises(PrivacyConfigError, match=r"keeps more with every call.*\(state\)"):
        check_against_autograd(model, rows_of(3))
    assert picture(model.state) == before
    Bank.shared.clear()


def test_a_write_into_an_array_that_is_too_large_to_be_put_back_is_seen() -> None:
    model = Gathering("the last one")
    model.state = np.zeros(COPIED + 1, np.int8)
    model.gather = lambda q, h: written(q, 0, [q[0] + 1])
    with pytest.raises(PrivacyConfigError, match=r"writes in place.*\(state\)"):
        check_against_autograd(model, rows_of(3))


def test_an_attribute_of_a_parameter_that_gathers_is_refused_and_left_as_it_was() -> None:
    class Marked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            vars(self.weight).setdefault("seen", []).extend(x.detach())
            return super().forward(x).sin().sum(1)

    model = Marked(D, 2)
    with pytest.raises(PrivacyConfigError, match=r"keeps more with every call.*\(weight\)"):
        check_against_autograd(model, {"input": rows_of(3)["x"]}, lambda input: model(input))
    assert not vars(model.weight)


def test_a_gradient_that_a_forward_keeps_in_a_buffer_is_refused_and_left_as_it_was() -> None:
    model = Gathering("a gradient")
    del model.state
    model.register_buffer("state", torch.zeros(()))
    with pytest.raises(PrivacyConfigError, match=r"keeps more with every call.*\(state.grad\)"):
        check_against_autograd(model, rows_of(3))
    assert model.get_buffer("state").grad is None


@pytest.mark.parametrize("name", GATHERS_NOTHING)
def test_state_that_gathers_nothing_is_accepted_and_left_as_it_was(name: str) -> None:
    model = Gathering(name)
    before = copy.deepcopy(vars(model.state)) if isinstance(model.state, Bank) else None
    check_against_autograd(model, rows_of(3))
    assert before is None or vars(model.state) == before


# Sizes, shapes and autocasts that the self-check has not met are tried on made-up examples when they come.


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def centred(h: Tensor) -> Tensor:
    return h - h.detach().mean(0)


def in_groups(h: Tensor) -> Tensor:
    """Of two rows that lie apart, or of all, as minibatch standard deviation has it."""
    groups = len(h) // 2 if len(h) % 2 == 0 else 1
    return (
        h * h.view(-1, groups, h.shape[1]).std(0, correction=0).repeat(len(h) // groups, 1).detach()
    )


def previous(h: Tensor) -> Tensor:
    return h + 1e-3 * h.detach().roll(1, 0)


def guard(x: Tensor) -> None:
    if not bool(x.abs().amax() < 100):
        raise ValueError("what is this?")


class Net(nn.Module):
    """Mixes where `mixes` says so."""

    def __init__(
        self, mixes: Callable[[Tensor], bool], mix: Callable[[Tensor], Tensor] = centred
    ) -> None:
        super().__init__()
        self.a, self.b, self.mixes, self.mix = nn.Linear(4, 5), nn.Linear(5, 3), mixes, mix

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.mixes(x):
            h = self.mix(h)
        return self.b(h).sin().flatten(1).sum(1)


def add(total: ClippedSum, model: nn.Module, x: Tensor) -> None:
    total.add_micro_batch(model, {"x": x}, torch.zeros(len(x), dtype=torch.bool))


@pytest.mark.parametrize("mix", [centred, in_groups, previous, lambda h: h.flip(0)])
def test_every_size_at_which_a_model_mixes_is_found(mix: Callable[[Tensor], Tensor]) -> None:
    """Also where the model raises an error on what is hostile."""
    for seed, mixes in enumerate((lambda x: len(x) > 24, lambda x: len(x) in (2, 12, 26))):
        torch.manual_seed(seed)
        model = Net(mixes, mix)

        def guarded(x: Tensor, model: nn.Module = model) -> Tensor:
            guard(x)
            return model(x)

        for size in (1, 2, 3, 12, 24, 25, 26, 27, 40):
            for task in (model, guarded):
                found = pytest.raises(
                    PrivacyConfigError, match=f"in micro-batches of {size} examples"
                )
                with found if mixes(torch.empty(size, 1)) else contextlib.nullcontext():
                    require_apart(task, {"x": numbers(3, 4)}, size)


def nine_and_guarded(x: Tensor) -> bool:
    guard(x)
    return len(x) == 9


WAYS: dict[
    str, tuple[Callable[[Tensor], bool], tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]
] = {
    # where it mixes, made-up inputs of the self-check, micro-batches that pass, and one that is refused
    "size": (lambda x: len(x) > 60, (40, 4), [(1, 4), (3, 4), (60, 4)], (64, 4)),
    "length": (lambda x: x.shape[1] > 6, (3, 5, 4), [(3, 6, 4)], (3, 7, 4)),
    "autocast": (lambda x: torch.is_autocast_enabled("cpu"), (3, 4), [(4, 4)], (4, 4)),
    "weights of zero": (
        nine_and_guarded,
        (2, 4),
        [(8, 4)],
        (9, 4),
    ),  # through which NaN would come, but for the guard
}


@pytest.mark.parametrize("certified", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_sum_tries_every_new_way_before_it_adds(way: str, certified: bool) -> None:
    mixes, made_up, right, wrong = WAYS[way]
    model = Net(mixes)
    if way == "weights of zero":
        nn.init.zeros_(model.b.weight)
    check_against_autograd(model, {"x": numbers(*made_up)})
    total = (
        Guarded(CertifiedSum(model, Lattice.of(1.0, 64, 1.0)))
        if certified
        else Guarded(ClippedSum(model, 1.0))
    )
    for shape in right:
        add(total, model, numbers(*shape, seed=1))
    before = {name: value.clone() for name, value in total.sums()}
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        for _ in range(2):
            with pytest.raises(
                PrivacyConfigError, match=f"in micro-batches of {wrong[0]} examples"
            ):
                add(total, model, numbers(*wrong, seed=1))
    assert all(torch.equal(value, before[name]) for name, value in total.sums())


@pytest.mark.parametrize("mixing_dtype", [torch.float16, torch.bfloat16])
def test_a_sum_tries_every_dtype_of_autocast_before_it_adds(mixing_dtype: torch.dtype) -> None:
    model = Net(
        lambda x: (
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == mixing_dtype
        )
    )
    check_against_autograd(model, {"x": numbers(3, 4)})
    total = Guarded(ClippedSum(model, 1.0))
    (other_dtype,) = {torch.float16, torch.bfloat16} - {mixing_dtype}
    with torch.autocast("cpu", other_dtype):
        add(total, model, numbers(4, 4, seed=1))
    before = {name: value.clone() for name, value in total.sums()}
    with (
        torch.autocast("cpu", mixing_dtype),
        pytest.raises(PrivacyConfigError, match="in micro-batches of 4 examples"),
    ):
        add(total, model, numbers(4, 4, seed=1))
    assert all(torch.equal(value, before[name]) for name, value in total.sums())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_branch_on_the_dtype_of_the_run_is_found(dtype: torch.dtype) -> None:
    for mixing in (dtype, torch.float64):
        model = Net(lambda x: x.dtype == mixing).to(dtype)  # noqa: B023
        with pytest.raises(PrivacyConfigError, match=r"clipping rules|loss of an example"):
            check_against_autograd(model, {"x": numbers(3, 4).to(dtype)})


class Halting(nn.Module):
    """Goes on while any example does; those that have stopped stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for step in range(4):
            goes_on = (x.abs().amax(1) > 10.0 * step)[:, None]
            if not bool(goes_on.any()):
                break
            h = torch.where(goes_on, h + self.a(h).tanh(), h)
        return self.b(h).sin().sum(1)


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass", "certified"])
def test_layers_that_are_called_as_often_as_the_longest_example_asks_are_refused(mode: Any) -> None:
    """At the start, or at the micro-batch that asks."""
    model, lattice = Halting(), Lattice.of(1.0, 64, 1.0)
    with pytest.raises(
        PrivacyConfigError, match=r"the layer of a\.\w+ was called \d times .* and \d times"
    ):
        check_against_autograd(model, {"x": numbers(3, 4)})
    certified = mode == "certified"
    total = CertifiedSum(model, lattice) if certified else SUMS[mode](model, 1.0)
    for size in (2, 3):
        add(total, model, numbers(size, 4))
    with pytest.raises(
        PrivacyConfigError, match=r"the layer of a\.\w+ was called 2 times .* and 1 times"
    ):
        add(total, model, numbers(3, 4) + 11)


def reads(read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reads what `read` makes of all inputs; the rest does not see what is not finite."""
    return lambda x: torch.where(x.isfinite(), x, 0.0).sin().sum(1) + 1e-30 * read(x).sum()


def last_bit(x: Tensor) -> Tensor:
    """Equal shapes give equal bits, so a share of a ten-millionth is seen where nothing hostile comes through."""
    guard(x)
    return (1 + 3e-7 * x.mean()) * (2 + x.sin().sum(1))


def chance(x: Tensor) -> Tensor:
    """Losses do not show it."""
    torch.rand(1)
    return x.sin().sum(1)


def crowd(x: Tensor) -> Tensor:
    """The capacity of an expert: hostile numbers do not count, and the made-up examples are spread evenly."""
    is_ordinary = x.abs().amax(1) < 100
    taken = is_ordinary & (x[:, 0] > 0)
    is_full = taken.sum() > 0.6 * is_ordinary.sum()
    return x.nan_to_num(0, 0, 0).clamp(-9, 9).sin().sum(1) * (1 + 1e-3 * is_full)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (reads(lambda x: torch.where(x.isnan(), 0.0, x)), "in micro-batches of 64 examples"),
        (reads(lambda x: torch.where(x.isinf(), 0.0, x)), "in micro-batches of 64 examples"),
        (last_bit, "in micro-batches of 64 examples"),
        (crowd, "in micro-batches of 64 examples"),
        (chance, "draws random numbers"),
        (lambda x: x.sin().sum(), "for 64 examples, not one loss for each"),
        (lambda x: x.sin().sum(1)[:-1], "for 64 examples, not one loss for each"),
        (reads(lambda x: torch.zeros_like(x)), None),
    ],
)
def test_what_one_kind_of_neighbour_finds_and_no_other_does(
    task: Callable[[Tensor], Tensor], line: str | None
) -> None:
    inputs = {"x": torch.tensor([[1.0, 2, 3, 4], [-1, 2, 5, 3]])}
    with (
        contextlib.nullcontext() if line is None else pytest.raises(PrivacyConfigError, match=line)
    ):
        require_apart(task, inputs, 64)


# Models whose inputs fit together only as they are given: placeholders among ids, which a picture replaces.


class Placeholders(nn.Module):
    """Raises an error where the ids have another number of placeholders than the pictures have patches."""

    def __init__(
        self, error: type[Exception], mix: Callable[[Tensor], Tensor] = lambda h: h
    ) -> None:
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
    return {"ids": ids, "picture": numbers(count, 4, 3)}


@pytest.mark.parametrize("error", [ValueError, RuntimeError, IndexError])
def test_a_model_that_refuses_made_up_neighbours_is_tried_on_whole_examples(
    error: type[Exception],
) -> None:
    torch.manual_seed(0)
    model = Placeholders(error)
    check_against_autograd(model, prompts(3))
    total = Guarded(ClippedSum(model, 1.0))
    for size, length in ((1, 6), (5, 6), (8, 6), (8, 9)):
        total.add_micro_batch(
            model, prompts(size, length=length), torch.zeros(size, dtype=torch.bool)
        )
    for mix in (centred, previous, lambda h: h + 1e-6 * h.mean()):
        with pytest.raises(
            PrivacyConfigError, match=r"loss of an example changes|clipping rules do not see"
        ):
            check_against_autograd(Placeholders(error, mix), prompts(3))
        with pytest.raises(PrivacyConfigError, match="in micro-batches of 9 examples"):
            require_apart(Placeholders(error, mix), prompts(3), 9)
    # A model that refuses the made-up examples themselves is named in one line.
    line = rf"^the model raises {error.__name__} on made-up .*\({{}}\): features and .*, really; .*made_up="
    wrong = {**prompts(3), "ids": torch.randint(1, 8, (3, 6))}
    with pytest.raises(PrivacyConfigError, match=line.format("one alone")):
        check_against_autograd(Placeholders(error), wrong)
    with pytest.raises(PrivacyConfigError, match=line.format("9 examples together")):
        require_apart(Placeholders(error), wrong, 9)


def test_certified_rows_are_tried_without_what_a_model_refuses() -> None:
    class Guarded(Net):
        def forward(self, x: Tensor) -> Tensor:
            guard(x.nan_to_num(1000))
            return super().forward(x)

    lattice = Lattice.of(1.0, 64, 1.0)
    right, wrong = Guarded(lambda x: False), Guarded(lambda x: True)
    check_rows(CertifiedSum(right, lattice), right, {"x": numbers(4, 4)})
    with pytest.raises(PrivacyConfigError, match="of one and the same example is another"):
        check_rows(CertifiedSum(wrong, lattice), wrong, {"x": numbers(4, 4)})


# What a model's own backward writes, or repeats differently, never parts the norm from what is summed. The self-check passes on
# such models, because the made-up inputs have other sizes or values; so the sum itself notices.


class ReusesItsOutput(torch.autograd.Function):
    """The gradient is computed into the activation, as fused losses do; somebody may still need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.kept = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        kept: Tensor = ctx.kept
        return kept.mul_(gradients[0])


class Shift(nn.Module):
    """A parameter of few numbers, whose norm is taken with others, later."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 3, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Writing(nn.Module):
    def __init__(self, use: Callable[["Writing", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.shift, self.use = (
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            Shift(),
            use,
        )

    def forward(self, x: Tensor) -> Tensor:
        return (3 * self.use(self, x)).sum((1, 2))


def hooked_with(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if h.requires_grad:
        h.register_hook(hook)
    return h


def differentiates_in_a_hook(m: Writing, x: Tensor) -> Tensor:
    h = m.first(x)
    y = m.last(h)
    total = y.sum()
    return hooked_with(y * 1, lambda g: g + 0 * torch.autograd.grad(total, h, retain_graph=True)[0])


@pytest.mark.parametrize(
    ("use", "mode", "line"),
    [
        (
            lambda m, x: m.last(ReusesItsOutput.apply(m.first(x) * 0.1)),
            "bookkeeping",
            "writes in place",
        ),
        (
            lambda m, x: hooked_with(m.first(x) * 1, lambda g: g.clamp_(-1, 1)) + m.last(x),
            "bookkeeping",
            "in place",
        ),
        (
            lambda m, x: m.shift(hooked_with(m.first(x) * 1, lambda g: g.mul_(1e-3))),
            "bookkeeping",
            "writes in place",
        ),
        (
            lambda m, x: m.shift(hooked_with(m.first(x) * 1, lambda g: g.mul_(1e-3))),
            "two_pass",
            "writes in place",
        ),
        (lambda m, x: ReusesItsOutput.apply(m.first(x) * 0.1), "two_pass", "the second time"),
        (lambda m, x: m.first(x.mul_(30)), "two_pass of two forwards", "writes in place"),
        (differentiates_in_a_hook, "bookkeeping", "more gradients"),
        (differentiates_in_a_hook, "two_pass", "more gradients|second time"),
    ],
)
def test_what_is_written_in_place_is_refused_before_a_sum_can_be_read(
    use: Any, mode: str, line: str
) -> None:
    torch.manual_seed(0)
    model = Writing(use)
    two_forwards = mode.endswith("two forwards")  # as where weights are sharded or compiled
    clipped = SUMS[mode.split()[0]](model, 1.0)  # type: ignore[arg-type]
    if two_forwards:
        assert isinstance(clipped, TwoPassSum)
        clipped.keeps_graph = False
    with pytest.raises(PrivacyConfigError, match=line):  # noqa: PT012  # at the latest when the sum is read
        clipped.add_micro_batch(
            model, {"x": torch.randn(4, 3, 64)}, torch.zeros(4, dtype=torch.bool)
        )
        list(clipped.sums())
