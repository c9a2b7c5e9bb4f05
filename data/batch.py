"""The one type that leaves this package: a padded micro-batch.

Shapes: B micro-batch, C H W image, L text tokens.
"""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A micro-batch of fixed shape.

    Attributes:
        inputs: what the task is called with, `task(**inputs)`; every tensor has B rows.
        is_padding_B: bool; True for rows that are no example or could not be decoded. They contribute exactly zero.
        num_undecodable: how many rows are padding because their own bytes could not be decoded (private).
    """

    inputs: dict[str, Tensor]
    is_padding_B: Tensor
    num_undecodable: int = 0
