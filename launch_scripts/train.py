"""Train a model with differential privacy.

    deepspeed launch_scripts/train.py --ds_config ds_configs/zero3.json --recipe RECIPE.toml

The same command again resumes; on a finished run it says so and exits 0. Exit codes: 0 done, 2 bad
input, 3 the budget is spent and steps remain, 4 the privacy state is refused, 7 stopped early on
request and resumable, 1 anything else.
"""

import argparse
import functools
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, get_args

# Data workers import this module too, and keep their own handlers.
if __name__ == "__main__":
    # While modules are imported there is nothing to save.
    for stop in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        if signal.getsignal(stop) != signal.SIG_IGN:
            signal.signal(stop, lambda number, frame: os._exit(7))

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER_OPTIONS = {
    "--num_gpus",
    "--num_nodes",
    "--hostfile",
    "--include",
    "--exclude",
    "--master_addr",
    "--master_port",
    "--launcher",
    "--nproc_per_node",
    "--nproc-per-node",
    "--nnodes",
    "--node_rank",
    "--node-rank",
}
sys.path.insert(0, str(ROOT))

from trainer.config.environment import require_packages

require_packages()

# torch reads this when it is imported. It hides C++ frames where a store is lost, since the trainer
# prints a line of its own.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if not sys.warnoptions:
    # A user cannot mend what torch and DeepSpeed will rename; python -W default shows the warnings.
    warnings.simplefilter("ignore", FutureWarning)

from trainer.ranks.discovery import launcher_processes, watch

# The launcher may end in the seconds that the import of torch takes.
LAUNCHER = launcher_processes()

from privacy.errors import folded, say
from trainer.config.cli import Parser, explain, prepare_console, require_open_files
from trainer.config.recipe import EngineName, RunConfig, load_config, resolve_recipe
from trainer.config.sections import key_lines
from trainer.errors import in_one_line
from trainer.ranks.discovery import (
    HEARTBEAT_SECONDS,
    LONGEST_RENDEZVOUS_SECONDS,
    RENDEZVOUS_SECONDS,
    Ranks,
    discover_ranks,
)

if TYPE_CHECKING:
    from privacy.noise.source import NoiseSource


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Returns the arguments of the command line; a bad argument is a ConfigError (exit 2)."""
    parser = Parser(
        prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ds_config", type=Path, required=True, help="machine settings, e.g. ds_configs/zero3.json"
    )
    parser.add_argument(
        "--recipe", type=Path, default=ROOT / "recipes" / "quickstart.toml", help="what to train"
    )
    parser.add_argument(
        "--engine", choices=get_args(EngineName), default="deepspeed", help="how to shard"
    )
    parser.add_argument("--run_dir", type=Path, help="run folder; default runs/RECIPE")
    for option, default, meaning in (
        ("--rendezvous_seconds", RENDEZVOUS_SECONDS, "how long to wait for all ranks to come up"),
        (
            "--heartbeat_seconds",
            HEARTBEAT_SECONDS,
            "how long a rank may be silent before it counts as dead, or late",
        ),
    ):
        parser.add_argument(option, type=float, default=default, help=f"{meaning} ({default:g})")
    parser.add_argument(
        "--restart_from_step_0",
        action="store_true",
        help="begin again, and charge all steps again, if the ledger records a checkpoint that is "
        "gone",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="make all checks of a start, print run, time and epsilon, and leave nothing behind",
    )
    parser.add_argument(
        "--may_differ",
        default="",
        metavar="NAME,NAME",
        help="environment variables that may differ between ranks",
    )
    # The launcher adds this option; the environment states the local rank, too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="overrides of single recipe keys"
    )
    keys = "\n".join(map(folded, key_lines(RunConfig)))
    parser.add_argument(
        "--keys", action="version", version=keys, help="list all keys of a recipe, and exit"
    )
    for word in arguments:
        if word.partition("=")[0] in LAUNCHER_OPTIONS:
            parser.error(
                f"{word} is an option of the launcher: write it before launch_scripts/train.py"
            )
    options = parser.parse_intermixed_args(arguments)
    for name, least in (("rendezvous_seconds", 1), ("heartbeat_seconds", 5)):
        seconds = getattr(options, name)
        if not least <= seconds <= LONGEST_RENDEZVOUS_SECONDS:
            parser.error(
                f"argument --{name}: must be at least {least} and at most "
                f"{LONGEST_RENDEZVOUS_SECONDS:g}, a day, not {seconds:g}"
            )
    variables = map(str.strip, options.may_differ.split(","))
    options.may_differ = tuple(filter(None, variables))
    return options


def main(arguments: list[str], noise: "NoiseSource | None" = None) -> None:
    """Trains or makes a dry run, and ends the process (see `trainer.ranks.distributed.finish`).

    Args:
        noise: a noise source of a test; None otherwise.
    """
    prepare_console()
    ranks = Ranks()
    # torch takes seconds to import. Checks that need neither torch nor another rank come first, so
    # that a wrong key is refused at once.
    try:
        ranks = discover_ranks(os.environ)
        require_open_files(ranks.world_size)
        watch(LAUNCHER, speaks=ranks.local_rank == 0)
        options = parse_args(arguments)
        config = load_config(options.recipe, options.overrides)
    except Exception as error:
        explain(error, ranks.rank)
        refusal = in_one_line(error)
        sys.exit(1 if refusal is None else refusal.exit_code)
    from trainer.config.machine import load_machine_settings
    from trainer.engines import require_supported
    from trainer.loop.stopping import end_on_signals
    from trainer.ranks.distributed import fail, finish, start, where
    from trainer.ranks.rendezvous import settings_of

    end_on_signals()
    try:
        machine = load_machine_settings(options.ds_config)
        require_supported(options.engine, machine, ranks.world_size)
        run_dir = (options.run_dir or ROOT / "runs" / config.name).resolve()
        restart = options.restart_from_step_0
        arguments_of_ranks = {
            "--engine": options.engine,
            "--run_dir": str(run_dir),
            "--restart_from_step_0": str(restart),
            "--dry_run": str(options.dry_run),
        }
        settings = settings_of(os.environ, ROOT, config, machine, arguments_of_ranks)
        device = start(
            ranks,
            options.rendezvous_seconds,
            settings,
            options.heartbeat_seconds,
            may_differ=options.may_differ,
        )
        if ranks.is_main:
            job = "a dry run" if options.dry_run else "training"
            dtype = str(machine.compute_dtype).replace("torch.", "")
            recipe_lines = resolve_recipe(options.recipe, options.overrides).publicity_lines(config)
            say(
                f"{job} on {where(ranks.world_size, device)}, {dtype}",
                *recipe_lines,
                folds=True,
            )
        if options.dry_run:
            from trainer.run.dry_run import dry_run

            code = dry_run(
                config, machine, options.engine, run_dir, ROOT, ranks, device, may_restart=restart
            )
        else:
            from trainer.run.start import train

            code = train(
                config,
                machine,
                options.engine,
                run_dir,
                ROOT,
                ranks,
                device,
                noise,
                may_restart=restart,
            )
    except Exception as error:
        fail(error, functools.partial(explain, error, ranks.rank))
    finish(code)


if __name__ == "__main__":
    main(sys.argv[1:])
