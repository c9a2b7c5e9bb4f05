"""One rank of benchmarks/scaling.py: builds a model on an engine and takes a DP-SGD step for every line on standard input.

Each answer is one JSON line on the file descriptor given: seconds of the step; for the line "measure N" instead of "step", bytes
on the wire and memory of a step with N micro-batches. Standard output is left to engines that print.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from data.batch import Batch  # noqa: E402
from models.captioner import build_captioner  # noqa: E402
from models.config import captioner_config  # noqa: E402
from privacy.clipping.accumulators import LocalSums  # noqa: E402
from privacy.plan import make_plan  # noqa: E402
from privacy.plan_request import PlanRequest  # noqa: E402
from privacy.releases import Release  # noqa: E402
from privacy.step.noise_variance import NoiseVariance  # noqa: E402
from privacy.step.sharded_sums import ShardedSums  # noqa: E402
from privacy.step.step import Mechanism, train_step  # noqa: E402
from trainer.config.machine import load_machine_settings  # noqa: E402
from trainer.config.optimizer import OptimizerSection  # noqa: E402
from trainer.engines import build_engine  # noqa: E402
from trainer.ranks import distributed  # noqa: E402
from trainer.ranks.discovery import discover_ranks  # noqa: E402

MODEL: dict[str, Any] = {
    "image_size": 96, "patch_size": 8, "vocab_size": 4000, "num_tokens": 24, "encoder_width": 192, "encoder_depth": 8,
    "encoder_num_heads": 4, "decoder_width": 192, "decoder_depth": 4, "decoder_num_heads": 4,
}  # fmt: skip
MICRO_BATCH = 8


class WireBytes(TorchDispatchMode):
    """Bytes that this rank sends in all of torch's collectives, whoever issues them, if nothing is sent twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function.__name__.split(".")[0].strip("_")
            self.bytes[name] = self.bytes.get(name, 0.0) + sent_bytes(name, [_nbytes(a) for a in args])
        return function(*args, **(kwargs or {}))


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_nbytes(v) for v in value) if isinstance(value, list | tuple) else 0


def sent_bytes(name: str, sizes: list[int]) -> float:
    """What a rank sends, by the sizes of a collective's first two arguments; a ring, or each part once."""
    world_size = distributed.world_size()
    share = (world_size - 1) / world_size
    if name.startswith("allgather"):
        return sizes[0] * share
    if name.startswith(("reduce_scatter", "alltoall")):
        return sizes[1] * share
    if name.startswith("allreduce"):
        return 2 * sizes[0] * share
    return sizes[0] * share if name.startswith(("broadcast", "reduce")) else 0.0


class _NoLedger:
    """A benchmark claims nothing, so it charges nothing."""

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        pass

    def done(self, step: int) -> None:
        pass


def build(device: torch.device, case: dict[str, Any]) -> tuple[Mechanism, list[Batch]]:
    """A step without data, ledger and files."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(case["ds_config"], file)
        file.flush()
        machine = load_machine_settings(Path(file.name))
    optimizer = OptimizerSection(peak_lr=1e-4)
    model = build_captioner(captioner_config("pico", **MODEL), generator=torch.Generator().manual_seed(0))
    engine = build_engine(case["engine"], model, optimizer, machine, device, MICRO_BATCH)
    del model
    accumulator = ShardedSums if case["accumulation"] == "sharded" else LocalSums
    batch_size = MICRO_BATCH * case["micro_batches"]
    plan = make_plan(
        PlanRequest(num_examples=1000 * batch_size, expected_batch_size=batch_size, num_steps=1, noise_multiplier=1.0)
    )
    mechanism = Mechanism(
        plan=plan,
        clipped=plan.clipped_sum(
            engine.module,
            shapes=engine.shapes,
            mode=case["mode"],
            accumulator=accumulator,
            device=engine.device,
            self_check=False,
        ),
        engine=engine,
        task=engine.module,
        ledger=_NoLedger(),
        noise=plan.noise(),
        noise_variance=NoiseVariance(optimizer.betas[1]),
        learning_rate=lambda step: optimizer.peak_lr,
        note_charge=lambda step: None,
        keep_noise_on=None,
    )
    size, length = MODEL["image_size"], MODEL["num_tokens"]
    batches = []
    for seed in range(case["micro_batches"]):
        generator = torch.Generator().manual_seed(seed)
        inputs = {
            "images_BCHW": torch.randn(MICRO_BATCH, 3, size, size, generator=generator),
            "tokens_BL": torch.randint(3, MODEL["vocab_size"], (MICRO_BATCH, length), generator=generator),
            "token_mask_BL": torch.ones(MICRO_BATCH, length, dtype=torch.bool),
        }
        batches.append(Batch(inputs, torch.zeros(MICRO_BATCH, dtype=torch.bool)))
    return mechanism, batches


def main() -> None:
    case, out = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")
    os.sched_setaffinity(0, {case["core"]})
    torch.set_num_threads(1)
    ranks = discover_ranks(os.environ)
    device = distributed.start(ranks)
    before = _peak_mib()
    mechanism, batches = build(device, case)
    step = 0
    _answer(out, {"ready": True, "parameters": sum(s.numel() for s in mechanism.engine.shapes.values())})
    for line in sys.stdin:
        step += 1
        started = time.perf_counter()
        order, _, count = line.strip().partition(" ")
        if order == "measure":
            with WireBytes() as wire:
                record = train_step(mechanism, step, iter(batches[: int(count)]))
            answer = {
                "peak_mib": _peak_mib(), "rise_mib": _peak_mib() - before, "sums_bytes": record.communication_bytes.inside(),
                "bytes": wire.bytes, "collectives": dict(distributed.traffic.collectives),
            }  # fmt: skip
            _answer(out, answer)
            continue
        train_step(mechanism, step, iter(batches))
        _answer(out, {"seconds": time.perf_counter() - started})
    distributed.finish(0)


def _answer(out: Any, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def _peak_mib() -> float:
    """The peak of this program: the usual counter of maximum resident size would start at the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
