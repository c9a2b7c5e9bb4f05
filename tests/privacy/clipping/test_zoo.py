"""The record of models of other projects says what is true: each label and outcome; `make test` tries a few kinds."""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from privacy.clipping import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.zoo import MODELS, PAGE, TOKENS, label, outcome, prepared
from tests.privacy.clipping.zoo_labels import LABELS

ROWS = {
    name: (keeps, what)
    for name, keeps, what in re.findall(r"^\| ([^|]+?) \| (yes|mixes) \| ([^|]+?) \| [^|]*\|$", PAGE.read_text(), re.M)
}
(_BY_RULES,) = re.findall(r"^Exact by the clipping rules alone: (.*)\.$", PAGE.read_text(), re.M)
ROWS |= dict.fromkeys(_BY_RULES.split(", "), ("yes", "exact"))
FEW = (
    "BEiT with relative positions",
    "Swin",
    "GIT",
    "LLaVA",
    "EfficientNet with frozen batch norm",
    "ResNet",
    "Qwen2-VL",
    "ViLT",
)
TRIED = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in MODELS]


def without_peft(name: str) -> None:
    if "RA on" in name:
        pytest.importorskip("peft")


def test_the_page_names_every_model_with_its_label() -> None:
    assert {name: {"apart": "yes"}.get(kept, kept) for name, kept in LABELS.items()} == {
        n: k for n, (k, _) in ROWS.items()
    }
    assert MODELS.keys() == LABELS.keys()


@pytest.mark.parametrize("name", TRIED)
def test_a_model_mixes_only_where_another_examples_input_changes_a_loss(name: str) -> None:
    without_peft(name)
    assert label(name) == LABELS[name]


@pytest.mark.parametrize("name", TRIED)
def test_a_model_comes_to_what_the_page_says(name: str) -> None:
    without_peft(name)
    found, error = outcome(name)
    keeps, said = ROWS[name]
    if said.startswith("refused"):
        assert " ".join(found.split()).startswith(said.removeprefix("refused: ").removesuffix(" ..."))
    else:
        assert keeps == "yes" and found.startswith("exact") and error <= (1e-4 if name in ("AIMv2", "Mamba") else 1e-9)
        assert ("fallback" in said) == ("fallback" in found)


@pytest.mark.parametrize("name", ["Swin", "GIT", pytest.param("BEiT with relative positions", marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_4_one_example_moves_the_sum_by_at_most_c(name: str, dtype: Any) -> None:
    """In the precisions of runs, and the sum is that of the same gradients in float64, up to their rounding."""
    task = prepared(name)
    check_against_autograd(task, MODELS[name][2](2))  # finds what the fallback covers
    task.to(dtype)
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in MODELS[name][2](TOKENS).items()}
    gradients = oracle.per_example_gradients(task, task, inputs)
    c = sorted(oracle.norm(g) for g in gradients)[TOKENS // 2]
    weights = [min(1.0, c / oracle.norm(g)) for g in gradients]
    expected = {n: sum(w * g[n].double() for w, g in zip(weights, gradients, strict=True)) for n in gradients[0]}
    total = ClippedSum(task, c, self_check=False)
    for others in (torch.arange(TOKENS) < TOKENS, *(torch.arange(TOKENS) == i for i in range(TOKENS))):
        total.zero_()
        total.add_micro_batch(task, inputs, ~others)
        sums = dict(total.sums())
        if others.all():
            assert oracle.relative_error(sums, expected) <= (3e-2 if dtype == torch.bfloat16 else 1e-4)
        else:
            assert oracle.norm(sums) <= c * (1 + SENSITIVITY_SLACK)
