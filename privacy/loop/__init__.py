"""Private training in a loop of one's own: `PrivateLoop`, its `WeightAverage`, and `floats`, `integers`, `mask` for an item."""

from ..step.averaging import WeightAverage
from .fields import Field, floats, integers, mask
from .loop import PrivateLoop, StepResult

__all__ = ["Field", "PrivateLoop", "StepResult", "WeightAverage", "floats", "integers", "mask"]
