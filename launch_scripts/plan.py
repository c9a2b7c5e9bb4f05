"""Epsilon or noise multiplier, memory and time of a planned run, before any data is touched.

python launch_scripts/plan.py --num_examples 233000000 --expected_batch_size 1310720 --num_steps 5708 \
    --noise_multiplier 0.728 --delta 4.2918e-9 [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml [section.key=value ...] [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml --ds_config ds_configs/zero3_bf16.json --world_size 128 \
    --gpu a100-80gb [--json]
The first computes for exactly these numbers, without a cap and without a reserve for crashes. The second gives what training with
the recipe would claim: with cap, reserve and the slack for rounding in the clipping. The third adds memory per rank, the largest
micro-batch, FLOP, time with failures, price (--gpu_price) and reads (docs/planning.md).
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import ROOT, require_packages

require_packages()

from pydantic import Field, model_validator

from privacy.accounting.rounding import rounded_up
from privacy.errors import PrivacyConfigError, printable, say
from privacy.plan.request import PlanRequest
from trainer.config.cli import run_command
from trainer.config.options import Options, Shown, options_of
from trainer.config.recipe import EngineName
from trainer.progress import working

if TYPE_CHECKING:
    from privacy.plan.numbers import PrivacyPlan

_ASSUMPTIONS = ("efficiency", "gpus_per_node")
_RESOURCE_OPTIONS = ("world_size", "gpu", "engine", *_ASSUMPTIONS, "gpu_price", "gpu_mtbf_hours")


class PrivacyPart(Options):
    """What a plan of its own is asked for, or the recipe that says it."""

    recipe: Annotated[Path | None, Shown("TOML")] = None
    """plan of a recipe, instead of the numbers below"""
    num_examples: Annotated[int | None, Shown("N")] = Field(None, ge=1)
    """examples in the data set"""
    expected_batch_size: Annotated[int | None, Shown("B")] = Field(None, ge=1)
    """expected logical batch"""
    num_steps: Annotated[int | None, Shown("T")] = Field(None, ge=1)
    """optimizer steps"""
    noise_multiplier: Annotated[float | None, Shown("S")] = Field(None, ge=0)
    """sigma; epsilon is computed"""
    target_epsilon: Annotated[float | None, Shown("E")] = Field(None, gt=0)
    """epsilon; the smallest sigma is computed"""
    delta: Annotated[float | None, Shown("D")] = Field(None, gt=0, lt=1)
    """default 1 / (2 N)"""
    choose: bool = False
    """also choose batch and steps for a recipe's compute; --num_examples and --target_epsilon may then replace its own"""
    no_extras: bool = False
    """the claim and its cross-checks only (faster)"""
    as_json: bool = Field(False, alias="json")
    """print one JSON object on stdout"""
    overrides: Annotated[tuple[str, ...], Shown("section.key=value", is_positional=True)] = ()
    """changes of the recipe"""


class PlanOptions(PrivacyPart):
    """Options of the command."""

    GROUP = "memory and time of a recipe"

    ds_config: Annotated[Path | None, Shown("JSON")] = None
    """machine settings, e.g. ds_configs/zero3_bf16.json"""
    world_size: Annotated[int | None, Shown("W")] = Field(None, ge=1)
    """ranks, one per accelerator; default 1"""
    gpu: Annotated[str | None, Shown("NAME")] = None
    """a100-40gb, a100-80gb, h100-80gb, h200-141gb or cpu"""
    engine: EngineName | None = None
    """how to shard; default deepspeed"""
    efficiency: Annotated[float | None, Shown("E")] = Field(None, gt=0, le=1)
    """share of the peak FLOP/s that is reached; default 0.35"""
    gpus_per_node: Annotated[int | None, Shown("G")] = Field(None, ge=1)
    """default: of the maker's reference system"""
    gpu_price: Annotated[float | None, Shown("PRICE")] = Field(None, ge=0)
    """of an hour of one accelerator, in any currency; the plan says what the run costs"""
    gpu_mtbf_hours: Annotated[float | None, Shown("H")] = Field(None, gt=0)
    """hours of one accelerator between failures that end a job; default 50,000"""

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        given = next((name for name in _RESOURCE_OPTIONS if getattr(self, name) is not None), None)
        if given is not None and self.ds_config is None:
            needed = "--ds_config, such as ds_configs/zero3.json" + (
                ", and --recipe" if self.recipe is None else ""
            )
            raise ValueError(f"--{given} also needs {needed}")
        if self.recipe is None:
            for name, is_given in (
                ("ds_config", self.ds_config is not None),
                ("choose", self.choose),
            ):
                if is_given:
                    raise ValueError(f"--{name} plans a recipe: give --recipe too")
            if self.overrides:
                raise ValueError(f"{self.overrides[0]!r} changes a recipe: give --recipe")
        return self


def parse_args(arguments: list[str] | None = None) -> PlanOptions:
    """The command line; a bad argument is a ConfigError (exit 2)."""
    return options_of(__doc__, PlanOptions, arguments, intermixed=True)


_RECIPE_KEYS = {
    "num_examples": "data.num_examples",
    "expected_batch_size": "privacy.expected_batch_size",
    "num_steps": "train.num_steps",
    "noise_multiplier": "privacy.noise_multiplier",
    "target_epsilon": "privacy.target_epsilon",
    "delta": "privacy.target_delta",
}
_CHOICE_KEYS = ("num_examples", "target_epsilon", "delta")
"""Options that --choose takes together with a recipe."""


def plan(options: PlanOptions) -> dict[str, Any]:
    """Plans, computes and prints; returns what --json prints.

    Raises:
        ConfigError, PrivacyConfigError: an option is missing, refused, or one that the recipe states (exit 2).
    """
    result = _of_numbers(options) if options.recipe is None else _of_recipe(options.recipe, options)
    if options.as_json:
        say(json.dumps(result, allow_nan=False))
        return result
    from rich.console import Console

    from trainer.planner.tables import privacy_table, resource_table

    console = Console()
    if "resources" in result:  # what an allocation is asked for comes first
        console.print(resource_table(result["resources"]))
    console.print(privacy_table(result))
    for reason in result["reasons"]:
        console.print(printable(f"no formal guarantee: {reason}"), style="bold red", markup=False)
    return result


def _of_numbers(options: PlanOptions) -> dict[str, Any]:
    """What exactly these numbers mean, without a recipe: neither cap nor reserve."""
    sizes = {
        name: getattr(options, name)
        for name in ("num_examples", "expected_batch_size", "num_steps")
    }
    for name, value in sizes.items():
        if value is None:
            raise PrivacyConfigError(f"--{name} is required (or --recipe)")
    if (options.noise_multiplier is None) == (options.target_epsilon is None):
        raise PrivacyConfigError("give exactly one of --noise_multiplier and --target_epsilon")
    request = PlanRequest(
        **sizes,
        noise_multiplier=options.noise_multiplier,
        target_epsilon=options.target_epsilon,
        target_delta=options.delta,
        reserved_attempts=0,
        cap=None,
    )
    return _privacy(request, options)[1]


def _of_recipe(recipe: Path, options: PlanOptions) -> dict[str, Any]:
    """What a recipe with these options claims and takes."""
    from trainer.config.machine import load_machine_settings
    from trainer.config.recipe import load_config
    from trainer.hardware import find_gpu
    from trainer.noise_to_signal import NoiseToSignal
    from trainer.planner.choice import choose
    from trainer.planner.memory import trained_count
    from trainer.planner.resources import (
        GPU_MTBF_HOURS,
        Cluster,
        allocation,
        plan_resources,
        planning_task,
    )
    from trainer.planner.resources import examples as known_examples

    for name, key in _RECIPE_KEYS.items():
        value = getattr(options, name)
        if value is not None and not (options.choose and name in _CHOICE_KEYS):
            raise PrivacyConfigError(
                f"the recipe states what --{name} is: give {key}={value} instead"
            )
    config = load_config(recipe, options.overrides)
    machine = None if options.ds_config is None else load_machine_settings(options.ds_config)
    gpu = (
        None if options.gpu is None else find_gpu(options.gpu)
    )  # a wrong name is refused before sigma is calibrated
    examples = None
    num_examples = (
        config.data.num_examples if options.num_examples is None else options.num_examples
    )
    if machine is not None or num_examples is None:
        examples = known_examples(config, ROOT)
        num_examples = examples.count if num_examples is None else num_examples
    if num_examples is None:
        shards, is_folder = (
            shlex.quote(config.data.shards),
            (ROOT / Path(config.data.shards).expanduser()).is_dir(),
        )
        raise PrivacyConfigError(
            f"recipe {recipe} names no data.num_examples, and no index tells it: add data.num_examples=N, or index its shards: "
            f"python launch_scripts/prepare.py index {shards}{'' if is_folder else ' --output DIR, and add data.index=DIR'}"
        )
    request = config.privacy.request(config.train.num_steps, num_examples)
    if options.choose:  # on the data and for the guarantee that the options name
        if options.target_epsilon is not None:
            request = replace(request, target_epsilon=options.target_epsilon, noise_multiplier=None)
        if options.delta is not None:
            request = replace(request, target_delta=options.delta)
        if (size := request.expected_batch_size) > num_examples:
            steps = max(1, round(size * request.num_steps / num_examples))
            _warn(
                f"the recipe's batch of {size:,} is larger than the data: compared with {num_examples:,} in {steps:,} steps"
            )
            request = replace(request, expected_batch_size=num_examples, num_steps=steps)
    planned, result = _privacy(request, options, config.privacy.max_examples_per_owner)
    parameters, kind = trained_count(planning_task(config, ROOT)[0].skeleton()), config.model.kind
    if options.choose:
        if (
            request.target_epsilon is None
        ):  # the recipe's own sigma says which epsilon there is to spend
            request = replace(
                request, target_epsilon=planned.epsilon_with_reserve, noise_multiplier=None
            )
        result["choice"] = choose(request, parameters, kind=kind)
    signal = NoiseToSignal.of(planned, parameters, kind)
    result["noise_to_signal"] = None if signal is None else signal.as_json()
    if machine is not None:
        assert examples is not None
        assumed = {
            name: value for name in _ASSUMPTIONS if (value := getattr(options, name)) is not None
        }
        cluster = Cluster(options.engine or "deepspeed", options.world_size or 1, gpu, **assumed)
        result["resources"] = resources = plan_resources(
            config, machine, cluster, examples, planned, ROOT
        )
        if "time" in resources:
            mtbf = options.gpu_mtbf_hours or GPU_MTBF_HOURS
            resources["allocation"] = allocation(
                resources, config, planned, options.gpu_price, mtbf
            )
    return result


def _privacy(
    request: PlanRequest, options: PlanOptions, max_examples_per_owner: int | None = None
) -> tuple[PrivacyPlan, dict[str, Any]]:
    """The plan, and what it means."""
    from rich.console import Console

    from privacy.plan.numbers import make_plan
    from trainer.planner.privacy import summarise
    from trainer.planner.tables import size_table

    if not options.as_json:  # calibration may take half a minute
        is_given = request.target_epsilon is None
        known = request if is_given else replace(request, target_epsilon=None, noise_multiplier=1.0)
        Console().print(size_table(make_plan(known)))
    planned = make_plan(request, progress=_report_progress)
    for line in planned.warnings:
        _warn(line)
    extras = not options.no_extras
    return planned, summarise(
        planned, _warn, extras=extras, max_examples_per_owner=max_examples_per_owner
    )


def _warn(line: str) -> None:
    say(f"warning: {line}", file=sys.stderr, folds=True)


def _report_progress(stage: str, sigma: float, epsilon: float) -> None:
    if sys.stderr.isatty():
        line = f"calibrating ({stage}): noise multiplier {sigma:.6f} gives epsilon {rounded_up(epsilon)}"
        say(line, file=sys.stderr)


def main() -> int:
    """Runs the command of the process."""
    options = parse_args()
    with working("computing epsilon by several accountants"):
        plan(options)
    return 0


if __name__ == "__main__":
    run_command(main)
