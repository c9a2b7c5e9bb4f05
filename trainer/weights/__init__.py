"""Weights in and out, and what is known of the data behind them. Parsers import this, so nothing heavy is imported here."""

from typing import Literal

Format = Literal["hf", "peft", "safetensors", "timm"]
Provenance = Literal["private", "public", "synthetic"]
