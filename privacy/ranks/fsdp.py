"""Models in the shards of torch's FSDP2 (`fully_shard`), and how a check sees them: whole, and without FSDP's hooks.

FSDP gathers weights in module hooks and exchanges parameters while it does. A check exchanges parameters too, calls the model
on one example, and puts back what the model holds; so for its time the model is what it was before `fully_shard`.
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
    """Whether a tensor is a DTensor, without an import of their module, which takes every process a second and 30 MB.

    Only FSDP2 makes DTensors. While nobody has imported their module, there are none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_unit(module: nn.Module) -> bool:
    """Whether somebody called `fully_shard` on this module; also without an import."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def units(model: nn.Module) -> "list[FSDPModule]":
    """The modules on which somebody called `fully_shard`, from the outermost on."""
    return [cast("FSDPModule", module) for module in model.modules() if is_unit(module)]


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, which `fully_shard` replaces by one of its own."""
    kind = type(module)
    return (
        kind.__mro__[kind.__mro__.index(sys.modules["torch.distributed.fsdp"].FSDPModule) + 1]
        if is_unit(module)
        else kind
    )


def put_away(model: nn.Module) -> None:
    """Frees gathered weights, so that parameters are their shards: gathered ones are outdated after a step."""
    for unit in units(model):
        unit.reshard()


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, gathered (collective); any other tensor itself."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def is_of_fsdp(hook: object) -> bool:
    """Whether a hook of a module is one by which FSDP gathers and frees weights."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Sharded parameters are gathered copies inside, and FSDP's hooks are off. Collective; other models stay as they are.

    Memory: one copy of the sharded weights. What is written into the copies is lost.

    Raises:
        PrivacyConfigError: FSDP works in another way than by hooks of modules that are known here.
    """
    put_away(model)
    gathered: dict[Tensor, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    hooks: list[tuple[dict[int, object], dict[int, object]]] = []
    for path, module in model.named_modules():
        tables = module._forward_pre_hooks, module._forward_hooks
        if is_unit(module) and not all(any(map(is_of_fsdp, table.values())) for table in tables):
            raise PrivacyConfigError(
                f"{path or 'the model'} is sharded by fully_shard, and has not the hooks that torch {torch.__version__} gives "
                "such a module: shard it once more, or train it whole"
            )
        hooks += [(table, dict(table)) for table in tables if any(map(is_of_fsdp, table.values()))]
        for name, p in module._parameters.items():
            if p is not None and is_dtensor(p):
                places.append((module, name, cast(nn.Parameter, p)))
                if p not in gathered:
                    gathered[p] = nn.Parameter(full(p).clone(), requires_grad=p.requires_grad)
    try:
        for module, name, p in places:
            module._parameters[name] = gathered[p]
        for table, _ in hooks:
            for key in [key for key, hook in table.items() if is_of_fsdp(hook)]:
                del table[key]
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p
        for table, content in hooks:
            table.clear()
            table.update(content)


def switch_reduction(model: nn.Module, *, on: bool) -> None:
    """Whether FSDP reduces the gradients of a backward; no private step has any that it could see."""
    for unit in units(model):
        unit.set_requires_gradient_sync(on, recurse=False)
