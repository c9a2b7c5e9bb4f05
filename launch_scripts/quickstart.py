"""The main job end to end: a private training run on the embedded data, its report, and one JSON line about it.

    make quickstart

Two ranks on CPU, every GPU where there are some; a fresh run folder each time. The last line on stdout is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from trainer.config.cli import Parser, run_command  # noqa: E402


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", default="ds_configs/zero3.json")
    parser.add_argument("--run_dir", type=Path, help="default runs/quickstart-DATE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(arguments)


def main() -> int:
    """Trains, reports, and prints one JSON line."""
    options = parse_args()
    run_dir = options.run_dir or ROOT / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    launcher = [str(Path(sys.executable).parent / "deepspeed")]
    if not torch.cuda.is_available():
        launcher += ["--num_gpus", "2"]
    train = [
        *launcher,
        "launch_scripts/train.py",
        "--ds_config",
        options.ds_config,
        "--recipe",
        "recipes/quickstart.toml",
    ]
    code = _run([*train, "--run_dir", str(run_dir), *options.overrides])
    if code != 0:
        print(f"error: training ended with exit code {code}; run folder {run_dir}", file=sys.stderr)
        return code
    card = json.loads(_output([sys.executable, "launch_scripts/report.py", "--run_dir", str(run_dir), "--json"]))
    print(f"privacy card: {run_dir / 'report' / 'privacy_card.md'}")
    print(json.dumps(_summary(run_dir, card)))
    return 0


def _summary(run_dir: Path, card: dict) -> dict:
    losses = [entry["loss"] for entry in card["utility"]["heldout_loss"] or []]  # empty where held-out data are private
    return {
        "run_dir": str(run_dir),
        "steps": card["steps_done"],
        "epsilon": card["epsilon"],
        "delta": card["delta"],
        "heldout_loss_before": losses[0] if losses else None,
        "heldout_loss_after": losses[-1] if losses else None,
        "formal_guarantee": card["formal_guarantee"],
    }


def _run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def _environment() -> dict[str, str]:
    import os

    # Two ranks share two cores: more threads per rank only get in each other's way.
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} if not torch.cuda.is_available() else {}
    return {"PYTHONWARNINGS": "ignore::FutureWarning", **quiet, **os.environ}


if __name__ == "__main__":
    run_command(main)
