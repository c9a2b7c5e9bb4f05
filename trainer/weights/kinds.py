"""What can be written and what can be declared of weights; this module imports nothing heavy, since parsers need it."""

from typing import Literal

Format = Literal["hf", "peft", "safetensors", "timm"]
Provenance = Literal["private", "public", "synthetic"]
