"""Private training in a loop of one's own.

`PrivateLoop` and `WeightAverage` train, `fix` changes models, and `floats`, `integers` and `mask`
declare the fields of an item.
"""

from ..step.averaging import WeightAverage
from .fields import Field, floats, integers, mask
from .fix import fix
from .loop import PrivateLoop, StepResult

__all__ = [
    "Field",
    "PrivateLoop",
    "StepResult",
    "WeightAverage",
    "fix",
    "floats",
    "integers",
    "mask",
]
