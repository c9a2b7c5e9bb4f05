"""The cost of the check of secret micro-batches, and its false alarms where examples stay apart.

    python benchmarks/isolation.py --json [--rows 500000] [--seconds 600] [--only vip_tiny ...]

Honest rows: micro-batches of random rows, of the models of all recipes in fp32 and bf16, are
checked as a run checks them (privacy/guards/isolation.py). Models of more than LARGE numbers have
one block of each stack. Cost: processor time of a checked micro-batch against an unchecked one, in
interleaved rounds; a run checks one in WINDOW. With --json one JSON object on stdout.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from privacy.guards.isolation import WINDOW, Agreement, Isolation  # noqa: E402
from privacy.guards.unchanged import Part  # noqa: E402
from privacy.plan.numbers import make_plan  # noqa: E402
from privacy.plan.releases import SENSITIVITY_SLACK  # noqa: E402
from privacy.plan.request import PlanRequest  # noqa: E402
from privacy.ranks.allocator import keep_freed_memory  # noqa: E402
from privacy.ranks.engine import to_device  # noqa: E402
from privacy.run.mechanism import mechanism_of  # noqa: E402
from privacy.step.loop_engine import LoopEngine  # noqa: E402
from trainer.config.recipe import load_config  # noqa: E402
from trainer.tasks import make_task  # noqa: E402

LARGE = 30_000_000
SIZES = {"own_loop": 256}
"""Rows of a micro-batch, if they are not DEFAULT_SIZE."""
DEFAULT_SIZE = 64
ROUNDS = 7
COSTS = ("quickstart", "vip_small", "finetune_vit_base_lora", "own_loop")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TwoLayers(nn.Module):
    """A network of 26,010 parameters, as in a loop of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 336), nn.ReLU(), nn.Linear(336, 12))

    def forward(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Returns the loss of each row."""
        return F.cross_entropy(self.net(x_BD).float(), labels_B, reduction="none")


class Workload:
    """A model, rows for its micro-batches, and the row of padding."""

    def __init__(self, name: str) -> None:
        self.name = name
        generator = torch.Generator().manual_seed(0)
        if name == "own_loop":
            torch.manual_seed(0)
            self.model: nn.Module = TwoLayers()
            x_BD = torch.randn(256, 64, generator=generator)
            labels_B = torch.randint(12, (256,), generator=generator)
            self.rows = {"x_BD": x_BD, "labels_B": labels_B}
            self.padding = {name: torch.zeros_like(x[:1]) for name, x in self.rows.items()}
            return
        task = make_task(load_config(ROOT / "recipes" / f"{name}.toml"), ROOT)
        num_parameters = sum(p.numel() for p in task.skeleton().parameters())
        self.model = task.build(generator, one_block=num_parameters > LARGE)
        self.rows = task.synthetic_inputs(64)
        self.padding = task.padding()

    def micro_batch(self, size: int, generator: torch.Generator) -> Part:
        """Returns random rows: floating-point inputs are new, others are mixed among the rows."""
        inputs = {}
        for name, x in self.rows.items():
            if x.is_floating_point():
                scale_B = 10 ** torch.empty(size).uniform_(-2, 1, generator=generator)
                fresh = torch.randn(size, *x.shape[1:], generator=generator)
                inputs[name] = fresh * scale_B.view(-1, *[1] * (x.dim() - 1))
            else:
                inputs[name] = x[torch.randint(len(x), (size,), generator=generator)]
        is_padding_B = torch.rand(size, generator=generator) < 0.1
        for name, x in inputs.items():
            x[is_padding_B] = self.padding[name].to(x)
        return Part(inputs, is_padding_B, 0)


class Bench:
    """An isolation check of a workload in one dtype, with the plan of a large run."""

    def __init__(self, workload: Workload, dtype: torch.dtype, size: int) -> None:
        self.workload = workload
        self.size = size
        request = PlanRequest(
            num_examples=1_000_000,
            expected_batch_size=10_000,
            num_steps=100,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sensitivity_slack=SENSITIVITY_SLACK,
        )
        plan = make_plan(request)
        model = workload.model.to(dtype)
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = LoopEngine(model, torch.optim.SGD(trained, lr=0.0))
        self.mechanism = mechanism_of(plan, engine, model, size)
        self.clipped = self.mechanism.clipped
        self.isolation = Isolation(self.mechanism, workload.padding)
        self.generator = torch.Generator().manual_seed(1)

    def start(self) -> bool:
        """Checks made-up examples as a run does; returns whether their rows keep their bits."""
        index = torch.arange(self.size)
        rows = {name: x[index % len(x)] for name, x in self.workload.rows.items()}
        self.isolation.require(rows)
        return bool(self.isolation._kinds_that_keep_bits)

    def add(self, part: Part, *, is_checked: bool) -> float:
        """Adds a micro-batch, and returns the processor seconds that it took."""
        mechanism = self.mechanism
        self.isolation.begin(1)
        micro_batches = iter([part])
        start = time.process_time()
        for micro_batch in self.isolation.watched(micro_batches) if is_checked else micro_batches:
            inputs = to_device(micro_batch.inputs, mechanism.engine)
            self.clipped.add_micro_batch(mechanism.task, inputs, micro_batch.is_padding_B)
        return time.process_time() - start


def measure_cost(name: str) -> dict[str, Any]:
    """Returns the cost of a checked micro-batch, in units of an unchecked one, and of a run."""
    bench = Bench(Workload(name), torch.float32, SIZES.get(name, 16))
    bench.start()
    ratios = []
    for number in range(ROUNDS + 1):
        part = bench.workload.micro_batch(bench.size, bench.generator)
        bench.clipped.zero_()
        plain = bench.add(part, is_checked=False)
        bench.clipped.zero_()
        checked = bench.add(part, is_checked=True)
        # The first round warms up.
        if number > 0:
            ratios.append(checked / plain)
    ratio = statistics.median(ratios)
    return {"checked_by_plain": round(ratio, 3), "share_of_a_run": round((ratio - 1) / WINDOW, 4)}


def honest_rows(name: str, dtype: str, num_rows: int, seconds: float) -> dict[str, Any]:
    """Checks random rows until there are enough or time is over; returns the number of alarms."""
    bench = Bench(Workload(name), DTYPES[dtype], SIZES.get(name, DEFAULT_SIZE))
    keeps_bits = bench.start()
    agreements: list[Agreement] = []
    compare = bench.isolation._compare_halves

    def record(*arguments: Any) -> Agreement:
        agreements.append(compare(*arguments))
        return agreements[-1]

    bench.isolation._compare_halves = record  # type: ignore[method-assign, assignment]
    rows = 0
    alarms = 0
    start = time.time()
    while rows < num_rows and time.time() - start < seconds:
        bench.clipped.zero_()
        part = bench.workload.micro_batch(bench.size, bench.generator)
        try:
            bench.add(part, is_checked=True)
        except Exception as error:
            print(f"{name} {dtype}: {error}", file=sys.stderr)
            bench.isolation.is_mixed = False
            alarms += 1
        rows += int((~part.is_padding_B).sum())
    distances = [agreement.distance for agreement in agreements]
    return {
        "rows": rows,
        "alarms": alarms,
        "start_keeps_bits": keeps_bits,
        "micro_batches": len(agreements),
        "that_keep_bits": sum(agreement.keeps_bits for agreement in agreements),
        "largest_distance": round(max(distances), 4),
        "seconds": round(time.time() - start),
    }


def workloads() -> Iterator[str]:
    """Yields one recipe for each model, and the network of a user's loop."""
    yield "own_loop"
    models = set()
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        config = load_config(path)
        model = json.dumps(config.model.model_dump(), sort_keys=True, default=str)
        if model not in models:
            models.add(model)
            yield path.stem


def main() -> None:
    """Prints costs and false alarms as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=500_000, help="of each model and dtype")
    parser.add_argument("--seconds", type=float, default=600, help="the most for each of these")
    parser.add_argument("--only", nargs="*", help="recipes, or own_loop")
    options = parser.parse_args()
    keep_freed_memory()
    names = options.only or list(workloads())
    print(names, file=sys.stderr)
    costs = {name: measure_cost(name) for name in COSTS if name in names}
    honest: dict[str, Any] = {}
    for name in names:
        for dtype in DTYPES:
            alarms = honest_rows(name, dtype, options.rows, options.seconds)
            honest[f"{name} {dtype}"] = alarms
            print(name, dtype, alarms, file=sys.stderr)
    print(json.dumps({"cost": costs, "honest_rows": honest}, indent=1))


if __name__ == "__main__":
    main()
