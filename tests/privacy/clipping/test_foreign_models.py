"""The table of docs/extending.md: which classes of transformers are exact as they are, and what is done about the others.

Tiny, in float64, with as many tokens as examples in one of the micro-batches, each against a loop of single examples.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from privacy.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle

hf = pytest.importorskip("transformers")
hf.logging.set_verbosity_error()

TOKENS, VOCABULARY = 4, 30
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT: dict[str, Any] = {**SMALL, **NO_DROPOUT, "image_size": 16, "patch_size": 8}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 12, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SEQUENCES = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0, "pad_token_id": 0,
    "decoder_start_token_id": 1, **ENDS,
}  # fmt: skip


class Task(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.loss(self.model, **inputs)


def images(count: int) -> dict[str, Tensor]:
    return {"images": torch.randn(count, 3, 16, 16).double() * torch.logspace(-1, 1, count)[:, None, None, None]}


def texts(count: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(3, VOCABULARY, (count, TOKENS))}


def pairs(count: int) -> dict[str, Tensor]:
    return {**images(count), **texts(count)}


def sounds(count: int) -> dict[str, Tensor]:
    return {"sounds": torch.randn(count, 8, 16).double(), **texts(count)}


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def pooled(model: Any, images: Tensor) -> Tensor:
    out = model(pixel_values=images)
    return out.pooler_output.square().sum(1) + out.last_hidden_state.sin().flatten(1).sum(1)


def features(model: Any, images: Tensor) -> Tensor:
    return model(pixel_values=images).last_hidden_state.sin().flatten(1).sum(1)


def language(model: Any, ids: Tensor) -> Tensor:
    return next_token(model(input_ids=ids, use_cache=False).logits, ids)


def masked_language(model: Any, ids: Tensor) -> Tensor:
    return next_token(model(input_ids=ids).logits, ids)


def translation(model: Any, ids: Tensor) -> Tensor:
    return next_token(model(input_ids=ids.flip(1), decoder_input_ids=ids, use_cache=False).logits, ids)


def speech(model: Any, sounds: Tensor, ids: Tensor) -> Tensor:
    return next_token(model(input_features=sounds, decoder_input_ids=ids, use_cache=False).logits, ids)


def caption(model: Any, images: Tensor, ids: Tensor) -> Tensor:
    return next_token(model(pixel_values=images, input_ids=ids).logits, ids)


def prompts(count: int) -> dict[str, Tensor]:
    """A placeholder for each patch, and behind them fewer words."""
    ids = torch.randint(3, VOCABULARY - 1, (count, 6))
    ids[:, :4] = VOCABULARY - 1
    return {**images(count), "ids": ids}


def answer(model: Any, images: Tensor, ids: Tensor) -> Tensor:
    logits = model(pixel_values=images, input_ids=ids, use_cache=False).logits
    return next_token(logits[:, 3:], ids[:, 3:])


def alike(model: Any, images: Tensor, ids: Tensor) -> Tensor:
    """No contrast: that would mix the examples of a batch."""
    out = model(pixel_values=images, input_ids=ids)
    return (out.image_embeds * out.text_embeds).sum(-1).exp() + out.text_embeds[..., 0]


def clip() -> nn.Module:
    vision, text = {**SMALL, "image_size": 16, "patch_size": 8}, {**TEXT, **ENDS}
    return hf.CLIPModel(hf.CLIPConfig(vision_config=vision, text_config=text, projection_dim=8))


def siglip() -> nn.Module:
    vision, text = {**SMALL, "image_size": 16, "patch_size": 8}, {**TEXT, **ENDS, "projection_size": 16}
    return hf.SiglipModel(hf.SiglipConfig(vision_config=vision, text_config=text))


def blip() -> nn.Module:
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    text = {**TEXT, **NO_DROPOUT, **ENDS, "encoder_hidden_size": 16, "sep_token_id": 2}
    return hf.BlipForConditionalGeneration(hf.BlipConfig(vision_config=vision, text_config=text, projection_dim=8))


def llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)
    ends = {"image_token_index": VOCABULARY - 1, "vision_feature_layer": -1}
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT, **ENDS), **ends)
    )


def paligemma() -> nn.Module:
    vision = hf.SiglipVisionConfig(**SMALL, image_size=16, patch_size=8, projection_dim=16, vision_use_head=False)
    text = hf.GemmaConfig(**TEXT, **ENDS, head_dim=8, num_key_value_heads=1)
    return hf.PaliGemmaForConditionalGeneration(
        hf.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1, projection_dim=16)
    )


GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, **ENDS}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {**TEXT, **ENDS, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}
WHISPER = {**SEQUENCES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 12}

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], dict[str, Tensor]]]] = {
    "ViTModel": (lambda: hf.ViTModel(hf.ViTConfig(**VIT)), pooled, images),
    "Dinov2Model": (lambda: hf.Dinov2Model(hf.Dinov2Config(**{**VIT, "mlp_ratio": 2})), pooled, images),
    "CLIPModel": (clip, alike, pairs),
    "SiglipModel": (siglip, alike, pairs),
    "BlipForConditionalGeneration": (blip, caption, pairs),
    "LlavaForConditionalGeneration": (llava, answer, prompts),
    "PaliGemmaForConditionalGeneration": (paligemma, answer, prompts),
    "ConvNextModel": (lambda: hf.ConvNextModel(hf.ConvNextConfig(**CONVNEXT)), pooled, images),
    "SwinModel": (lambda: hf.SwinModel(hf.SwinConfig(**SWIN)), pooled, images),
    "GPT2LMHeadModel": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), language, texts),
    "LlamaForCausalLM": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **ENDS)), language, texts),
    "MistralForCausalLM": (
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**TEXT, **ENDS, num_key_value_heads=1, sliding_window=3)),
        language,
        texts,
    ),
    "OPTForCausalLM": (lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT)), language, texts),
    "BertForMaskedLM": (lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT, **NO_DROPOUT)), masked_language, texts),
    "AlbertForMaskedLM": (
        lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**TEXT, **NO_DROPOUT, embedding_size=8)),
        masked_language,
        texts,
    ),
    "BartForConditionalGeneration": (
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(**SEQUENCES, max_position_embeddings=12, scale_embedding=True)
        ),
        translation,
        texts,
    ),
    "T5ForConditionalGeneration": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
        translation,
        texts,
    ),
    "WhisperForConditionalGeneration": (
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
        speech,
        sounds,
    ),
}


def prepared(name: str, frozen: str) -> Task:
    """A parameter whose name contains one of the words in `frozen` is frozen."""
    make, loss, _ = MODELS[name]
    torch.manual_seed(0)
    task = Task(make(), loss).double().eval()
    for path, p in task.named_parameters():
        with torch.no_grad():
            p.add_(0.1 * torch.randn_like(p))
        p.requires_grad_(p.requires_grad and not any(word in path for word in frozen.split()))
    return task


def outcome(name: str, frozen: str) -> str:
    """ "exact" or the line of the refusal."""
    task, inputs = prepared(name, frozen), MODELS[name][2]
    try:
        check_against_autograd(task, inputs(2))
        total = ClippedSum(task, 1.0)
        for count in (1, 3, TOKENS):
            some = inputs(count)
            total.max_grad_norm = c = oracle.median_norm(task, task, some)
            total.add_micro_batch(task, some, torch.zeros(count, dtype=torch.bool))
            assert oracle.relative_error(dict(total.sums()), oracle.clipped_sum(task, task, some, c)) <= 1e-9
    except PrivacyConfigError as error:
        return str(error)
    return "exact"


TABLE = re.findall(
    r"^\| `(\w+)` \| (exact|refused: [^|]+?) \| ?([^|]*?) ?\|$",
    (Path(__file__).parents[3] / "docs" / "extending.md").read_text(),
    re.M,
)


def test_the_table_names_every_model_that_is_tried() -> None:
    assert sorted(name for name, _, _ in TABLE) == sorted(MODELS)


@pytest.mark.parametrize(("name", "as_it_is", "way_out"), TABLE, ids=[name for name, _, _ in TABLE])
def test_a_model_of_transformers_is_what_the_table_says(name: str, as_it_is: str, way_out: str) -> None:
    """A refusal contains the words of the table; with the parameters frozen that the table names, the model is exact."""
    result = outcome(name, "")
    assert as_it_is.removeprefix("refused: ") in result
    assert (as_it_is == "exact") == (result == "exact")
    words = re.findall(r"`([^`]+)`", way_out)
    if words:
        assert outcome(name, " ".join(words)) == "exact"
    else:
        assert as_it_is == "exact"


@pytest.mark.parametrize("name", [name for name, as_it_is, _ in TABLE if as_it_is == "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_4_one_example_moves_the_sum_by_at_most_c(name: str, dtype: torch.dtype) -> None:
    """In the precisions of runs, and the sum is that of the same gradients in float64, up to their rounding."""
    task = prepared(name, "").to(dtype)
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
            assert oracle.relative_error(sums, expected) <= (2e-2 if dtype == torch.bfloat16 else 1e-4)
        else:
            assert oracle.norm(sums) <= c * (1 + SENSITIVITY_SLACK)
