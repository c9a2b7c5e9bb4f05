"""`dpcap_large` and `vip_large` whole, at random, by train.py: start, step, checkpoint, resume, export and import.

Everything but the model is tiny: 48 pictures, logical batches of 4, two steps. A step runs the rows of its cap. Where a run is
smaller than its recipe in another way, its name says so: products of bf16 are slow on a CPU without instructions for them.

    python -m tests.rehearsal.model TRAIN_ARGUMENTS     # launch_scripts/train.py with a clock on the parts of a start

It notes their times in the file that REHEARSAL_CLOCK names, and asks the run to stop behind its first checkpoint.
"""

import contextlib
import functools
import json
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.rehearsal.part import GIB, ROOT, Part, command, lap

PICTURES = 48
WORKERS = 1
"""Processes that decode; 0 works in the rank."""
NUM_STEPS = 2
STOPPED = 7
ROOM = 21 * GIB
"""Bytes that all processes of a run may hold together: the system has the rest of 24 GiB."""
CLOCK = "REHEARSAL_CLOCK"
TIMED = {
    "trainer.run.start": (
        *("train", "build_engine", "require_neighbours_apart", "require_repeats"),
        *("check_against_autograd", "check_at_size"),
    ),
    "trainer.run.start:TrainerStart": (
        *(
            "build_model",
            "require_sums_of_autograd",
            "open_data",
            "look_at_examples",
            "open_ledger",
        ),
        *("require_sums_at_size", "training"),
    ),
    "privacy.run.run": ("train_step",),
    "privacy.run.run:Run": ("save",),
}
"""Functions that the clock is on, by where they are called from."""


class Trained(NamedTuple):
    """One model as it is trained.

    Attributes:
        ds_config: its name in ds_configs/.
        overrides: what differs from the recipe besides the data and the batch.
    """

    label: str
    recipe: str
    ds_config: str
    num_ranks: int = 1
    overrides: tuple[str, ...] = ()
    is_exported: bool = False


AT_RANDOM = ("init.parts=none",)
SMALL_DPCAP = (*AT_RANDOM, "data.image_size=32", "data.num_tokens=8")
SMALL_VIP = (*AT_RANDOM, "data.image_size=64")
SHARDED_VIP = (*SMALL_VIP, "train.accumulation=sharded")
ONE_PATCH = (*AT_RANDOM, "data.image_size=16", "data.num_tokens=3")
DPCAP, VIP = "recipes/dpcap_large.toml", "recipes/vip_large.toml"
RUNS = (
    Trained("dpcap_large fp32, 4 patches", DPCAP, "zero1", 1, SMALL_DPCAP, is_exported=True),
    Trained("vip_large fp32, 16 patches", VIP, "zero1", 1, SMALL_VIP, is_exported=True),
    Trained("vip_large ZeRO-3 and sharded sums, 16 patches", VIP, "zero3", 2, SHARDED_VIP),
    Trained("dpcap_large bf16, 1 patch", DPCAP, "zero1_bf16", 1, ONE_PATCH),
)
"""Small pictures: all parameters are there, and so are their states, sums and files, but a step has few products.

Two ranks train `vip_large`: each gathers all weights while it computes, and two of `dpcap_large` hold more than `ROOM` so."""


def rehearse(part: Part, runs: tuple[Trained, ...] = RUNS) -> None:
    shards = part.folder / "shards"
    part.stage(f"{PICTURES} pictures", lambda: make_shards(shards))
    for run in runs:
        rehearse_run(part, run, shards)


def rehearse_run(part: Part, run: Trained, shards: Path) -> None:
    """Trains one model in two starts, and exports it; its large files are gone afterwards."""
    folder = part.folder / run.label.replace(" ", "_").replace(",", "")
    run_dir = folder / "run"
    first = part.stage(f"{run.label}: start and step 1", lambda: start(run, folder, shards))
    part.ran(parameters=first["parameters"])
    part.stage(f"{run.label}: resume and step 2", lambda: resume(run, folder, shards))
    if run.is_exported:
        part.stage(f"{run.label}: export and import", lambda: exchange(run_dir, folder))
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def make_shards(folder: Path) -> dict[str, Any]:
    """Draws the pictures at the size that both recipes have."""
    shutil.rmtree(folder, ignore_errors=True)
    script = ROOT / "launch_scripts" / "prepare.py"
    command(
        sys.executable,
        script,
        "synthetic",
        "--output",
        folder,
        "--num_examples",
        PICTURES,
        "--workers",
        1,
    )
    return {"bytes": sum(file.stat().st_size for file in folder.glob("*.tar"))}


def start(run: Trained, folder: Path, shards: Path) -> dict[str, Any]:
    """Takes step 1, saves and stops; says what the start was made of."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    clock, run_dir, measured = folder / "clock.jsonl", folder / "run", dict[str, Any]()
    launched = time.time()
    with watched(measured):
        words = train_words(run, run_dir, shards, module="tests.rehearsal.model")
        command(*words, log=folder / "start.log", code=STOPPED, **{CLOCK: str(clock)})
    times = [json.loads(line) for line in clock.read_text().splitlines()]
    began = {timed["name"]: timed["began"] - launched for timed in reversed(times)}
    measured["seconds_to_imports"] = round(began["train"], 1)
    measured["seconds_to_step_1"] = round(began["train/train_step"], 1)
    for timed in times:
        name = timed["name"].removeprefix("train/").replace("/", ": ")
        for kind in ("seconds", "processor_seconds") if name != "train" else ():
            measured[f"{name} {kind}"] = round(measured.get(f"{name} {kind}", 0) + timed[kind], 2)
    measured |= steps_of(run_dir, 1)
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    measured["checkpoint_bytes"] = sum(file.stat().st_size for file in checkpoint.iterdir())
    measured["parameters"] = sum(
        functools.reduce(int.__mul__, shape, 1) for shape in manifest["parameters"].values()
    )
    return measured


def resume(run: Trained, folder: Path, shards: Path) -> dict[str, Any]:
    """Takes step 2 by the same command, without a clock."""
    measured, run_dir = dict[str, Any](), folder / "run"
    with watched(measured), lap(measured, "whole"):
        command(*train_words(run, run_dir, shards), log=folder / "resume.log")
    return measured | steps_of(run_dir, NUM_STEPS)


def train_words(
    run: Trained, run_dir: Path, shards: Path, module: str | None = None
) -> list[object]:
    """The project's main command.

    Args:
        module: stands in for launch_scripts/train.py.
    """
    options = [
        *(
            "--ds_config",
            ROOT / "ds_configs" / f"{run.ds_config}.json",
            "--recipe",
            ROOT / run.recipe,
        ),
        *("--run_dir", run_dir, f"data.shards={shards}", f"data.num_examples={PICTURES}"),
        *(
            f"data.num_workers={WORKERS}",
            "privacy.expected_batch_size=4",
            "privacy.target_delta=0.01",
        ),
        *(f"train.num_steps={NUM_STEPS}", "train.micro_batch_size=4", "train.checkpoint_every=1"),
        *("train.keep_checkpoints=1", *run.overrides),
    ]
    script: list[object] = ["launch_scripts/train.py"] if module is None else ["-m", module]
    if run.num_ranks == 1:
        return [sys.executable, *script, *options]
    if module is not None:
        script = ["--module", module]
    return [
        Path(sys.executable).parent / "deepspeed",
        "--num_gpus",
        run.num_ranks,
        *script,
        *options,
    ]


def steps_of(run_dir: Path, last: int) -> dict[str, Any]:
    """Asserts that the ledger has charged and done the steps up to `last`, and says how long that one took."""
    records = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["type"] == "done"] == list(
        range(1, last + 1)
    )
    assert sum(record["type"] == "intent" for record in records) == last, "a step was charged twice"
    lines = map(json.loads, (run_dir / "private" / "metrics.jsonl").read_text().splitlines())
    (metrics,) = (line for line in lines if line["step"] == last and "train/loss" in line)
    phases = ("step", "gradients", "intent", "reduction", "noise", "update")
    return {
        **{
            f"{phase}_seconds": round(metrics[f"performance/{phase}_seconds"], 2)
            for phase in phases
        },
        "rank_peak_gib": round(metrics["performance/peak_memory_gib"], 2),
    }


def exchange(run_dir: Path, folder: Path) -> dict[str, Any]:
    """Exports the newest checkpoint in two formats and imports both; our own comes back with equal bits."""
    from safetensors import safe_open

    measured: dict[str, Any] = {}
    script = [sys.executable, ROOT / "launch_scripts" / "export.py"]
    with watched(measured):
        for form in ("hf", "safetensors"):
            out, back = folder / form, folder / f"{form}-imported"
            for path in (out, back):
                shutil.rmtree(path, ignore_errors=True)
            with lap(measured, f"export_{form}"):
                command(
                    *script,
                    "--checkpoint",
                    run_dir,
                    "--format",
                    form,
                    out,
                    log=folder / f"export-{form}.log",
                )
            measured[f"export_{form}_bytes"] = sum(
                f.stat().st_size for f in out.rglob("*") if f.is_file()
            )
            with lap(measured, f"import_{form}"):
                command(*script, "--import", form, out, back, log=folder / f"import-{form}.log")
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*/rank-*")
    (imported,) = (folder / "safetensors-imported").glob("rank-*")
    with safe_open(checkpoint, "pt") as trained, safe_open(imported, "pt") as read:
        names = [name for name in trained.keys() if name.startswith("param|")]  # noqa: SIM118 - no mapping
        assert set(names) == set(read.keys())
        assert all(trained.get_tensor(name).equal(read.get_tensor(name)) for name in names)
    measured["equal_tensors"] = len(names)
    for form in ("hf", "safetensors"):
        shutil.rmtree(folder / form)
        shutil.rmtree(folder / f"{form}-imported")
    return measured


@contextlib.contextmanager
def watched(measured: dict[str, Any], room: int = ROOM, interval: float = 0.5) -> Iterator[None]:
    """Notes how much memory the processes that are started meanwhile hold together at most, as together_peak_gib.

    Raises:
        AssertionError: they hold more than `room` bytes, and were ended.
    """
    peak, ends, before = 0, threading.Event(), {*descendants(os.getpid())}

    def watch() -> None:
        nonlocal peak
        while not ends.wait(interval):
            processes = {*descendants(os.getpid())} - before
            peak = max(peak, sum(map(own_bytes, processes)))
            if peak > room:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ends.set()
        watcher.join()
        assert peak <= room, f"the run was ended: its processes hold {peak / GIB:.1f} GiB together"
    measured["together_peak_gib"] = round(peak / GIB, 2)


def descendants(process: int) -> list[int]:
    """The processes below one, by their parents in /proc."""
    parent_of: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent_of[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = [process]
    for elder in family:
        family += [child for child, parent in parent_of.items() if parent == elder]
    return family[1:]


def own_bytes(process: int) -> int:
    """Resident memory of a process without mapped files; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


def start_clock(clock: Path) -> None:
    """Puts the clock on TIMED in this process; a line of the file is a call, named by the calls around it."""
    inside: list[str] = []

    def put_on(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            inside.append(name)
            began, started, used = time.time(), time.monotonic(), time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                line = {
                    "name": "/".join(inside),
                    "began": began,
                    "seconds": time.monotonic() - started,
                }
                line["processor_seconds"] = time.process_time() - used
                with clock.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                inside.pop()

        setattr(owner, name, timed)

    for owner, names in TIMED.items():
        for name in names:
            put_on(pkgutil.resolve_name(owner), name)


def main() -> None:
    """Trains as launch_scripts/train.py does, with a clock on rank 0, until the first checkpoint."""
    from launch_scripts import train
    from privacy.run.run import Run

    save = Run.save

    def save_and_stop(run: Run) -> None:
        save(run)
        run.folder.stop.touch()

    if os.environ.get("RANK", "0") == "0":  # another rank would ask once more, behind the stop
        Run.save = save_and_stop  # type: ignore[method-assign]
        start_clock(Path(os.environ[CLOCK]))
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
