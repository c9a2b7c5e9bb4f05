"""The fallback: parameters that no rule can follow are differentiated per example through a module around them, as a whole.

The recorder keeps what a module was called with, and the gradient with respect to what it returned. `Replay` then calls the
module's own forward again, for every example alone, and pulls that example's output gradient back to the parameters: `vjp` of
torch.func, under `vmap`. So it is exact for whatever the forward does inside, such as windows that are folded into the examples'
dimension, tables that are interpolated, weights that are read without their layer, writes in place, or experts.

What it rests on, and where each is seen to:

* **Which dimension holds the examples is found by two batch sizes** (`places_of`), never by a size: a mask may have T = B. A
  module qualifies where every tensor that it takes has one dimension that follows the number of examples, or none, and every
  output that carries a gradient has one. An output for all examples together (a router's loss) disqualifies.
* **An example's gradient is written out once**; norm and sum read that tensor (`Dense`). Clipping in two passes computes it
  twice, and compares both. Sums are fp64 or over EXAMPLES_PER_SUM examples. Rows that are excluded are blanked, not multiplied.
* **Chunks have one shape**, from public sizes alone (CHUNK_BYTES); the last is filled up with copies of the last example.
* **Nothing is counted twice**: while a module runs that covers a parameter, no rule inside sees that parameter; layers inside it
  keep their rules for parameters that it does not cover. All calls and all tied uses add up like those of layers.
* **The replay repeats the forward**: autocast and modes of that call; inputs that were written to in place are refused; buffers
  are copies; attributes are put back; hooks of clipping are off; `randomness="error"`, so a layer that draws is refused.
* **Mixing**: a replay sees one example at a time, so it hides that a module mixes. The self-check and `require_passed` try the
  model itself, with the fallback in it, at training's size, and compare what is replayed with what was recorded.

Dispatch on data that vmap cannot follow is refused with the module's name.
"""

import dataclasses
import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import PrivacyConfigError
from .module_state import put_back

CHUNK_BYTES = 1 << 28
"""Gradients, inputs and outputs of the examples that are replayed together; what a forward keeps inside comes on top."""
OUTPUTS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference between outputs of a replay and those of the forward; 0.1 in half precision."""
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Enum)
Fallback = bool | Collection[str]
"""True lets any module take over, False none, and a collection those of these paths."""
Dims = tuple[int | None, ...]
"""Says of each tensor which dimension holds the examples; None is for one that they share."""


class Uncovered(PrivacyConfigError):
    """No rule covers these parameters, or layers with all their parameters, where they are used; the fallback may."""

    def __init__(self, message: str, names: Collection[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


def mapped(
    x: Any, change: Callable[[Tensor], Any], plain: Callable[[Any], Any] = lambda value: value
) -> Any:
    """x with every tensor (and plain value) in it changed, in one order through tuples, lists, mappings and data classes.

    Raises:
        Uncovered: something else is in it.
    """
    match x:
        case Tensor():
            return change(x)
        case _ if isinstance(x, PLAIN):
            return plain(x)
        case tuple() if hasattr(x, "_fields"):
            return type(x)(*(mapped(y, change, plain) for y in x))
        case tuple() | list():
            return type(x)(mapped(y, change, plain) for y in x)
        case Mapping():
            return type(x)(**{name: mapped(y, change, plain) for name, y in x.items()})
        case _ if dataclasses.is_dataclass(x) and not isinstance(x, type):
            parts = {
                f.name: mapped(getattr(x, f.name), change, plain) for f in dataclasses.fields(x)
            }
            return dataclasses.replace(x, **parts)
    raise Uncovered(
        f"a module was called with a {type(x).__name__}, in which the fallback finds no examples"
    )


def tensors_of(x: Any) -> list[Tensor]:
    """All tensors in x, in the order of `mapped`."""
    found: list[Tensor] = []
    mapped(x, found.append)
    return found


def form_of(given: Any) -> str:
    """Arguments without their values: what calls have in common whose examples are in the same places."""
    return repr(_listed(given, lambda t: t.dim(), lambda value: type(value).__name__))


def _listed(x: Any, change: Callable[[Tensor], Any], plain: Callable[[Any], Any]) -> Any:
    """As `mapped`, with all that holds others as (name of its type, entries), so that any entry will do."""
    found: list[Any] = []
    mapped(x, lambda t: found.append(change(t)), lambda value: found.append(plain(value)))
    return found


Places = dict[nn.Module, dict[str, Dims]]
"""Module -> form of a call -> where the examples are; without modules that do not qualify."""
SIZES = (2, 3)


def places_of(
    model: nn.Module, run: Callable[[int], object], restore: Callable[[], object]
) -> Places:
    """Finds where the examples stand in what every module takes and returns, from forwards of two batch sizes.

    Args:
        run: forwards a number of made-up examples, under torch.enable_grad.
        restore: puts back what a forward has changed.
    """

    def calls(size: int) -> dict[nn.Module, list[Any]]:
        found: dict[nn.Module, list[Any]] = defaultdict(list)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            try:
                given = args, kwargs
                values = repr(_listed(given, lambda t: None, lambda value: value))
                returned = [(t.shape, t.requires_grad) for t in tensors_of(output)]
                found[module].append(
                    (form_of(given), values, [t.shape for t in tensors_of(given)], returned)
                )
            except (
                Exception
            ):  # an object that may hold anything, or cannot be made of others (packed sequences)
                found[module].append(None)

        restore()
        handles = [m.register_forward_hook(hook, with_kwargs=True) for m in model.modules()]
        try:
            run(size)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def dim(x: torch.Size, y: torch.Size) -> int | None:
        differs = [i for i, sizes in enumerate(zip(x, y, strict=True)) if sizes[0] != sizes[1]]
        if differs and (len(differs) > 1 or (x[differs[0]], y[differs[0]]) != SIZES):
            raise ValueError  # another dimension than the examples' follows their number
        return differs[0] if differs else None

    def dims(small: list[Any], large: list[Any]) -> dict[str, Dims]:
        found: dict[str, Dims] = {}
        for call, other in zip(small, large, strict=True):
            if (
                call is None
                or other is None
                or (*call[:2], len(call[3])) != (*other[:2], len(other[3]))
            ):
                raise ValueError
            inputs = [dim(*pair) for pair in zip(call[2], other[2], strict=True)]
            outputs = [
                dim(x[0], y[0]) if x[1] else -1 for x, y in zip(call[3], other[3], strict=True)
            ]
            if None in outputs or not {*outputs} - {-1} or not {*inputs} - {None}:
                raise ValueError
            if found.setdefault(call[0], (*inputs, *outputs)) != (*inputs, *outputs):
                raise ValueError
        return found

    small, large = map(calls, SIZES)
    places: Places = {}
    for module in small.keys() & large.keys():
        with suppress(ValueError):
            places[module] = dims(small[module], large[module])
    return places


@dataclass
class Plan:
    """Which modules of a model cover which parameters by the fallback.

    Attributes:
        allowed: see `Fallback`.
        covers: name of a parameter -> path.
        places: path -> form of a call -> where the examples are.
        ways: path -> how its examples are replayed: 0 by vmap; 1 so, with a copy of the weights for each, because the forward
            writes what comes from the batch into what comes from weights alone, as recurrent layers of torch do.
        layouts: name of a parameter that its owner reads itself -> number of ones between examples and its shape (`raw.layouts`).
        shared: names of parameters of layers that were called once for all examples.
    """

    allowed: Fallback = True
    covers: dict[str, str] = field(default_factory=dict)
    places: dict[str, dict[str, Dims]] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def start(self, allowed: Fallback) -> None:
        """A check begins; what an earlier one has found stays, where it is allowed."""
        self.allowed = allowed
        self.covers = {name: path for name, path in self.covers.items() if self._may(path)}

    def _may(self, path: str) -> bool:
        return self.allowed is True or (self.allowed is not False and path in self.allowed)

    def lift(self, model: nn.Module, names: Collection[str], places: Callable[[], Places]) -> bool:
        """Gives parameters, and all whose names differ in numbers alone, to the next module around that qualifies.

        Args:
            names: of parameters, or of layers whose parameters are meant.

        Returns:
            Whether one of them moved; False where they have gone as far as they can.
        """
        if self.allowed is False or not names:
            return False
        modules = dict(model.named_modules())
        trained = {n: n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad}
        wanted = set()
        for name in names:
            of_layer = (
                [f"{name}.{n}" for n, _ in modules[name].named_parameters()]
                if name in modules
                else [name]
            )
            wanted |= {re.sub(r"\d+", "#", one) for one in of_layer}
        known = places()
        before = dict(self.covers)
        for name, owner in trained.items():
            if re.sub(r"\d+", "#", name) in wanted:
                path = before.get(name, f"{owner}.")
                while path:  # the next module around, up to the model's own
                    path = path.rpartition(".")[0]
                    if modules[path] in known and self._may(path):
                        self.covers[name], self.places[path] = path, known[modules[path]]
                        break
        return self.covers != before

    def sentences(self, model: nn.Module) -> list[str]:
        """One line for the console for each kind of module: which, its share of the parameters, and what it costs."""
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        groups: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for name, path in self.covers.items():
            groups[re.sub(r"\d+", "#", path)][path] += sizes[name]
        lines = []
        for counts in groups.values():
            path, count = next(iter(counts)), sum(counts.values())
            others = f" and {len(counts) - 1} more like it" if len(counts) > 1 else ""
            lines.append(
                f"fallback: {path or 'the model'} ({type(model.get_submodule(path)).__name__}){others} covers "
                f"{100 * count / sum(sizes.values()):.2g} % of the trained parameters: it runs forward and backward once more "
                f"for every micro-batch, and an example's gradient takes {4 * count / 2**20:.2g} MiB there"
            )
        return lines


_PLANS: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan_of(model: nn.Module) -> Plan:
    """The model's plan, which the self-check finds; empty before that."""
    return _PLANS.setdefault(model, Plan())


@dataclass(frozen=True)
class Claim:
    """A module together with the trainable parameters that it owns directly: local name -> canonical name.

    A layer whose mode decides whether it is supported (dropout) has a claim without parameters, so that the recorder asks
    again at every forward.

    Attributes:
        plan: the model's.
        is_whole: whether the module covers parameters of its own and of those in it, by a replay.
    """

    module: nn.Module
    path: str
    parameters: dict[str, str]
    plan: Plan
    is_whole: bool = False

    @property
    def where(self) -> str:
        """Begins an error about a replay."""
        return f"{self.path or 'the model'} ({type(self.module).__name__}) is differentiated per example as a whole"


@dataclass(frozen=True)
class Replay:
    """One call of a module that covers parameters, so that it can be repeated for every example alone.

    Attributes:
        given: args and kwargs of the call, with numbers in place of their tensors.
        dims: of inputs, then of outputs; -1 for outputs that carry no gradient.
        recorded: outputs to compare with; empty where none are.
        autocast: device, whether it was on, and its dtype.
        modes: which modules were in training mode.
    """

    claim: Claim
    given: Any
    dims: Dims
    num_inputs: int
    recorded: tuple[Tensor, ...]
    autocast: tuple[str, bool, torch.dtype]
    modes: tuple[bool, ...]

    def gradients(
        self, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """(B, *shape) by local name.

        Args:
            inputs: tensors of the call.
            output_gradients: of the outputs that carry one.

        Raises:
            PrivacyConfigError: the replay gives other outputs than the forward, so examples meet in it, or it keeps state; or
                vmap cannot follow it.
        """
        dims_in, dims_out = (
            self.dims[: self.num_inputs],
            [d for d in self.dims[self.num_inputs :] if d != -1],
        )
        module, size = self.claim.module, output_gradients[0].shape[dims_out[0] or 0]
        trained = {name: module.get_parameter(name).detach() for name in self.claim.parameters}
        of_each = [(inputs, dims_in), (output_gradients, dims_out)]
        numel = sum(p.numel() for p in trained.values())
        numel += sum(
            x.numel() // size
            for xs, ds in of_each
            for x, d in zip(xs, ds, strict=True)
            if d is not None
        )
        chunk = min(size, max(1, CHUNK_BYTES // (numel * output_gradients[0].element_size())))
        parts: dict[str, list[Tensor]] = {name: [] for name in trained}
        seen: list[list[Tensor]] = []
        device, is_on, dtype = self.autocast
        with put_back(module.modules()):
            for part, mode in zip(module.modules(), self.modes, strict=True):
                part.training = mode
            buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
            fixed = {
                n: p.detach() for n, p in module.named_parameters() if n not in trained
            } | buffers

            def one(xs: list[Tensor], gs: list[Tensor], weights: dict[str, Tensor]) -> Any:
                """Gradients and outputs of one example."""
                tensors = [
                    x if d is None else x.unsqueeze(d) for x, d in zip(xs, dims_in, strict=True)
                ]

                def outputs(weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
                    args, kwargs = mapped(self.given, lambda number: tensors[len(number)])
                    named = {f"of.{n}": p for n, p in (fixed | weights).items()}
                    with torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=False):
                        returned = torch.func.functional_call(_Forward(module), named, args, kwargs)
                    ys = zip(tensors_of(returned), self.dims[self.num_inputs :], strict=True)
                    return tuple(y for y, d in ys if d != -1)

                ys, back = torch.func.vjp(outputs, weights)
                (found,) = back(
                    tuple(
                        g.unsqueeze(d) for g, d in zip(gs, dims_out, strict=True) if d is not None
                    )
                )
                return found, tuple(
                    y.squeeze(d) for y, d in zip(ys, dims_out, strict=True) if d is not None
                )

            for start in range(0, size, chunk):
                rows = torch.arange(start, start + chunk, device=output_gradients[0].device).clamp(
                    max=size - 1
                )
                some = [
                    [
                        x if d is None else x.index_select(d, rows)
                        for x, d in zip(xs, ds, strict=True)
                    ]
                    for xs, ds in of_each
                ]
                found, outputs = self._each(
                    one, some, trained, (list(dims_in), list(dims_out)), chunk
                )
                for name, g in found.items():
                    parts[name].append(g[: size - start])
                if self.recorded:
                    seen.append([y[: size - start] for y in outputs])
            if any(b._version for b in buffers.values()):
                raise PrivacyConfigError(f"{self.claim.where}: its forward writes to a buffer")
        replayed = [torch.cat(ys) for ys in zip(*seen, strict=True)]
        for y, before, d in zip(replayed, self.recorded, dims_out, strict=False):
            before = before.movedim(d or 0, 0)
            finite = before.reshape(len(before), -1).isfinite().all(1)
            y, before = y[finite].double(), before[finite].double()
            if float((y - before).norm()) > OUTPUTS_TOLERANCE.get(
                self.recorded[0].dtype, 0.1
            ) * float(before.norm()):
                raise PrivacyConfigError(
                    f"{self.claim.where}, and gives other outputs for examples alone than together: they meet in it, or it keeps "
                    "state"
                )
        return {name: torch.cat(some) if len(some) > 1 else some[0] for name, some in parts.items()}

    def _each(self, one: Any, some: Any, weights: dict[str, Tensor], dims: Any, count: int) -> Any:
        """What `one` gives for each example by vmap, where that does not go with a copy of the weights for each.

        What vmap cannot follow branches or dispatches on values. It is refused, since examples may meet in a branch that no
        made-up input takes, and a replay of one after the other would hide that.
        """
        for way in range(self.claim.plan.ways.get(self.claim.path, 0), 2):
            each = (
                {n: p.expand(count, *p.shape) for n, p in weights.items()} if way == 1 else weights
            )
            # On CPU torch has a fused attention without a vmap of its own: it would be called for one example after the other.
            attention = sdpa_kernel(SDPBackend.MATH) if self.autocast[0] == "cpu" else nullcontext()
            try:
                with torch.enable_grad(), warnings.catch_warnings(), attention:
                    # Operations without a vmap of their own.
                    warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                    in_dims = (*dims, 0 if way == 1 else None)
                    found = torch.func.vmap(one, in_dims=in_dims, randomness="error")(*some, each)
            except (PrivacyConfigError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a foreign forward may raise anything
                if way == 1:
                    said = " ".join(str(error).split())[:160]
                    raise PrivacyConfigError(
                        f"{self.claim.where}, and torch.func.vmap cannot follow its forward ({said}): it may branch or dispatch "
                        "on values, or draw random numbers; rewrite that part with torch.where or masks, or freeze the parameters"
                    ) from error
                continue
            self.claim.plan.ways[self.claim.path] = way
            return found
        raise AssertionError


class _Forward(nn.Module):
    """A module's forward without its own hooks, which stand around what is recorded."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.of.forward(*args, **kwargs)


def numbered(given: Any) -> Any:
    """`given` with numbers of meta tensors' first dimension in place of tensors, so that no memory is held."""
    count = iter(range(1 << 30))
    return mapped(given, lambda t: torch.empty(next(count), 0, device="meta"))
