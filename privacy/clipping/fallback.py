"""The fallback: parameters that no rule can follow are differentiated per example through a module around them, as a whole.

The recorder keeps what a module was called with, and the gradient with respect to what it returned. `Replay` then calls the
module's own forward again, for every example alone, and pulls that example's output gradient back to the parameters: `vjp` under
`vmap` of torch.func. So it is exact for whatever the forward does inside, such as windows that are folded into the examples'
dimension, tables that are interpolated, weights that are read without their layer, writes in place, or experts.

What it rests on, and where each is seen to:

* **Which dimension holds the examples is found by two batch sizes** (`Probe`), never by a size: a (T, T) mask may have T = B. A
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor, nn

from ..errors import PrivacyConfigError

CHUNK_BYTES = 1 << 28
"""Gradients, inputs and outputs of the examples that are replayed together; what a forward keeps inside comes on top."""
OUTPUTS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference between outputs of a replay and those of the forward; 0.1 in half precision."""
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Enum)
Fallback = bool | Collection[str]
"""True lets any module take over, False none, and a collection those of these paths."""
Dims = tuple[int | None, ...]
"""Of each tensor, the dimension that holds the examples; None for one that they share."""


class Uncovered(PrivacyConfigError):
    """No rule covers these parameters, or layers with all their parameters, where they are used; the fallback may."""

    def __init__(self, message: str, names: Collection[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


def mapped(x: Any, change: Callable[[Tensor], Any], plain: Callable[[Any], Any] = lambda value: value) -> Any:
    """x with every tensor (and plain value) in it changed, in one order through tuples, lists, mappings and data classes.

    Raises:
        TypeError: something else is in it.
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
            parts = {f.name: mapped(getattr(x, f.name), change, plain) for f in dataclasses.fields(x)}
            return dataclasses.replace(x, **parts)
    raise TypeError(type(x).__name__)


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


class Probe:
    """Where the examples stand in what every module takes and returns, from forwards of two batch sizes.

    Args:
        run: forwards a number of made-up examples, under torch.enable_grad.
        restore: puts back what a forward has changed.
    """

    SIZES = (2, 3)

    def __init__(self, model: nn.Module, run: Callable[[int], object], restore: Callable[[], object]) -> None:
        self._dims: dict[int, dict[str, Dims] | None] = {}
        found = []
        for size in self.SIZES:
            restore()
            found.append(self._calls(model, run, size))
        small, large = found
        for module in small.keys() | large.keys():
            self._dims[module] = self._together(small.get(module, []), large.get(module, []))

    def dims(self, module: nn.Module) -> dict[str, Dims] | None:
        """Form of a call -> where the examples are; None where the module does not qualify."""
        return self._dims.get(id(module))

    @staticmethod
    def _calls(model: nn.Module, run: Callable[[int], object], size: int) -> dict[int, list[Any]]:
        calls: dict[int, list[Any]] = defaultdict(list)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            try:
                given = args, kwargs
                values = repr(_listed(given, lambda t: None, lambda value: value))
                shapes = [t.shape for t in tensors_of(given)]
                returned = [(t.shape, t.requires_grad) for t in tensors_of(output)]
                calls[id(module)].append((form_of(given), values, shapes, returned))
            except TypeError:  # an object that may hold anything
                calls[id(module)].append(None)

        handles = [m.register_forward_hook(hook, with_kwargs=True) for m in model.modules()]
        try:
            run(size)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _together(self, small: list[Any], large: list[Any]) -> dict[str, Dims] | None:
        if len(small) != len(large) or any(call is None for call in (*small, *large)):
            return None
        found: dict[str, Dims] = {}
        for (form, values, shapes, returned), (form_, values_, shapes_, returned_) in zip(small, large, strict=True):
            if (form, values, len(returned)) != (form_, values_, len(returned_)):
                return None
            try:
                inputs = [self._dim(*pair) for pair in zip(shapes, shapes_, strict=True)]
                outputs = [self._dim(x[0], y[0]) if x[1] else -1 for x, y in zip(returned, returned_, strict=True)]
            except ValueError:
                return None
            if None in outputs or not any(d != -1 for d in outputs) or not any(d is not None for d in inputs):
                return None
            if found.setdefault(form, (*inputs, *outputs)) != (*inputs, *outputs):
                return None
        return found or None

    def _dim(self, x: torch.Size, y: torch.Size) -> int | None:
        """
        Raises:
            ValueError: another dimension than the examples' follows their number.
        """
        differs = [i for i, sizes in enumerate(zip(x, y, strict=True)) if sizes[0] != sizes[1]]
        if not differs:
            return None
        if len(differs) > 1 or (x[differs[0]], y[differs[0]]) != self.SIZES:
            raise ValueError
        return differs[0]


@dataclass
class Plan:
    """Which modules of a model cover which parameters by the fallback.

    Attributes:
        allowed: see `Fallback`.
        covers: path -> names of parameters.
        dims: path -> where the examples are (`Probe.dims`).
        expanded: modules in which every example needs a copy of the weights, because the forward writes what comes from the
            batch into what comes from weights alone, as recurrent layers of torch do.
    """

    allowed: Fallback = True
    covers: dict[str, set[str]] = field(default_factory=dict)
    dims: dict[str, dict[str, Dims]] = field(default_factory=dict)
    expanded: set[str] = field(default_factory=set)

    def start(self, allowed: Fallback) -> None:
        """A check begins; what an earlier one has found stays, where it is allowed."""
        self.allowed = allowed
        self.covers = {path: names for path, names in self.covers.items() if self._may(path)}

    def _may(self, path: str) -> bool:
        return self.allowed is True or (self.allowed is not False and path in self.allowed)

    def lift(self, model: nn.Module, names: Collection[str], probe: Callable[[], Probe]) -> bool:
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
            of_layer = [f"{name}.{n}" for n, _ in modules[name].named_parameters()] if name in modules else [name]
            wanted |= {re.sub(r"\d+", "#", one) for one in of_layer}
        known = probe()
        moved = False
        for name, owner in trained.items():
            if re.sub(r"\d+", "#", name) not in wanted:
                continue
            now = next((path for path, covered in self.covers.items() if name in covered), None)
            around = _around(owner) if now is None else _around(now)[1:]
            for path in around:
                dims = known.dims(modules[path])
                if dims is None or not self._may(path):
                    continue
                for covered in self.covers.values():
                    covered.discard(name)
                self.covers.setdefault(path, set()).add(name)
                self.dims[path] = dims
                moved = True
                break
        self.covers = {path: covered for path, covered in self.covers.items() if covered}
        return moved

    def frozen(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """What a recorder was made for."""
        return tuple((path, frozenset(names)) for path, names in sorted(self.covers.items()))

    def sentences(self, model: nn.Module) -> list[str]:
        """One line for the console for each kind of module: which, its share of the parameters, and what it costs."""
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        groups: dict[str, list[str]] = defaultdict(list)
        for path in self.covers:
            groups[re.sub(r"\d+", "#", path)].append(path)
        lines = []
        for paths in groups.values():
            count = sum(sizes[name] for path in paths for name in self.covers[path])
            kind = type(model.get_submodule(paths[0])).__name__
            others = f" and {len(paths) - 1} more like it" if len(paths) > 1 else ""
            lines.append(
                f"fallback: {paths[0] or 'the model'} ({kind}){others} covers {100 * count / sum(sizes.values()):.2g} % of the "
                f"trained parameters: it runs forward and backward once more for every micro-batch, and an example's gradient "
                f"takes {4 * count / 2**20:.2g} MiB there"
            )
        return lines


def _around(path: str) -> list[str]:
    """A path, and those of the modules around it, from the inside to the model's own."""
    found = [path]
    while found[-1]:
        found.append(found[-1].rpartition(".")[0])
    return found


_PLANS: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan_of(model: nn.Module) -> Plan:
    """The model's plan, which the self-check finds; empty before that."""
    return _PLANS.setdefault(model, Plan())


@dataclass(frozen=True)
class Replay:
    """One call of a module that covers parameters, so that it can be repeated for every example alone.

    Attributes:
        names: of its parameters that are differentiated, as the module calls them.
        given: args and kwargs of the call, with numbers in place of their tensors.
        dims: of inputs, then of outputs; -1 for outputs that carry no gradient.
        recorded: outputs to compare with; empty where none are.
        autocast: device, whether it was on, and its dtype.
        modes: which modules were in training mode.
    """

    module: nn.Module
    path: str
    names: tuple[str, ...]
    given: Any
    dims: Dims
    num_inputs: int
    recorded: tuple[Tensor, ...]
    autocast: tuple[str, bool, torch.dtype]
    modes: tuple[bool, ...]
    expanded: set[str]

    def gradients(self, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """(B, *shape) by local name.

        Args:
            inputs: tensors of the call.
            output_gradients: of the outputs that carry one.
        """
        dims_in, dims_out = self.dims[: self.num_inputs], [d for d in self.dims[self.num_inputs :] if d != -1]
        size = output_gradients[0].shape[dims_out[0] or 0]
        trained = {name: self.module.get_parameter(name).detach() for name in self.names}
        numel = sum(p.numel() for p in trained.values()) + sum(
            x.numel() // size
            for x, d in zip([*inputs, *output_gradients], [*dims_in, *dims_out], strict=True)
            if d is not None
        )
        chunk = min(size, max(1, CHUNK_BYTES // (numel * output_gradients[0].element_size())))
        parts: dict[str, list[Tensor]] = {name: [] for name in trained}
        seen: list[list[Tensor]] = []
        with _as_it_was(self.module, self.modes) as buffers:
            one = self._one(buffers, dims_in, dims_out)
            for start in range(0, size, chunk):
                rows = torch.arange(start, start + chunk, device=output_gradients[0].device).clamp(max=size - 1)
                some = [
                    [x if d is None else x.index_select(d, rows) for x, d in zip(xs, ds, strict=True)]
                    for xs, ds in ((inputs, dims_in), (output_gradients, dims_out))
                ]
                found, outputs = self._in_plain_words(one, some, trained, (list(dims_in), list(dims_out)))
                for name, g in found.items():
                    parts[name].append(g[: size - start])
                if self.recorded:
                    seen.append([y[: size - start] for y in outputs])
            if any(b._version for b in buffers.values()):
                raise PrivacyConfigError(f"{self._what}: its forward writes to a buffer")
        self._compare([torch.cat(ys) for ys in zip(*seen, strict=True)], dims_out)
        return {name: torch.cat(some) if len(some) > 1 else some[0] for name, some in parts.items()}

    def _one(
        self,
        buffers: Mapping[str, Tensor],
        dims_in: Sequence[int | None],
        dims_out: Sequence[int | None],
    ) -> Callable[[list[Tensor], list[Tensor], dict[str, Tensor]], tuple[dict[str, Tensor], tuple[Tensor, ...]]]:
        """Gradients and outputs of one example, for `vmap`."""
        module = _Forward(self.module)
        fixed = {f"of.{n}": p.detach() for n, p in self.module.named_parameters() if n not in self.names}
        fixed |= {f"of.{n}": b for n, b in buffers.items()}
        device, is_on, dtype = self.autocast

        def one(
            inputs: list[Tensor], gradients: list[Tensor], trained: dict[str, Tensor]
        ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
            tensors = [x if d is None else x.unsqueeze(d) for x, d in zip(inputs, dims_in, strict=True)]

            def outputs(trained: dict[str, Tensor]) -> tuple[Tensor, ...]:
                args, kwargs = _filled(self.given, tensors)
                weights = {**fixed, **{f"of.{n}": p for n, p in trained.items()}}
                with torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=False):
                    returned = torch.func.functional_call(module, weights, args, kwargs)
                ys = zip(tensors_of(returned), self.dims[self.num_inputs :], strict=True)
                return tuple(y for y, d in ys if d != -1)

            ys, back = torch.func.vjp(outputs, trained)
            pulled = [g.unsqueeze(d) for g, d in zip(gradients, dims_out, strict=True) if d is not None]
            (found,) = back(tuple(pulled))
            return found, tuple(y.squeeze(d) for y, d in zip(ys, dims_out, strict=True) if d is not None)

        return one

    def _in_plain_words(
        self, one: Any, some: list[list[Tensor]], trained: dict[str, Tensor], dims: tuple[list[int | None], ...]
    ) -> Any:
        """vmap over some examples; weights get a copy for each where it does not go without."""
        count = next(
            x.shape[d] for xs, ds in zip(some, dims, strict=True) for x, d in zip(xs, ds, strict=True) if d is not None
        )
        for expands in [True] if self.path in self.expanded else [False, True]:
            weights = {n: p.expand(count, *p.shape) for n, p in trained.items()} if expands else trained
            try:
                with torch.enable_grad(), warnings.catch_warnings(), _attention_in_steps(self.autocast[0]):
                    warnings.filterwarnings(
                        "ignore", "There is a performance drop", UserWarning
                    )  # ops without a vmap of their own
                    found = torch.func.vmap(one, in_dims=(*dims, 0 if expands else None), randomness="error")(
                        *some, weights
                    )
            except (PrivacyConfigError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a foreign forward may raise anything
                if not expands:
                    continue
                said = " ".join(str(error).split())[:160]
                raise PrivacyConfigError(
                    f"{self._what}, and torch.func.vmap cannot follow its forward ({said}): it may branch or dispatch on values, "
                    "or draw random numbers; rewrite that part with torch.where or masks, or freeze the parameters"
                ) from error
            if expands:
                self.expanded.add(self.path)
            return found
        raise AssertionError

    @property
    def _what(self) -> str:
        return (
            f"{self.path or 'the model'} ({type(self.module).__name__}) would be differentiated per example as a whole"
        )

    def _compare(self, outputs: Sequence[Tensor], dims_out: Sequence[int | None]) -> None:
        """
        Raises:
            PrivacyConfigError: a replay gives other outputs than the forward, so examples meet in it, or it keeps state.
        """
        for y, before, d in zip(outputs, self.recorded, dims_out, strict=False):
            before = before.movedim(d or 0, 0)
            rows = before.reshape(len(before), -1).isfinite().all(1)
            y, before = y[rows].double(), before[rows].double()
            tolerance = OUTPUTS_TOLERANCE.get(self.recorded[0].dtype, 0.1)
            if float((y - before).norm()) > tolerance * float(before.norm()):
                raise PrivacyConfigError(
                    f"{self._what}, and gives other outputs for examples alone than together: they meet in it, or it keeps state"
                )


def _attention_in_steps(device: str) -> Any:
    """On CPU torch has a fused attention without a vmap of its own: it would be called for one example after the other."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) if device == "cpu" else nullcontext()


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


def _filled(given: Any, tensors: Sequence[Tensor]) -> Any:
    return mapped(given, lambda t: tensors[len(t)])


@contextmanager
def _as_it_was(module: nn.Module, modes: Sequence[bool]) -> Iterator[dict[str, Tensor]]:
    """Modes of the call, and attributes that are put back; yields copies of the buffers."""
    modules = list(module.modules())
    tables: list[Any] = [vars(m) for m in modules]
    tables += [x for table in tables for x in table.values() if isinstance(x, dict | list | set)]
    before = [(table, table.copy()) for table in tables]
    try:
        for m, mode in zip(modules, modes, strict=True):
            m.training = mode
        yield {name: b.detach().clone() for name, b in module.named_buffers()}
    finally:
        for table, content in before:
            table.clear()
            table.extend(content) if isinstance(table, list) else table.update(content)
