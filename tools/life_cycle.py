"""Measures the statements that one private training executes, and those of a life cycle, as JSON.

    python tools/life_cycle.py [--root OTHER_CHECKOUT]

The training is recipes/tiny.toml on one rank of the plain engine, from the shards to its last
checkpoint. The life cycle adds a stop and a resume, the plan, the card, two audits, the verifier
and a training loop of the user's. It needs coverage (the extra `dev`) and writes into a temporary
folder. `--root` measures another checkout with this Python.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOMS = ("privacy", "trainer", "data", "models", "evaluation", "launch_scripts")
USER_LOOP = """
import torch, torch.nn.functional as F
from privacy.loop import PrivateLoop, floats, integers

x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with PrivateLoop(
    model, optimizer, torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()),
    example=(floats(4), integers(2)),
    loss=lambda x, y: F.cross_entropy(model(x), y, reduction="none"),
    run_dir={run_dir!r}, expected_batch_size=20, num_steps=3, noise_multiplier=4.0,
    starts_from="public",
) as loop:
    for step in loop:
        print(step.number, step.epsilon)
    print(loop.claim)
    loop.write_card()
"""


def main() -> None:
    """Prints the shares of statements that one training and a life cycle execute."""
    parser = argparse.ArgumentParser(
        description="Measures which statements runs execute and prints JSON."
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="a checkout; this one by default",
    )
    root = parser.parse_args().root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        loop = work / "user_loop.py"
        loop.write_text(USER_LOOP.format(run_dir=str(work / "user_run")))
        settings = work / "coverage.ini"
        settings.write_text(
            f"[run]\nsource = {','.join(ROOMS)}\nparallel = true\npatch = subprocess, _exit\n"
            f"concurrency = multiprocessing, thread\ndata_file = {work}/data\n[report]\n"
            "exclude_also =\n    if TYPE_CHECKING:\n    @overload\n    : \\.\\.\\.$\n"
        )
        environment = os.environ | {
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "COVERAGE_RCFILE": str(settings),
        }

        def run(*command: object, exit_code: int = 0) -> None:
            """Runs a command of the project under coverage; ends with its output if it fails."""
            print("running", *command, file=sys.stderr)
            words = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
            process = subprocess.run(
                [*words, *map(str, command)],
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
            if process.returncode != exit_code:
                output = f"{process.stdout}{process.stderr}"
                sys.exit(f"exit code {process.returncode}, not {exit_code}:\n{output}")

        def share() -> dict[str, float]:
            """Returns the shares of statements executed so far, of all rooms and of each."""
            options = [f"--rcfile={settings}", f"--data-file={work}/whole"]
            report = work / "report.json"
            for task in (
                ["combine", "--keep", *options, *work.glob("data.*")],
                ["json", *options, "-o", report],
            ):
                words = [sys.executable, "-m", "coverage", *map(str, task)]
                subprocess.run(words, cwd=root, check=True, capture_output=True)
            files = json.loads(report.read_text())["files"]
            shares: dict[str, float] = {}
            for name, prefix in {"all": "", **{room: f"{room}/" for room in ROOMS}}.items():
                num_statements = 0
                num_executed = 0
                for path, file in files.items():
                    if path.startswith(prefix):
                        num_statements += file["summary"]["num_statements"]
                        num_executed += file["summary"]["covered_lines"]
                shares[name] = round(num_executed / num_statements, 3)
                shares[f"{name}_statements"] = num_statements
            return shares

        settings_of_run = (
            "--ds_config",
            "ds_configs/zero3.json",
            "--recipe",
            "recipes/tiny.toml",
            "--engine",
            "local",
        )
        train = ("launch_scripts/train.py", *settings_of_run)
        run(*train, "--run_dir", work / "run")
        training = share()
        (work / "run2").mkdir()
        run(*train, "--run_dir", work / "run2", "train.max_minutes=0.0001", exit_code=7)
        run(*train, "--run_dir", work / "run2")
        run("launch_scripts/plan.py", "--recipe", "recipes/tiny.toml", "data.num_examples=1000")
        run("launch_scripts/report.py", "--run_dir", work / "run")
        run("launch_scripts/audit.py", "ledger", "--run_dir", work / "run")
        run("launch_scripts/audit.py", "schedule", "--run_dir", work / "run")
        run(work / "run/verify.py")
        run(loop)
        print(json.dumps({"training": training, "life_cycle": share()}, indent=1))


if __name__ == "__main__":
    main()
