"""Whether the integers of certified arithmetic follow from the example alone, looked for on made-up inputs."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..certified.certified_sum import CertifiedSum
from ..errors import PrivacyConfigError
from ..gradients.recorder import Task
from .neighbours import NotTaken, must_take


def check_rows(
    clipped: CertifiedSum, task: Task, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Looks for an example whose integers depend on its row, its micro-batch or its neighbours; collective where `task` is.

    The first example stands in every row, among itself and among others, some of which are padding and some not finite. All
    micro-batches are gone through before an error is raised, so that no rank of a sharded model waits for another.

    Args:
        inputs: one micro-batch of made-up examples, of the size that training has; never private data.

    Returns:
        The example's integers by parameter, (n,), which other ranks must find too.

    Raises:
        PrivacyConfigError: there is one; the parameter is named.
    """
    num_rows = len(next(iter(inputs.values())))
    size = clipped.size_of_part(num_rows)
    part = {name: x[:size] for name, x in inputs.items()}
    expected: dict[str, Tensor] = {}
    differing: tuple[str, int] | None = None
    for micro_batch, is_here_B, is_padding_B in _neighbourhoods(part, size):
        try:
            with must_take(f"{size} examples together"):
                k, multiplier_B, _, _ = clipped.vectors(
                    task, micro_batch, is_padding_B.to(clipped.device)
                )
        except NotTaken:  # the model refuses what is not finite itself
            if all(x.isfinite().all() for x in micro_batch.values()):
                raise
            continue
        here_B = is_here_B.to(clipped.device)
        z = {name: (k_Bn * multiplier_B[:, None])[here_B] for name, k_Bn in k.items()}
        expected = expected or {name: z_Rn[0].clone() for name, z_Rn in z.items()}
        for name, z_Rn in z.items():
            differs_R = (z_Rn != expected[name]).any(1)
            if differing is None and differs_R.any():
                differing = name, int(is_here_B.nonzero()[differs_R.nonzero()[0].cpu()])
    if differing is not None:
        raise PrivacyConfigError(
            f"privacy.arithmetic = 'certified' is refused: in micro-batches of {size} examples, the gradient of "
            f"{differing[0]} of one and the same example is another in row {differing[1]} or among other examples, so here "
            "leaving an example out would change others; take train.micro_batch_size = 1, a ds_config with fp32, or "
            "privacy.arithmetic = 'floating'"
        )
    return expected


def _neighbourhoods(
    inputs: Mapping[str, Tensor], size: int
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """(micro-batch, rows in which the first example is, rows that are padding)."""
    every, nobody = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    alone_B = torch.arange(size) == 0
    yield dict(inputs), alone_B, nobody
    yield {name: x[:1].expand_as(x).contiguous() for name, x in inputs.items()}, every, nobody
    for shift in range(2):
        here_B = torch.arange(size) % 2 == shift
        if not here_B.any():
            continue
        for kind in ("others", "padding", "not finite"):
            mixed = {}
            for name, x in inputs.items():
                others = x.roll(1, 0)
                if kind == "not finite" and x.is_floating_point():
                    others = torch.full_like(x, float("nan"))
                here = here_B.to(x.device).view(-1, *[1] * (x.dim() - 1))
                mixed[name] = torch.where(here, x[:1], others)
            yield mixed, here_B, (~here_B if kind == "padding" else nobody)
