"""How training scales: one rank against two, what travels, and what a rank holds.

    python benchmarks/scaling.py --json       # within 10 minutes on two CPU cores

Weak scaling: every rank sums 32 examples per logical step on a core of its own (OMP_NUM_THREADS=1, fixed affinity), alone or
next to a second rank. All processes are started once and step in turns, round by round; the median over rounds is reported.
`two_alone` are two runs of one rank at the same time, which share memory bandwidth but no data: what they lose is the
machine's, not the trainer's. Bytes and memory are of processes of their own, one pair per engine. With --json one JSON
object on stdout, everything else on stderr.
What a logical step takes on many GPUs is a model of the planner's (trainer/planner/hardware.py), whose bytes follow from the
engines' rules; here they are counted.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MICRO_BATCH, MICRO_BATCHES = 8, 4
START_SECONDS, STEP_SECONDS = 180, 120

Case = dict[str, Any]


def case(engine: str, stage: int, *, accumulation: str = "local", mode: str = "bookkeeping", **settings: Any) -> Case:
    others = {key: settings.pop(key) for key in list(settings) if key == "activation_checkpointing"}
    return {
        "engine": engine,
        "ds_config": {"zero_optimization": {"stage": stage, **settings}, **others},
        "accumulation": accumulation,
        "mode": mode,
        "micro_batches": MICRO_BATCHES,
    }


CPU = {"device": "cpu"}
SHARDED: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
CASES: dict[str, Case] = {
    "local": case("local", 1),
    "zero1": case("deepspeed", 1),
    "zero3": case("deepspeed", 3, **SHARDED),
    "zero3_offload": case("deepspeed", 3, offload_optimizer=CPU, offload_param=CPU, **SHARDED),
    "zero3_sharded": case("deepspeed", 3, accumulation="sharded", **SHARDED),
    "zero3_two_pass_checkpointing": case(
        "deepspeed", 3, mode="two_pass", activation_checkpointing={"enabled": True}, **SHARDED
    ),
    "fsdp": case("fsdp", 3),
    "fairscale": case("fairscale", 1),
}


class Group:
    """The ranks of one run, waiting for orders."""

    def __init__(self, chosen: Case, cores: list[int]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._ranks = [_Rank({**chosen, "core": core}, rank, len(cores), port) for rank, core in enumerate(cores)]
        self.num_parameters = 0

    def wait(self) -> None:
        for answer in self.answers(START_SECONDS):
            self.num_parameters = answer["parameters"]

    def order(self, word: str) -> None:
        for rank in self._ranks:
            rank.order(word)

    def answers(self, timeout: float = STEP_SECONDS) -> list[dict[str, Any]]:
        return [rank.answer(timeout) for rank in self._ranks]

    def step(self) -> float:
        """Seconds of the slowest rank."""
        self.order("step")
        return max(float(answer["seconds"]) for answer in self.answers())

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class _Rank:
    def __init__(self, chosen: Case, rank: int, world_size: int, port: int) -> None:
        read, write = os.pipe()
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        script = str(Path(__file__).with_name("scaling_rank.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, json.dumps(chosen), str(write)],
            cwd=ROOT, env=environment, pass_fds=[write], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read)
        self._errors: list[str] = []
        assert self._process.stderr is not None
        threading.Thread(target=self._errors.extend, args=(self._process.stderr,), daemon=True).start()

    def order(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        watchdog = threading.Timer(timeout, self._process.kill)
        watchdog.start()
        line = self._answers.readline()
        watchdog.cancel()
        if not line:
            self._process.wait()
            raise RuntimeError(f"a rank ended with {self._process.returncode}:\n{''.join(self._errors[-20:])}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


@contextmanager
def running(groups: dict[str, tuple[Case, list[int]]]) -> Iterator[dict[str, Group]]:
    started: dict[str, Group] = {}
    try:
        for name, (chosen, cores) in groups.items():
            started[name] = Group(chosen, cores)
            started[name].wait()
        yield started
    finally:
        for group in started.values():
            group.close()


def weak_scaling(engines: list[str], rounds: int, cores: list[int]) -> dict[str, Any]:
    """One rank's time over two ranks' time by engine, where each rank has the same work."""
    groups = {f"{engine} alone": (CASES[engine], cores[:1]) for engine in engines}
    groups |= {f"{engine} pair": (CASES[engine], cores) for engine in engines}
    groups["local other"] = (CASES["local"], cores[1:])
    seconds: dict[str, list[float]] = {name: [] for name in (*groups, "two_alone")}
    with running(groups) as started:
        for number in range(rounds + 1):  # the first round warms up
            taken = {name: group.step() for name, group in started.items()}
            both = [started["local alone"], started["local other"]]
            for group in both:
                group.order("step")
            taken["two_alone"] = statistics.mean(float(g.answers()[0]["seconds"]) for g in both)
            if number > 0:
                for name, value in taken.items():
                    seconds[name].append(value)
            _note(f"round {number} of {rounds}: " + ", ".join(f"{n} {s:.2f} s" for n, s in taken.items()))

    def ratio(one: list[float], two: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(one, two, strict=True))

    single = [(a + b) / 2 for a, b in zip(seconds["local alone"], seconds["local other"], strict=True)]
    return {
        "examples_per_rank": MICRO_BATCH * MICRO_BATCHES,
        "rounds": rounds,
        "efficiency": {e: ratio(seconds[f"{e} alone"], seconds[f"{e} pair"]) for e in engines},
        "efficiency_of_two_alone": ratio(single, seconds["two_alone"]),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
    }


def footprint(chosen: Case, cores: list[int]) -> dict[str, Any]:
    """Bytes on the wire and memory of one rank of two; the peaks are of processes that ran nothing else."""
    with running({"pair": (chosen, cores)}) as started:
        group = started["pair"]
        group.step()
        group.order("measure 1")
        short = group.answers()[0]
        group.order(f"measure {MICRO_BATCHES}")
        ranks = group.answers()
    full, count = ranks[0], MICRO_BATCHES - 1
    num_parameters = group.num_parameters

    def split(short: float, full: float) -> tuple[float, float]:
        """Bytes per parameter: of every further micro-batch, and of the rest."""
        each = max(0.0, (full - short) / count)
        return each / num_parameters, max(0.0, short - each) / num_parameters

    sums = split(short["sums_bytes"], full["sums_bytes"])
    weights = split(
        sum(short["bytes"].values()) - short["sums_bytes"], sum(full["bytes"].values()) - full["sums_bytes"]
    )
    return {
        "parameters": num_parameters,
        "bytes_per_example": sum(full["bytes"].values()) / (MICRO_BATCH * MICRO_BATCHES),
        "bytes_of_sums_per_example": full["sums_bytes"] / (MICRO_BATCH * MICRO_BATCHES),
        "bytes_per_step_by_collective": full["bytes"],
        "collectives_of_sums_per_step": full["collectives"],
        "bytes_per_parameter": {
            "weights_per_micro_batch": weights[0],
            "weights_per_step": weights[1],
            "sums_per_micro_batch": sums[0],
            "sums_per_step": sums[1],
        },
        "peak_mib_per_rank": [rank["peak_mib"] for rank in ranks],
        "rise_mib_per_rank": [rank["rise_mib"] for rank in ranks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=7, help="of the weak-scaling measurement")
    parser.add_argument(
        "--engines", nargs="*", default=["local", "zero1", "zero3"], help="for weak scaling; local always"
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="for bytes and memory")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two CPU cores are needed: one for each rank")
    started = time.monotonic()
    report: dict[str, Any] = {"hardware": f"{platform.processor() or platform.machine()}, cores {cores}"}
    report["weak_scaling"] = weak_scaling(list(dict.fromkeys(["local", *options.engines])), options.rounds, cores)
    report["engines"] = {}
    for name in options.cases:
        report["engines"][name] = footprint(CASES[name], cores)
        _note(f"{name}: {report['engines'][name]}")
    report["minutes"] = (time.monotonic() - started) / 60
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
