"""Acceptance on one GPU: starts, sums, noise, cost, failures; prints a table and writes a JSON record of each part.

    make gpu                          # everything, about 40 minutes
    make gpu PART=micro_batches       # one part
    make gpu DEVICE=cpu REDUCED=1     # the same program on a CPU, in minutes
    make gpu PYTHON=python3           # with a Python that has torch already; nothing is installed

Every part runs in a process of its own and may take eight minutes. Exit 0: every check that ran holds. Exit 1: one does not,
or a part crashed. Exit 2: this cannot run here. What is not installed is reported as not run.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "versions",
    "micro_batches",
    "starts",
    "sums",
    "neighbours",
    "noise",
    "failures",
    "loading",
)
"""What clipping costs first, then in the order in which they decide most."""
MOST_SECONDS = 480
SIGNS = {True: "ok", False: "FAILED", None: "not run"}
Result = dict[str, Any]


def run_part(part: str, device: str, reduced: bool, lines: Path) -> None:
    """Yields the checks of one part into `lines`, one JSON object each, as soon as they are known."""
    import torch

    from tests.gpu.checks import Setting

    module = importlib.import_module(f"tests.gpu.{part}")
    with tempfile.TemporaryDirectory() as folder, lines.open("a") as file:
        started = time.monotonic()
        for check in module.checks(Setting(torch.device(device), reduced, Path(folder))):
            now = time.monotonic()
            result = {**asdict(check), "seconds": round(now - started, 2)}
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(f"{SIGNS[check.holds]:8} {check.name}", file=sys.stderr, flush=True)
            started = now


def supervise(part: str, device: str, reduced: bool) -> list[Result]:
    """The checks of a part, shown as they come; a crash, a time limit or a missing package is one of them."""
    with tempfile.TemporaryDirectory() as folder:
        lines, log = Path(folder) / "checks", Path(folder) / "log"
        lines.touch()
        command = [
            sys.executable,
            "-m",
            "tests.gpu",
            "--device",
            device,
            "--run",
            part,
            "--lines",
            str(lines),
        ]
        errors: list[str] = []
        with log.open("wb") as file:
            process = subprocess.Popen(
                command + ["--reduced"] * reduced,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
            )
        timer = threading.Timer(MOST_SECONDS, process.kill)
        timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            errors.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)
        code = process.wait()
        timer.cancel()
        results: list[Result] = [json.loads(line) for line in lines.read_text().splitlines()]
    if code != 0:
        missing = next(
            (line for line in reversed(errors) if line.startswith("ModuleNotFoundError")), None
        )
        holds = None if missing else False
        measured = missing or {"exit": code, "log": errors[-30:]}
        expected = f"ends by itself within {MOST_SECONDS} s"
        results.append(
            {"name": f"part {part}", "holds": holds, "measured": measured, "expected": expected}
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="this one alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reduced", action="store_true", help="small models and few repetitions")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "gpu", help="folder of the records"
    )
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_part(options.run, options.device, options.reduced, options.lines)
        return 0
    try:
        import torch
    except ImportError:
        print(
            f"error: {sys.executable} has no torch; choose another by `make gpu PYTHON=...`",
            file=sys.stderr,
        )
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} finds no GPU here; `make gpu DEVICE=cpu REDUCED=1` runs on a CPU",
            file=sys.stderr,
        )
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    chosen, results = [options.part] if options.part else list(PARTS), []
    for part in chosen:
        print(f"--- {part}", file=sys.stderr, flush=True)
        started = time.monotonic()
        checks = supervise(part, options.device, options.reduced)
        record = {
            "command": f"python -m tests.gpu --part {part} --device {options.device}"
            + " --reduced" * options.reduced,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "seconds": round(time.monotonic() - started, 1),
            "checks": checks,
        }
        (options.output / f"{part}.json").write_text(json.dumps(record, indent=1) + "\n")
        results += checks
    width = max(len(result["name"]) for result in results)
    for result in results:
        measured = json.dumps(result["measured"])
        print(
            f"{SIGNS[result['holds']]:8} {result['name']:{width}}  {measured[:100]}  ({result['expected']})"
        )
    failed = [result["name"] for result in results if result["holds"] is False]
    not_run = sum(result["holds"] is None for result in results)
    print(
        f"{len(results)} checks: {len(failed)} failed, {not_run} not run; records: {options.output}"
    )
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
