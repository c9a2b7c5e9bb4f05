"""What a loop's own program must leave alone: the weights, the optimizer and its state, frozen weights, gradients.

`WatchedEngine` takes the steps of a `LoopEngine`. Anything else that could bring private data into the weights is refused: a step
that is not this engine's, a gradient of the user's own backward, weights or an optimizer's state that changed meanwhile.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import optimizer as of_torch

from ..errors import PrivacyConfigError
from ..gradients.module_state import writes_to
from ..ranks import collectives
from ..ranks.engine import GradShard, Piece
from ..ranks.fsdp import is_dtensor, is_unit, put_away, switch_reduction, units
from ..ranks.row_shards import own_rows
from ..step.optimizer_state import leaves_of, probe, settings
from ..step.own_engine import LoopEngine
from .fingerprints import fingerprint, fixed_tensors, is_strided, overlaps, require_comparable

WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)


class WatchedEngine(LoopEngine):
    """A `LoopEngine` that knows what it left behind, and refuses to go on from anything else."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sets_rate: bool = False
    ) -> None:
        put_away(model)
        trainable = require_plain(model, optimizer)
        require_rows(model)
        require_apart_in_memory(trainable, optimizer)
        super().__init__(model, optimizer, sets_rate=sets_rate)
        self._is_stepping = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_foreign_step)
        self._settled = settings(optimizer, with_rates=False)
        fixed = fixed_tensors(model)
        self._fixed = dict(
            zip(fixed, zip(marks_of(fixed).values(), fingerprint(fixed), strict=True), strict=True)
        )
        self._remember()

    def _remember(self) -> None:
        """The weights and the optimizer's state are as they should be."""
        self._seen, self._left = fingerprint(self.trainable), kept_state(self.optimizer.state)

    def release(self) -> None:
        """Gives model and optimizer back."""
        self._hook.remove()
        super().release()

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Takes one step of the optimizer, and remembers what it left."""
        self._is_stepping = True
        try:
            super().step(shards, lr=lr)
        finally:
            self._is_stepping = False
        self._remember()

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Takes all coordinates that this rank holds, and remembers them."""
        super().load_state(states, num_steps=num_steps)
        self._remember()

    def require_untouched(self) -> object:
        """Before a step: model and optimizer are as this engine has put them; returns what ranks have to have in common.

        Raises:
            PrivacyConfigError: naming what changed.
        """
        self._require_no_gradient()  # also of gathered weights, which are put away now
        put_away(self.module)
        switch_reduction(self.module, on=False)
        now = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if now.keys() != self.trainable.keys() or any(
            now[name] is not p for name, p in self.trainable.items()
        ):
            raise PrivacyConfigError(
                "parameters were frozen, unfrozen or exchanged since the loop was made: make a new PrivateLoop with another run "
                "folder"
            )
        # Frozen weights and buffers are hashed where torch has seen a write or an exchange.
        fixed = fixed_tensors(self.module)
        marks, changed = marks_of(fixed), sorted(fixed.keys() ^ self._fixed.keys())
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
        now_is = self.rates if self.sets_rate else self.read_rates()
        if self.is_resumed and not self.is_scheduled and now_is != self.rates:
            collectives.say(  # schedulers of torch begin again with their program
                f"the run goes on with the learning rate {now_is}, and its last step took {self.rates}; give a scheduler of "
                "torch to loop.register(scheduler), which forwards it"
            )
        return in_common

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
        now = fingerprint(self.trainable)
        if now != self._seen:
            raise PrivacyConfigError(
                "the weights changed since the loop's last step: something else writes to them (another optimizer, another "
                "loop, a loaded checkpoint), and the ledger would not know what it spent; let the loop alone change them"
            )
        require_settings(self.optimizer, self._refuse_foreign_step)
        require_held(self.trainable, self.optimizer)
        require_apart_in_memory(self.trainable, self.optimizer)
        if (state := kept_state(self.optimizer.state)) != self._left:
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
            moments, numbers = probe(self.optimizer, self.trainable)
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
    if (kept := kept_state(optimizer.state)) and kept != newly_built(optimizer):
        raise PrivacyConfigError(
            f"the optimizer has taken steps already, or holds what a new one does not ({next(iter(kept))[-1]}), and that may be "
            "gradients without noise: make a new one; the run folder resumes it by itself"
        )
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
    for place, leaf in leaves_of(
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


def newly_built(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, ...], object]:
    """What `kept_state` says of an optimizer that is made anew of the same parameters; nothing where that fails."""
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
    return kept_state({p: made.state.get(twin) for p, twin in twins.items()})


def marks_of(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """What changes when a tensor is exchanged, given other memory, or written to in any way but through `.data`."""
    local = {
        name: own_rows(x)[0] for name, x in tensors.items()
    }  # of a detached view the count is that of its tensor
    places = {name: x.data_ptr() if is_strided(x) else 0 for name, x in local.items()}
    return {name: (id(x), places[name], writes_to(local[name])) for name, x in tensors.items()}


def require_rows(model: nn.Module) -> bool:
    """Whether the model is in shards, after a look that the loop can train them. Collective where it is.

    Raises:
        PrivacyConfigError: other shards, with what to give instead.
    """
    put_away(model)
    parameters = dict(model.named_parameters())
    sharded = {name: p for name, p in parameters.items() if is_dtensor(p)}
    if not sharded:
        return False
    ranks = list(range(collectives.world_size()))
    for name, p in parameters.items():
        if not is_dtensor(p):
            if p.requires_grad:
                raise PrivacyConfigError(
                    f"{name} is trained and whole, and other parameters are sharded: call fully_shard(model) on the model "
                    "itself, after its blocks and without ignored_params"
                )
            continue
        mesh = p.device_mesh
        if mesh.mesh.tolist() != ranks:
            raise PrivacyConfigError(
                f"{name} is sharded over a mesh of ranks {mesh.mesh.tolist()}, and a loop takes all ranks in one dimension, "
                f"{ranks}: call fully_shard without mesh=, without tensor parallelism; the trainer has replicas (--engine fsdp)"
            )
        if not p.placements[0].is_shard(0):
            raise PrivacyConfigError(
                f"{name} is placed as {p.placements[0]}, and a loop takes rows: call fully_shard without shard_placement_fn"
            )
        if p.device.type != mesh.device_type or p.to_local().device.type != mesh.device_type:
            raise PrivacyConfigError(
                f"{name} waits on {p.to_local().device.type} for a step on {mesh.device_type}: call fully_shard without "
                "offload_policy; the trainer offloads (--engine fsdp)"
            )
    if not is_unit(model):
        raise PrivacyConfigError(
            f"{next(iter(sharded))} is sharded, and the model that holds it is not: call fully_shard(model) on the model itself, "
            "after its blocks"
        )
    # Every shard is one of FSDP's, and is gathered in its own dtype; one unit of FSDP after the other.
    gathered: dict[str, torch.dtype] = {}
    for unit in units(model):
        unit.unshard()
        gathered |= {name: p.dtype for name, p in model.named_parameters() if not is_dtensor(p)}
        unit.reshard()
    for name, shard in sharded.items():
        if name not in gathered:
            raise PrivacyConfigError(
                f"{name} is sharded by something else than fully_shard, such as tensor parallelism: give a model without it"
            )
        if gathered[name] != shard.dtype:
            raise PrivacyConfigError(
                f"{name} is {shard.dtype} and computes in {gathered[name]}: call fully_shard without mp_policy; torch.autocast "
                "in the loss computes in bfloat16"
            )
    return True


def kept_state(state: Mapping[Any, Any]) -> dict[tuple[Any, ...], object]:
    """What lies in an optimizer's state, by place: hashes of tensors, and other values as text."""
    leaves = leaves_of(state)
    tensors = {place: value for place, value in leaves.items() if isinstance(value, Tensor)}
    kept: dict[tuple[Any, ...], object] = dict(zip(tensors, fingerprint(tensors), strict=True))
    return kept | {
        place: repr(value)
        for place, value in leaves.items()
        if place not in tensors and value is not None
    }
