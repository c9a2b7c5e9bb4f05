"""The one type that leaves this package: a padded micro-batch.

Shapes: B micro-batch, C H W image, L text tokens.
"""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A micro-batch of fixed shape.

    Attributes:
        inputs: arguments of the task, which is called as `task(**inputs)`; each tensor has B rows.
        is_padding_B: bool; True for rows without an example and for undecodable examples. They
            contribute exactly zero.
        num_undecodable: padding rows whose example could not be decoded (private).
    """

    inputs: dict[str, Tensor]
    is_padding_B: Tensor
    num_undecodable: int = 0
