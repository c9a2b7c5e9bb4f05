"""Epsilon or noise multiplier, memory and time of a planned run, before any data is touched.

python launch_scripts/plan.py --num_examples 233000000 --expected_batch_size 1310720 --num_steps 5708 \
    --noise_multiplier 0.728 --delta 4.2918e-9 [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml [section.key=value ...] [--num_examples N] [--json]
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

from privacy import accounting, attack_risk, what_if
from privacy.alternatives import steps_per_epoch
from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan, make_plan
from trainer.cli import Parser, run_command
from trainer.planner import command
from trainer.planner.scaling_rule import scaling_rule

if TYPE_CHECKING:
    from trainer.config import RunConfig

# Group epsilons are guidance beside the claim; a coarse grid is still an upper bound (0.1 % here), 25 times faster.
_GROUP_INTERVAL = 5e-3


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
    command.add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes of the recipe")
    return parser.parse_args(arguments)


_NUMBERS = ("expected_batch_size", "num_steps", "noise_multiplier", "target_epsilon", "delta", "reserve")


def _plan(args: argparse.Namespace) -> PrivacyPlan:
    if args.overrides:
        raise PrivacyConfigError(f"{args.overrides[0]!r} changes a recipe: give --recipe")
    for name in ("num_examples", "expected_batch_size", "num_steps"):
        if getattr(args, name) is None:
            raise PrivacyConfigError(f"--{name} is required (or --recipe)")
    if (args.noise_multiplier is None) == (args.target_epsilon is None):
        raise PrivacyConfigError("give exactly one of --noise_multiplier and --target_epsilon")
    return make_plan(
        num_examples=args.num_examples,
        expected_batch_size=args.expected_batch_size,
        num_steps=args.num_steps,
        noise_multiplier=args.noise_multiplier,
        target_epsilon=args.target_epsilon,
        target_delta=args.delta,
        reserved_attempts=args.reserve or 0,
        cap="default" if args.cap else None,
        allow_small_noise=args.allow_small_noise,
        progress=_report_progress,
    )


def _load_recipe(args: argparse.Namespace) -> RunConfig:
    from trainer.config import load_config

    given = next((name for name in _NUMBERS if getattr(args, name) is not None), None)
    if given is not None or args.cap or args.allow_small_noise:
        raise PrivacyConfigError(f"--{given or 'cap'} is the recipe's business: change it by section.key=value")
    config = load_config(args.recipe, args.overrides)
    if args.max_examples_per_owner is None:
        args.max_examples_per_owner = config.privacy.max_examples_per_owner
    return config


def _recipe_plan(args: argparse.Namespace, config: RunConfig, num_examples: int) -> PrivacyPlan:
    from trainer.run_ledger import recipe_plan

    return recipe_plan(config.privacy, config.train.num_steps, num_examples, progress=_report_progress)


def main() -> int:
    """Plans, computes and prints."""
    args = parse_args()
    plans_resources = command.is_wanted(args)
    if args.recipe is None:
        result = _privacy(_plan(args), args)
    else:
        config = _load_recipe(args)
        examples = command.known_examples(args, config) if plans_resources else None
        num_examples = args.num_examples or config.data.num_examples or (examples.count if examples else None)
        if num_examples is None and not plans_resources:
            raise PrivacyConfigError(f"recipe {args.recipe} names no data.num_examples: give --num_examples")
        plan = None if num_examples is None else _recipe_plan(args, config, num_examples)
        result = _privacy(plan, args) if plan is not None else {}
        if examples is not None:
            if plan is None:
                _warn("no epsilon: the recipe names no data.num_examples; give --num_examples")
            result["resources"] = command.resources(args, config, examples, plan)
    if args.json:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    return 0


def _privacy(plan: PrivacyPlan, args: argparse.Namespace) -> dict[str, Any]:
    for line in plan.warnings:
        _warn(line)
    return summarise(plan, extras=not args.no_extras) | _owner(plan, args.max_examples_per_owner)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _print(result: dict[str, Any]) -> None:
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


def summarise(plan: PrivacyPlan, *, extras: bool = True) -> dict[str, Any]:
    """All numbers of the plan. An epsilon that does not exist (no noise, delta too small for PLD) is None."""
    result: dict[str, Any] = {
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "reserved_attempts": plan.reserved_attempts,
        "cap": plan.cap,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "delta": plan.target_delta,
        "noise_source": plan.noise_source,
        "noise_tail_delta": plan.noise_tail_delta,
        "target_epsilon": plan.target_epsilon,
        "formal_guarantee": plan.formal_guarantee,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "accountant": accounting.accountant_version(),
        "epochs": plan.num_steps * plan.sample_rate,
        "examples_processed": plan.num_steps * plan.expected_batch_size,
    }
    result |= _epsilons(plan, extras) | (_extras(plan) if extras else {})
    return result | {"scaling_rule": scaling_rule(plan)}


def _owner(plan: PrivacyPlan, limit: int | None) -> dict[str, Any]:
    """Epsilon of all examples of one owner together, where each owner has at most `limit`."""
    if limit is None:
        return {}
    if limit < 1:
        raise PrivacyConfigError(f"--max_examples_per_owner is {limit}; it must be at least 1")
    epsilon = None
    if plan.formal_guarantee and plan.accounted_delta >= accounting.PLD_SMALLEST_DELTA:
        groups = [plan.release_group(plan.num_steps)]
        epsilon = accounting.epsilon_group(groups, plan.accounted_delta, limit, _GROUP_INTERVAL)
    return {"max_examples_per_owner": limit, **_finite({"epsilon_owner": epsilon})}


def _extras(plan: PrivacyPlan) -> dict[str, Any]:
    """What the guarantee means, and what else the run could cost; None where it cannot be said."""
    names = ("epsilon_by_delta", "attack_risk", "replays", "private_selection", "shuffled_instead")
    values: dict[str, Any] = dict.fromkeys((*names, "opacus_rdp", "opacus_prv"))
    group, delta = plan.release_group(plan.num_steps), plan.accounted_delta
    if not plan.formal_guarantee or delta < accounting.PLD_SMALLEST_DELTA or plan.epsilon_planned == float("inf"):
        return values
    whole = accounting.loss_distribution([group.without_cap()], accounting.COARSE_INTERVAL)
    values["epsilon_by_delta"] = attack_risk.epsilon_curve(whole)
    values["attack_risk"] = attack_risk.risk_of(whole, attack_risk.FALSE_POSITIVE_RATES)
    values["replays"] = what_if.replay_costs(group, delta)
    values["private_selection"] = what_if.selection_costs(group, delta)
    steps = steps_per_epoch(plan.num_examples, plan.expected_batch_size)
    values["shuffled_instead"] = what_if.shuffled_instead(group, delta, steps)
    return values | what_if.opacus_opinion(group, delta)


def _epsilons(plan: PrivacyPlan, extras: bool) -> dict[str, float | None]:
    groups = [plan.release_group(plan.num_steps)]
    delta = plan.accounted_delta
    names = ("epsilon_pld", "epsilon_rdp", "epsilon_prv_lower", "epsilon_prv", "epsilon_prv_upper")
    values: dict[str, float | None] = dict.fromkeys((*names, "epsilon_with_reserve", "replace_one"))
    values |= {"group_2": None, "group_5": None, "tan": None}
    if not plan.formal_guarantee:
        return values
    values["epsilon_rdp"] = accounting.epsilon_rdp(groups, delta)
    values["tan"] = accounting.tan(groups)
    values["epsilon_with_reserve"] = plan.epsilon_with_reserve
    if delta >= accounting.PLD_SMALLEST_DELTA:
        values["epsilon_pld"] = plan.epsilon_planned
        values |= _prv(groups, delta)
        if not extras:
            return _finite(values)
        values["replace_one"] = accounting.epsilon_replace_one(groups, delta, accounting.COARSE_INTERVAL)
        for count in (2, 5):
            values[f"group_{count}"] = accounting.epsilon_group(groups, delta, count, _GROUP_INTERVAL)
    return _finite(values)


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is None or value < float("inf") else None for name, value in values.items()}


def _prv(groups: list[accounting.ReleaseGroup], delta: float) -> dict[str, float | None]:
    try:
        lower, estimate, upper = accounting.epsilon_prv(groups, delta)
    except accounting.CrossCheckUnavailable as error:
        print(f"warning: {error}", file=sys.stderr)
        return {}
    return {"epsilon_prv_lower": lower, "epsilon_prv": estimate, "epsilon_prv_upper": upper}


def _report_progress(stage: str, sigma: float, epsilon: float) -> None:
    if sys.stderr.isatty():
        print(f"calibrating ({stage}): noise multiplier {sigma:.6f} gives epsilon {epsilon:.4f}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
