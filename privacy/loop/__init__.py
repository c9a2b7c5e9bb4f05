"""Private training in a loop of one's own: `PrivateLoop` with `WeightAverage`, and `floats`, `integers` and `mask` to say what one item is."""

from ..step.averaging import WeightAverage
from .fields import Field, floats, integers, mask
from .loop import PrivateLoop, StepResult

__all__ = ["Field", "PrivateLoop", "StepResult", "WeightAverage", "floats", "integers", "mask"]
