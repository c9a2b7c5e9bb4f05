"""Private training in a loop of one's own: `PrivateLoop`, and `floats`, `integers` and `mask` to say what one item is."""

from .fields import Field, floats, integers, mask
from .loop import PrivateLoop, StepResult

__all__ = ["Field", "PrivateLoop", "StepResult", "floats", "integers", "mask"]
