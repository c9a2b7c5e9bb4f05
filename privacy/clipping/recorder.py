"""Records, for one micro-batch, the input and the output gradient of every layer with trainable parameters.

Each claimed layer's output passes through `_Tap`, an identity that remembers the gradient on its way back. The backward pass
is `torch.autograd.grad(loss.sum(), [root])` for a dummy leaf `root` that every tap depends on, so no weight gradient is
computed, no `.grad` is touched and no engine hook fires: sharded engines gather their weights in their own module hooks as
in any forward and backward, and never see a gradient. (Parameters keep requires_grad; torch skips what root does not need.)

A raw parameter of shape (1, ...) is shadowed, for the time of its owner's forward, by a tapped copy of shape (B, ...): an
entry in the instance's `__dict__` goes before the module's parameters in attribute lookup.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from privacy.clipping.contributions import Contribution, Dense
from privacy.clipping.coverage import Claim
from privacy.clipping.rules import RULES


@dataclass
class _Call:
    """One call of a claimed layer."""

    claim: Claim
    local_name: str  # of a raw parameter; empty for a layer with a rule
    input: Tensor | None
    output_gradient: Tensor | None = None

    def contributions(self) -> Iterator[tuple[str, Contribution]]:
        """(canonical name, contribution); nothing when the loss does not depend on this call."""
        gradient = self.output_gradient
        if gradient is None:
            return
        if self.input is None:
            wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            yield self.claim.parameters[self.local_name], Dense(gradient.to(wide))
            return
        found = RULES[type(self.claim.module)](self.claim.module, self.input, gradient)
        for local, contribution in found.items():
            if local in self.claim.parameters:
                yield self.claim.parameters[local], contribution


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.call.output_gradient = gradients[0].detach()
        return gradients[0], None, None


class Recorder:
    """Hooks on the claimed layers of a model; active only inside `recording`."""

    def __init__(self, claims: list[Claim]):
        self._claims = claims
        self._calls: list[_Call] = []
        self._root: Tensor | None = None
        self._batch_size = 0
        self._handles: list[RemovableHandle] = []
        for claim in claims:
            if claim.is_raw:
                self._handles.append(claim.module.register_forward_pre_hook(self._shadow(claim)))
                self._handles.append(claim.module.register_forward_hook(self._unshadow(claim), always_call=True))
            else:
                self._handles.append(claim.module.register_forward_hook(self._record(claim), with_kwargs=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def recording(self, batch_size: int) -> Iterator[Tensor]:
        """Yields the root leaf; every claimed call inside is recorded."""
        device = next(p.device for c in self._claims for p in c.module.parameters(recurse=False))
        self._root = torch.zeros((), device=device, requires_grad=True)
        self._batch_size = batch_size
        self._calls = []
        try:
            yield self._root
        finally:
            self._root = None
            for claim in self._claims:
                _unshadow_all(claim)

    def contributions(self) -> dict[str, list[Contribution]]:
        """All contributions of the recorded micro-batch by canonical parameter name; forgets the record."""
        found: dict[str, list[Contribution]] = {}
        for call in self._calls:
            for name, contribution in call.contributions():
                found.setdefault(name, []).append(contribution)
        self._calls = []
        return found

    def _tap(self, output: Tensor, call: _Call) -> Tensor:
        assert self._root is not None
        self._calls.append(call)
        return _Tap.apply(output, self._root, call)

    def _record(self, claim: Claim) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            if self._root is None:
                return None
            x = args[0] if args else next(iter(kwargs.values()))
            if len(output) != self._batch_size or len(x) != self._batch_size:
                raise RuntimeError(
                    f"layer {claim.path} ({type(module).__name__}) maps {tuple(x.shape)} to {tuple(output.shape)}, "
                    f"but the first dimension of both must be the {self._batch_size} examples of the micro-batch"
                )
            return self._tap(output, _Call(claim, "", x.detach()))

        return hook

    def _shadow(self, claim: Claim) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._root is None:
                return
            for local in claim.parameters:
                parameter = module._parameters[local]
                assert parameter is not None
                copy = parameter.detach().expand(self._batch_size, *parameter.shape[1:])
                module.__dict__[local] = self._tap(copy, _Call(claim, local, None))

        return hook

    def _unshadow(self, claim: Claim) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            _unshadow_all(claim)

        return hook


def _unshadow_all(claim: Claim) -> None:
    if claim.is_raw:
        for local in claim.parameters:
            claim.module.__dict__.pop(local, None)
