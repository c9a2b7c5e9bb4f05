"""The head by chunks of the vocabulary, clipped: against the loop of single examples, plain and tied, in every mode and dtype."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from models.captioner import build_captioner
from models.config import captioner_config
from models.vocabulary_head import VocabularyHead
from privacy.clipping import ClippedSum, TwoPassSum
from privacy.clipping.clipped_sum import Mode
from privacy.errors import PrivacyConfigError
from privacy.gradients import per_example_gradients as contributions
from privacy.guards.selfcheck import check_against_autograd
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_sensitivity import change

B, L, D, V = 6, 7, 12, 31
MODES = ["bookkeeping", "two_pass"]


class Language(nn.Module):
    """Embedding, one hidden layer, head; tied or not, the head used once or twice."""

    def __init__(
        self, *, chunk: int = 8, tied: bool = False, bias: bool = True, twice: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.hidden = nn.Linear(D, D)
        self.head = VocabularyHead(D, V, bias=bias, max_logits=B * L * chunk)
        if tied:
            self.head.weight = self.embedding.weight
        self.twice = twice
        self.checkpointed = False

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor, scale_B: Tensor) -> Tensor:
        # Chunks follow the shape of the micro-batch; the loop of single examples has the same number.
        self.head.max_logits = len(tokens_BL) * L * 8
        x_BLD = self.embedding(tokens_BL[:, :-1]) * scale_B[:, None, None]
        call = (
            checkpoint(self.hidden, x_BLD, use_reentrant=False)
            if self.checkpointed
            else self.hidden(x_BLD)
        )
        x_BLD = x_BLD + call
        loss_BL = self.head.token_losses(x_BLD, tokens_BL[:, 1:])
        if self.twice:
            loss_BL = loss_BL + self.head.token_losses(x_BLD.flip(1) * 0.5, tokens_BL[:, 1:])
        return loss_BL.masked_fill(~mask_BL, 0).sum(1) / mask_BL.sum(1).clamp(min=1)


def language(
    dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Language, dict[str, Tensor]]:
    model = Language(**options).to(dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "tokens_BL": torch.randint(0, V, (B, L + 1), generator=generator),
        "mask_BL": torch.arange(L) < torch.tensor([[7], [5], [1], [7], [3], [6]]),
        "scale_B": torch.logspace(-1, 1, B, dtype=torch.float64).to(dtype),
    }
    return model, inputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("twice", [pytest.param(False, marks=pytest.mark.full), True])
def test_float64_equals_the_loop(mode: str, tied: bool, bias: bool, twice: bool) -> None:
    model, inputs = language(tied=tied, bias=bias, twice=twice)
    assert model.head.num_chunks(torch.zeros(B, L, 1)) == 4
    assert oracle.error(model, inputs, mode=mode) < 1e-9
    model.checkpointed = True
    assert oracle.error(model, inputs, mode=mode) < 1e-9


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias"])
def test_a_frozen_half_of_the_head(frozen: str) -> None:
    model, inputs = language()
    model.get_parameter(frozen).requires_grad_(False)
    assert oracle.error(model, inputs) < 1e-9
    check_against_autograd(model, inputs)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_against_the_float64_sum_of_the_same_gradients(mode: str) -> None:
    model, inputs = language(torch.bfloat16)
    c = oracle.median_norm(model, model, inputs)
    exact = oracle.clipped_sum(model, model, inputs, c, dtype=torch.float64)
    found = oracle.summed(model, inputs, c, mode=mode)
    assert all(value.dtype == torch.float64 for value in found.values())
    assert oracle.relative_error(found, exact) <= 1e-2


def test_under_autocast_the_same_scores_are_computed_again() -> None:
    model, inputs = language(torch.float32)

    def task(**kwargs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**kwargs)

    assert oracle.error(model, inputs, task=task) <= 1e-2


CASES = list(itertools.product(MODES, (torch.float32, torch.bfloat16, "folded"), (False, True)))
DAILY = [("bookkeeping", torch.float32, True), ("two_pass", "folded", False)]


@pytest.mark.parametrize(
    ("mode", "dtype", "tied"),
    [case if case in DAILY else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_contract_4_adversarial_examples(
    mode: Mode, dtype: torch.dtype | str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled, non-finite, all-padding and repeated tokens: each moves the sum by at most C (1 + r)."""
    if dtype == "folded":  # as on CUDA, where the factor is rounded to bf16 too
        monkeypatch.setattr(contributions, "_has_bf16_units", lambda device: True)
        dtype = torch.bfloat16
    (model, inputs), moved = language(dtype, tied=tied), 0
    for i in range(12):
        example = {k: v[i % B : i % B + 1].clone() for k, v in inputs.items()}
        example["scale_B"][:] = [1e-6, 1e6, torch.nan, torch.inf, 3e30, 1.0][i % 6]
        if i % 4 == 0:
            example["tokens_BL"][:] = i
        if i % 5 == 0:
            example["mask_BL"][:] = False
        size = change(model, inputs, example, mode)
        assert size <= 1 + SENSITIVITY_SLACK, (i, size)
        moved += size > 0.5
    assert moved >= 2


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes. Views count as what they show, expanded ones as what they store."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                stored = x.untyped_storage().nbytes() // x.element_size()
                self.num_elements = max(self.num_elements, min(x.numel(), stored))
        return out


@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_holds_all_logits(mode: str) -> None:
    """40 tokens, a batch whose logits are the largest tensor by far: neither forward, norm nor sum holds them."""
    words, rows, length, most = 2003, 16, 40, 300_000
    overrides = {
        "vocab_size": words,
        "num_tokens": length,
        "image_size": 16,
        "decoder_depth": 1,
        "encoder_depth": 1,
    }
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "images_BCHW": torch.randn(rows, 3, 16, 16, generator=generator),
        "tokens_BL": torch.randint(3, words, (rows, length), generator=generator),
        "token_mask_BL": torch.ones(rows, length, dtype=torch.bool),
    }
    largest = {}
    for name, max_logits in (("chunked", most), ("plain", 2**27)):
        config = captioner_config("pico", max_logits=max_logits, **overrides)
        model = build_captioner(config, generator=torch.Generator().manual_seed(0))
        with LargestTensor() as seen:
            oracle.summed(model, inputs, 0.1, mode=mode)
        largest[name] = seen.num_elements
    assert largest["plain"] == rows * (length - 1) * words
    assert largest["chunked"] <= most


def test_in_a_compiled_block_it_is_refused() -> None:
    model = nn.Sequential(nn.Linear(D, D), VocabularyHead(D, V, max_logits=8))
    model[1].compile(backend="aot_eager")
    with pytest.raises(PrivacyConfigError, match="more than its layer's input"):
        ClippedSum(model, 1.0)


def test_contract_6_bookkeeping_compares_what_the_head_computes_again_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward of attention on CUDA adds up in no fixed order, which does no harm where it runs once."""
    model, inputs = language()
    turn = itertools.count()
    model.hidden.register_forward_hook(lambda *_: _[2] * (1 + 2.0**-20 * next(turn)))
    clipped = ClippedSum(model, 1.0)
    clipped.check_repeatable(model, inputs)
    in_two_passes = TwoPassSum(model, 1.0)
    in_two_passes.keeps_graph = False
    with pytest.raises(PrivacyConfigError, match="gradients the second time"):
        in_two_passes.check_repeatable(model, inputs)
    in_two_passes.detach()
    usual = VocabularyHead.logit_gradients

    def other_bits(*arguments: Any) -> Any:
        return ((words, g * (1 + 2.0**-20 * next(turn))) for words, g in usual(*arguments))

    monkeypatch.setattr(VocabularyHead, "logit_gradients", staticmethod(other_bits))
    with pytest.raises(PrivacyConfigError, match="gradients the second time"):
        clipped.check_repeatable(model, inputs)
