"""The engine of a loop of one's own: a model and an optimizer of torch, whole on every rank or in the shards of FSDP2.

The optimizer steps on `.grad`s that hold noised, divided sums and nothing else. Anything else that could bring private data into
the weights is refused: a step that is not this engine's, a gradient of the user's own backward, weights or an optimizer's state
that changed meanwhile.
"""

import copy
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import optimizer as of_torch

from ..errors import ConfigError, PrivacyConfigError
from ..gradients.module_state import writes_to
from ..gradients.sharded import put_away
from ..guards.fingerprints import (
    fingerprint,
    fixed_tensors,
    is_strided,
    overlaps,
    require_comparable,
    require_rows,
    switch_reduction,
)
from ..step import collectives
from ..step.engine import GradShard, Piece, ShardState, even_layout
from ..step.row_shards import RowShards, in_shards, own_part, own_rows, set_own_part
from ..sums.reduction import gather_from_owners

WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)
OPTIMIZER_FACTS = "optimizer"
"""Key of a manifest: the optimizer's class, and its numbers that are no tensors of a parameter's shape, such as step counts."""
LARGEST_RATE = torch.finfo(torch.float32).max
OF_TORCH = ("state", "param_groups", "_opt_called", "_need_device_dtype_check_for_fused")
"""Attributes that torch's own optimizers and schedulers change at a step, and that need no place in a checkpoint."""


class OwnEngine:
    """See `privacy.step.engine.Engine`.

    Args:
        sets_rate: the step's learning rate goes into all groups of the optimizer; else they keep what the caller has put there.

    Attributes:
        is_scheduled: a scheduler is registered, which a resume forwards.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sets_rate: bool = False
    ) -> None:
        put_away(model)
        trainable = require_plain(model, optimizer)
        self.replicated = not require_rows(model)
        require_apart_in_memory(trainable, optimizer)
        self.module, self.optimizer, self._trainable, self.sets_rate = (
            model,
            optimizer,
            trainable,
            sets_rate,
        )
        self.shapes = {name: p.shape for name, p in trainable.items()}
        first = next(iter(trainable.values()))
        self.device, self.compute_dtype = first.device, first.dtype
        self._rows = None if self.replicated else RowShards(trainable, self.device)
        self.layout = (
            self._rows.layout if self._rows else even_layout(self.shapes, collectives.world_size())
        )
        self.moments, self._numbers = _probe(optimizer, trainable)
        self._left = _kept(optimizer.state)
        self._is_stepping = False
        self._guard = optimizer.register_step_pre_hook(self._refuse_foreign_step)
        self._rates, self._is_resumed, self.is_scheduled = list[float](), False, False
        self._next_rates = list[float]()
        self._settled = settings(optimizer, with_rates=False)
        self._seen, fixed = fingerprint(trainable), fixed_tensors(model)
        self._fixed = dict(
            zip(fixed, zip(_marks(fixed).values(), fingerprint(fixed), strict=True), strict=True)
        )

    def release(self) -> None:
        """Gives model and optimizer back."""
        self._guard.remove()
        switch_reduction(self.module, on=True)

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """One step of the optimizer."""
        put_away(self.module)
        _clear_gradients(self.module, self.optimizer)
        for name, gradient in self._gradients(shards).items():
            p = self._trainable[name]  # fused steps take gradient and moments for laid out as it is
            p.grad = _strided_as(p, gradient)
            stepped = self.optimizer.state.get(p, {})
            stepped.update(
                {key: _strided_as(p, x) for key, x in stepped.items() if key in self.moments}
            )
        given = [group.get("lr") for group in self.optimizer.param_groups]
        self._rates = [lr] * len(given) if self.sets_rate else self._next_rates or self.read_rates()
        self._next_rates, self._is_resumed = [], False
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if self.sets_rate or "lr" in group:
                group["lr"] = (
                    rate  # torch's steps compute with a tensor's own dtype, which may be too narrow
                )
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False
            for group, value in zip(self.optimizer.param_groups, given, strict=True):
                if (
                    isinstance(value, Tensor) and not self.sets_rate
                ):  # the caller may go on to fill it
                    group["lr"] = value
        _clear_gradients(self.module, self.optimizer)
        self._seen, self._left = fingerprint(self._trainable), _kept(self.optimizer.state)

    def _gradients(self, shards: list[GradShard]) -> dict[str, Tensor]:
        """Noised gradients by name: whole ones, or in the shards of their parameters."""
        if self._rows is None:
            return gather_from_owners(
                shards, self.layout, self.shapes, self.compute_dtype, self.device
            )
        rows = self._rows.exchange([shard.values for shard in shards])
        return {name: in_shards(values, self._trainable[name]) for name, values in rows.items()}

    def require_untouched(self) -> object:
        """Before a step: model and optimizer are as this engine has put them; returns what ranks have to have in common.

        Raises:
            PrivacyConfigError: naming what changed.
        """
        self._require_no_gradient()  # also of gathered weights, which are put away now
        put_away(self.module)
        switch_reduction(self.module, on=False)
        now = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if now.keys() != self._trainable.keys() or any(
            now[name] is not p for name, p in self._trainable.items()
        ):
            raise PrivacyConfigError(
                "parameters were frozen, unfrozen or exchanged since the loop was made: make a new PrivateLoop with another run "
                "folder"
            )
        # Frozen weights and buffers are hashed where torch has seen a write or an exchange.
        fixed = fixed_tensors(self.module)
        marks, changed = _marks(fixed), sorted(fixed.keys() ^ self._fixed.keys())
        if not changed:
            written = {name: x for name, x in fixed.items() if marks[name] != self._fixed[name][0]}
            numbers = dict(zip(written, fingerprint(written), strict=True))
            changed = [name for name, number in numbers.items() if number != self._fixed[name][1]]
        if changed:
            raise PrivacyConfigError(
                f"frozen weights or buffers changed since the loop was made ({changed[0]}): every gradient goes through them, so "
                "they may hold nothing of private data, and no checkpoint keeps them; change a copy of the model"
            )
        self._fixed |= {name: (marks[name], number) for name, number in numbers.items()}
        in_common = self.require_all_noised()
        now_is = self._rates if self.sets_rate else self.read_rates()
        if self._is_resumed and not self.is_scheduled and now_is != self._rates:
            collectives.say(  # schedulers of torch begin again with their program
                f"the run goes on with the learning rate {now_is}, and its last step took {self._rates}; give a scheduler of "
                "torch to loop.register(scheduler), which forwards it"
            )
        return in_common

    def read_rates(self) -> list[float]:
        """Returns the learning rate of each group, which the next step takes: behind its charge none is read.

        Raises:
            PrivacyConfigError: see `rate_of`.
        """
        self._next_rates = [
            rate_of(group.get("lr", 0.0), f"param_groups[{number}]['lr'] of the optimizer")
            for number, group in enumerate(self.optimizer.param_groups)
        ]
        return self._next_rates

    def require_all_noised(self) -> object:
        """Checks that only the loop's own steps have changed weights or gradients; returns what `require_unchanged` returns.

        Raises:
            PrivacyConfigError: naming what changed.
        """
        self._require_no_gradient()
        put_away(self.module)
        self._require_no_gradient()
        return self.require_unchanged()

    def _require_no_gradient(self) -> None:
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        touched = [name for name, p in self.module.named_parameters() if p.grad is not None]
        if touched or any(p.grad is not None for p in held):
            raise PrivacyConfigError(
                f"{[*touched, 'the optimizer'][0]} has a gradient that is not the loop's: a loss.backward() of your own would "
                "bring private data into the weights without noise; remove it (torch.no_grad() for evaluation), and set the "
                "gradient to None"
            )

    def require_unchanged(self) -> object:
        """The weights are those of the last step; returns their fingerprint, which is the same on all ranks that hold the same.

        Ranks that hold shards have nothing alike but the settings of their optimizers, and those are returned then.

        Raises:
            PrivacyConfigError: something else wrote to them.
        """
        put_away(self.module)
        now = fingerprint(self._trainable)
        if now != self._seen:
            raise PrivacyConfigError(
                "the weights changed since the loop's last step: something else writes to them (another optimizer, another "
                "loop, a loaded checkpoint), and the ledger would not know what it spent; let the loop alone change them"
            )
        require_settings(self.optimizer, self._refuse_foreign_step)
        require_held(self._trainable, self.optimizer)
        require_apart_in_memory(self._trainable, self.optimizer)
        if (state := _kept(self.optimizer.state)) != self._left:
            place = next(
                key for key in {**state, **self._left} if state.get(key) != self._left.get(key)
            )
            raise PrivacyConfigError(
                f"the optimizer's state ({place[-1]}) changed since the loop's last step, and may hold gradients without noise: "
                "let the loop alone change it; a resume needs no load_state_dict"
            )
        self._require_steps()
        return now if self.replicated else settings(self.optimizer)

    def _require_steps(self) -> None:
        """Settings that changed are tried on a copy, before a charge for a step that fails.

        Raises:
            PrivacyConfigError: the optimizer takes no step with them, or would keep what checkpoints have no place for.
        """
        now = settings(self.optimizer, with_rates=False)
        if now == self._settled:
            return
        changed = next(
            place
            for place in {**now, **self._settled}
            if now.get(place) != self._settled.get(place)
        )
        what = f"{changed} of the optimizer was changed, and {type(self.optimizer).__name__}"
        try:
            moments, numbers = _probe(self.optimizer, self._trainable)
        except PrivacyConfigError as error:
            why = error.__cause__ or error
            reason = " ".join(f"{type(why).__name__}: {why}".split())[:200]
            raise PrivacyConfigError(
                f"{what} takes no step with it ({reason}): put it back"
            ) from error
        more = {*moments, *numbers} - {*self.moments, *self._numbers}
        if more:
            raise PrivacyConfigError(
                f"{what} keeps {min(more)!r} with it, which it did not when the loop was made: put it back, or set it before "
                "the loop is made, in another run folder"
            )
        self._settled = now

    def _refuse_foreign_step(self, *_: object) -> None:
        """Before it changes anything: after the last step no other look at the weights would come."""
        if not self._is_stepping:
            raise PrivacyConfigError(
                "optimizer.step() was called by hand: the private loop takes the steps, and no other one is noised or charged; "
                "remove the call, or give it an optimizer of its own"
            )

    def facts(self) -> dict[str, Any]:
        """The optimizer as a checkpoint's manifest describes it."""
        numbers: dict[str, dict[str, float]] = {}
        for name, p in self._trainable.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if key not in self.moments and value is not None:
                    if key not in self._numbers:
                        raise PrivacyConfigError(
                            f"{type(self.optimizer).__name__} keeps {key!r} of {name}, which it did not when the loop was made: "
                            "leave its settings as they were; a scheduler that changes momentum is made before the loop"
                        )
                    numbers.setdefault(name, {})[key] = float(value)
        return {
            OPTIMIZER_FACTS: {
                "class": type(self.optimizer).__name__,
                "numbers": numbers,
                "rates": self._rates,
            }
        }

    def state(self) -> Iterator[ShardState]:
        for piece in self.layout.owned_by(collectives.rank()):
            p = self._trainable[piece.name]
            stepped = self.optimizer.state.get(p, {})
            # A group may keep less than another; zeros stand for what it does not have.
            moments = {
                key: stepped[key] if key in stepped else torch.zeros_like(p) for key in self.moments
            }
            tensors = {"param": p.detach(), **moments}
            yield ShardState(piece, {key: own_part(t, piece) for key, t in tensors.items()})

    def load_facts(self, manifest: Mapping[str, Any]) -> None:
        """Takes what `facts` said, before `load_state`.

        Raises:
            ConfigError: another optimizer.
        """
        known = manifest.get(OPTIMIZER_FACTS, {})
        if known.get("class") != type(self.optimizer).__name__:
            raise ConfigError(
                f"the checkpoint was written with the optimizer {known.get('class')}, not {type(self.optimizer).__name__}: give "
                "the same one, or start another run folder"
            )
        for name, numbers in known["numbers"].items():
            for key, number in numbers.items():
                if key not in self._numbers:
                    raise ConfigError(
                        f"the checkpoint was written with other settings of the optimizer, which kept {key!r}: give the same ones"
                    )
                like = self._numbers[key]
                value = (
                    torch.full_like(like, number)
                    if isinstance(like, Tensor)
                    else type(like)(number)
                )
                self.optimizer.state[self._trainable[name]][key] = value
        self._rates, self._is_resumed = known["rates"], bool(known["rates"])

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Takes all coordinates that this rank holds."""
        with torch.no_grad():
            for p in self._trainable.values():  # of some, this rank may hold no row
                self.optimizer.state[p].update({key: torch.zeros_like(p) for key in self.moments})
            for piece, tensors in states.items():
                p = self._trainable[piece.name]
                for key, values in tensors.items():
                    set_own_part(
                        p if key == "param" else self.optimizer.state[p][key], piece, values
                    )
        self._seen, self._left = fingerprint(self._trainable), _kept(self.optimizer.state)


def require_alike(check: Callable[[], object]) -> None:
    """Collective; no rank waits for one that stopped.

    Raises:
        PrivacyConfigError: on all ranks, where the check raises it on one, or returns something else on another.
    """
    found = collectives.refuse_together(check)
    if any(other != found[0] for other in found):
        raise PrivacyConfigError(
            "ranks hold different weights: was their optimizer or learning rate set differently between two steps? Make the loop "
            "again on all ranks, and it goes on where it was saved"
        )


def require_model(model: object) -> None:
    """Refuses what is no model, or one whose weights hold no numbers that a step could change.

    Raises:
        PrivacyConfigError: with what to do instead.
    """
    if not isinstance(model, nn.Module):
        raise PrivacyConfigError(f"give a model, a torch.nn.Module, not a {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(
            p.requires_grad for p in module.parameters()
        ):
            raise PrivacyConfigError(
                f"{path or 'the model'} is compiled by torch.jit, whose layers show no gradient of an example: give the module "
                "that it was made of, or freeze it"
            )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(x, UninitializedParameter | UninitializedBuffer):
            raise PrivacyConfigError(
                f"{name} is lazy and has no shape yet: call the model once on made-up examples, and make its optimizer then"
            )
        if x.is_meta:
            raise PrivacyConfigError(
                f"{name} is on the device meta and holds no numbers: make the model on its own device, or call "
                'model.to_empty(device="cpu") and set its weights'
            )
        if x.is_inference():
            raise PrivacyConfigError(
                f"{name} was made under torch.inference_mode, and no step can change it: make it outside"
            )
        require_comparable(name, x)


def require_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, if the loop can train them.

    Raises:
        PrivacyConfigError: a wrapper, a dtype or an optimizer that it cannot train, with what to give instead.
    """
    kind = type(model).__name__
    if kind in WRAPPERS:
        raise PrivacyConfigError(
            f"give the model itself, not {kind}(model): clipped sums are reduced over ranks once a step, with noise, and a "
            "wrapper's own reduction would carry gradients before noise"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        raise PrivacyConfigError(
            f"give torch's own optimizer, not {type(optimizer).__name__}: leave it out of accelerator.prepare, whose gradient "
            "scaling and accumulation know nothing of clipped sums"
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise PrivacyConfigError("the model has no parameter that requires a gradient")
    for name, p in trainable.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise PrivacyConfigError(
                f"{name} is {p.dtype}: noised steps are too small for it; train float32 weights, or low-rank adapters in float32 "
                "next to frozen weights of any dtype. A GradScaler is not needed"
            )
        if (
            p.dtype != next(iter(trainable.values())).dtype
            or p.device != next(iter(trainable.values())).device
        ):
            raise PrivacyConfigError(
                f"{name} has another dtype or device than the parameters before it: give all the same"
            )
    require_held(trainable, optimizer)
    require_settings(optimizer)
    if (kept := _kept(optimizer.state)) and kept != _newly_built(optimizer):
        raise PrivacyConfigError(
            f"the optimizer has taken steps already, or holds what a new one does not ({next(iter(kept))[-1]}), and that may be "
            "gradients without noise: make a new one; the run folder resumes it by itself"
        )
    _clear_gradients(model, optimizer)
    return trainable


def require_held(trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        PrivacyConfigError: the optimizer lacks a trainable parameter, or has one besides.
    """
    names = {id(p): name for name, p in trainable.items()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in names and p.requires_grad]
    missing = names.keys() - {id(p) for p in held}
    if foreign or missing:
        besides = f"holds a parameter of shape {tuple(foreign[0].shape)} besides" if foreign else ""
        what = f"lacks {names[min(missing)]}" if missing else besides
        raise PrivacyConfigError(
            f"the optimizer has to hold the model's trainable parameters, and it {what}: make it of "
            "[p for p in model.parameters() if p.requires_grad]"
        )


def require_apart_in_memory(
    trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Each coordinate of a weight has a place of its own, and fused steps find it.

    Raises:
        PrivacyConfigError: naming the parameter.
    """
    fused = {
        id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]
    }
    for name, p in trainable.items():
        rows = own_rows(p)[0]
        if overlaps(rows):
            raise PrivacyConfigError(
                f"{name} is expanded: several of its numbers share one place in memory, and a step writes to each of them; give "
                "the module a copy, nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))"
            )
        if id(p) in fused and torch.empty_like(rows, device="meta").stride() != rows.stride():
            raise PrivacyConfigError(
                f"{name} is a part of other memory, with gaps that a fused step of torch does not skip: leave fused=True out, or "
                "give the module a dense copy"
            )


def require_settings(
    optimizer: torch.optim.Optimizer, guard: Callable[..., object] | None = None
) -> None:
    """Numbers that are set, as callers and torch's schedulers may at any time, are all that an optimizer has besides its state.

    Raises:
        PrivacyConfigError: naming what else it has.
    """
    hooks = {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    hooks |= {**of_torch._global_optimizer_pre_hooks, **of_torch._global_optimizer_post_hooks}
    foreign = [
        hook
        for hook in hooks.values()
        if hook != guard and not str(hook.__module__).startswith("torch.")
    ]
    step = vars(optimizer).get("step")  # torch's schedulers wrap that of the class
    has_step = step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
    found = ["a hook, or a step(), of somebody else"] if foreign or has_step else []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for place, leaf in _leaves(
        {key: value for key, value in vars(optimizer).items() if key != "state"}
    ).items():
        if (
            isinstance(leaf, Tensor | np.ndarray)
            and leaf.shape.count(1) < len(leaf.shape)
            and id(leaf) not in held
        ):
            found.append(f"more than one number in {'.'.join(map(str, place))}")
        if (
            place[0] == "param_groups"
            and place[-1] != "lr"
            and isinstance(leaf, float)
            and math.isnan(leaf)
        ):
            raise PrivacyConfigError(
                f"the optimizer has NaN in {'.'.join(map(str, place))}: a step would lose the weights"
            )
    if found:
        raise PrivacyConfigError(
            f"the optimizer has {found[0]}, which could bring gradients without noise into the weights: remove it, or do its "
            "work between turns"
        )


def _newly_built(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, ...], object]:
    """What `_kept` says of an optimizer that is made anew of the same parameters; nothing where that fails."""
    known = inspect.signature(type(optimizer)).parameters
    given = {key: value for key, value in optimizer.defaults.items() if key in known}
    twins = {
        p: nn.Parameter(p.detach().clone(), p.requires_grad)
        for g in optimizer.param_groups
        for p in g["params"]
    }
    groups = [
        {**group, "params": [twins[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    try:
        made = type(optimizer)(groups, **given)
    except Exception:  # whatever a constructor raises that wants something else
        return {}
    return _kept({p: made.state.get(twin) for p, twin in twins.items()})


def _kept(state: Mapping[Any, Any]) -> dict[tuple[Any, ...], object]:
    """What lies in an optimizer's state, by place: hashes of tensors, and other values as text."""
    leaves = _leaves(state)
    tensors = {place: value for place, value in leaves.items() if isinstance(value, Tensor)}
    kept: dict[tuple[Any, ...], object] = dict(zip(tensors, fingerprint(tensors), strict=True))
    return kept | {
        place: repr(value)
        for place, value in leaves.items()
        if place not in tensors and value is not None
    }


def _leaves(value: object, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], object]:
    """What lies in containers, by place."""
    children: Any
    if isinstance(value, Mapping):
        children = [
            (id(key) if isinstance(key, Tensor) else str(key), child)
            for key, child in value.items()
        ]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        children = enumerate(value)
    else:
        return {place: value}
    return {
        at: leaf for key, child in children for at, leaf in _leaves(child, (*place, key)).items()
    }


def _marks(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """What changes when a tensor is exchanged, given other memory, or written to in any way but through `.data`."""
    local = {
        name: own_rows(x)[0] for name, x in tensors.items()
    }  # of a detached view the count is that of its tensor
    places = {name: x.data_ptr() if is_strided(x) else 0 for name, x in local.items()}
    return {name: (id(x), places[name], writes_to(local[name])) for name, x in tensors.items()}


def _clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No gradient of anybody stays, frozen parameters included."""
    for p in (
        *model.parameters(),
        *(p for group in optimizer.param_groups for p in group["params"]),
    ):
        p.grad = None


def _strided_as(p: Tensor, values: Any) -> Any:
    """Returns a tensor laid out in memory as a parameter; anything else as it is."""
    is_alike = not isinstance(values, Tensor) or values.stride() == p.stride()
    return values if is_alike else torch.empty_like(p).copy_(values)


def rate_of(value: Any, what: str) -> float:
    """Returns a learning rate as a float: any kind of number from 0 on, one of numpy and a tensor of one number too.

    Args:
        what: begins the error.

    Raises:
        PrivacyConfigError: it is none, and a step with it would be charged for weights that are lost.
    """
    try:
        if isinstance(value, Tensor | np.ndarray):
            kind = str(value.dtype).removeprefix("torch.")
            is_number = value.ndim == 0 and kind.startswith(("float", "bfloat", "int", "uint"))
            is_number &= not (isinstance(value, Tensor) and value.is_meta)
        else:
            is_number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
        rate = (
            float(value.detach() if isinstance(value, Tensor) else value) if is_number else math.nan
        )
    except (
        Exception
    ) as error:  # too large for a float, a NaN that signals, or what a foreign class raises
        raise PrivacyConfigError(
            f"{what} is a {type(value).__name__} that no float holds, and a learning rate is a finite number from 0 on that fits "
            "into float32"
        ) from error
    if not 0 <= rate <= LARGEST_RATE:
        raise PrivacyConfigError(
            f"{what} is {shown(value)}, and a learning rate is a finite number from 0 on that fits into float32, or a function "
            "of the step that returns one; schedulers of torch are for loop.register"
        )
    return abs(rate)  # 0 has no sign


def shown(value: object, most: int | None = 120) -> str:
    """Returns the representation of an object of the caller in one short line; that of its class where it has none."""
    try:
        return " ".join(repr(value).split())[:most]
    except Exception:  # whatever a foreign class raises
        return f"a {type(value).__name__}"


def _probe(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What the optimizer keeps of a parameter: names of tensors of its shape, and numbers, each as it is after a step.

    Found by steps of a copy on copies of the smallest parameters, one for each number of dimensions.

    Raises:
        PrivacyConfigError: it keeps something else, or needs a closure.
    """
    kind = type(optimizer)
    smallest: dict[tuple[int, int], nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in sorted((p for p in group["params"] if p.requires_grad), key=Tensor.numel):
            smallest.setdefault((number, p.dim()), p)
    twins = {place: nn.Parameter(p.detach().clone()) for place, p in smallest.items()}
    for twin in twins.values():
        twin.grad = torch.ones_like(twin)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    for place, p in smallest.items():
        if p in optimizer.state:
            probe.state[twins[place]] = copy.deepcopy(optimizer.state[p])
    probe.param_groups = [
        {**group, "params": [twin for (of, _), twin in twins.items() if of == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    for group in probe.param_groups:
        if "lr" in group:  # as a step will have it
            group["lr"] = 0.001

    def outside() -> dict[str, str]:
        attributes = {
            f"attribute {key}": shown(value, None)
            for key, value in vars(probe).items()
            if key not in OF_TORCH
        }
        return settings(probe) | attributes

    before = outside()
    try:
        kind.step(probe)
    except (
        Exception
    ) as error:  # whatever an optimizer raises that wants a closure, a scaler or a wrapper
        raise PrivacyConfigError(
            f"{kind.__name__} takes no step from gradients alone ({type(error).__name__}: {error}): the loop has no loss to "
            "evaluate again; take SGD, Adam, AdamW or another optimizer whose step() needs no closure"
        ) from error
    after = outside()
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed := [
        *changed,
        *(f"state of {key!r}" for key in probe.state if not isinstance(key, Tensor)),
    ]:
        raise PrivacyConfigError(
            f"{kind.__name__} counts in its {changed[0]}, outside of the state of its parameters, which checkpoints do not hold: "
            "a resumed run would go on otherwise; take SGD, Adam or AdamW"
        )
    moments, numbers = dict[str, None](), dict[str, Any]()
    for twin in twins.values():
        for key, value in probe.state[twin].items():
            is_tensor = isinstance(value, Tensor)
            if (
                is_tensor
                and value.dim() > 0
                and (value.shape, value.dtype) == (twin.shape, twin.dtype)
            ):
                moments[key] = None
            elif (is_tensor and value.numel() == 1) or isinstance(value, int | float):
                numbers[key] = value
            elif value is not None:
                raise PrivacyConfigError(
                    f"{kind.__name__} keeps {key!r} of another shape than its parameter, which checkpoints do not hold: take "
                    "SGD, Adam or AdamW"
                )
    return tuple(moments), {key: value for key, value in numbers.items() if key not in moments}


def settings(optimizer: torch.optim.Optimizer, *, with_rates: bool = True) -> dict[str, str]:
    """Returns an optimizer's class and what stands in its groups besides parameters, as text.

    Args:
        with_rates: else of rates only which groups have one.
    """
    return {"class": type(optimizer).__name__} | {
        f"param_groups[{number}][{key!r}]": (
            shown(
                value.tolist() if isinstance(value, Tensor) and not value.is_meta else value, None
            )
            if with_rates or key != "lr"
            else "a rate"
        )
        for number, group in enumerate(
            getattr(optimizer, "param_groups", [])
        )  # what is no optimizer is refused later
        for key, value in group.items()
        if key != "params"
    }
