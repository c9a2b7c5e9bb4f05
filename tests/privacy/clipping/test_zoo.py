"""The record of models of other projects says what is true of one of each kind; `make test` tries a few of them."""

import pytest

pytest.importorskip("transformers")

from tests.privacy.clipping.zoo import MODELS, ROWS, label, outcome

FEW = ("Swin", "LLaVA", "ResNet", "Qwen2-VL", "ViLT")
TRIED = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in MODELS]


@pytest.mark.parametrize("name", TRIED)
def test_a_model_comes_to_what_the_page_says(name: str) -> None:
    if "RA on" in name:
        pytest.importorskip("peft")
    keeps, said = ROWS[name]
    assert label(name) == keeps
    found, error = outcome(name)
    if said.startswith("refused"):
        assert " ".join(found.split()).startswith(said.removeprefix("refused: ").removesuffix(" ..."))
    else:
        assert keeps == "yes" and found.startswith("exact") and error <= (1e-4 if name in ("AIMv2", "Mamba") else 1e-9)
        assert ("fallback" in said) == ("fallback" in found)
