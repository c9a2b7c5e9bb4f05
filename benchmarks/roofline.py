"""The least time of a clipped micro-batch on a CPU core, by FLOPs and bytes: no measurement.

    python benchmarks/roofline.py --recipe recipes/quickstart.toml
    python benchmarks/roofline.py --recipe recipes/quickstart.toml --json train.micro_batch_size=64

A micro-batch runs on the meta device, where nothing is computed, in fp32. Each operation of torch
is one launch. It takes the longer of two times: its FLOPs at the rate of a core, and its bytes,
inputs read once and outputs written once, at the rate of the memory (trainer/hardware.py). Views
and allocations launch nothing. On CUDA clipping takes another way (products of bf16, functions that
torch.compile fuses), which only a GPU shows: `make gpu` measures it.

`ratio` is the time of a clipped micro-batch, until its sums are complete, to the time of a
non-private one, until its gradients are added to those of earlier micro-batches. With --json one
JSON object on stdout.
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
"""Operations in place that do not read the earlier contents."""
FILLS = {
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
}
"""Operations that take the shape of their input alone."""


@dataclass
class Row:
    """The sums over all operations of one kind.

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
    """A mode that counts every operation while it is active: `rows` by operation and dtypes."""

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
        operand_of = dict(zip(names, args, strict=False)) | kwargs
        written = []
        for argument in func._schema.arguments:
            is_written = argument.alias_info and argument.alias_info.is_write
            if argument.name in operand_of and is_written:
                written.append(operand_of[argument.name])
        is_overwritten = packet in OVERWRITES or "out" in kwargs
        skipped = {id(leaf) for leaf in tree_leaves(written)} if is_overwritten else set()
        read = []
        if packet not in FILLS:
            leaves = tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            read = [tensor for tensor in tensors if id(tensor) not in skipped]
        flops = 0
        if packet in CLIPPING_FORMULAS:
            shapes = [x.shape if isinstance(x, Tensor) else x for x in args]
            flops = CLIPPING_FORMULAS[packet](*shapes)
        elif packet in flop_registry:
            # torch's formulas do not know `out_dtype`.
            arguments = [x for x in args if not isinstance(x, torch.dtype)]
            options = {name: x for name, x in kwargs.items() if name != "out"}
            flops = flop_registry[packet](*arguments, **options, out_val=out)
        # The dtypes of a row: a product's two factors, not the tensor that it is added to;
        # attention's query.
        if flops == 0:
            operands = read
        elif packet in PRODUCTS:
            operands = read[-2:]
        else:
            operands = read[:1]
        self._add(packet.__name__, operands, moved_bytes(read, (out, written)), flops)
        return out

    def _add(self, operation: str, operands: list[Tensor], moved: int, flops: int) -> None:
        floating = [x for x in operands if x.is_floating_point() and x.dim() > 0]
        dtypes = {str(x.dtype).removeprefix("torch.") for x in floating}
        key = (operation, "+".join(sorted(dtypes)))
        row = self.rows.setdefault(key, Row(*key))
        row.launches += 1
        row.flops += flops
        row.moved += moved
        row.seconds += max(flops / CORE.fp32_peak, moved / CORE.memory_bandwidth)


def moved_bytes(read: list[Tensor], written: Any) -> int:
    """Returns the bytes of different entries in memory.

    An expanded dimension is one row, and a matrix that meets itself is read once.
    """

    def size(x: Tensor) -> int:
        lengths = zip(x.shape, x.stride(), strict=True)
        return prod(length for length, stride in lengths if stride != 0) * x.element_size()

    def place(x: Tensor) -> tuple[object, ...]:
        """Returns the same for the same entries in memory, transposed or not."""
        lengths = zip(x.shape, x.stride(), strict=True)
        return (x.untyped_storage()._cdata, x.storage_offset(), *sorted(lengths))

    read_once = {place(x): x for x in read}
    outputs = {id(x): x for x in tree_leaves(written) if isinstance(x, Tensor)}
    return sum(map(size, read_once.values())) + sum(map(size, outputs.values()))


def count_operations(step: Callable[[], object]) -> OperationCounter:
    """Returns the operations of the second `step()` on the meta device.

    The first run makes the tensors that stay.
    """
    counter = OperationCounter()
    with with_fused_attention():
        step()
        with counter:
            step()
    return counter


def roofline_of_recipe(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Returns the counts of a recipe's micro-batch, ready for JSON."""
    config = load_config(path, overrides)
    task, _ = planning_task(config, ROOT)
    model = task.skeleton()
    size = config.train.micro_batch_size
    cap = usual_cap(config.privacy.expected_batch_size)
    clipped = ClippedSum(model, 1.0, cap=cap, rows=2 * max(size, cap))
    inputs = {}
    for name, example in task.synthetic_inputs(1).items():
        inputs[name] = torch.empty(size, *example.shape[1:], dtype=example.dtype, device=META)
    is_padding_B = torch.zeros(size, dtype=torch.bool, device=META)
    private = count_operations(lambda: clipped.add_micro_batch(model, inputs, is_padding_B))
    clipped.detach()

    def plain_step() -> None:
        model(**inputs).sum().backward()

    plain = count_operations(plain_step)
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
    """Prints the least times of a recipe's micro-batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.toml")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes of the recipe"
    )
    options = parser.parse_intermixed_args()
    counts = roofline_of_recipe(options.recipe, options.overrides)
    if options.json:
        print(json.dumps(counts))
        return
    print(
        "{recipe}, micro-batches of {micro_batch_size}: ratio {ratio:.3f}, "
        "{private_ms:.1f} to {non_private_ms:.1f} ms, "
        "{launches} to {non_private_launches} launches".format(**counts)
    )
    row_format = (
        "  {seconds:.5f} s  {operation} ({dtypes}) x{launches}: {flops:.3g} FLOP, {moved:.3g} B"
    )
    for row in counts["rows"]:
        print(row_format.format(**row))


if __name__ == "__main__":
    main()
