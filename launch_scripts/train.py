"""Train a model with differential privacy.

    deepspeed launch_scripts/train.py --ds_config ds_configs/zero3.json --recipe recipes/quickstart.toml

The same command again resumes; on a finished run it says so and exits 0. Exit codes: 0 done, 2 bad input, 3 the budget is
spent and steps remain, 4 the privacy state is refused, 7 stopped early on request and resumable, 1 anything else.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from privacy.noise import NoiseSource  # noqa: E402
from trainer.config import EngineName, load_config  # noqa: E402
from trainer.distributed import Ranks, discover_ranks, finish, quit_now, start  # noqa: E402
from trainer.ds_config import load_machine_settings  # noqa: E402
from trainer.errors import ConfigError, RemoteError  # noqa: E402


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ds_config", type=Path, required=True, help="machine settings, e.g. ds_configs/zero3.json")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.toml", help="what to train")
    parser.add_argument("--engine", choices=get_args(EngineName), default="deepspeed", help="how to shard")
    parser.add_argument("--run_dir", type=Path, help="run folder; default runs/RECIPE")
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # the launcher adds it; the environment says it
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of single recipe keys")
    return parser.parse_args(arguments)


def main(arguments: list[str], noise: NoiseSource | None = None) -> None:
    """Never returns: see `trainer.distributed.finish`. Only tests pass a noise source."""
    options = parse(arguments)
    ranks = Ranks()
    try:
        # Everything that needs no other rank comes first, so that a wrong key costs no rendezvous.
        ranks = discover_ranks(os.environ)
        config = load_config(options.recipe, options.overrides)
        machine = load_machine_settings(options.ds_config)
        device = start(ranks)
        from trainer.train import train

        run_dir = options.run_dir or ROOT / "runs" / config.name
        code = train(config, machine, options.engine, run_dir.resolve(), ROOT, ranks, device, noise)
    except KeyboardInterrupt:
        quit_now(130)
    except Exception as error:
        _explain(error, ranks)
        quit_now(getattr(error, "exit_code", 1))
    finish(code)


def _explain(error: Exception, ranks: Ranks) -> None:
    """One line for what the user can mend, said once; a traceback for a defect."""
    if isinstance(error, RemoteError):
        return
    if hasattr(error, "exit_code"):
        where = "" if ranks.is_main else f" on rank {ranks.rank}"
        if ranks.is_main or not isinstance(error, ConfigError):  # those come from the command line: every rank has them
            print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return
    print(f"error on rank {ranks.rank}:", file=sys.stderr)
    traceback.print_exception(error)


if __name__ == "__main__":
    main(sys.argv[1:])
