"""How training scales: one rank against two.

    python benchmarks/scaling.py --json       # within 6 minutes on two CPU cores

Weak scaling: every rank sums 32 examples per logical step on a core of its own, alone or next to a second rank. All processes are
started once and step in turns, round by round; the median over rounds is reported. `two_alone` are two runs of one rank at the
same time, which share memory bandwidth but no data: what they lose is the machine's, not the trainer's. With --json one JSON
object on stdout, everything else on stderr.
"""

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from data.batch import Batch
from models.captioner import build_captioner
from models.config import captioner_config
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import Release
from privacy.step.batches import most_rows
from privacy.step.noise_variance import NoiseVariance
from privacy.step.step import Mechanism, train_step
from trainer.config.machine import load_machine_settings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines import build_engine
from trainer.ranks import distributed
from trainer.ranks.discovery import discover_ranks

MODEL: dict[str, Any] = {
    "image_size": 96, "patch_size": 8, "vocab_size": 4000, "num_tokens": 24, "encoder_width": 192, "encoder_depth": 8,
    "encoder_num_heads": 4, "decoder_width": 192, "decoder_depth": 4, "decoder_num_heads": 4,
}  # fmt: skip
MICRO_BATCH, MICRO_BATCHES = 8, 4
SECONDS = 300
"""The most that a start or a step may take."""

CASES: dict[str, tuple[EngineName, dict[str, Any]]] = {
    "local": ("local", {"stage": 1}),
    "zero1": ("deepspeed", {"stage": 1}),
    "zero3": ("deepspeed", {"stage": 3, "stage3_param_persistence_threshold": 0}),
    "fsdp": ("fsdp", {"stage": 3}),
    "fairscale": ("fairscale", {"stage": 1}),
}
"""Engines with their `zero_optimization` of a ds_config."""


# One rank


class _NoLedger:
    """A benchmark claims nothing, so it charges nothing."""

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        pass

    def done(self, step: int, **noised: object) -> None:
        pass


def build(device: torch.device, name: str) -> tuple[Mechanism, list[Batch]]:
    """A step without data, ledger and files."""
    engine_name, zero = CASES[name]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"zero_optimization": zero}, file)
        file.flush()
        machine = load_machine_settings(Path(file.name))
    optimizer = OptimizerSection(peak_lr=1e-4)
    model = build_captioner(captioner_config("pico", **MODEL), generator=torch.Generator().manual_seed(0))
    engine = build_engine(engine_name, model, optimizer, machine, device, MICRO_BATCH)
    del model
    size = MICRO_BATCH * MICRO_BATCHES
    request = PlanRequest(num_examples=1000 * size, expected_batch_size=size, num_steps=1, noise_multiplier=1.0)
    plan = make_plan(request)
    rows = most_rows(plan, MICRO_BATCH)
    clipped = plan.clipped_sum(engine.module, shapes=engine.shapes, rows=rows, device=engine.device, self_check=False)
    mechanism = Mechanism(
        plan=plan, clipped=clipped, engine=engine, task=engine.module, ledger=_NoLedger(), noise=plan.noise(),
        noise_variance=NoiseVariance(optimizer.betas[1]), learning_rate=lambda step: optimizer.peak_lr,
        note_charge=lambda step: None, keep_noise_on=None,
    )  # fmt: skip
    batches = []
    for seed in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, MODEL["vocab_size"], (MICRO_BATCH, MODEL["num_tokens"]), generator=generator)
        inputs = {
            "images_BCHW": torch.randn(MICRO_BATCH, 3, MODEL["image_size"], MODEL["image_size"], generator=generator),
            "tokens_BL": tokens,
            "token_mask_BL": torch.ones_like(tokens, dtype=torch.bool),
        }
        batches.append(Batch(inputs, torch.zeros(MICRO_BATCH, dtype=torch.bool)))
    return mechanism, batches


def run_rank(name: str, core: int, environment: dict[str, str], orders: Connection) -> None:
    """Takes a step at every order, answers with its seconds, and ends when told so."""
    os.dup2(2, 1)  # engines print
    os.environ |= environment
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    mechanism, batches = build(distributed.start(discover_ranks(os.environ)), name)
    orders.send(0.0)
    step = 0
    while orders.recv():
        step += 1
        started = time.perf_counter()
        train_step(mechanism, step, iter(batches))
        orders.send(time.perf_counter() - started)
    distributed.finish(0)


# What starts them


class Group:
    """The ranks of one run, one on each core, waiting for orders."""

    def __init__(self, name: str, cores: list[int]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        context = multiprocessing.get_context("spawn")
        self._ranks: list[Connection] = []
        for rank, core in enumerate(cores):
            ours, theirs = context.Pipe()
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(cores))}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            context.Process(target=run_rank, args=(name, core, environment, theirs), daemon=True).start()
            theirs.close()
            self._ranks.append(ours)

    def order(self, *, another: bool = True) -> None:
        """Asks for another step, or for the end."""
        for rank in self._ranks:
            rank.send(another)

    def seconds(self) -> float:
        """Of the slowest rank in the ordered step; 0 once all are ready."""
        if not all(rank.poll(SECONDS) for rank in self._ranks):
            raise RuntimeError(f"a rank did not answer within {SECONDS} s")
        return max(rank.recv() for rank in self._ranks)  # EOFError: it ended, and has said why on stderr


def weak_scaling(engines: list[str], rounds: int, cores: list[int]) -> dict[str, Any]:
    """One rank's time over two ranks' time by engine, where each rank has the same work."""
    groups = {
        f"{engine} {kind}": Group(engine, cores[:n]) for engine in engines for kind, n in (("alone", 1), ("pair", 2))
    }
    both = [groups["local alone"], Group("local", cores[1:])]
    for group in (*groups.values(), both[1]):
        group.seconds()  # until it is ready
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first round warms up
        taken = {}
        for name, group in groups.items():
            group.order()
            taken[name] = group.seconds()
        both[1].order()
        taken["local other"] = both[1].seconds()
        for group in both:
            group.order()
        taken["two_alone"] = statistics.mean(group.seconds() for group in both)
        if number > 0:
            for name, value in taken.items():
                seconds.setdefault(name, []).append(value)
        line = ", ".join(f"{name} {value:.2f} s" for name, value in taken.items())
        print(f"round {number} of {rounds}: {line}", file=sys.stderr, flush=True)
    for group in (*groups.values(), both[1]):
        group.order(another=False)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=7, help="of the weak-scaling measurement")
    engines = ["local", "zero1", "zero3"]
    parser.add_argument("--engines", nargs="*", default=engines, choices=list(CASES), help="local is always among them")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two CPU cores are needed: one for each rank")
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    started = time.monotonic()
    report: dict[str, Any] = {"hardware": f"{platform.processor() or platform.machine()}, cores {cores}"}
    report["weak_scaling"] = weak_scaling(list(dict.fromkeys(["local", *options.engines])), options.rounds, cores)
    report["minutes"] = (time.monotonic() - started) / 60
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
