"""The planner's part of `launch_scripts/plan.py`: its arguments, and its call."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan
    from trainer.config.recipe import RunConfig
    from trainer.planner.batches import Examples

ENGINES = ("deepspeed", "fsdp", "fairscale", "local")
ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The group of options that plan memory and time; all of them need --recipe."""
    group = parser.add_argument_group("memory and time of a recipe")
    group.add_argument(
        "--ds_config", type=Path, metavar="JSON", help="machine settings, e.g. ds_configs/zero3_bf16.json"
    )
    group.add_argument("--world_size", type=int, metavar="W", help="ranks, one per accelerator; default 1")
    group.add_argument("--gpu", metavar="NAME", help="v100-32gb, a100-40gb, a100-80gb, h100-80gb, h200-141gb or cpu")
    group.add_argument("--engine", choices=ENGINES, help="how to shard; default deepspeed")
    group.add_argument(
        "--efficiency", type=float, metavar="E", help="share of the peak FLOP/s that is reached; default 0.35"
    )
    group.add_argument("--gpus_per_node", type=int, metavar="G", help="default: of the maker's reference system")
    group.add_argument("--network_gbits", type=float, metavar="X", help="Gb/s per GPU to other nodes; default likewise")
    group.add_argument("--bytes_per_example", type=float, metavar="N", help="default: the index's mean, else 50,000")


_OPTIONS = ("world_size", "gpu", "engine", "efficiency", "gpus_per_node", "network_gbits", "bytes_per_example")


def is_wanted(args: argparse.Namespace) -> bool:
    """Whether memory and time are to be planned.

    Raises:
        ConfigError: an option of the group without --ds_config, or --ds_config without --recipe.
    """
    given = next((name for name in _OPTIONS if getattr(args, name) is not None), None)
    if args.ds_config is None and given is not None:
        raise ConfigError(f"--{given} plans memory and time: give --ds_config and --recipe too")
    if args.ds_config is not None and args.recipe is None:
        raise ConfigError("--ds_config plans memory and time of a recipe: give --recipe")
    return args.ds_config is not None


def known_examples(args: argparse.Namespace, config: "RunConfig") -> "Examples":
    """How many examples there are, and how long; see `trainer.planner.batches`."""
    from trainer.planner.batches import examples

    return examples(config, ROOT, args.bytes_per_example)


def resources(
    args: argparse.Namespace, config: "RunConfig", examples: "Examples", plan: "PrivacyPlan | None"
) -> dict[str, Any]:
    """See `trainer.planner.resources.plan_resources`.

    Raises:
        ConfigError: a value out of range, an unknown accelerator, or what `plan_resources` refuses.
    """
    from trainer.config.machine import load_machine_settings
    from trainer.planner.hardware import find_gpu
    from trainer.planner.resources import EFFICIENCY, Wanted, plan_resources

    for name in ("gpus_per_node", "network_gbits", "bytes_per_example"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value}; it must be positive")
    world_size = 1 if args.world_size is None else args.world_size
    if world_size < 1:
        raise ConfigError(f"--world_size is {world_size}; it must be at least 1")
    efficiency = EFFICIENCY if args.efficiency is None else args.efficiency
    if not 0 < efficiency <= 1:
        raise ConfigError(f"--efficiency is {efficiency}; it is a share of the peak, above 0 and at most 1")
    wanted = Wanted(
        engine=args.engine or "deepspeed",
        world_size=world_size,
        gpu=None if args.gpu is None else find_gpu(args.gpu),
        efficiency=efficiency,
        gpus_per_node=args.gpus_per_node,
        network_bandwidth=None if args.network_gbits is None else args.network_gbits * 1e9 / 8,
    )
    return plan_resources(config, load_machine_settings(args.ds_config), wanted, examples, plan, ROOT)
