"""Private training in a loop of one's own: `PrivateLoop`, `WeightAverage`, `fix` for models, `floats`, `integers` and `mask`."""

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
