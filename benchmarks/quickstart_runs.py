"""What `make quickstart` reaches, run after run: median and range of what its last line says, and of its processor seconds.

    python benchmarks/quickstart_runs.py --output benchmarks/results/2026-11-22-quickstart

Weights begin from the seeds 1 to --runs; noise and sampling have none. Writes OUTPUT.json and OUTPUT.md after every run, so that
what was stopped goes on where it was, and the first run's pictures with captions as OUTPUT.png. The runs' folders are
runs/quickstart-seed-N.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURED = (
    "captions_right", "heldout_loss", "blind_loss", "shuffled_loss", "epsilon", "seconds", "processor_seconds",
)  # fmt: skip


def one_run(seed: int) -> dict[str, Any]:
    """What the quickstart's last line says, and the processor seconds of the command and all its ranks."""
    run_dir = ROOT / "runs" / f"quickstart-seed-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "launch_scripts/quickstart.py", "--run_dir", str(run_dir), f"train.seed={seed}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout.strip().splitlines()[-1])
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    measured = {name: said[name] for name in MEASURED if name in said}
    return {
        "seed": seed,
        **measured,
        "processor_seconds": round(used, 1),
        "run_dir": run_dir.relative_to(ROOT).as_posix(),
    }


def write(output: Path, runs: list[dict[str, Any]]) -> None:
    """OUTPUT.json, OUTPUT.md and OUTPUT.png."""
    rows = {name: (median(x := [run[name] for run in runs]), min(x), max(x)) for name in MEASURED}
    summary = {name: dict(zip(("median", "least", "most"), row, strict=True)) for name, row in rows.items()}
    command = f"python benchmarks/quickstart_runs.py --output {output}"
    held = {"command": command, "recipe": "recipes/quickstart.toml", "summary": summary, "runs": runs}
    output.with_suffix(".json").write_text(json.dumps(held, indent=1) + "\n")
    table = ["| | median | least | most |", "|---|---|---|---|"]
    table += [f"| {name} | " + " | ".join(f"{value:.4g}" for value in row) + " |" for name, row in rows.items()]
    text = f"""# The quickstart, {len(runs)} times

    {command}

on two CPU cores. The recipe is `recipes/quickstart.toml`, which says how it was chosen; weights begin from the seeds 1 to
{len(runs)}, noise and sampling have none. The test is on the 1,000 held-out pairs of `runs/fashion/test-*.tar`.

{chr(10).join(table)}

`captions_right` counts greedy captions that are exactly the true one, of 20 captions of which the most frequent has a share of
9.3 %. Losses are nats per token. `blind_loss` is the lowest of what unigrams, bigrams and whole captions of the other held-out
pairs give; `shuffled_loss` is the model's own with another picture for each caption. `seconds` is the time of the whole
command, which grows with what else the machine does meanwhile; `processor_seconds` is all that its processes used.

![Pictures with the captions of the run with seed 1: green ones are right]({output.name}.png)
"""
    output.with_suffix(".md").write_text(text)
    shutil.copyfile(ROOT / runs[0]["run_dir"] / "evaluation" / "answers.png", output.with_suffix(".png"))


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="without suffix")
    parser.add_argument("--runs", type=int, default=5, help="how many (default: 5)")
    options = parser.parse_args()
    record = options.output.with_suffix(".json")
    runs: list[dict[str, Any]] = json.loads(record.read_text())["runs"] if record.exists() else []
    for seed in sorted(set(range(1, options.runs + 1)) - {run["seed"] for run in runs}):
        runs.append(one_run(seed))
        print(json.dumps(runs[-1]), flush=True)
        write(options.output, sorted(runs, key=lambda run: run["seed"]))


if __name__ == "__main__":
    main()
