"""The fallback for parameters that no rule can follow: gradients through a module around them.

The recorder keeps the inputs of a module around such parameters, and the gradient with respect to
its outputs. `Replay` then calls the module's own forward again, for every example alone, and pulls
that example's output gradient back to the parameters: `vjp` of torch.func, under `vmap`. So it is
exact for whatever the forward does inside. docs/extending.md lists the conditions.
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
"""Gradients, inputs and outputs of the examples that are replayed together; the tensors that a
forward keeps inside come on top."""
OUTPUTS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference between outputs of a replay and of the forward; 0.1 in half precision."""
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Enum)
Fallback = bool | Collection[str]
"""True lets any module take over, False none, and a collection those of these paths."""
Dims = tuple[int | None, ...]
"""Says of each tensor which dimension holds the examples; None is for a tensor that they share."""


class Uncovered(PrivacyConfigError):
    """No rule covers these parameters, or layers with all their parameters; the fallback may."""

    def __init__(self, message: str, names: Collection[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


def map_tensors(
    x: Any, change: Callable[[Tensor], Any], plain: Callable[[Any], Any] = lambda constant: constant
) -> Any:
    """Returns x with every tensor (and plain constant) in it changed.

    The order is always the same, through tuples, lists, mappings and data classes.

    Raises:
        Uncovered: x holds an object of another kind.
    """
    match x:
        case Tensor():
            return change(x)
        case _ if isinstance(x, PLAIN):
            return plain(x)
        case tuple() if hasattr(x, "_fields"):
            return type(x)(*(map_tensors(y, change, plain) for y in x))
        case tuple() | list():
            return type(x)(map_tensors(y, change, plain) for y in x)
        case Mapping():
            return type(x)(**{name: map_tensors(y, change, plain) for name, y in x.items()})
        case _ if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {
                f.name: map_tensors(getattr(x, f.name), change, plain)
                for f in dataclasses.fields(x)
            }
            return dataclasses.replace(x, **fields)
    raise Uncovered(
        f"a module was called with a {type(x).__name__}, in which the fallback finds no examples"
    )


def tensors_of(x: Any) -> list[Tensor]:
    """Returns all tensors in x, in the order of `map_tensors`."""
    tensors: list[Tensor] = []
    map_tensors(x, tensors.append)
    return tensors


def form_of(arguments: Any) -> str:
    """Returns the form of a call's arguments; calls of one form have examples in one place."""
    return repr(_listed(arguments, lambda t: t.dim(), lambda constant: type(constant).__name__))


def _listed(x: Any, change: Callable[[Tensor], Any], plain: Callable[[Any], Any]) -> list[Any]:
    """Returns the changed tensors and constants of x, in the order of `map_tensors`."""
    leaves: list[Any] = []
    map_tensors(x, leaves.append, leaves.append)
    return [change(leaf) if isinstance(leaf, Tensor) else plain(leaf) for leaf in leaves]


Places = dict[nn.Module, dict[str, Dims]]
"""Module -> form of a call -> where the examples are; without modules that do not qualify."""
SIZES = (2, 3)


@dataclass(frozen=True)
class _ObservedCall:
    """One call of a module, as a forward hook sees it."""

    form: str
    constants: str
    input_shapes: list[torch.Size]
    output_shapes: list[torch.Size]
    carries_gradient: list[bool]


def places_of(
    model: nn.Module, run: Callable[[int], object], restore: Callable[[], object]
) -> Places:
    """Returns where the examples stand in the inputs and outputs of every module.

    Forwards of two batch sizes show it.

    Args:
        run: forwards a number of made-up examples, under torch.enable_grad.
        restore: puts back what a forward has changed.
    """

    def calls(size: int) -> dict[nn.Module, list[_ObservedCall | None]]:
        calls_of: dict[nn.Module, list[_ObservedCall | None]] = defaultdict(list)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            arguments = (args, kwargs)
            # An input may hold anything, or be impossible to make of others (packed sequences).
            try:
                outputs = tensors_of(output)
                call = _ObservedCall(
                    form=form_of(arguments),
                    constants=repr(_listed(arguments, lambda t: None, lambda constant: constant)),
                    input_shapes=[x.shape for x in tensors_of(arguments)],
                    output_shapes=[y.shape for y in outputs],
                    carries_gradient=[y.requires_grad for y in outputs],
                )
            except Exception:
                calls_of[module].append(None)
            else:
                calls_of[module].append(call)

        restore()
        handles = [m.register_forward_hook(hook, with_kwargs=True) for m in model.modules()]
        try:
            run(size)
        finally:
            for handle in handles:
                handle.remove()
        return calls_of

    small, large = map(calls, SIZES)
    places: Places = {}
    for module in small.keys() & large.keys():
        with suppress(ValueError):
            places[module] = _dims_of_calls(small[module], large[module])
    return places


def _dims_of_calls(
    small_calls: Sequence[_ObservedCall | None], large_calls: Sequence[_ObservedCall | None]
) -> dict[str, Dims]:
    """Returns where the examples are, by form of a module's calls of two batch sizes.

    Raises:
        ValueError: the module does not qualify.
    """
    dims_of: dict[str, Dims] = {}
    for small, large in zip(small_calls, large_calls, strict=True):
        if small is None or large is None:
            raise ValueError
        if (small.form, small.constants) != (large.form, large.constants):
            raise ValueError
        if len(small.output_shapes) != len(large.output_shapes):
            raise ValueError
        shapes = zip(small.input_shapes, large.input_shapes, strict=True)
        inputs = [_dim_of_examples(*pair) for pair in shapes]
        outputs: list[int | None] = []
        for i, carries_gradient in enumerate(small.carries_gradient):
            dim: int | None = -1
            if carries_gradient:
                dim = _dim_of_examples(small.output_shapes[i], large.output_shapes[i])
            outputs.append(dim)
        if None in outputs or not {*outputs} - {-1} or not {*inputs} - {None}:
            raise ValueError
        dims = (*inputs, *outputs)
        if dims_of.setdefault(small.form, dims) != dims:
            raise ValueError
    return dims_of


def _dim_of_examples(small: torch.Size, large: torch.Size) -> int | None:
    """Returns the dimension that follows the number of examples, or None.

    Raises:
        ValueError: another dimension follows it too, or not one for one.
    """
    sizes = zip(small, large, strict=True)
    differing = [i for i, pair in enumerate(sizes) if pair[0] != pair[1]]
    if not differing:
        return None
    dim = differing[0]
    if len(differing) > 1 or (small[dim], large[dim]) != SIZES:
        raise ValueError
    return dim


@dataclass
class FallbackPlan:
    """Holds which modules of a model cover which parameters by the fallback.

    Attributes:
        allowed: see `Fallback`.
        covers: name of a parameter -> path.
        places: path -> form of a call -> where the examples are.
        ways: path -> how its examples are replayed: 0 by vmap; 1 so, with a copy of the weights for
            each, because the forward writes what comes from the batch into what comes from weights
            alone, as recurrent layers of torch do.
        layouts: name of a parameter that its owner reads itself -> number of ones between examples
            and its shape (`raw_parameters.layouts`).
        shared: names of parameters of layers that were called once for all examples.
    """

    allowed: Fallback = True
    covers: dict[str, str] = field(default_factory=dict)
    places: dict[str, dict[str, Dims]] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def start(self, allowed: Fallback) -> None:
        """Begins a check; the outcome of an earlier check stays, where it is allowed."""
        self.allowed = allowed
        self.covers = {name: path for name, path in self.covers.items() if self._may(path)}

    def _may(self, path: str) -> bool:
        return self.allowed is True or (self.allowed is not False and path in self.allowed)

    def lift(self, model: nn.Module, names: Collection[str], places: Callable[[], Places]) -> bool:
        """Gives parameters to the next module around that qualifies.

        All parameters whose names differ in numbers alone go with them.

        Args:
            names: of parameters, or of layers whose parameters are meant.

        Returns:
            Whether a parameter moved; False where all have gone as far as they can.
        """
        if self.allowed is False or not names:
            return False
        modules = dict(model.named_modules())
        owners = {n: n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad}
        kinds = set()
        for name in names:
            parameter_names = [name]
            if name in modules:
                parameter_names = [f"{name}.{n}" for n, _ in modules[name].named_parameters()]
            kinds |= {re.sub(r"\d+", "#", parameter_name) for parameter_name in parameter_names}
        places_of_modules = places()
        earlier_covers = dict(self.covers)
        for name, owner in owners.items():
            if re.sub(r"\d+", "#", name) not in kinds:
                continue
            path = earlier_covers.get(name, f"{owner}.")
            # The next module around, up to the model's own.
            while path:
                path = path.rpartition(".")[0]
                if modules[path] in places_of_modules and self._may(path):
                    self.covers[name] = path
                    self.places[path] = places_of_modules[modules[path]]
                    break
        return self.covers != earlier_covers

    def sentences(self, model: nn.Module) -> list[str]:
        """Returns one line for the console for each kind of module: its share and its cost."""
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        numel = sum(sizes.values())
        groups: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for name, path in self.covers.items():
            groups[re.sub(r"\d+", "#", path)][path] += sizes[name]
        lines = []
        for counts in groups.values():
            path = next(iter(counts))
            kind = type(model.get_submodule(path)).__name__
            count = sum(counts.values())
            siblings = ""
            if len(counts) > 1:
                siblings = f" and {len(counts) - 1} more like it"
            percentage = 100 * count / numel
            mebibytes = 4 * count / 2**20
            lines.append(
                f"fallback: {path or 'the model'} ({kind}){siblings} covers {percentage:.2g} % of "
                "the trained parameters: it runs forward and backward once more for every "
                f"micro-batch, and an example's gradient takes {mebibytes:.2g} MiB there"
            )
        return lines


_PLANS: weakref.WeakKeyDictionary[nn.Module, FallbackPlan] = weakref.WeakKeyDictionary()


def plan_of(model: nn.Module) -> FallbackPlan:
    """Returns the model's plan, which the self-check makes; empty before that."""
    return _PLANS.setdefault(model, FallbackPlan())


@dataclass(frozen=True)
class Claim:
    """A module together with the trainable parameters that it owns directly.

    A layer whose mode decides whether it is supported (dropout) has a claim without parameters, so
    that the recorder asks again at every forward.

    Attributes:
        parameters: local name -> canonical name.
        plan: the model's.
        is_whole: whether the module covers parameters of its own and of modules in it, by a replay.
    """

    module: nn.Module
    path: str
    parameters: dict[str, str]
    plan: FallbackPlan
    is_whole: bool = False

    @property
    def where(self) -> str:
        """Returns the beginning of an error about a replay."""
        place = f"{self.path or 'the model'} ({type(self.module).__name__})"
        return f"{place} is differentiated per example as a whole"


@dataclass(frozen=True)
class Replay:
    """One call of a module that covers parameters, to be repeated for every example alone.

    Attributes:
        arguments: args and kwargs of the call, with numbers in place of their tensors.
        dims: of inputs, then of outputs; -1 for outputs that carry no gradient.
        recorded: outputs to compare with; empty where none are.
        autocast: device, whether it was on, and its dtype.
        modes: which modules were in training mode.
    """

    claim: Claim
    arguments: Any
    dims: Dims
    num_inputs: int
    recorded: tuple[Tensor, ...]
    autocast: tuple[str, bool, torch.dtype]
    modes: tuple[bool, ...]

    def gradients(
        self, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Returns the gradients (B, *shape) by local name.

        Args:
            inputs: tensors of the call.
            output_gradients: of the outputs that carry one.

        Raises:
            PrivacyConfigError: the replay gives other outputs than the forward, so examples meet in
                it, or it keeps state; or vmap cannot follow it.
        """
        dims_in = [*self.dims[: self.num_inputs]]
        dims_out = [d for d in self.dims[self.num_inputs :] if d != -1]
        module = self.claim.module
        size = output_gradients[0].shape[dims_out[0] or 0]
        weights = {name: module.get_parameter(name).detach() for name in self.claim.parameters}
        # Numbers of one example: its gradient, inputs and output gradients.
        numel = sum(p.numel() for p in weights.values())
        for x, d in zip([*inputs, *output_gradients], [*dims_in, *dims_out], strict=True):
            if d is not None:
                numel += x.numel() // size
        bytes_of_example = numel * output_gradients[0].element_size()
        chunk = min(size, max(1, CHUNK_BYTES // bytes_of_example))
        gradients: dict[str, list[Tensor]] = {name: [] for name in weights}
        replayed_outputs: list[list[Tensor]] = []
        device, is_on, dtype = self.autocast
        with put_back(module.modules()):
            for part, mode in zip(module.modules(), self.modes, strict=True):
                part.training = mode
            buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
            frozen = {n: p.detach() for n, p in module.named_parameters() if n not in weights}
            constants = frozen | buffers

            def differentiate(
                xs: list[Tensor], gs: list[Tensor], example_weights: dict[str, Tensor]
            ) -> Any:
                """Returns gradients and outputs of one example."""
                example_inputs = [
                    x if d is None else x.unsqueeze(d) for x, d in zip(xs, dims_in, strict=True)
                ]

                def outputs(example_weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
                    args, kwargs = map_tensors(self.arguments, lambda t: example_inputs[len(t)])
                    tensors = constants | example_weights
                    tensors = {f"module.{n}": x for n, x in tensors.items()}
                    forward = _Forward(module)
                    with torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=False):
                        output = torch.func.functional_call(forward, tensors, args, kwargs)
                    ys = zip(tensors_of(output), self.dims[self.num_inputs :], strict=True)
                    return tuple(y for y, d in ys if d != -1)

                ys, pull_back = torch.func.vjp(outputs, example_weights)
                dims_of_gs = zip(gs, dims_out, strict=True)
                dims_of_ys = zip(ys, dims_out, strict=True)
                (by_name,) = pull_back(
                    tuple(g.unsqueeze(d) for g, d in dims_of_gs if d is not None)
                )
                return by_name, tuple(y.squeeze(d) for y, d in dims_of_ys if d is not None)

            for start in range(0, size, chunk):
                # The last chunk is filled up with copies of the last example.
                rows = torch.arange(start, start + chunk, device=output_gradients[0].device)
                rows = rows.clamp(max=size - 1)
                chunk_inputs = [
                    x if d is None else x.index_select(d, rows)
                    for x, d in zip(inputs, dims_in, strict=True)
                ]
                chunk_gradients = [
                    g if d is None else g.index_select(d, rows)
                    for g, d in zip(output_gradients, dims_out, strict=True)
                ]
                chunk_tensors = (chunk_inputs, chunk_gradients)
                by_name, outputs = self._each(
                    differentiate, chunk_tensors, weights, (dims_in, dims_out), chunk
                )
                for name, g in by_name.items():
                    gradients[name].append(g[: size - start])
                if self.recorded:
                    replayed_outputs.append([y[: size - start] for y in outputs])
            if any(b._version for b in buffers.values()):
                raise PrivacyConfigError(f"{self.claim.where}: its forward writes to a buffer")
        replayed = [torch.cat(ys) for ys in zip(*replayed_outputs, strict=True)]
        for output, recorded, d in zip(replayed, self.recorded, dims_out, strict=False):
            recorded = recorded.movedim(d or 0, 0)
            is_finite_B = recorded.reshape(len(recorded), -1).isfinite().all(1)
            recorded = recorded[is_finite_B].double()
            difference = float((output[is_finite_B].double() - recorded).norm())
            tolerance = OUTPUTS_TOLERANCE.get(self.recorded[0].dtype, 0.1)
            if difference > tolerance * float(recorded.norm()):
                raise PrivacyConfigError(
                    f"{self.claim.where}, and gives other outputs for examples alone than "
                    "together: they meet in it, or it keeps state"
                )
        by_name = {}
        for name, parts in gradients.items():
            by_name[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return by_name

    def _each(
        self,
        differentiate: Any,
        tensors: Any,
        weights: dict[str, Tensor],
        dims: Any,
        count: int,
    ) -> Any:
        """Returns what `differentiate` gives for each example, by vmap.

        Where that fails, it tries vmap with a copy of the weights for each example. A forward that
        vmap cannot follow branches or dispatches on values. It is refused, since examples may meet
        in a branch that no made-up input takes, and a replay of one after the other would hide
        that.
        """
        for way in range(self.claim.plan.ways.get(self.claim.path, 0), 2):
            example_weights = weights
            if way == 1:
                example_weights = {n: p.expand(count, *p.shape) for n, p in weights.items()}
            # On CPU torch has a fused attention without a vmap of its own: it would be called for
            # one example after the other.
            attention = sdpa_kernel(SDPBackend.MATH) if self.autocast[0] == "cpu" else nullcontext()
            in_dims = (*dims, 0 if way == 1 else None)
            vmapped = torch.func.vmap(differentiate, in_dims=in_dims, randomness="error")
            try:
                with torch.enable_grad(), warnings.catch_warnings(), attention:
                    # Operations without a vmap of their own.
                    warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                    gradients_and_outputs = vmapped(*tensors, example_weights)
            except (PrivacyConfigError, MemoryError, torch.OutOfMemoryError):
                raise
            # A foreign forward may raise anything.
            except Exception as error:
                if way == 1:
                    reason = " ".join(str(error).split())[:160]
                    raise PrivacyConfigError(
                        f"{self.claim.where}, and torch.func.vmap cannot follow its forward "
                        f"({reason}): it may branch or dispatch on values, or draw random numbers; "
                        "rewrite that part with torch.where or masks, or freeze the parameters"
                    ) from error
                continue
            self.claim.plan.ways[self.claim.path] = way
            return gradients_and_outputs
        raise AssertionError


class _Forward(nn.Module):
    """A module's forward without its own hooks, which surround what is recorded."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def number_tensors(arguments: Any) -> Any:
    """Returns the arguments with meta tensors in place of tensors, so that no memory is held.

    The length of a meta tensor is the number of the tensor.
    """
    numbers = iter(range(1 << 30))
    return map_tensors(arguments, lambda t: torch.empty(next(numbers), 0, device="meta"))
