"""Which shards a loop of one's own can train: those of `fully_shard`, in rows over all ranks."""

import torch
from torch import nn

from ..clipping.sharded import is_dtensor, is_unit, put_away, units
from ..errors import PrivacyConfigError
from ..step import collectives


def switch_reduction(model: nn.Module, *, on: bool) -> None:
    """Whether FSDP reduces the gradients of a backward; no private step has any that it could see."""
    for unit in units(model):
        unit.set_requires_gradient_sync(on, recurse=False)


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
    _require_gathered_as_they_are(model)
    return True


def _require_gathered_as_they_are(model: nn.Module) -> None:
    """Every shard is one of FSDP's, and is gathered in its own dtype; one unit of FSDP after the other."""
    sharded = {name: p.dtype for name, p in model.named_parameters() if is_dtensor(p)}
    gathered: dict[str, torch.dtype] = {}
    for unit in units(model):
        unit.unshard()
        gathered |= {name: p.dtype for name, p in model.named_parameters() if not is_dtensor(p)}
        unit.reshard()
    for name, dtype in sharded.items():
        if name not in gathered:
            raise PrivacyConfigError(
                f"{name} is sharded by something else than fully_shard, such as tensor parallelism: give a model without it"
            )
        if gathered[name] != dtype:
            raise PrivacyConfigError(
                f"{name} is {dtype} and computes in {gathered[name]}: call fully_shard without mp_policy; torch.autocast in the "
                "loss computes in bfloat16"
            )
