"""Trains privately on the embedded data, writes the report, and prints one JSON line.

    make quickstart

It uses two ranks on the CPU or every GPU, and a fresh run folder each time (--run_dir resumes one
that was stopped). Afterwards the model describes pictures that it has never seen
(RUN_DIR/evaluation/answers.png), and runs/latest leads to the run folder. The last lines are the
outcome, the folder, commands for a closer look, one a line, and one JSON object:

captions_right    share of held-out pictures whose caption is exactly the true one
heldout_loss      nats per token; to be compared with
blind_loss        the loss that the frequencies of captions give, without the pictures
shuffled_loss     the model's own loss if every caption stands with another picture
epsilon           from the ledger, at the delta of verify.py's line
seconds           the whole command
"""

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import ROOT, require_packages

require_packages()

from trainer.config.cli import Parser, run_command


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line; a bad argument is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", default="ds_configs/zero3.json")
    parser.add_argument("--recipe", default="recipes/quickstart.toml", help="of a captioner")
    parser.add_argument("--run_dir", type=Path, help="default runs/quickstart-DATE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(arguments)


def main() -> int:
    """Trains, writes the card, describes held-out pictures, verifies, and prints a JSON line."""
    start = time.monotonic()
    options = parse_args()
    # torch takes seconds to import, and a wrong argument is refused at once.
    import torch

    run_dir = (
        options.run_dir or ROOT / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    ).absolute()
    environment = {"PYTHONWARNINGS": "ignore::FutureWarning", **os.environ}
    # A free port, since the launcher's default is the same for every job of a machine.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    # -q hides the launcher's own lines, which say nothing about the run.
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "-q", "--master_port", port]
    if not torch.cuda.is_available():
        launcher += ["--num_gpus", "2"]
        # A build of torch with CUDA refuses to train on the CPU unless it is asked. Two ranks share
        # two cores, so more threads in a rank would only wait for each other.
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | environment

    def run(*command: object, is_captured: bool = True) -> subprocess.CompletedProcess[str]:
        words = list(map(str, command))
        return subprocess.run(
            words, cwd=ROOT, env=environment, check=False, capture_output=is_captured, text=True
        )

    train = [*launcher, "launch_scripts/train.py"]
    train += ["--ds_config", options.ds_config, "--recipe", options.recipe]
    python = _shown(Path(sys.executable))
    code = 1
    try:
        code = run(*train, "--run_dir", run_dir, *options.overrides, is_captured=False).returncode
    finally:
        # An interrupted run can be looked at and resumed, too.
        if options.run_dir is None and run_dir.is_dir():
            _link_latest(run_dir)
        if code != 0:
            command = f"{python} launch_scripts/quickstart.py --run_dir {_shown(run_dir)}"
            print(f"to go on: {command}", file=sys.stderr)
    if code != 0:
        print(f"error: training ended with exit code {code}; run folder {run_dir}", file=sys.stderr)
        return code
    from privacy.card.run_card import write_card
    from trainer.card_of_run import build_card
    from trainer.progress import working

    with working("computing the privacy card"):
        card = build_card(run_dir)
        write_card(run_dir, card)
    captions_right = _captions_right(run_dir)
    # A reader of the published folder runs verify.py without this project, too.
    verification = run(sys.executable, "-I", run_dir / "verify.py", run_dir)
    if verification.returncode != 0:
        print(verification.stdout, verification.stderr, sep="")
        code = verification.returncode
        print(
            f"error: verify.py does not find {run_dir} consistent (exit code {code})",
            file=sys.stderr,
        )
        return code
    # Without public held-out data there is no such file.
    results = run_dir / "evaluation" / "heldout.jsonl"
    heldout = json.loads(results.read_text().splitlines()[-1]) if results.exists() else {}
    latest = run_dir.with_name("latest")
    is_latest = latest.exists() and latest.resolve() == run_dir.resolve()
    short_path = _shown(latest if is_latest else run_dir)
    print(verification.stdout.splitlines()[-1])
    print(f"privacy card: {_shown(run_dir / 'report' / 'privacy_card.html')}")
    print(f"run folder: {_shown(run_dir)}")
    print("next:")
    if Path.cwd() != ROOT:
        print(f"cd {shlex.quote(str(ROOT))}")
    print(f"{python} launch_scripts/report.py --run_dir {short_path}")
    print(f"{python} launch_scripts/audit.py ledger --run_dir {short_path}")
    print(f"{python} -I {short_path}/verify.py")
    summary = {
        "captions_right": captions_right,
        "heldout_loss": heldout.get("loss"),
        "blind_loss": heldout.get("blind_loss"),
        "shuffled_loss": heldout.get("shuffled_loss"),
        "epsilon": card.epsilon,
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(summary))
    return 0


def _link_latest(run_dir: Path) -> None:
    """Makes runs/latest lead to this run folder, in one step."""
    link = run_dir.with_name(f".latest-{os.getpid()}")
    # The link is a convenience: it fails if a folder has its name, or if the disk has no links.
    with contextlib.suppress(OSError):
        link.symlink_to(run_dir.name)
        link.replace(run_dir.with_name("latest"))
    link.unlink(missing_ok=True)


def _shown(path: Path) -> str:
    """Returns a path as a shell takes it, short if it is in the project."""
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    return shlex.quote(str(path))


def _captions_right(run_dir: Path) -> float | None:
    """Writes the sheet of held-out pictures and returns the share of captions that are right."""
    from evaluation.captions import captions, equal_words
    from evaluation.command_options import CaptionsOptions
    from trainer.config.recipe import load_config

    heldout = load_config(run_dir / "config.toml").heldout
    if heldout is None or not heldout.is_public:
        print("no results: the held-out data are not declared public (heldout.is_public)")
        return None
    sheet = run_dir / "evaluation" / "answers.png"
    source = f"shards:{heldout.shards}"
    options = CaptionsOptions(
        checkpoint=run_dir,
        data=source,
        data_is_public=True,
        cache=run_dir / "private",
        batch_size=250,
        grid=sheet,
    )
    rows = [row for row in captions(options).details["captions"] if "references" in row]
    num_right = sum(equal_words(row["caption"], row["references"][0]) for row in rows)
    share = num_right / len(rows)
    print(f"{share:.1%} of {len(rows):,} captions are exactly right; with their pictures:")
    print(f"  {_shown(sheet)}")
    return share


if __name__ == "__main__":
    run_command(main)
