"""Models in the shards of torch's FSDP2 (`fully_shard`), and their whole form for a check.

FSDP gathers weights in module hooks and exchanges parameters meanwhile. A check exchanges
parameters, too, calls the model on one example, and restores the model; so during the check the
model is as it was before `fully_shard`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Returns whether a tensor is a DTensor, without importing their module.

    The import would take every process a second and 30 MB. Only FSDP2 makes DTensors: while their
    module is not imported, none exists.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_unit(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was called on this module, without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def units(model: nn.Module) -> "list[FSDPModule]":
    """Returns the modules on which `fully_shard` was called, from the outermost on."""
    return [cast("FSDPModule", module) for module in model.modules() if is_unit(module)]


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module before `fully_shard` replaced it by one of its own."""
    kind = type(module)
    if not is_unit(module):
        return kind
    bases = kind.__mro__
    return bases[bases.index(sys.modules["torch.distributed.fsdp"].FSDPModule) + 1]


def put_away(model: nn.Module) -> None:
    """Frees gathered weights, which a step outdates, so that parameters are their shards."""
    for unit in units(model):
        unit.reshard()


def full(tensor: Tensor) -> Tensor:
    """Gathers a whole DTensor (collective); returns any other tensor detached."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def is_of_fsdp(hook: object) -> bool:
    """Returns whether a hook of a module is FSDP's, which gathers and frees weights."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Yields while sharded parameters are gathered copies and FSDP's hooks are off. Collective.

    Other models stay as they are. Memory: one copy of the sharded weights. Changes to the copies
    are lost.

    Raises:
        PrivacyConfigError: FSDP works in another way than by the hooks that are recognised here.
    """
    put_away(model)
    copies: dict[Tensor, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    hooks: list[tuple[dict[int, object], dict[int, object]]] = []
    for path, module in model.named_modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            if any(map(is_of_fsdp, table.values())):
                hooks.append((table, dict(table)))
            elif is_unit(module):
                raise PrivacyConfigError(
                    f"{path or 'the model'} is sharded by fully_shard, and has not the hooks that "
                    f"torch {torch.__version__} gives such a module: shard it once more, or train "
                    "it whole"
                )
        for name, p in module._parameters.items():
            if p is not None and is_dtensor(p):
                places.append((module, name, cast(nn.Parameter, p)))
                if p not in copies:
                    copies[p] = nn.Parameter(full(p).clone(), requires_grad=p.requires_grad)
    try:
        for module, name, p in places:
            module._parameters[name] = copies[p]
        for table, content in hooks:
            for key, hook in content.items():
                if is_of_fsdp(hook):
                    del table[key]
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p
        for table, content in hooks:
            table.clear()
            table.update(content)


def switch_reduction(model: nn.Module, *, on: bool) -> None:
    """Switches FSDP's reduction of gradients; a private step leaves none that FSDP could see."""
    for unit in units(model):
        unit.set_requires_gradient_sync(on, recurse=False)
