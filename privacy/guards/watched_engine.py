"""Refuses a loop whose own program changes weights, the optimizer's state or gradients.

Each such change could bring private data into the weights without noise. `WatchedEngine` takes
the steps of a `LoopEngine` and compares hashes before the next one.
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
from ..step.loop_engine import LoopEngine
from ..step.optimizer_state import leaves_of, probe, settings
from .fingerprints import fingerprint, fixed_tensors, is_strided, overlaps, require_comparable

WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)


class WatchedEngine(LoopEngine):
    """A `LoopEngine` that remembers its weights and refuses to go on from others."""

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
        self._tried_settings = settings(optimizer, with_rates=False)
        fixed = fixed_tensors(model)
        records = zip(marks_of(fixed).values(), fingerprint(fixed), strict=True)
        self._fixed = dict(zip(fixed, records, strict=True))
        self._remember()

    def _remember(self) -> None:
        """Records the weights and the optimizer's state that this engine has made."""
        self._weights = fingerprint(self.trainable)
        self._state = kept_state(self.optimizer.state)

    def release(self) -> None:
        """Gives model and optimizer back."""
        self._hook.remove()
        super().release()

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Takes one step of the optimizer, and records the weights after it."""
        self._is_stepping = True
        try:
            super().step(shards, lr=lr)
        finally:
            self._is_stepping = False
        self._remember()

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Takes all coordinates that this rank holds, and records them."""
        super().load_state(states, num_steps=num_steps)
        self._remember()

    def require_untouched(self) -> object:
        """Refuses a step from a model or an optimizer that something else has changed.

        Returns:
            The object that ranks must have in common.

        Raises:
            PrivacyConfigError: naming the change.
        """
        # Gathered weights may have gradients, too, and are put away next.
        self._require_no_gradient()
        put_away(self.module)
        switch_reduction(self.module, on=False)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        is_same = trained.keys() == self.trainable.keys()
        if not is_same or any(trained[name] is not p for name, p in self.trainable.items()):
            raise PrivacyConfigError(
                "parameters were frozen, unfrozen or exchanged since the loop was made: make a "
                "new PrivateLoop with another run folder"
            )
        # Hashing takes time, so frozen weights and buffers are hashed only where torch has seen a
        # write or an exchange.
        fixed = fixed_tensors(self.module)
        marks = marks_of(fixed)
        changed = sorted(fixed.keys() ^ self._fixed.keys())
        if not changed:
            written = {name: x for name, x in fixed.items() if marks[name] != self._fixed[name][0]}
            hashes = dict(zip(written, fingerprint(written), strict=True))
            changed = [name for name, digest in hashes.items() if digest != self._fixed[name][1]]
        if changed:
            raise PrivacyConfigError(
                f"frozen weights or buffers changed since the loop was made ({changed[0]}): every "
                "gradient goes through them, so they may hold nothing of private data, and no "
                "checkpoint keeps them; change a copy of the model"
            )
        self._fixed |= {name: (marks[name], digest) for name, digest in hashes.items()}
        common_state = self.require_all_noised()
        rates = self.rates if self.sets_rate else self.read_rates()
        if self.is_resumed and not self.is_scheduled and rates != self.rates:
            # Schedulers of torch begin again with their program.
            collectives.say(
                f"the run goes on with the learning rate {rates}, and its last step took "
                f"{self.rates}; give a scheduler of torch to loop.register(scheduler), which "
                "forwards it"
            )
        return common_state

    def require_all_noised(self) -> object:
        """Refuses weights or gradients that anything but the loop's own steps has changed.

        Returns:
            The same as `require_unchanged`.

        Raises:
            PrivacyConfigError: naming the change.
        """
        self._require_no_gradient()
        put_away(self.module)
        self._require_no_gradient()
        return self.require_unchanged()

    def _require_no_gradient(self) -> None:
        names = [name for name, p in self.module.named_parameters() if p.grad is not None]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if names or any(p.grad is not None for p in parameters):
            place = names[0] if names else "the optimizer"
            raise PrivacyConfigError(
                f"{place} has a gradient that is not the loop's: a loss.backward() of your own "
                "would bring private data into the weights without noise; remove it "
                "(torch.no_grad() for evaluation), and set the gradient to None"
            )

    def require_unchanged(self) -> object:
        """Refuses weights, a state or an optimizer other than those of the last step.

        Returns:
            The fingerprint of the weights, which ranks with the same weights have in common. Ranks
            that hold shards have only the settings of their optimizers in common, and get those.

        Raises:
            PrivacyConfigError: something else wrote to them.
        """
        put_away(self.module)
        weights = fingerprint(self.trainable)
        if weights != self._weights:
            raise PrivacyConfigError(
                "the weights changed since the loop's last step: something else writes to them "
                "(another optimizer, another loop, a loaded checkpoint), and the ledger would not "
                "know what it spent; let the loop alone change them"
            )
        require_settings(self.optimizer, self._refuse_foreign_step)
        require_held(self.trainable, self.optimizer)
        require_apart_in_memory(self.trainable, self.optimizer)
        state = kept_state(self.optimizer.state)
        if state != self._state:
            places = {**state, **self._state}
            place = next(key for key in places if state.get(key) != self._state.get(key))
            raise PrivacyConfigError(
                f"the optimizer's state ({place[-1]}) changed since the loop's last step, and may "
                "hold gradients without noise: let the loop alone change it; a resume needs no "
                "load_state_dict"
            )
        self._require_steps()
        return weights if self.replicated else settings(self.optimizer)

    def _require_steps(self) -> None:
        """Tries changed settings on a copy, before a charge for a step that fails.

        Raises:
            PrivacyConfigError: the optimizer takes no step with them, or would keep a state that
                checkpoints have no place for.
        """
        new_settings = settings(self.optimizer, with_rates=False)
        if new_settings == self._tried_settings:
            return
        tried_settings = self._tried_settings
        names = {**new_settings, **tried_settings}
        setting = next(key for key in names if new_settings.get(key) != tried_settings.get(key))
        subject = f"{setting} of the optimizer was changed, and {type(self.optimizer).__name__}"
        try:
            moments, numbers = probe(self.optimizer, self.trainable)
        except PrivacyConfigError as error:
            cause = error.__cause__ or error
            message = f"{type(cause).__name__}: {cause}"
            reason = " ".join(message.split())[:200]
            raise PrivacyConfigError(
                f"{subject} takes no step with it ({reason}): put it back"
            ) from error
        new_names = {*moments, *numbers} - {*self.moments, *self._numbers}
        if new_names:
            raise PrivacyConfigError(
                f"{subject} keeps {min(new_names)!r} with it, which it did not when the loop was "
                "made: put it back, or set it before the loop is made, in another run folder"
            )
        self._tried_settings = new_settings

    def _refuse_foreign_step(self, *_: object) -> None:
        """Refuses a foreign step before it changes anything.

        After the last step of the loop no other check of the weights follows.
        """
        if not self._is_stepping:
            raise PrivacyConfigError(
                "optimizer.step() was called by hand: the private loop takes the steps, and no "
                "other one is noised or charged; remove the call, or give it an optimizer of its "
                "own"
            )


def require_alike(check: Callable[[], object]) -> None:
    """Runs the check on every rank, and raises on all if one fails. Collective.

    Raises:
        PrivacyConfigError: the check raises it on one rank, or returns other objects on others.
    """
    states = collectives.refuse_together(check)
    if any(state != states[0] for state in states):
        raise PrivacyConfigError(
            "ranks hold different weights: was their optimizer or learning rate set differently "
            "between two steps? Make the loop again on all ranks, and it goes on where it was saved"
        )


def require_model(model: object) -> None:
    """Refuses an object that is no model, or a model whose weights hold no numbers to change.

    Raises:
        PrivacyConfigError: with the way out.
    """
    if not isinstance(model, nn.Module):
        raise PrivacyConfigError(f"give a model, a torch.nn.Module, not a {type(model).__name__}")
    for path, module in model.named_modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if is_scripted and any(p.requires_grad for p in module.parameters()):
            raise PrivacyConfigError(
                f"{path or 'the model'} is compiled by torch.jit, whose layers show no gradient "
                "of an example: give the module that it was made of, or freeze it"
            )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(x, UninitializedParameter | UninitializedBuffer):
            raise PrivacyConfigError(
                f"{name} is lazy and has no shape yet: call the model once on made-up examples, "
                "and make its optimizer then"
            )
        if x.is_meta:
            raise PrivacyConfigError(
                f"{name} is on the device meta and holds no numbers: make the model on its own "
                'device, or call model.to_empty(device="cpu") and set its weights'
            )
        if x.is_inference():
            raise PrivacyConfigError(
                f"{name} was made under torch.inference_mode, and no step can change it: make it "
                "outside"
            )
        require_comparable(name, x)


def require_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters by name, if the loop can train them.

    Raises:
        PrivacyConfigError: a wrapper, a dtype or an optimizer that the loop cannot train, with the
            way out.
    """
    kind = type(model).__name__
    if kind in WRAPPERS:
        raise PrivacyConfigError(
            f"give the model itself, not {kind}(model): clipped sums are reduced over ranks once "
            "a step, with noise, and a wrapper's own reduction would carry gradients before noise"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        raise PrivacyConfigError(
            f"give torch's own optimizer, not {type(optimizer).__name__}: leave it out of "
            "accelerator.prepare, whose gradient scaling and accumulation know nothing of clipped "
            "sums"
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise PrivacyConfigError("the model has no parameter that requires a gradient")
    first = next(iter(trainable.values()))
    for name, p in trainable.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise PrivacyConfigError(
                f"{name} is {p.dtype}: noised steps are too small for it; train float32 weights, "
                "or low-rank adapters in float32 next to frozen weights of any dtype. A "
                "GradScaler is not needed"
            )
        if p.dtype != first.dtype or p.device != first.device:
            raise PrivacyConfigError(
                f"{name} has another dtype or device than the parameters before it: give all the "
                "same"
            )
    require_held(trainable, optimizer)
    require_settings(optimizer)
    state = kept_state(optimizer.state)
    if state and state != newly_built(optimizer):
        place = next(iter(state))
        raise PrivacyConfigError(
            "the optimizer has taken steps already, or holds what a new one does not "
            f"({place[-1]}), and that may be gradients without noise: make a new one; the run "
            "folder resumes it by itself"
        )
    return trainable


def require_held(trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose trained parameters are not exactly these.

    Raises:
        PrivacyConfigError: the optimizer lacks a trainable parameter, or has one besides.
    """
    names = {id(p): name for name, p in trainable.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in parameters if id(p) not in names and p.requires_grad]
    missing = names.keys() - {id(p) for p in parameters}
    if not foreign and not missing:
        return
    if missing:
        difference = f"lacks {names[min(missing)]}"
    else:
        difference = f"holds a parameter of shape {tuple(foreign[0].shape)} besides"
    raise PrivacyConfigError(
        f"the optimizer has to hold the model's trainable parameters, and it {difference}: make "
        "it of [p for p in model.parameters() if p.requires_grad]"
    )


def require_apart_in_memory(
    trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Refuses weights whose coordinates share memory, or have gaps that fused steps do not skip.

    Raises:
        PrivacyConfigError: naming the parameter.
    """
    fused_ids: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("fused"):
            fused_ids |= {id(p) for p in group["params"]}
    for name, p in trainable.items():
        rows = own_rows(p)[0]
        if overlaps(rows):
            raise PrivacyConfigError(
                f"{name} is expanded: several of its numbers share one place in memory, and a "
                "step writes to each of them; give the module a copy, "
                "nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))"
            )
        if id(p) not in fused_ids:
            continue
        dense_strides = torch.empty_like(rows, device="meta").stride()
        if dense_strides != rows.stride():
            raise PrivacyConfigError(
                f"{name} is a part of other memory, with gaps that a fused step of torch does not "
                "skip: leave fused=True out, or give the module a dense copy"
            )


def require_settings(
    optimizer: torch.optim.Optimizer, guard: Callable[..., object] | None = None
) -> None:
    """Refuses an optimizer that has more than numbers besides its state.

    Callers and torch's schedulers may set such numbers at any time.

    Args:
        guard: a hook that is allowed.

    Raises:
        PrivacyConfigError: naming the foreign part.
    """
    hooks = {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    hooks |= {**of_torch._global_optimizer_pre_hooks, **of_torch._global_optimizer_post_hooks}
    foreign_hooks = []
    for hook in hooks.values():
        is_of_torch = str(hook.__module__).startswith("torch.")
        if hook != guard and not is_of_torch:
            foreign_hooks.append(hook)
    # Schedulers of torch wrap the step of the class.
    step = vars(optimizer).get("step")
    is_foreign_step = step is not None and (
        getattr(step, "__wrapped__", None) is not type(optimizer).step
    )
    foreign_parts: list[str] = []
    if foreign_hooks or is_foreign_step:
        foreign_parts.append("a hook, or a step(), of somebody else")
    parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    attributes = {name: x for name, x in vars(optimizer).items() if name != "state"}
    for place, leaf in leaves_of(attributes).items():
        path = ".".join(map(str, place))
        if isinstance(leaf, Tensor | np.ndarray) and id(leaf) not in parameter_ids:
            has_many_numbers = leaf.shape.count(1) < len(leaf.shape)
            if has_many_numbers:
                foreign_parts.append(f"more than one number in {path}")
        is_setting = place[0] == "param_groups" and place[-1] != "lr"
        if is_setting and isinstance(leaf, float) and math.isnan(leaf):
            raise PrivacyConfigError(
                f"the optimizer has NaN in {path}: a step would lose the weights"
            )
    if foreign_parts:
        raise PrivacyConfigError(
            f"the optimizer has {foreign_parts[0]}, which could bring gradients without noise "
            "into the weights: remove it, or do its work between turns"
        )


def newly_built(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, ...], object]:
    """Returns `kept_state` of a new optimizer of the same parameters, or {} if that fails."""
    parameter_names = inspect.signature(type(optimizer)).parameters
    arguments = {name: x for name, x in optimizer.defaults.items() if name in parameter_names}
    copies: dict[nn.Parameter, nn.Parameter] = {}
    groups = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            copies[p] = nn.Parameter(p.detach().clone(), p.requires_grad)
        groups.append({**group, "params": [copies[p] for p in group["params"]]})
    try:
        twin = type(optimizer)(groups, **arguments)
    except Exception:
        # A foreign constructor with other arguments may raise any exception.
        return {}
    return kept_state({p: twin.state.get(copy) for p, copy in copies.items()})


def marks_of(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Returns marks that change when a tensor is exchanged, moved in memory or written to.

    Writes through `.data` leave them as they are.
    """
    marks: dict[str, object] = {}
    for name, x in tensors.items():
        # The count of writes of a detached view is that of its tensor.
        rows = own_rows(x)[0]
        address = rows.data_ptr() if is_strided(rows) else 0
        marks[name] = (id(x), address, writes_to(rows))
    return marks


def require_rows(model: nn.Module) -> bool:
    """Returns whether the model is in shards, which the loop can train. Collective for shards.

    Raises:
        PrivacyConfigError: other shards, with the way out.
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
                    f"{name} is trained and whole, and other parameters are sharded: call "
                    "fully_shard(model) on the model itself, after its blocks and without "
                    "ignored_params"
                )
            continue
        mesh = p.device_mesh
        ranks_of_mesh = mesh.mesh.tolist()
        if ranks_of_mesh != ranks:
            raise PrivacyConfigError(
                f"{name} is sharded over a mesh of ranks {ranks_of_mesh}, and a loop takes all "
                f"ranks in one dimension, {ranks}: call fully_shard without mesh=, without tensor "
                "parallelism; the trainer has replicas (--engine fsdp)"
            )
        placement = p.placements[0]
        if not placement.is_shard(0):
            raise PrivacyConfigError(
                f"{name} is placed as {placement}, and a loop takes rows: call fully_shard "
                "without shard_placement_fn"
            )
        local_device = p.to_local().device.type
        if p.device.type != mesh.device_type or local_device != mesh.device_type:
            raise PrivacyConfigError(
                f"{name} waits on {local_device} for a step on {mesh.device_type}: call "
                "fully_shard without offload_policy; the trainer offloads (--engine fsdp)"
            )
    if not is_unit(model):
        raise PrivacyConfigError(
            f"{next(iter(sharded))} is sharded, and the model that holds it is not: call "
            "fully_shard(model) on the model itself, after its blocks"
        )
    # Every shard must be FSDP's and be gathered in its own dtype. Units are gathered one after
    # the other.
    gathered: dict[str, torch.dtype] = {}
    for unit in units(model):
        unit.unshard()
        gathered |= {name: p.dtype for name, p in model.named_parameters() if not is_dtensor(p)}
        unit.reshard()
    for name, shard in sharded.items():
        if name not in gathered:
            raise PrivacyConfigError(
                f"{name} is sharded by something else than fully_shard, such as tensor "
                "parallelism: give a model without it"
            )
        if gathered[name] != shard.dtype:
            raise PrivacyConfigError(
                f"{name} is {shard.dtype} and computes in {gathered[name]}: call fully_shard "
                "without mp_policy; torch.autocast in the loss computes in bfloat16"
            )
    return True


def kept_state(state: Mapping[Any, Any]) -> dict[tuple[Any, ...], object]:
    """Returns an optimizer's state by place: hashes of tensors, and other leaves as text."""
    leaves = leaves_of(state)
    tensors = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, Tensor)}
    contents: dict[tuple[Any, ...], object] = {}
    contents |= zip(tensors, fingerprint(tensors), strict=True)
    for place, leaf in leaves.items():
        if place not in tensors and leaf is not None:
            contents[place] = repr(leaf)
    return contents
