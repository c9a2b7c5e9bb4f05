"""Hands over the input and the output gradient of every layer with trainable parameters.

Each claimed layer's output passes through `_Tap`, an identity that reports the gradient on its way
back, together with the layer's input. The backward pass is `torch.autograd.grad(loss.sum(),
[root])` for a dummy leaf `root` that every tap depends on, so no weight gradient is computed, no
`.grad` is touched and no engine hook fires: sharded engines gather their weights in their own
module hooks as in any forward and backward, and never see a gradient. (Parameters keep
requires_grad; torch skips gradients that root does not need.)
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
from .fallback import Claim, Replay, Uncovered, form_of, map_tensors, number_tensors, tensors_of
from .per_example_gradients import (
    Contribution,
    Dense,
    EmbeddingGradient,
    OuterProducts,
    copy_borrowed,
)
from .raw_parameters import Table, copies, is_table
from .rules import KEEPS, RULES, tokens

Task = Callable[..., Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a claimed layer, with its gradient.

    Attributes:
        local_name: of a raw parameter; empty for a layer with a rule.
        input: ids for a raw table; None for any other raw parameter.
        tensors: all else that the layer's rule asked for.
        is_borrowed: the memory of input and gradient is used again as soon as the call has been
            reported, as compiled blocks do.
        replayed: by local name, the gradients of a module that the fallback has replayed;
            `output_gradient` holds their norms.
    """

    claim: Claim
    local_name: str
    input: Tensor | None
    output_gradient: Tensor
    tensors: tuple[Tensor, ...] = ()
    is_borrowed: bool = False
    replayed: Mapping[str, Tensor] | None = None

    def contributions(self) -> Iterator[tuple[str, Contribution]]:
        """Yields (canonical parameter name, contribution) for the layer's trainable parameters.

        Contributions hold no borrowed memory.
        """
        gradient = self.output_gradient
        if self.replayed is not None:
            for local, grad_B in self.replayed.items():
                is_product = grad_B[0].numel() > SHORT
                yield self.claim.parameters[local], Dense(wide(grad_B), is_product=is_product)
            return
        if self.local_name:
            name = self.claim.parameters[self.local_name]
            if self.input is None:
                yield name, Dense(wide(gradient))
            else:
                yield (
                    name,
                    EmbeddingGradient(self.input.reshape(len(self.input), -1), tokens(gradient)),
                )
            return
        kind = rule_of(self.claim.module)
        assert kind is not None
        part_by_name = RULES[kind](self.claim.module, self.input, gradient, *self.tensors)
        for local, name in self.claim.parameters.items():
            if local not in part_by_name:
                raise Uncovered(
                    f"the clipping rule of {type(self.claim.module).__name__} does not cover "
                    f"{name}: remove what added it to the layer (such as nn.utils.weight_norm), "
                    "give it to a module of its own, or freeze it",
                    [name],
                )
            part = part_by_name[local]
            if isinstance(part, OuterProducts):
                part = part.compact()
            yield name, copy_borrowed(part, self.input, gradient) if self.is_borrowed else part


class _Tap(torch.autograd.Function):
    """Outputs of a layer, or of a module that the fallback replays.

    `report(tensors, gradients)` follows on the way back. The tap keeps its tensors as autograd
    keeps its own, so under non-reentrant activation checkpointing they are recomputed with the
    rest; a tap that only the recomputation makes is never run backward and reports nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, report: "Report", num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[num_outputs:])
        ctx.report = report
        # Not `view_as`: the caller may write into a layer's output in place, since no rule reads
        # it. Where the layer itself or the next one has kept it, torch's write counter, which both
        # share, refuses the backward.
        return tuple(output.detach() for output in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under activation checkpointing every read recomputes.
        tensors = [tensor.detach() for tensor in ctx.saved_tensors]
        ctx.report(tensors, [g.detach() for g in gradients])
        return None, None, None, *gradients, *[None] * len(tensors)


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
    """A hook of clipping on a module.

    Copies of the module, by pickle or deepcopy, get one of Python's own that does nothing.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that takes anything and returns None, without this package.
        return getattr, (nullcontext(), "__exit__")


class Recorder:
    """Hooks on the claimed layers of a model; active only inside `forward`.

    Attributes:
        compares: whether outputs of replays are compared with those of the forward, which keeps
            them in memory.
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
        self._running: list[tuple[Claim, dict[int, int]]] = []
        """Modules that the fallback covers and whose forward runs now, with the write counters of
        their inputs."""
        self._handles: list[RemovableHandle] = []
        for claim in claims:
            module = claim.module
            # Claims of the fallback come first, so their hooks surround those of layers.
            if claim.is_whole:
                enter = Hook(partial(self._enter, claim))
                leave = Hook(partial(self._leave, claim))
                handles = [
                    module.register_forward_pre_hook(enter, with_kwargs=True),
                    module.register_forward_hook(
                        leave, prepend=True, with_kwargs=True, always_call=True
                    ),
                ]
            elif rule_of(module) is None:
                shadow = Hook(partial(self._shadow, claim))
                unshadow = Hook(partial(_unshadow, claim))
                handles = [
                    module.register_forward_pre_hook(shadow),
                    module.register_forward_hook(unshadow, always_call=True),
                ]
            else:
                # First of all hooks: a sharded engine's would take the weights away that a rule may
                # want to keep.
                record = Hook(self._record(claim))
                handles = [module.register_forward_hook(record, prepend=True, with_kwargs=True)]
            self._handles += handles

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def forward(
        self, task: Task, inputs: Mapping[str, Tensor], batch_size: int, num_backwards: int = 1
    ) -> Iterator["Forward"]:
        """Runs one forward of `task(**inputs)`.

        Inside the context, `num_backwards` backwards of its graph are possible.
        """
        device = next(p.device for c in self._claims for p in c.module.parameters(recurse=False))
        self.root = root = torch.zeros((), device=device, requires_grad=True)
        self._batch_size = batch_size
        self._num_calls.clear()
        try:
            with compiled.weights_at_rest(self._compiled_weights):
                with torch.enable_grad():
                    with plain_words():
                        loss_B = task(**inputs)
                    is_tensor = isinstance(loss_B, Tensor)
                    shape = tuple(loss_B.shape) if is_tensor else type(loss_B).__name__
                    if shape != (batch_size,):
                        raise PrivacyConfigError(
                            f"the task returned {shape} for {batch_size} examples, not one of "
                            f"shape ({batch_size},): it must return one loss per example; a loss "
                            'function of torch does so with reduction="none"'
                        )
                    if not loss_B.requires_grad:
                        raise PrivacyConfigError(
                            "the loss depends on no layer that is trained: was it detached, or "
                            "computed under torch.no_grad?"
                        )
                    loss = loss_B.sum()
                num_calls = dict(self._num_calls)
                # Layers are called as often in every micro-batch of the same shapes: the number of
                # contributions moves how the gradient of every example is rounded, so the example
                # with most work must not set it.
                shapes = tuple((name, x.shape) for name, x in inputs.items())
                first_num_calls = self._num_calls_at.setdefault(shapes, num_calls)
                if first_num_calls != num_calls:
                    names = {**first_num_calls, **num_calls}
                    name = min(n for n in names if first_num_calls.get(n) != num_calls.get(n))
                    count = num_calls.get(name, 0)
                    first_count = first_num_calls.get(name, 0)
                    raise PrivacyConfigError(
                        f"the layer of {name} was called {count} times here, and {first_count} "
                        "times in another micro-batch of the same shapes: how often must not "
                        "depend on the examples; call it as often for all, and mask"
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
            self._running.clear()
            for claim in self._claims:
                _unshadow(claim)

    def report(
        self, call: Call, replay: Replay | None = None, gradients: Sequence[Tensor] = ()
    ) -> None:
        """Hands a call to the sink, once a tap saw its gradient.

        Args:
            replay: of a module that covers parameters.
            gradients: of that module's outputs.
        """
        if self.sink is None:
            raise PrivacyConfigError(
                f"the forward differentiates through layer {call.claim.path or 'root'} "
                "(torch.autograd.grad inside the model), which per-example clipping cannot follow; "
                "freeze the layer, or let the forward differentiate around it"
            )
        if replay is not None:
            # Hooks are off inside.
            root = self.root
            self.root = None
            try:
                replayed = replay.gradients(call.tensors, gradients)
            finally:
                self.root = root
        with torch.no_grad(), exact(call.output_gradient.device):
            if replay is not None:
                norms = [
                    torch.linalg.vector_norm(wide(g).flatten(1), dim=1) for g in replayed.values()
                ]
                norms_BP = torch.stack(norms, 1)
                call = replace(call, tensors=(), output_gradient=norms_BP, replayed=replayed)
            self.sink(call)

    def _enter(
        self, claim: Claim, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.root is None:
            return
        if torch.compiler.is_compiling():
            raise PrivacyConfigError(
                f"{claim.path or 'the model'} is differentiated per example as a whole: leave it "
                "out of torch.compile"
            )
        versions = {id(x): x._version for x in tensors_of((args, kwargs))}
        self._running.append((claim, versions))

    def _leave(
        self,
        claim: Claim,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Returns the outputs of a module that covers parameters, tapped.

        Raises:
            Uncovered: examples are not where the self-check has seen them, or an input was written
                to meanwhile.
        """
        if self.root is None or not self._running:
            return None
        _, versions = self._running.pop()
        # The forward has raised an error.
        if output is None:
            return None
        arguments = (args, kwargs)
        names = list(claim.parameters.values())
        inputs = tensors_of(arguments)
        outputs = tensors_of(output)
        if any(versions.get(id(x)) != x._version for x in inputs):
            raise Uncovered(
                f"{claim.where}, but something writes in place to what it was called with", names
            )
        dims = claim.plan.places[claim.path].get(form_of(arguments), ())
        is_as_checked = len(dims) == len(inputs) + len(outputs)
        for x, d in zip([*inputs, *outputs], dims, strict=False):
            if d == -1:
                is_as_checked &= not x.requires_grad
            elif d is not None:
                is_as_checked &= x.dim() > d and x.shape[d] == self._batch_size
        if not is_as_checked:
            raise Uncovered(
                f"{claim.where}, but was called in another way than in the self-check, or with "
                "another number of examples",
                names,
            )
        output_dims = dims[len(inputs) :]
        tapped_outputs = [y for y, d in zip(outputs, output_dims, strict=True) if d != -1]
        device = tapped_outputs[0].device.type
        inputs = [x.detach() for x in inputs]
        recorded = tuple(y.detach().clone() for y in tapped_outputs) if self.compares else ()
        autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        modes = tuple(m.training for m in module.modules())
        replay = Replay(
            claim, number_tensors(arguments), dims, len(inputs), recorded, autocast, modes
        )
        self._num_calls.update(names)

        def report(tensors: list[Tensor], gradients: list[Tensor]) -> None:
            self.report(Call(claim, "", None, gradients[0], tuple(tensors)), replay, gradients)

        arguments_of_tap = (self.root, report, len(tapped_outputs), *tapped_outputs, *inputs)
        taps = iter(_Tap.apply(*arguments_of_tap))  # type: ignore[no-untyped-call]  # torch's
        new_outputs = []
        for y, d in zip(outputs, output_dims, strict=True):
            new_outputs.append(y if d == -1 else next(taps))
        in_order = iter(new_outputs)
        return map_tensors(output, lambda _: next(in_order))

    def _left(self, claim: Claim) -> Claim:
        """Returns the claim without parameters that a module around this call covers."""
        covered = {name for outer, _ in self._running for name in outer.parameters.values()}
        if not covered:
            return claim
        parameters = {
            local: name for local, name in claim.parameters.items() if name not in covered
        }
        return replace(claim, parameters=parameters)

    def _tap(self, output: Tensor, claim: Claim, local_name: str, *tensors: Tensor) -> Tensor:
        names = [claim.parameters[local_name]] if local_name else claim.parameters.values()
        self._num_calls.update(names)

        def report(tensors: list[Tensor], gradients: list[Tensor]) -> None:
            x = tensors[0] if tensors else None
            self.report(Call(claim, local_name, x, gradients[0], tuple(tensors[1:])))

        arguments = (self.root, report, 1, output, *tensors)
        tapped: Tensor = _Tap.apply(*arguments)[0]  # type: ignore[no-untyped-call]  # torch's
        return tapped

    def _record(self, claim: Claim) -> Callable[..., Tensor | None]:
        kind = rule_of(claim.module)
        keep = None if kind is None else KEEPS.get(kind)

        def on_compiled_call(x: Tensor, output: Tensor) -> None:
            self._require_examples(x, output, claim)
            self._num_calls.update(claim.parameters.values())

        def on_compiled_gradient(x: Tensor, g: Tensor) -> None:
            self.report(Call(claim, "", x, g, is_borrowed=True))

        tap_in_graph = compiled.CompiledTap(on_compiled_call, on_compiled_gradient)

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if self.root is None:
                return None
            x = args[0] if args else next(iter(kwargs.values()))
            if torch.compiler.is_compiling():
                return compiled.tap(output, self.root, x, tap_in_graph.key, tap_in_graph.num_calls)
            uncovered_claim = self._left(claim)
            if not uncovered_claim.parameters:
                return None
            tensors: tuple[Tensor, ...] = ()
            if keep is not None:
                with torch.no_grad():
                    tensors = keep(module, (*args, *kwargs.values()), output)
            return self._tap_call(uncovered_claim, "", x, output, *tensors)

        return hook

    def _tap_call(
        self, claim: Claim, local_name: str, x: Tensor, output: Tensor, *tensors: Tensor
    ) -> Tensor:
        """Returns the output of a layer, or of a raw parameter that was used like one, tapped."""
        if len(x) == len(output) == 1 != self._batch_size and not x.requires_grad:
            # One row for all examples (position ids of shape (1, T)): as if every example had made
            # the call for itself.
            output_rows = output.detach().expand(self._batch_size, *output.shape[1:])
            input_rows = x.detach().expand(self._batch_size, *x.shape[1:])
            claim.plan.shared.update(claim.parameters.values())
            return self._tap(output_rows, claim, local_name, input_rows)
        self._require_examples(x, output, claim, local_name)
        # On CUDA, bad rows of inputs are overwritten (`blank_rows`), which must not happen to the
        # caller's tensors.
        x = x.clone() if x.is_cuda and not x.requires_grad else x.detach()
        return self._tap(output, claim, local_name, x, *tensors)

    def _require_examples(
        self, x: Tensor, output: Tensor, claim: Claim, local_name: str = ""
    ) -> None:
        size = self._batch_size
        if len(output) == len(x) == size:
            return
        if x.requires_grad or x.dim() > 2:
            way_out = (
                "put the examples first (batch_first=True, or transpose before the layer), and "
                "give windows, heads or crops a dimension of their own behind them, as in "
                "(B, windows, tokens, width)"
            )
        else:
            way_out = (
                "a table that all examples share (position ids) needs a leading dimension of 1: "
                "layer(ids[None])"
            )
        name = f"{claim.path}.{local_name}" if local_name else claim.path
        names = [claim.parameters[local_name]] if local_name else list(claim.parameters.values())
        shapes = f"{tuple(x.shape)} to {tuple(output.shape)}"
        raise Uncovered(
            f"layer {name} ({type(claim.module).__name__}) maps {shapes}, but the first dimension "
            f"of both must be the {size} examples of the micro-batch: {way_out}; or freeze the "
            "layer's parameters",
            names,
        )

    def _shadow(self, claim: Claim, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Puts a stand-in in the place of each raw parameter, for the time of its owner's forward.

        An entry in the instance's `__dict__` goes before the module's parameters in attribute
        lookup.
        """
        if self.root is None:
            return
        parameters = self._left(claim).parameters
        reason = mixing_reason(module)
        if not reason and parameters:
            reason = reason_without_rule(module)
        if reason:
            raise PrivacyConfigError(refusal(module, claim.path, reason))
        for local, name in parameters.items():
            parameter = module._parameters[local]
            assert parameter is not None
            if is_table(module, local):
                tap = partial(self._tap_call, claim, local)
                module.__dict__[local] = Table.of(parameter, name, tap)
            else:
                rows = copies(parameter, self._batch_size, claim.plan.layouts.get(name))
                module.__dict__[local] = self._tap(rows, claim, local)


@contextmanager
def plain_words() -> Iterator[None]:
    """Turns torch's errors about taps into errors in words of the model."""
    try:
        yield
    except RuntimeError as error:
        package = str(Path(__file__).parent)
        # The innermost frame of the model.
        place = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if "/torch/" not in frame.filename and not frame.filename.startswith(package):
                place = f" (at {frame.filename}:{frame.lineno})"
        if isinstance(error, CheckpointError):
            reason = (
                f"activation checkpointing did not repeat a forward{place}: put the checkpoint "
                "around the module that owns a parameter read without a layer, not inside its "
                "forward"
            )
        elif "use_reentrant" in str(error):
            reason = (
                "reentrant activation checkpointing runs a backward of its own, which clipping "
                "cannot follow: give torch.utils.checkpoint use_reentrant=False"
            )
        elif "functorch" in str(error):
            reason = (
                f"a layer runs inside torch.func{place}, which clipping cannot follow: call it on "
                "the whole batch instead"
            )
        elif "inplace" in str(error):
            reason = (
                f"the model changes a layer's input or output in place{place}, where clipping "
                "still needs it: write y = y + x instead of y += x, and nn.ReLU(inplace=False)"
            )
        else:
            raise
        raise PrivacyConfigError(reason) from error


def _unshadow(claim: Claim, *_hook_arguments: Any) -> None:
    if rule_of(claim.module) is None:
        for local in claim.parameters:
            claim.module.__dict__.pop(local, None)
