"""Epsilon or noise multiplier, memory and time of a planned run, before any data is touched.

python launch_scripts/plan.py --num_examples 233000000 --expected_batch_size 1310720 --num_steps 5708 \
    --noise_multiplier 0.728 --delta 4.2918e-9 [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml [section.key=value ...] [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml --ds_config ds_configs/zero3_bf16.json --world_size 128 \
    --gpu a100-80gb [--json]
The first computes for exactly these numbers: no cap (--cap) and no reserve for crashes (--reserve K) unless asked for. The
second gives what training with the recipe would claim: with cap, reserve and the slack for rounding in the clipping. The third
adds memory per rank, the largest micro-batch, FLOP, time, traffic and reads (docs/planning.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from trainer.config.cli import Parser, run_command
from trainer.errors import ConfigError
from trainer.planner.privacy import summarise

if TYPE_CHECKING:
    from trainer.config.recipe import RunConfig
    from trainer.planner.batches import Examples

ROOT = Path(__file__).resolve().parents[1]
_RESOURCE_OPTIONS = ("world_size", "gpu", "engine", "efficiency", "gpus_per_node", "network_gbits", "bytes_per_example")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, metavar="TOML", help="plan of a recipe, instead of the numbers below")
    parser.add_argument("--num_examples", type=int, metavar="N", help="examples in the data set")
    parser.add_argument("--expected_batch_size", type=int, metavar="B", help="expected logical batch")
    parser.add_argument("--num_steps", type=int, metavar="T", help="optimizer steps")
    parser.add_argument("--noise_multiplier", type=float, metavar="S", help="sigma; epsilon is computed")
    parser.add_argument("--target_epsilon", type=float, metavar="E", help="epsilon; the smallest sigma is computed")
    parser.add_argument("--delta", type=float, metavar="D", help="default 1 / (2 N)")
    parser.add_argument("--cap", action="store_true", help="cut batches at B + 8 sqrt(B) and charge the truncation")
    parser.add_argument("--reserve", type=int, metavar="K", help="further attempts that crashes may use up; default 0")
    parser.add_argument(
        "--max_examples_per_owner", type=int, metavar="K", help="also the epsilon of an owner of K examples"
    )
    parser.add_argument("--allow_small_noise", action="store_true", help="allow a noise multiplier below 0.3")
    parser.add_argument("--no_extras", action="store_true", help="the claim and its cross-checks only (faster)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    group = parser.add_argument_group("memory and time of a recipe")
    group.add_argument(
        "--ds_config", type=Path, metavar="JSON", help="machine settings, e.g. ds_configs/zero3_bf16.json"
    )
    group.add_argument("--world_size", type=int, metavar="W", help="ranks, one per accelerator; default 1")
    group.add_argument("--gpu", metavar="NAME", help="v100-32gb, a100-40gb, a100-80gb, h100-80gb, h200-141gb or cpu")
    group.add_argument(
        "--engine", choices=("deepspeed", "fsdp", "fairscale", "local"), help="how to shard; default deepspeed"
    )
    group.add_argument(
        "--efficiency", type=float, metavar="E", help="share of the peak FLOP/s that is reached; default 0.35"
    )
    group.add_argument("--gpus_per_node", type=int, metavar="G", help="default: of the maker's reference system")
    group.add_argument("--network_gbits", type=float, metavar="X", help="Gb/s per GPU to other nodes; default likewise")
    group.add_argument("--bytes_per_example", type=float, metavar="N", help="default: the index's mean, else 50,000")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes of the recipe")
    return parser.parse_intermixed_args(arguments)


_RECIPE_KEYS = {
    "num_examples": "data.num_examples",
    "expected_batch_size": "privacy.expected_batch_size",
    "num_steps": "train.num_steps",
    "noise_multiplier": "privacy.noise_multiplier",
    "target_epsilon": "privacy.target_epsilon",
    "delta": "privacy.target_delta",
    "reserve": "privacy.reserved_attempts",
    "allow_small_noise": "privacy.allow_small_noise",
}


def _plan(args: argparse.Namespace) -> PrivacyPlan:
    if args.overrides:
        raise PrivacyConfigError(f"{args.overrides[0]!r} changes a recipe: give --recipe")
    for name in ("num_examples", "expected_batch_size", "num_steps"):
        if getattr(args, name) is None:
            raise PrivacyConfigError(f"--{name} is required (or --recipe)")
    if (args.noise_multiplier is None) == (args.target_epsilon is None):
        raise PrivacyConfigError("give exactly one of --noise_multiplier and --target_epsilon")
    request = PlanRequest(
        num_examples=args.num_examples,
        expected_batch_size=args.expected_batch_size,
        num_steps=args.num_steps,
        noise_multiplier=args.noise_multiplier,
        target_epsilon=args.target_epsilon,
        target_delta=args.delta,
        reserved_attempts=args.reserve or 0,
        cap="default" if args.cap else None,
        allow_small_noise=args.allow_small_noise,
    )
    return make_plan(request, progress=_report_progress)


def _load_recipe(args: argparse.Namespace) -> RunConfig:
    from trainer.config.recipe import load_config

    for name, key in _RECIPE_KEYS.items():
        value = getattr(args, name)
        if value is not None and value is not False:
            text = "true" if value is True else value
            raise PrivacyConfigError(f"--{name} is the recipe's business: change it by {key}={text}")
    if args.cap:
        raise PrivacyConfigError("--cap is for a plan without --recipe: training with a recipe always cuts batches")
    config = load_config(args.recipe, args.overrides)
    if args.max_examples_per_owner is None:
        args.max_examples_per_owner = config.privacy.max_examples_per_owner
    return config


def main() -> int:
    """Plans, computes and prints."""
    args = parse_args()
    plans_resources = args.ds_config is not None
    given = next((name for name in _RESOURCE_OPTIONS if getattr(args, name) is not None), None)
    if given is not None and not plans_resources:
        raise ConfigError(f"--{given} plans memory and time: give --ds_config and --recipe too")
    if plans_resources and args.recipe is None:
        raise ConfigError("--ds_config plans memory and time of a recipe: give --recipe")
    if args.recipe is None:
        result = _privacy(_plan(args), args)
    else:
        config, examples = _load_recipe(args), None
        if plans_resources:
            from trainer.planner.batches import examples as known_examples

            examples = known_examples(config, ROOT, args.bytes_per_example)
        num_examples = config.data.num_examples or (examples.count if examples else None)
        if num_examples is None and not plans_resources:
            raise PrivacyConfigError(f"recipe {args.recipe} names no data.num_examples: add data.num_examples=N")
        plan = None
        if num_examples is not None:
            plan = make_plan(config.privacy.request(config.train.num_steps, num_examples), progress=_report_progress)
        result = _privacy(plan, args) if plan is not None else {}
        if examples is not None:
            if plan is None:
                _warn("no epsilon: the recipe names no data.num_examples; add data.num_examples=N")
            result["resources"] = _resources(args, config, examples, plan)
    if args.json:
        print(json.dumps(result, allow_nan=False))
        return 0
    from rich.console import Console

    from trainer.planner.tables import privacy_table, resource_table, scaling_table

    console = Console()
    if "epsilon_pld" in result:
        console.print(privacy_table(result))
    if result.get("scaling_rule") is not None:
        console.print(scaling_table(result["scaling_rule"], result["noise_multiplier"]))
    if "resources" in result:
        console.print(resource_table(result["resources"]))
    for reason in result.get("reasons", []):
        console.print(f"no formal guarantee: {reason}", style="bold red")
    return 0


def _privacy(plan: PrivacyPlan, args: argparse.Namespace) -> dict[str, Any]:
    for line in plan.warnings:
        _warn(line)
    return summarise(plan, _warn, extras=not args.no_extras, max_examples_per_owner=args.max_examples_per_owner)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _resources(
    args: argparse.Namespace, config: RunConfig, examples: Examples, plan: PrivacyPlan | None
) -> dict[str, Any]:
    from trainer.config.machine import load_machine_settings
    from trainer.planner.hardware import find_gpu
    from trainer.planner.resources import EFFICIENCY, Cluster, plan_resources

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
    cluster = Cluster(
        engine=args.engine or "deepspeed",
        world_size=world_size,
        gpu=None if args.gpu is None else find_gpu(args.gpu),
        efficiency=efficiency,
        gpus_per_node=args.gpus_per_node,
        network_bandwidth=None if args.network_gbits is None else args.network_gbits * 1e9 / 8,
    )
    return plan_resources(config, load_machine_settings(args.ds_config), cluster, examples, plan, ROOT)


def _report_progress(stage: str, sigma: float, epsilon: float) -> None:
    if sys.stderr.isatty():
        print(f"calibrating ({stage}): noise multiplier {sigma:.6f} gives epsilon {epsilon:.4f}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
