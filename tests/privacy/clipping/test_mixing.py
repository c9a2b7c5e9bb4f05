"""The self-check decides: whatever lets one example reach another is refused at any strength, what does not is accepted."""

import random
from collections.abc import Iterable

import pytest
import torch

from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from tests.privacy.clipping.mixing import RIGHT, STRENGTHS, WRONG, Net, made_up

LIMITS = ("capacity", "trimmed", "share_of_tokens")
"""What they do is seen in losses only, to 1e-3 where values are narrowed to float32."""


def cases(names: Iterable[str], seed: int, *, every: bool) -> list[tuple[str, float, bool, bool]]:
    """(mechanism, strength, words or not, fp32 inside or not): all of them, or one of each mechanism."""
    draw = random.Random(seed)
    ways = [(s, w, f) for s in STRENGTHS for w in (False, True) for f in (False, True)]
    return [(name, *way) for name in names for way in (ways if every else [draw.choice(ways)])]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_mixes_examples_is_refused_at_any_strength(every: bool) -> None:
    passed = []
    for mix, strength, words, narrow in cases(WRONG, 1, every=every):
        if narrow and mix in LIMITS:
            continue
        torch.manual_seed(0)
        model = Net(WRONG[mix], strength, words=words, narrow=narrow)
        try:
            check_against_autograd(model, made_up(6, words=words))
        except PrivacyConfigError:
            continue
        passed.append((mix, strength, words, narrow))
    assert not passed, passed


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_keeps_examples_apart_is_accepted_at_any_strength(every: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for mix, strength, words, narrow in cases(RIGHT, 2, every=every):
            torch.manual_seed(0)
            model = Net(RIGHT[mix], strength, words=words, narrow=narrow).to(dtype)
            check_against_autograd(model, made_up(3, words=words, dtype=dtype))
