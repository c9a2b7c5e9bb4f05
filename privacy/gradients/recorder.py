"""Hands over, for one micro-batch, the input and the output gradient of every layer with trainable parameters.

Each claimed layer's output passes through `_Tap`, an identity that reports the gradient on its way back, together with the
layer's input. The backward pass is `torch.autograd.grad(loss.sum(), [root])` for a dummy leaf `root` that every tap depends
on, so no weight gradient is computed, no `.grad` is touched and no engine hook fires: sharded engines gather their weights in
their own module hooks as in any forward and backward, and never see a gradient. (Parameters keep requires_grad; torch skips
what root does not need.)

The tap keeps the layer's input as autograd keeps its own tensors, so under non-reentrant activation checkpointing it is
recomputed with the rest; a tap that only the recomputation makes is never run backward and reports nothing.

A raw parameter is shadowed, for the time of its owner's forward, by one tapped copy per example or by a table
(raw_parameters.py): an entry in the instance's `__dict__` goes before the module's parameters in attribute lookup. The
output of a layer that is called once for all examples (position ids of shape (1, T)) is one copy per example too.

Under torch.compile's tracer a hook leaves an opaque operation in the graph that does the same (compiled.py).
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from ..errors import PrivacyConfigError
from ..numerics.precision import exact, wide
from ..sums.grid import SHORT
from . import compiled
from .coverage import mixing_reason, reason_without_rule, refusal, rule_of
from .fallback import Claim, Replay, Uncovered, form_of, mapped, numbered, tensors_of
from .per_example_gradients import Contribution, Dense, OuterProducts, Rows, owned
from .raw_parameters import Table, copies, is_table
from .rules import KEEPS, RULES, tokens

Task = Callable[..., Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a claimed layer, with its gradient.

    Attributes:
        local_name: of a raw parameter; empty for a layer with a rule.
        input: ids for a raw table; None for any other raw parameter.
        kept: what else the layer's rule asked for.
        is_borrowed: the memory of input and gradient is used again as soon as the call has been reported.
        written: by local name, the gradients of a module that the fallback has replayed; `output_gradient` holds their norms.
    """

    claim: Claim
    local_name: str
    input: Tensor | None
    output_gradient: Tensor
    kept: tuple[Tensor, ...] = ()
    is_borrowed: bool = False
    written: Mapping[str, Tensor] | None = None

    def contributions(self) -> Iterator[tuple[str, Contribution]]:
        """(canonical parameter name, contribution) for each trainable parameter of the layer; nothing borrowed is in them."""
        gradient = self.output_gradient
        if self.written is not None:
            for local, grad_B in self.written.items():
                yield (
                    self.claim.parameters[local],
                    Dense(wide(grad_B), is_product=grad_B[0].numel() > SHORT),
                )
            return
        if self.local_name:
            x, name = self.input, self.claim.parameters[self.local_name]
            yield (
                name,
                Dense(wide(gradient))
                if x is None
                else Rows(x.reshape(len(x), -1), tokens(gradient)),
            )
            return
        kind = rule_of(self.claim.module)
        assert kind is not None
        by_name = RULES[kind](self.claim.module, self.input, gradient, *self.kept)
        for local, name in self.claim.parameters.items():
            if local not in by_name:
                raise Uncovered(
                    f"the clipping rule of {type(self.claim.module).__name__} does not cover {name}: remove what added it to the "
                    "layer (such as nn.utils.weight_norm), give it to a module of its own, or freeze it",
                    [name],
                )
            part = by_name[local]
            part = part.settled() if isinstance(part, OuterProducts) else part
            yield name, owned(part, self.input, gradient) if self.is_borrowed else part


class _Tap(torch.autograd.Function):
    """Outputs of a layer, or of a module that the fallback replays; `report(kept, gradients)` follows on the way back."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, report: "Report", num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[num_outputs:])
        ctx.report = report
        # Not `view_as`: the caller may write into a layer's output in place, since no rule reads it. Where the layer itself or
        # the next one has kept it, torch's write counter, which both share, refuses the backward.
        return tuple(output.detach() for output in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under activation checkpointing it is recomputed.
        kept = [tensor.detach() for tensor in ctx.saved_tensors]
        ctx.report(kept, [g.detach() for g in gradients])
        return None, None, None, *gradients, *[None] * len(kept)


Report = Callable[[list[Tensor], list[Tensor]], None]


class Forward(NamedTuple):
    """A forward that can be differentiated.

    Attributes:
        loss_B: detached.
        num_calls: parameter name -> number of calls of its layers.
        backward: hands every call to a sink as soon as its gradient is known, last layer first.
    """

    loss_B: Tensor
    num_calls: Mapping[str, int]
    backward: Callable[[Callable[[Call], None]], None]


class Hook:
    """A hook of clipping on a module. Copies of the module, by pickle or deepcopy, get one of Python's own that does nothing."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (
            nullcontext(),
            "__exit__",
        )  # it takes anything and returns None, without this package


class Recorder:
    """Hooks on the claimed layers of a model; active only inside `forward`.

    Attributes:
        compares: whether outputs of replays are compared with those of the forward, which keeps them in memory.
    """

    compares = False

    def __init__(self, claims: list[Claim], compiled_weights: Sequence[nn.Parameter] = ()):
        self._claims = claims
        self._compiled_weights = compiled_weights
        self.root: Tensor | None = None
        self._batch_size = 0
        self._num_calls: Counter[str] = Counter()
        self._num_calls_at: dict[object, dict[str, int]] = {}
        self.sink: Callable[[Call], None] | None = None
        self._inside: list[tuple[Claim, dict[int, int]]] = []
        """Modules that the fallback covers and whose forward runs now, with the write counters of what they were given."""
        self._handles: list[RemovableHandle] = []
        for claim in claims:
            module = claim.module
            if claim.is_whole:  # they come first, so their hooks stand around those of layers
                before, after = Hook(partial(self._enter, claim)), Hook(partial(self._leave, claim))
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(
                    module.register_forward_hook(
                        after, prepend=True, with_kwargs=True, always_call=True
                    )
                )
            elif rule_of(module) is None:
                self._handles.append(
                    module.register_forward_pre_hook(Hook(partial(self._shadow, claim)))
                )
                self._handles.append(
                    module.register_forward_hook(Hook(partial(_unshadow, claim)), always_call=True)
                )
            else:
                # First of all hooks: a sharded engine's would take the weights away that a rule may want to keep.
                hook = Hook(self._record(claim))
                self._handles.append(
                    module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def forward(
        self, task: Task, inputs: Mapping[str, Tensor], batch_size: int, num_backwards: int = 1
    ) -> Iterator["Forward"]:
        """One forward of `task(**inputs)`; inside the context, `num_backwards` backwards of its graph are possible."""
        device = next(p.device for c in self._claims for p in c.module.parameters(recurse=False))
        self.root = root = torch.zeros((), device=device, requires_grad=True)
        self._batch_size = batch_size
        self._num_calls.clear()
        try:
            with compiled.weights_at_rest(self._compiled_weights):
                with torch.enable_grad():
                    with plain_words():
                        loss_B = task(**inputs)
                    shape = (
                        tuple(loss_B.shape) if isinstance(loss_B, Tensor) else type(loss_B).__name__
                    )
                    if shape != (batch_size,):
                        raise PrivacyConfigError(
                            f"the task returned {shape} for {batch_size} examples, not one of shape ({batch_size},): it must "
                            'return one loss per example; a loss function of torch does so with reduction="none"'
                        )
                    if not loss_B.requires_grad:
                        raise PrivacyConfigError(
                            "the loss depends on no layer that is trained: was it detached, or computed under torch.no_grad?"
                        )
                    loss = loss_B.sum()
                num_calls = dict(self._num_calls)
                # Layers are called as often in every micro-batch of the same shapes: the number of contributions moves how the
                # gradient of every example is rounded, so the example with most work must not set it.
                before = self._num_calls_at.setdefault(
                    tuple((name, x.shape) for name, x in inputs.items()), num_calls
                )
                if before != num_calls:
                    name = min(
                        n for n in {**before, **num_calls} if before.get(n) != num_calls.get(n)
                    )
                    raise PrivacyConfigError(
                        f"the layer of {name} was called {num_calls.get(name, 0)} times here, and {before.get(name, 0)} times in "
                        "another micro-batch of the same shapes: how often must not depend on the examples; call it as often for "
                        "all, and mask"
                    )

                def backward(sink: Callable[[Call], None]) -> None:
                    nonlocal num_backwards
                    num_backwards -= 1
                    self.sink = sink
                    with torch.enable_grad(), plain_words():
                        torch.autograd.grad(
                            loss, [root], retain_graph=num_backwards > 0, allow_unused=True
                        )

                yield Forward(loss_B.detach(), num_calls, backward)
        finally:
            self.root = self.sink = None
            self._inside.clear()
            for claim in self._claims:
                _unshadow(claim)

    def report(
        self, call: Call, replay: Replay | None = None, gradients: Sequence[Tensor] = ()
    ) -> None:
        """A tap saw its gradient, or those of the outputs of a module that covers parameters, which is replayed then."""
        if self.sink is None:
            raise PrivacyConfigError(
                f"the forward differentiates through layer {call.claim.path or 'root'} (torch.autograd.grad inside the model), "
                "which per-example clipping cannot follow; freeze the layer, or let the forward differentiate around it"
            )
        if replay is not None:
            root, self.root = self.root, None  # hooks are off inside
            try:
                written = replay.gradients(call.kept, gradients)
            finally:
                self.root = root
        with torch.no_grad(), exact(call.output_gradient.device):
            if replay is not None:
                norms = [
                    torch.linalg.vector_norm(wide(g).flatten(1), dim=1) for g in written.values()
                ]
                call = replace(
                    call, kept=(), output_gradient=torch.stack(norms, 1), written=written
                )
            self.sink(call)

    def _enter(
        self, claim: Claim, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.root is None:
            return
        if torch.compiler.is_compiling():
            raise PrivacyConfigError(
                f"{claim.path or 'the model'} is differentiated per example as a whole: leave it out of torch.compile"
            )
        self._inside.append((claim, {id(x): x._version for x in tensors_of((args, kwargs))}))

    def _leave(
        self,
        claim: Claim,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """The outputs of a module that covers parameters, tapped.

        Raises:
            Uncovered: examples are not where the self-check has found them, or what it was given was written to meanwhile.
        """
        if self.root is None or not self._inside:
            return None
        _, versions = self._inside.pop()
        if output is None:  # the forward has raised an error
            return None
        given, names = (args, kwargs), list(claim.parameters.values())
        inputs, outputs = tensors_of(given), tensors_of(output)
        if any(versions.get(id(x)) != x._version for x in inputs):
            raise Uncovered(
                f"{claim.where}, but something writes in place to what it was called with", names
            )
        dims = claim.plan.places[claim.path].get(form_of(given), ())
        sized = zip([*inputs, *outputs], dims, strict=False)
        if len(dims) != len(inputs) + len(outputs) or any(
            (d == -1 and x.requires_grad)
            or (d not in (None, -1) and (x.dim() <= d or x.shape[d] != self._batch_size))
            for x, d in sized
        ):
            raise Uncovered(
                f"{claim.where}, but was called in another way than in the self-check, or with another number of examples",
                names,
            )
        places = dims[len(inputs) :]
        chosen = [y for y, d in zip(outputs, places, strict=True) if d != -1]
        device = chosen[0].device.type
        inputs = [x.detach() for x in inputs]
        recorded = tuple(y.detach().clone() for y in chosen) if self.compares else ()
        autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        modes = tuple(m.training for m in module.modules())
        replay = Replay(claim, numbered(given), dims, len(inputs), recorded, autocast, modes)
        self._num_calls.update(names)

        def report(kept: list[Tensor], gradients: list[Tensor]) -> None:
            self.report(Call(claim, "", None, gradients[0], tuple(kept)), replay, gradients)

        tapped = iter(_Tap.apply(self.root, report, len(chosen), *chosen, *inputs))  # type: ignore[no-untyped-call]
        place = iter(places)
        return mapped(output, lambda y: y if next(place) == -1 else next(tapped))

    def _left(self, claim: Claim) -> Claim:
        """The claim without parameters that a module around this call covers."""
        covered = {name for around, _ in self._inside for name in around.parameters.values()}
        left = {local: name for local, name in claim.parameters.items() if name not in covered}
        return replace(claim, parameters=left) if covered else claim

    def _tap(self, output: Tensor, claim: Claim, local_name: str, *kept: Tensor) -> Tensor:
        self._num_calls.update(
            [claim.parameters[local_name]] if local_name else claim.parameters.values()
        )

        def report(kept: list[Tensor], gradients: list[Tensor]) -> None:
            self.report(
                Call(claim, local_name, kept[0] if kept else None, gradients[0], tuple(kept[1:]))
            )

        tapped: Tensor = _Tap.apply(self.root, report, 1, output, *kept)[0]  # type: ignore[no-untyped-call]  # torch's
        return tapped

    def _record(self, claim: Claim) -> Callable[..., Tensor | None]:
        kind, all_of_it = rule_of(claim.module), claim
        keep = None if kind is None else KEEPS.get(kind)

        def on_compiled_call(x: Tensor, output: Tensor) -> None:
            self._require_examples(x, output, claim)
            self._num_calls.update(claim.parameters.values())

        tap_in_graph = compiled.CompiledTap(
            on_compiled_call, lambda x, g: self.report(Call(claim, "", x, g, is_borrowed=True))
        )

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if self.root is None:
                return None
            x = args[0] if args else next(iter(kwargs.values()))
            if torch.compiler.is_compiling():
                return compiled.tap(output, self.root, x, tap_in_graph.key, tap_in_graph.num_calls)
            claim = self._left(all_of_it)
            if not claim.parameters:
                return None
            with torch.no_grad():
                others = keep(module, (*args, *kwargs.values()), output) if keep is not None else ()
            return self._tap_call(claim, "", x, output, *others)

        return hook

    def _tap_call(
        self, claim: Claim, local_name: str, x: Tensor, output: Tensor, *others: Tensor
    ) -> Tensor:
        """The output of a layer, or of a raw parameter that was used like one, tapped."""
        if len(x) == len(output) == 1 != self._batch_size and not x.requires_grad:
            # One row for all examples: as if every example had made the call for itself.
            rows, inputs = (t.detach().expand(self._batch_size, *t.shape[1:]) for t in (output, x))
            claim.plan.shared.update(claim.parameters.values())
            return self._tap(rows, claim, local_name, inputs)
        self._require_examples(x, output, claim, local_name)
        # On CUDA, bad rows of what is kept are overwritten (`blanked`), which must not happen to the caller's tensors.
        x = x.clone() if x.is_cuda and not x.requires_grad else x.detach()
        return self._tap(output, claim, local_name, x, *others)

    def _require_examples(
        self, x: Tensor, output: Tensor, claim: Claim, local_name: str = ""
    ) -> None:
        size = self._batch_size
        if len(output) == len(x) == size:
            return
        if x.requires_grad or x.dim() > 2:
            way_out = (
                "put the examples first (batch_first=True, or transpose before the layer), and give windows, heads or crops a "
                "dimension of their own behind them, as in (B, windows, tokens, width)"
            )
        else:
            way_out = "a table that all examples share (position ids) needs a leading dimension of 1: layer(ids[None])"
        name = f"{claim.path}.{local_name}" if local_name else claim.path
        raise Uncovered(
            f"layer {name} ({type(claim.module).__name__}) maps {tuple(x.shape)} to {tuple(output.shape)}, but the first "
            f"dimension of both must be the {size} examples of the micro-batch: {way_out}; or freeze the layer's parameters",
            [claim.parameters[local_name]] if local_name else list(claim.parameters.values()),
        )

    def _shadow(self, claim: Claim, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.root is None:
            return
        left = self._left(claim).parameters
        if reason := mixing_reason(module) or (reason_without_rule(module) if left else None):
            raise PrivacyConfigError(refusal(module, claim.path, reason))
        for local, name in left.items():
            parameter = module._parameters[local]
            assert parameter is not None
            if is_table(module, local):
                tap = partial(self._tap_call, claim, local)
                module.__dict__[local] = Table.of(parameter, name, tap)
            else:
                each = copies(parameter, self._batch_size, claim.plan.layouts.get(name))
                module.__dict__[local] = self._tap(each, claim, local)


@contextmanager
def plain_words() -> Iterator[None]:
    """Says in words of the model what torch says of taps."""
    try:
        yield
    except RuntimeError as error:
        ours = str(Path(__file__).parent)
        frames = traceback.extract_tb(error.__traceback__)
        outside = [
            f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(ours)
        ]
        place = f" (at {outside[-1].filename}:{outside[-1].lineno})" if outside else ""
        if isinstance(error, CheckpointError):
            reason = (
                f"activation checkpointing did not repeat a forward{place}: put the checkpoint around the module that owns a "
                "parameter read without a layer, not inside its forward"
            )
        elif "use_reentrant" in str(error):
            reason = (
                "reentrant activation checkpointing runs a backward of its own, which clipping cannot follow: give "
                "torch.utils.checkpoint use_reentrant=False"
            )
        elif "functorch" in str(error):
            reason = f"a layer runs inside torch.func{place}, which clipping cannot follow: call it on the whole batch instead"
        elif "inplace" in str(error):
            reason = (
                f"the model changes a layer's input or output in place{place}, where clipping still needs it: write y = y + x "
                "instead of y += x, and nn.ReLU(inplace=False)"
            )
        else:
            raise
        raise PrivacyConfigError(reason) from error


def _unshadow(claim: Claim, *_hook_arguments: Any) -> None:
    if rule_of(claim.module) is None:
        for local in claim.parameters:
            claim.module.__dict__.pop(local, None)
