"""Private training in a loop of one's own: `PrivateLoop`, `fix` for models, and `floats`, `integers` and `mask` for items."""

from .fields import Field, floats, integers, mask
from .fix import fix
from .loop import PrivateLoop, StepResult

__all__ = ["Field", "PrivateLoop", "StepResult", "fix", "floats", "integers", "mask"]
