"""Models that we did not write, with random weights: transformers' ViT, ViTMAE, GPT-2, BERT, encoder-decoders and others."""

import copy
from collections.abc import Callable
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

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

B = 4
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VIT = {**SMALL, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {
    **SMALL,
    "vocab_size": 30,
    "max_position_embeddings": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2: dict[str, Any] = {"vocab_size": 30, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SMALL,
    "vocab_size": 30,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Task(nn.Module):
    """A model of another project together with its loss per example; parameter names keep the model's own."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.loss(self.model, **inputs)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def images() -> Tensor:
    return torch.randn(B, 3, 16, 16) * torch.logspace(-1, 1, B)[:, None, None, None]


def ids() -> Tensor:
    return torch.randint(3, 30, (B, B))  # as many tokens as examples


def vit() -> tuple[Task, dict[str, Tensor]]:
    model = transformers.ViTModel(transformers.ViTConfig(**VIT), use_mask_token=True)

    def loss(model: nn.Module, images: Tensor, masked: Tensor) -> Tensor:
        out = model(pixel_values=images, bool_masked_pos=masked)
        return out.pooler_output.square().sum(1) + out.last_hidden_state.sin().sum((1, 2))

    return Task(model, loss), {"images": images(), "masked": torch.rand(B, 4) < 0.5}


def vit_mae() -> tuple[Task, dict[str, Tensor]]:
    decoder = {"decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**{**VIT, "patch_size": 4}, **decoder))

    def loss(model: Any, images: Tensor, noise: Tensor) -> Tensor:
        out = model(pixel_values=images, noise=noise)  # the order of masking comes from each example's own noise
        return ((out.logits - model.patchify(images)).square().mean(-1) * out.mask).sum(1)

    return Task(model, loss), {"images": images(), "noise": torch.rand(B, 16)}


def gpt2() -> tuple[Task, dict[str, Tensor]]:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    assert model.lm_head.weight is model.transformer.wte.weight
    return Task(model, lambda m, ids: next_token_loss(m(input_ids=ids, use_cache=False).logits, ids)), {"ids": ids()}


def bert() -> tuple[Task, dict[str, Tensor]]:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))

    def loss(model: nn.Module, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        logits = model(input_ids=ids, token_type_ids=types, attention_mask=mask).logits
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)

    mask = torch.ones(B, B).long()
    mask[1, 2:] = 0
    return Task(model, loss), {"ids": ids(), "types": torch.randint(0, 2, (B, B)), "mask": mask}


def bert_without_types() -> tuple[Task, dict[str, Tensor]]:
    task, inputs = bert()
    return Task(task.model, lambda m, ids: next_token_loss(m(input_ids=ids).logits, ids)), {"ids": inputs["ids"]}


def captioner(decoder: Any) -> tuple[Task, dict[str, Tensor]]:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VIT), decoder
    )
    model = transformers.VisionEncoderDecoderModel(config)

    def loss(model: nn.Module, images: Tensor, ids: Tensor) -> Tensor:
        return next_token_loss(model(pixel_values=images, decoder_input_ids=ids, use_cache=False).logits, ids)

    return Task(model, loss), {"images": images(), "ids": ids()}


def vit_gpt2() -> tuple[Task, dict[str, Tensor]]:
    return captioner(transformers.GPT2Config(**GPT2))


def vit_bert() -> tuple[Task, dict[str, Tensor]]:
    return captioner(transformers.BertConfig(**BERT))


def dinov2() -> tuple[Task, dict[str, Tensor]]:
    config = {k: v for k, v in VIT.items() if k != "intermediate_size"}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**config, mlp_ratio=2))  # with layer scale
    return Task(model, lambda m, images: m(pixel_values=images).pooler_output.square().sum(1)), {"images": images()}


def llama() -> tuple[Task, dict[str, Tensor]]:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA)
    )  # RMSNorm without a rule: its weight is raw
    return Task(model, lambda m, ids: next_token_loss(m(input_ids=ids, use_cache=False).logits, ids)), {"ids": ids()}


MODELS = [vit, vit_mae, gpt2, bert, bert_without_types, vit_gpt2, vit_bert, dinov2, llama]


def build(make: Callable[[], tuple[Task, dict[str, Tensor]]]) -> tuple[Task, dict[str, Tensor]]:
    """Everything trainable (ViTMAE freezes its positions) and random, so that no gradient is zero by initialisation."""
    torch.manual_seed(0)
    task, inputs = make()
    with torch.no_grad():
        for p in task.parameters():
            p.requires_grad_(True).add_(0.1 * torch.randn_like(p))
    return task, inputs


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def clipped(task: Task, inputs: dict[str, Tensor], c: float, micro: int = B) -> dict[str, Tensor]:
    total = ClippedSum(task, c, self_check=False)
    for start in range(0, B, micro):
        part = {k: v[start : start + micro] for k, v in inputs.items()}
        total.add_micro_batch(task, part, torch.zeros(len(next(iter(part.values()))), dtype=torch.bool))
    total.detach()
    return dict(total.sums())


@pytest.mark.parametrize("make", MODELS)
def test_as_exact_as_a_loop_in_float64_and_float32(make: Callable[[], tuple[Task, dict[str, Tensor]]]) -> None:
    single, inputs = build(make)
    exact, exact_inputs = copy.deepcopy(single).double(), cast(inputs, torch.float64)
    c = oracle.median_norm(exact, exact, exact_inputs)
    expected = oracle.clipped_sum(exact, exact, exact_inputs, c)
    for micro in (B, 3, 1):
        assert oracle.relative_error(clipped(exact, exact_inputs, c, micro), expected) <= 1e-9
    loop_error = oracle.relative_error(oracle.clipped_sum(single, single, inputs, c), expected)
    assert oracle.relative_error(clipped(single, inputs, c), expected) <= 2 * loop_error


@pytest.mark.parametrize("make", MODELS)
def test_bfloat16_weights_stay_within_a_per_cent(make: Callable[[], tuple[Task, dict[str, Tensor]]]) -> None:
    """Against the float64 sum of the gradients of the same bf16 model, which a loop of single examples finds in bf16 too."""
    task, inputs = build(make)
    task, inputs = task.to(torch.bfloat16), cast(inputs, torch.bfloat16)
    gradients = oracle.per_example_gradients(task, task, inputs)
    c = sorted(oracle.norm(g) for g in gradients)[B // 2]
    weights = [min(1.0, c / oracle.norm(g)) for g in gradients]
    expected = {n: sum(w * g[n].double() for w, g in zip(weights, gradients, strict=True)) for n in gradients[0]}
    assert oracle.relative_error(clipped(task, inputs, c), expected) <= 1e-2


@pytest.mark.parametrize("make", MODELS)
def test_contract_4_one_example_moves_the_sum_by_at_most_c(make: Callable[[], tuple[Task, dict[str, Tensor]]]) -> None:
    task, inputs = build(make)
    for last in range(B):
        total = ClippedSum(task, 0.01, self_check=False)
        total.add_micro_batch(task, inputs, torch.arange(B) != last)
        total.detach()
        assert oracle.flat(dict(total.sums())).norm() <= 0.01 * (1 + SENSITIVITY_SLACK)


@pytest.mark.parametrize("make", MODELS)
def test_the_self_check_passes(make: Callable[[], tuple[Task, dict[str, Tensor]]]) -> None:
    task, inputs = build(make)
    for name, p in task.named_parameters():  # the loss does not depend on them, which the self-check would say
        p.requires_grad_("mask_token" not in name and not name.startswith("model.encoder.pooler"))
    check_against_autograd(task, inputs)


def test_dropout_is_refused_while_it_is_active() -> None:
    task, _ = build(
        lambda: (Task(transformers.BertModel(transformers.BertConfig(**{**BERT, "hidden_dropout_prob": 0.1})), len), {})
    )
    with pytest.raises(PrivacyConfigError, match="Dropout"):
        ClippedSum(task.train(), 1.0, self_check=False)
    ClippedSum(task.eval(), 1.0, self_check=False)


def test_interpolated_positions_are_refused_by_name() -> None:
    task, _ = build(vit)
    images = torch.randn(B, 3, 32, 32)
    total = ClippedSum(task, 1.0, self_check=False)
    larger = lambda images: task.model(pixel_values=images, interpolate_pos_encoding=True).pooler_output.sum(1)  # noqa: E731
    with pytest.raises(PrivacyConfigError, match="position_embeddings"):
        total.add_micro_batch(larger, {"images": images}, torch.zeros(B, dtype=torch.bool))
