"""Every part of `make gpu` can be imported, here and in every `make test`; test_gpu.py runs them."""

import importlib

import pytest

from tests.gpu.__main__ import PARTS


@pytest.mark.parametrize("part", [*PARTS, "pauses"])
def test_a_part_is_there(part: str) -> None:
    module = importlib.import_module(f"tests.gpu.{part}")
    assert callable(getattr(module, "checks", None) or module.main)
