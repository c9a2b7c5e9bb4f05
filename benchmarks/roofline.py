"""The least time that a clipped micro-batch takes a CPU core, by the FLOPs and the bytes of every operation: no measurement.

    python benchmarks/roofline.py --recipe recipes/quickstart.toml
    python benchmarks/roofline.py --recipe recipes/quickstart.toml --json train.micro_batch_size=64

One micro-batch runs on the meta device, where nothing is computed, in fp32. Each operation of torch is one launch. It takes the
longer of two times: its FLOPs at the rate of a core, and its bytes, inputs read once and outputs written once, at that of the
memory (trainer/hardware.py). Views and allocations launch nothing. On CUDA clipping takes another way (products of bf16,
functions that torch.compile fuses), which only a GPU shows: `make gpu` measures it.

`ratio` is the time of a clipped micro-batch, until its sums are complete, to that of a non-private one, until its gradients are
added to those of earlier micro-batches. With --json one JSON object on stdout.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from privacy.clipping import ClippedSum  # noqa: E402
from privacy.plan.numbers import usual_cap  # noqa: E402
from trainer.config.recipe import load_config  # noqa: E402
from trainer.hardware import GPUS  # noqa: E402
from trainer.planner.probe import CLIPPING_FORMULAS, META, with_fused_attention  # noqa: E402
from trainer.planner.resources import planning_task  # noqa: E402

CORE = GPUS["cpu"]
SHOWN = 10
aten = torch.ops.aten
LAUNCH_NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten._unsafe_view,
    aten.promote_types,
}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, *CLIPPING_FORMULAS}
OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.random_}
"""In place, but what was there before is not read."""
FILLS = {
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
}
"""They take the shape of their input alone."""


@dataclass
class Row:
    """All operations of one kind.

    Attributes:
        dtypes: of the operands.
        moved: bytes read and written.
        seconds: the longer of computing and moving, launch by launch.
    """

    operation: str
    dtypes: str
    launches: int = 0
    flops: int = 0
    moved: int = 0
    seconds: float = 0.0


class OperationCounter(TorchDispatchMode):
    """Counts every operation while it is active; `rows` by operation and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], Row] = {}

    def total(self, attribute: str) -> Any:
        """Returns the sum of one attribute over all rows: "launches", "flops", "seconds"."""
        return sum(getattr(row, attribute) for row in self.rows.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.is_view or packet in LAUNCH_NOTHING:
            return out
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        written = [
            given[argument.name]
            for argument in func._schema.arguments
            if argument.name in given and argument.alias_info and argument.alias_info.is_write
        ]
        is_overwritten = packet in OVERWRITES or "out" in kwargs
        skipped = {id(x) for x in tree_leaves(written)} if is_overwritten else set()
        read = [
            x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) not in skipped
        ]
        read = [] if packet in FILLS else read
        flops = 0
        if packet in CLIPPING_FORMULAS:
            shapes = [x.shape if isinstance(x, Tensor) else x for x in args]
            flops = CLIPPING_FORMULAS[packet](*shapes)
        elif packet in flop_registry:
            # torch's formulas do not know `out_dtype`.
            arguments = [x for x in args if not isinstance(x, torch.dtype)]
            options = {name: x for name, x in kwargs.items() if name != "out"}
            flops = flop_registry[packet](*arguments, **options, out_val=out)
        # A product's operands decide, and not the tensor that it is added to; attention's first one.
        operands = read if flops == 0 else read[-2:] if packet in PRODUCTS else read[:1]
        self._add(packet.__name__, operands, moved_bytes(read, (out, written)), flops)
        return out

    def _add(self, operation: str, operands: list[Tensor], moved: int, flops: int) -> None:
        names = {
            str(x.dtype).removeprefix("torch.")
            for x in operands
            if x.is_floating_point() and x.dim() > 0
        }
        key = operation, "+".join(sorted(names))
        row = self.rows.setdefault(key, Row(*key))
        row.launches += 1
        row.flops += flops
        row.moved += moved
        row.seconds += max(flops / CORE.fp32_peak, moved / CORE.memory_bandwidth)


def moved_bytes(read: list[Tensor], written: Any) -> int:
    """Counts different entries: an expanded dimension is one row, and a matrix that meets itself is read once."""

    def size(x: Tensor) -> int:
        lengths = zip(x.shape, x.stride(), strict=True)
        return prod(length for length, stride in lengths if stride != 0) * x.element_size()

    def place(x: Tensor) -> tuple[object, ...]:
        """Returns the same for the same entries in memory, transposed or not."""
        lengths = zip(x.shape, x.stride(), strict=True)
        return (x.untyped_storage()._cdata, x.storage_offset(), *sorted(lengths))

    made = {id(x): x for x in tree_leaves(written) if isinstance(x, Tensor)}
    return sum(map(size, {place(x): x for x in read}.values())) + sum(map(size, made.values()))


def count_operations(step: Callable[[], object]) -> OperationCounter:
    """Counts what `step()` launches on the meta device; in its second run, since the first makes what stays."""
    counter = OperationCounter()
    with with_fused_attention():
        step()
        with counter:
            step()
    return counter


def of_recipe(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Counts the micro-batch of a recipe; JSON-ready."""
    config = load_config(path, overrides)
    task, _ = planning_task(config, ROOT)
    model = task.skeleton()
    size = config.train.micro_batch_size
    cap = usual_cap(config.privacy.expected_batch_size)
    clipped = ClippedSum(model, 1.0, cap=cap, rows=2 * max(size, cap))
    inputs = {
        name: torch.empty(size, *x.shape[1:], dtype=x.dtype, device=META)
        for name, x in task.synthetic_inputs(1).items()
    }
    is_padding_B = torch.zeros(size, dtype=torch.bool, device=META)
    private = count_operations(lambda: clipped.add_micro_batch(model, inputs, is_padding_B))
    clipped.detach()
    plain = count_operations(lambda: model(**inputs).sum().backward())
    rows = sorted(private.rows.values(), key=lambda row: -row.seconds)
    return {
        "recipe": path.stem,
        "micro_batch_size": size,
        "ratio": private.total("seconds") / plain.total("seconds"),
        "private_ms": private.total("seconds") * 1e3,
        "non_private_ms": plain.total("seconds") * 1e3,
        "launches": private.total("launches"),
        "non_private_launches": plain.total("launches"),
        "rows": [asdict(row) for row in rows[:SHOWN]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.toml")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes of the recipe"
    )
    options = parser.parse_intermixed_args()
    counted = of_recipe(options.recipe, options.overrides)
    if options.json:
        print(json.dumps(counted))
        return
    print(
        "{recipe}, micro-batches of {micro_batch_size}: ratio {ratio:.3f}, {private_ms:.1f} to {non_private_ms:.1f} ms, "
        "{launches} to {non_private_launches} launches".format(**counted)
    )
    for row in counted["rows"]:
        print(
            "  {seconds:.5f} s  {operation} ({dtypes}) x{launches}: {flops:.3g} FLOP, {moved:.3g} B".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
