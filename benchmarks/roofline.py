"""What clipping costs on a GPU by the bytes and FLOPs of every operation: a paper bound, no measurement.

    python benchmarks/roofline.py --recipe recipes/dpcap_large.toml --gpu h100 --json
    python benchmarks/roofline.py --recipe recipes/dpcap_large.toml train.micro_batch_size=112
    python benchmarks/roofline.py                  # every recipe that is made for GPUs, one line each
    python benchmarks/roofline.py --recipe recipes/dpcap_large.toml --step   # a logical step on 8 and 64 ranks, by stage

`ratio` is the time of a clipped micro-batch, until its sums are complete, to that of a non-private one, until its gradients are
added to those of earlier micro-batches; both in milliseconds, and the costliest `rows` of the clipped one: where (the model, the
norms layer by layer, the sums), operation, dtypes, launches, FLOPs, bytes, ms. trainer/planner/roofline.py says how they are
counted. With --json one JSON object on stdout, everything else on stderr.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from privacy.clipping import ClippedSum  # noqa: E402
from privacy.noise.source import MOST_THREADS  # noqa: E402
from privacy.plan.numbers import usual_cap  # noqa: E402
from trainer.config.machine import MachineSettings, load_machine_settings  # noqa: E402
from trainer.config.recipe import load_config  # noqa: E402
from trainer.engines.blocks import checkpoint_blocks  # noqa: E402
from trainer.engines.layouts import layout_of  # noqa: E402
from trainer.planner.hardware import GPUS, Gpu  # noqa: E402
from trainer.planner.memory import trained_shapes  # noqa: E402
from trainer.planner.probe import META  # noqa: E402
from trainer.planner.resources import micro_batches, planning_task  # noqa: E402
from trainer.planner.roofline import Row, roofline  # noqa: E402

GPU_NAMES = {"h100": "h100-80gb", "a100": "a100-80gb"}
SHOWN = 10


def of_recipe(
    path: Path, overrides: list[str], gpu: Gpu, machine: MachineSettings
) -> dict[str, Any]:
    """The micro-batch of a recipe, JSON-ready."""
    config = load_config(path, overrides)
    task, _ = planning_task(config, ROOT)
    model, size = task.skeleton().to(machine.compute_dtype), config.train.micro_batch_size
    checkpoint_blocks(model, machine)
    cap = usual_cap(config.privacy.expected_batch_size)
    clipped = ClippedSum(model, 1.0, cap=cap, rows=2 * max(size, cap // 64), self_check=False)
    inputs = {
        name: torch.empty(
            size,
            *x.shape[1:],
            dtype=machine.compute_dtype if x.is_floating_point() else x.dtype,
            device=META,
        )
        for name, x in task.synthetic_inputs(2).items()
    }
    private, plain = roofline(clipped, model, inputs, gpu)
    rows = sorted(private.rows.values(), key=lambda row: -row.seconds)
    return {
        "recipe": path.stem,
        "gpu": gpu.name,
        "micro_batch_size": size,
        "ratio": private.total("seconds") / plain.total("seconds"),
        "private_ms": private.total("seconds") * 1e3,
        "non_private_ms": plain.total("seconds") * 1e3,
        "launches": private.total("launches"),
        "non_private_launches": plain.total("launches"),
        "rows": [as_json(row) for row in rows[:SHOWN]],
    }


DRAWN = 60e-9 / MOST_THREADS
"""Seconds a rounded normal: 45 ns on one quiet thread (results/2026-11-29-noise.json), a third more on a loaded one, and as many
threads as draw for an accelerator."""
WIRE, LINK, HOST = 370e9, 45e9, 50e9
"""Bytes/s of a rank: within a node of eight, between nodes at 400 Gb/s a GPU, and to host memory. An H100's, assumed."""


def of_step(path: Path, overrides: list[str], gpu: Gpu, machine: MachineSettings) -> dict[str, Any]:
    """Milliseconds of one logical step by stage, on the rank that owns most, one engine after the other; JSON-ready.

    Weights of stage 3 travel for the forward and again for the backward. What overlaps is not known: all is added up.
    """
    config = load_config(path, overrides)
    checkpointed = replace(machine, activation_checkpointing=True)
    ms = {
        name: of_recipe(path, overrides, gpu, m)
        for name, m in (("kept", machine), ("recomputed", checkpointed))
    }
    shapes = trained_shapes(planning_task(config, ROOT)[0].skeleton())
    cap, count = (
        usual_cap(config.privacy.expected_batch_size),
        sum(shape.numel() for shape in shapes.values()),
    )
    found = {}
    for world_size in (8, 64):
        for name in ("zero1_bf16", "zero3_bf16", "zero3_offload_bf16"):
            machine = load_machine_settings(ROOT / f"ds_configs/{name}.json")
            layout = layout_of("deepspeed", shapes, config.optimizer, machine, world_size)
            owned = max(layout.count(rank) for rank in range(world_size))
            wire, others = (
                (WIRE if world_size <= gpu.gpus_per_node else LINK),
                count * (world_size - 1) / world_size,
            )
            number = micro_batches(config, cap, world_size, gpu.gpus_per_node)
            gathers = 2 * number if machine.stage == 3 else 1
            stages = {
                "weights on the wire": machine.compute_dtype.itemsize * others * gathers / wire,
                "sums on the wire": 8 * others / wire,
                # Sums are read and packed, and what comes is read, added, scaled and written.
                "packing": (14 * count + 8 * others + 40 * owned) / gpu.reached_bandwidth,
                # Drawn by the CPU and copied; then read, added, converted and written.
                "noise": owned * (DRAWN + 8 / HOST + 48 / gpu.reached_bandwidth),
                # Gradient, weights and two moments in fp32, read and written once; then the weights in bf16.
                "optimizer": 30
                * owned
                / (HOST if machine.offload_optimizer else gpu.reached_bandwidth),
                "host copies": 6 * owned / HOST if machine.offload_optimizer else 0.0,
            }
            found[f"{name}, {world_size} ranks"] = {
                "micro_batches": number,
                "bytes_on_the_wire": machine.compute_dtype.itemsize * others * gathers + 8 * others,
                "ms": {stage: 1e3 * seconds for stage, seconds in stages.items()},
                "micro_batches_ms": {kind: number * one["private_ms"] for kind, one in ms.items()},
                "share_outside_micro_batches": 1e3
                * sum(stages.values())
                / (number * ms["kept"]["private_ms"]),
            }
    return {
        "recipe": path.stem,
        "ratio_recomputed": ms["recomputed"]["ratio"],
        **ms["kept"],
        "step": found,
    }


def as_json(row: Row) -> dict[str, Any]:
    return {
        "part": row.part,
        "operation": row.operation,
        "dtypes": row.dtypes,
        "launches": row.launches,
        "flops": row.flops,
        "bytes": row.moved,
        "ms": row.seconds * 1e3,
    }


def large_recipes() -> list[Path]:
    """Those for images of 224 pixels; of recipes that differ in neither model nor micro-batch, the one with the shortest name."""
    found: dict[str, Path] = {}
    for path in sorted(
        (ROOT / "recipes").glob("*.toml"), key=lambda path: (len(path.stem), path.stem)
    ):
        config = load_config(path)
        if config.data.image_size == 224:
            found.setdefault(f"{config.model} {config.train.micro_batch_size}", path)
    return sorted(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", type=Path, help="default: all that are for images of 224 pixels"
    )
    parser.add_argument("--gpu", choices=[*GPU_NAMES, *GPUS], default="h100")
    parser.add_argument(
        "--ds_config",
        type=Path,
        default=ROOT / "ds_configs/zero3_bf16.json",
        help="dtype, checkpointing",
    )
    parser.add_argument(
        "--step", action="store_true", help="also a logical step by stage; takes a --recipe"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes of the recipe"
    )
    options = parser.parse_intermixed_args()
    gpu = GPUS[GPU_NAMES.get(options.gpu, options.gpu)]
    paths = [options.recipe] if options.recipe else large_recipes()
    results = []
    for path in paths:
        found = (of_step if options.step else of_recipe)(
            path, options.overrides, gpu, load_machine_settings(options.ds_config)
        )
        results.append(found)
        print(
            f"{found['recipe']:28} {found['micro_batch_size']:4}: ratio {found['ratio']:.3f}, {found['private_ms']:.1f} to "
            f"{found['non_private_ms']:.1f} ms, {found['launches']} to {found['non_private_launches']} launches",
            file=sys.stderr if options.json else sys.stdout,
            flush=True,
        )
        if options.recipe and not options.json:
            for row in found["rows"]:
                print(
                    "  {ms:7.2f} ms  {part:6} {operation} ({dtypes}) x{launches}: {flops:.3g} FLOP, {bytes:.3g} B".format(
                        **row
                    )
                )
            for name, step in found.get("step", {}).items():
                stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in step["ms"].items())
                kept, recomputed = step["micro_batches_ms"].values()
                print(
                    f"  {name}: {step['micro_batches']} micro-batches {kept:.0f} ms, {recomputed:.0f} recomputed; {stages}"
                )
    if options.json:
        print(json.dumps(results[0] if options.recipe else {"recipes": results}))


if __name__ == "__main__":
    main()
