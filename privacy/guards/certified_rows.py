"""Requires that the integers of certified arithmetic follow from the example alone."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..certified.certified_sum import CertifiedSum
from ..errors import PrivacyConfigError
from ..gradients.recorder import Task
from .neighbours import NotTaken, in_rows, must_take


def check_rows(
    clipped: CertifiedSum, task: Task, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the integers of a made-up example, the same in each row and among all neighbours.

    The first example stands in every row, among itself and among others, some of which are padding
    and some not finite. All micro-batches are computed before an error is raised, so that no rank
    of a sharded model waits for another. Collective where `task` is.

    Args:
        inputs: one micro-batch of made-up examples, of the size that training has; never private
            data.

    Returns:
        The example's integers by parameter, (n,), which other ranks must find too.

    Raises:
        PrivacyConfigError: integers change with the row, the micro-batch or the neighbours; the
            parameter is named.
    """
    num_rows = len(next(iter(inputs.values())))
    size = clipped.size_of_part(num_rows)
    part = {name: x[:size] for name, x in inputs.items()}
    expected: dict[str, Tensor] = {}
    first_difference: tuple[str, int] | None = None
    for micro_batch, is_example_B, is_padding_B in _neighbourhoods(part, size):
        try:
            with must_take(f"{size} examples together"):
                k, multiplier_B, _, _ = clipped.vectors(
                    task, micro_batch, is_padding_B.to(clipped.device)
                )
        except NotTaken:
            # A model may refuse numbers that are not finite itself.
            if all(x.isfinite().all() for x in micro_batch.values()):
                raise
            continue
        rows = is_example_B.to(clipped.device)
        z = {}
        for name, k_Bn in k.items():
            z[name] = (k_Bn * multiplier_B[:, None])[rows]
        expected = expected or {name: z_Rn[0].clone() for name, z_Rn in z.items()}
        for name, z_Rn in z.items():
            differs_R = (z_Rn != expected[name]).any(1)
            if first_difference is None and differs_R.any():
                number = differs_R.nonzero()[0].cpu()
                first_difference = (name, int(is_example_B.nonzero()[number]))
    if first_difference is not None:
        parameter, row = first_difference
        raise PrivacyConfigError(
            f"privacy.arithmetic = 'certified' is refused: in micro-batches of {size} examples, "
            f"the gradient of {parameter} of one and the same example is another in row {row} or "
            "among other examples, so here leaving an example out would change others; take "
            "train.micro_batch_size = 1, a ds_config with fp32, or "
            "privacy.arithmetic = 'floating'"
        )
    return expected


def _neighbourhoods(
    inputs: Mapping[str, Tensor], size: int
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Yields micro-batches, the rows that hold the first example, and the rows that are padding."""
    all_B = torch.ones(size, dtype=torch.bool)
    none_B = torch.zeros(size, dtype=torch.bool)
    is_first_B = torch.arange(size) == 0
    yield dict(inputs), is_first_B, none_B
    copies = {name: x[:1].expand_as(x).contiguous() for name, x in inputs.items()}
    yield copies, all_B, none_B
    for shift in range(2):
        is_example_B = torch.arange(size) % 2 == shift
        if not is_example_B.any():
            continue
        for kind in ("others", "padding", "not finite"):
            mixed = {}
            for name, x in inputs.items():
                neighbours = x.roll(1, 0)
                if kind == "not finite" and x.is_floating_point():
                    neighbours = torch.full_like(x, float("nan"))
                mixed[name] = torch.where(in_rows(is_example_B, x), x[:1], neighbours)
            yield mixed, is_example_B, (~is_example_B if kind == "padding" else none_B)
