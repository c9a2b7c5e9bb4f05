"""Plans a run before any data is touched: epsilon or noise multiplier, memory and time.

python launch_scripts/plan.py --num_examples 233000000 --expected_batch_size 1310720 \
    --num_steps 5708 --noise_multiplier 0.728 --delta 4.2918e-9 [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml [section.key=value ...] [--json]
python launch_scripts/plan.py --recipe recipes/dpcap_base.toml \
    --ds_config ds_configs/zero3_bf16.json --world_size 128 --gpu a100-80gb [--json]
The first command computes with exactly these numbers, without a cap and without a reserve for
crashes. The second prints the claim of a training with the recipe: with cap, reserve and the slack
for rounding in the clipping. The third adds memory per rank, the largest micro-batch, FLOP, time
with failures, price (--gpu_price) and reads (docs/planning.md).
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
    """The numbers of a plan, or the recipe that states them."""

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
    """also choose batch and steps for a recipe's compute; --num_examples and --target_epsilon may
    then replace its own"""
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
        resource_options = [name for name in _RESOURCE_OPTIONS if getattr(self, name) is not None]
        if resource_options and self.ds_config is None:
            requirement = "--ds_config, such as ds_configs/zero3.json"
            if self.recipe is None:
                requirement += ", and --recipe"
            raise ValueError(f"--{resource_options[0]} also needs {requirement}")
        if self.recipe is None:
            if self.ds_config is not None:
                raise ValueError("--ds_config plans a recipe: give --recipe too")
            if self.choose:
                raise ValueError("--choose plans a recipe: give --recipe too")
            if self.overrides:
                raise ValueError(f"{self.overrides[0]!r} changes a recipe: give --recipe")
        return self


def parse_args(arguments: list[str] | None = None) -> PlanOptions:
    """Returns the arguments of the command line; a bad argument is a ConfigError (exit 2)."""
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
    """Computes and prints the plan, and returns the object that --json prints.

    Raises:
        ConfigError, PrivacyConfigError: an option is missing, refused, or stated by the recipe
            (exit 2).
    """
    summary = (
        _of_numbers(options) if options.recipe is None else _of_recipe(options.recipe, options)
    )
    if options.as_json:
        say(json.dumps(summary, allow_nan=False))
        return summary
    from rich.console import Console

    from trainer.planner.tables import privacy_table, resource_table

    console = Console()
    if "resources" in summary:
        # A request for an allocation needs these numbers first.
        console.print(resource_table(summary["resources"]))
    console.print(privacy_table(summary))
    for reason in summary["reasons"]:
        console.print(printable(f"no formal guarantee: {reason}"), style="bold red", markup=False)
    return summary


def _of_numbers(options: PlanOptions) -> dict[str, Any]:
    """Returns the plan of exactly these numbers, without cap, reserve and recipe."""
    sizes: dict[str, Any] = {
        "num_examples": options.num_examples,
        "expected_batch_size": options.expected_batch_size,
        "num_steps": options.num_steps,
    }
    for name, size in sizes.items():
        if size is None:
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
    """Returns the claim of a recipe with these options, and its memory, time and reads."""
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
    from trainer.planner.resources import examples as examples_of

    for name, key in _RECIPE_KEYS.items():
        number = getattr(options, name)
        if number is not None and not (options.choose and name in _CHOICE_KEYS):
            raise PrivacyConfigError(
                f"the recipe states what --{name} is: give {key}={number} instead"
            )
    config = load_config(recipe, options.overrides)
    machine = None if options.ds_config is None else load_machine_settings(options.ds_config)
    # A wrong name is refused here, since calibrating sigma takes a while.
    gpu = None if options.gpu is None else find_gpu(options.gpu)
    examples = None
    num_examples = options.num_examples
    if num_examples is None:
        num_examples = config.data.num_examples
    if machine is not None or num_examples is None:
        examples = examples_of(config, ROOT)
        num_examples = examples.count if num_examples is None else num_examples
    if num_examples is None:
        is_folder = (ROOT / Path(config.data.shards).expanduser()).is_dir()
        output = "" if is_folder else " --output DIR, and add data.index=DIR"
        raise PrivacyConfigError(
            f"recipe {recipe} names no data.num_examples, and no index tells it: add "
            "data.num_examples=N, or index its shards: python launch_scripts/prepare.py index "
            f"{shlex.quote(config.data.shards)}{output}"
        )
    request = config.privacy.request(config.train.num_steps, num_examples)
    if options.choose:
        # Batch and steps are chosen for the data and the guarantee that the options name.
        if options.target_epsilon is not None:
            request = replace(request, target_epsilon=options.target_epsilon, noise_multiplier=None)
        if options.delta is not None:
            request = replace(request, target_delta=options.delta)
        batch = request.expected_batch_size
        if batch > num_examples:
            steps = max(1, round(batch * request.num_steps / num_examples))
            _warn(
                f"the recipe's batch of {batch:,} is larger than the data: "
                f"compared with {num_examples:,} in {steps:,} steps"
            )
            request = replace(request, expected_batch_size=num_examples, num_steps=steps)
    privacy_plan, summary = _privacy(request, options, config.privacy.max_examples_per_owner)
    task, _ = planning_task(config, ROOT)
    parameters = trained_count(task.skeleton())
    kind = config.model.kind
    if options.choose:
        if request.target_epsilon is None:
            # The recipe's own sigma tells the epsilon to spend.
            request = replace(
                request, target_epsilon=privacy_plan.epsilon_with_reserve, noise_multiplier=None
            )
        summary["choice"] = choose(request, parameters, kind=kind)
    signal = NoiseToSignal.of(privacy_plan, parameters, kind)
    summary["noise_to_signal"] = None if signal is None else signal.as_json()
    if machine is not None:
        assert examples is not None
        assumptions = {}
        for name in _ASSUMPTIONS:
            if getattr(options, name) is not None:
                assumptions[name] = getattr(options, name)
        engine = options.engine or "deepspeed"
        cluster = Cluster(engine, options.world_size or 1, gpu, **assumptions)
        resources = plan_resources(config, machine, cluster, examples, privacy_plan, ROOT)
        summary["resources"] = resources
        if "time" in resources:
            mtbf_hours = options.gpu_mtbf_hours or GPU_MTBF_HOURS
            resources["allocation"] = allocation(
                resources, config, privacy_plan, options.gpu_price, mtbf_hours
            )
    return summary


def _privacy(
    request: PlanRequest, options: PlanOptions, max_examples_per_owner: int | None = None
) -> tuple[PrivacyPlan, dict[str, Any]]:
    """Prints the sizes, calibrates, and returns the plan and its summary."""
    from rich.console import Console

    from privacy.plan.numbers import make_plan
    from trainer.planner.privacy import summarise
    from trainer.planner.tables import size_table

    if not options.as_json:
        # Calibration may take half a minute; the sizes do not depend on sigma.
        size_request = request
        if request.target_epsilon is not None:
            size_request = replace(request, target_epsilon=None, noise_multiplier=1.0)
        Console().print(size_table(make_plan(size_request)))
    privacy_plan = make_plan(request, progress=_report_progress)
    for line in privacy_plan.warnings:
        _warn(line)
    summary = summarise(
        privacy_plan,
        _warn,
        extras=not options.no_extras,
        max_examples_per_owner=max_examples_per_owner,
    )
    return privacy_plan, summary


def _warn(line: str) -> None:
    say(f"warning: {line}", file=sys.stderr, folds=True)


def _report_progress(stage: str, sigma: float, epsilon: float) -> None:
    if sys.stderr.isatty():
        line = f"noise multiplier {sigma:.6f} gives epsilon {rounded_up(epsilon)}"
        say(f"calibrating ({stage}): {line}", file=sys.stderr)


def main() -> int:
    """Runs the command of the process."""
    options = parse_args()
    with working("computing epsilon by several accountants"):
        plan(options)
    return 0


if __name__ == "__main__":
    run_command(main)
