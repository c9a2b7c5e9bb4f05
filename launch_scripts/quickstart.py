"""The main job end to end: a private training run on the embedded data, its report, and one JSON line about it.

    make quickstart

Two ranks on CPU, every GPU where there are some; a fresh run folder each time (one that was stopped goes on with --run_dir).
Afterwards the model describes pictures that it has never seen (RUN_DIR/evaluation/answers.png), and runs/latest leads to the run
folder. The last lines are the outcome, the folder, commands for a closer look, one a line, and one JSON object:

captions_right    share of held-out pictures whose caption is exactly the true one
heldout_loss      nats per token; to be compared with
blind_loss        what one gets from the frequencies of captions, without looking
shuffled_loss     the model's own loss where every caption stands with another picture
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
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", default="ds_configs/zero3.json")
    parser.add_argument("--recipe", default="recipes/quickstart.toml", help="of a captioner")
    parser.add_argument("--run_dir", type=Path, help="default runs/quickstart-DATE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(arguments)


def main() -> int:
    """Trains, reports, lets the model describe all held-out pictures, rechecks the folder, and prints one JSON line."""
    started = time.monotonic()
    options = parse_args()
    import torch  # after the arguments, so that a wrong one is answered at once

    run_dir = (
        options.run_dir or ROOT / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    ).absolute()
    environment = {"PYTHONWARNINGS": "ignore::FutureWarning", **os.environ}
    with (
        socket.socket() as held
    ):  # the launcher's own default port is the same for every job of a machine
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    # -q: the launcher's own lines say nothing about the run.
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "-q", "--master_port", port]
    if not torch.cuda.is_available():
        launcher += ["--num_gpus", "2"]
        # On purpose: a build of torch with CUDA refuses to train on the CPU unasked. Two ranks share two cores: more threads per
        # rank only get in each other's way.
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | environment

    def run(*command: object, is_captured: bool = True) -> subprocess.CompletedProcess[str]:
        words = list(map(str, command))
        return subprocess.run(
            words, cwd=ROOT, env=environment, check=False, capture_output=is_captured, text=True
        )

    train = [
        *launcher,
        "launch_scripts/train.py",
        "--ds_config",
        options.ds_config,
        "--recipe",
        options.recipe,
    ]
    code = 1
    try:
        code = run(*train, "--run_dir", run_dir, *options.overrides, is_captured=False).returncode
    finally:  # also where it is interrupted: what there is can be looked at, and goes on
        if options.run_dir is None and run_dir.is_dir():
            _link_latest(run_dir)
        if code != 0:
            again = f"{_shown(Path(sys.executable))} launch_scripts/quickstart.py --run_dir {_shown(run_dir)}"
            print(f"to go on: {again}", file=sys.stderr)
    if code != 0:
        print(f"error: training ended with exit code {code}; run folder {run_dir}", file=sys.stderr)
        return code
    from privacy.card.folder import write_card
    from trainer.progress import working
    from trainer.report import build_card

    with working("computing the privacy card"):
        card = build_card(run_dir)
        write_card(run_dir, card)
    captions_right = _captions_right(run_dir)
    # As somebody would who has only the published folder: without this project.
    verified = run(sys.executable, "-I", run_dir / "verify.py", run_dir)
    if verified.returncode != 0:
        print(verified.stdout, verified.stderr, sep="")
        code = verified.returncode
        print(
            f"error: verify.py does not find {run_dir} consistent (exit code {code})",
            file=sys.stderr,
        )
        return code
    public = run_dir / "evaluation" / "heldout.jsonl"  # not there where held-out data are private
    last = json.loads(public.read_text().splitlines()[-1]) if public.exists() else {}
    latest, python = run_dir.with_name("latest"), _shown(Path(sys.executable))
    looked_at = _shown(
        latest if latest.exists() and latest.resolve() == run_dir.resolve() else run_dir
    )
    print(
        verified.stdout.splitlines()[-1],
        f"privacy card: {_shown(run_dir / 'report' / 'privacy_card.html')}",
        f"run folder: {_shown(run_dir)}",
        "next:",
        *([] if Path.cwd() == ROOT else [f"cd {shlex.quote(str(ROOT))}"]),
        f"{python} launch_scripts/report.py --run_dir {looked_at}",
        f"{python} launch_scripts/audit.py ledger --run_dir {looked_at}",
        f"{python} -I {looked_at}/verify.py",
        sep="\n",
    )
    summary = {
        "captions_right": captions_right,
        "heldout_loss": last.get("loss"),
        "blind_loss": last.get("blind_loss"),
        "shuffled_loss": last.get("shuffled_loss"),
        "epsilon": card.epsilon,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(summary))
    return 0


def _link_latest(run_dir: Path) -> None:
    """Makes runs/latest lead to this run folder, in one step."""
    new = run_dir.with_name(f".latest-{os.getpid()}")
    with contextlib.suppress(
        OSError
    ):  # a folder has that name, or the disk knows no links: it is a convenience
        new.symlink_to(run_dir.name)
        new.replace(run_dir.with_name("latest"))
    new.unlink(missing_ok=True)


def _shown(path: Path) -> str:
    """A path as a shell takes it, from the project's root where it lies in the project."""
    return shlex.quote(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))


def _captions_right(run_dir: Path) -> float | None:
    """The share of public held-out pictures that the model describes as the truth does; writes the sheet."""
    from evaluation.captions import captions, equal_words
    from evaluation.options import CaptionsOptions
    from trainer.config.recipe import load_config

    heldout = load_config(run_dir / "config.toml").heldout
    if heldout is None or not heldout.is_public:
        print("nothing is said of held-out data that are not declared public (heldout.is_public)")
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
    right = sum(equal_words(row["caption"], row["references"][0]) for row in rows) / len(rows)
    print(
        f"{right:.1%} of {len(rows):,} captions are exactly right; with their pictures:\n  {_shown(sheet)}"
    )
    return right


if __name__ == "__main__":
    run_command(main)
