"""Every captioner that options can make: pre- and post-norm, biases, tied head, parallel prediction; learned and clipped."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.reading.loader import stack_examples
from data.reading.reader import RawExample
from models.captioner import Captioner, build_captioner
from models.config import captioner_config
from models.generation import greedy_captions
from privacy.clipping.clipped_sum import Mode
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_sensitivity import change

B, L, V = 5, 6, 11
VARIANTS = [
    {
        "decoder_norm_position": norm,
        "decoder_bias": bias,
        "tied_head": tied,
        "parallel_share": share,
    }
    for norm, bias, tied, share in itertools.product(
        ("pre", "post"), (True, False), (True, False), (0.0, 0.5, 1.0)
    )
]
WITH_ALL_VALUES = (4, 8, 21)  # of every key; `make test-all` takes all variants


def name_of(variant: dict[str, Any]) -> str:
    return "-".join(map(str, variant.values()))


some_variants = pytest.mark.parametrize(
    "variant",
    [
        v if i in WITH_ALL_VALUES else pytest.param(v, marks=pytest.mark.full)
        for i, v in enumerate(VARIANTS)
    ],
    ids=name_of,
)


def small_captioner(**overrides: Any) -> Captioner:
    """Away from the initial zeros and ones, so that every parameter has a gradient of its own."""
    config = captioner_config(
        "pico",
        image_size=8,
        patch_size=4,
        encoder_width=8,
        encoder_depth=1,
        encoder_num_heads=2,
        decoder_width=12,
        decoder_depth=2,
        decoder_num_heads=3,
        vocab_size=V,
        num_tokens=L,
        **overrides,
    )
    model = build_captioner(config, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(share: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Examples of very different norms, with coins of both kinds where the share allows it."""
    generator = torch.Generator().manual_seed(2)
    images_BCHW = (
        torch.randn(B, 3, 8, 8, generator=generator) * torch.logspace(-1, 1, B)[:, None, None, None]
    )
    inputs = {
        "images_BCHW": images_BCHW.to(dtype),
        "tokens_BL": torch.randint(3, V, (B, L), generator=generator),
        "token_mask_BL": torch.arange(L) < torch.tensor([[6], [4], [2], [6], [3]]),
    }
    if share > 0:
        inputs["is_parallel_B"] = (
            torch.arange(B) % 2 == 0 if share < 1 else torch.ones(B, dtype=torch.bool)
        )
    return inputs


def rows(inputs: dict[str, Tensor], chosen: Any) -> dict[str, Tensor]:
    return {name: value[chosen] for name, value in inputs.items()}


@some_variants
def test_clipped_sum_is_exact_in_float64_and_as_good_as_a_loop_in_float32(
    variant: dict[str, Any],
) -> None:
    single, inputs = small_captioner(**variant), batch(variant["parallel_share"])
    exact, exact_inputs = (
        copy.deepcopy(single).double(),
        batch(variant["parallel_share"], torch.float64),
    )
    c = oracle.median_norm(exact, exact, exact_inputs)
    expected = oracle.clipped_sum(exact, exact, exact_inputs, c)
    assert expected.keys() == {name for name, _ in single.named_parameters()}
    assert (
        all(value.abs().max() > 0 for value in expected.values()) or variant["parallel_share"] == 1
    )
    assert oracle.relative_error(oracle.summed(exact, exact_inputs, c), expected) <= 1e-9
    loop_error = oracle.relative_error(oracle.clipped_sum(single, single, inputs, c), expected)
    assert oracle.relative_error(oracle.summed(single, inputs, c), expected) <= 2 * loop_error
    for model in (exact, single):
        model.decoder.head.max_logits = (
            2 * (L - 1) * 4
        )  # two captions: three chunks of the vocabulary
    by_chunks = [
        oracle.summed(*of, c, micro=2, mode="two_pass")
        for of in ((exact, exact_inputs), (single, inputs))
    ]
    assert oracle.relative_error(by_chunks[0], expected) <= 1e-9
    assert oracle.relative_error(by_chunks[1], expected) <= 2 * loop_error


MODES: tuple[Mode, Mode] = ("bookkeeping", "two_pass")
ODD = ("nan", "inf", "huge", "large", "tiny", "no caption", "one word", "constant")


def odd_example(kind: str, share: float, number: int) -> dict[str, Tensor]:
    example = rows(batch(share), slice(number % B, number % B + 1))
    image_BCHW, mask_BL = example["images_BCHW"], example["token_mask_BL"].clone()
    tokens_BL = example["tokens_BL"].clone()
    match kind:
        case "nan" | "inf":
            image_BCHW = image_BCHW.clone()
            image_BCHW[0, 1, 2, 3] = float(kind)
        case "huge" | "large" | "tiny":
            image_BCHW = image_BCHW * {"huge": 1e30, "large": 1e6, "tiny": 1e-20}[kind]
        case "no caption":
            mask_BL[:] = False
        case "one word":
            tokens_BL[:] = 5
        case _:
            image_BCHW = torch.full_like(image_BCHW, 1000.0)
    changed = {"images_BCHW": image_BCHW, "tokens_BL": tokens_BL, "token_mask_BL": mask_BL}
    return example | changed


@some_variants
def test_contract_4_one_example_moves_the_sum_by_at_most_c(variant: dict[str, Any]) -> None:
    """Every variant meets three of the odd kinds, every kind nine variants, in modes that alternate."""
    share, number = variant["parallel_share"], VARIANTS.index(variant)
    model, others = small_captioner(**variant), rows(batch(share), slice(0, 2))
    kinds = [ODD[(number + step) % len(ODD)] for step in (0, 3, 6)]
    modes = [MODES[(number + i) % 2] for i in range(len(kinds))]
    sizes = [
        change(model, others, odd_example(kind, share, number), m)
        for kind, m in zip(kinds, modes, strict=True)
    ]
    assert max(sizes) <= 1 + SENSITIVITY_SLACK
    for kind, size in zip(
        kinds, sizes, strict=True
    ):  # a huge image may overflow, which is as good as NaN
        assert kind == "huge" or (size > 0) == (kind not in ("nan", "inf", "no caption")), kind


@pytest.mark.parametrize(("norm", "position"), [("pre", "sincos"), ("post", "learned")])
def test_contract_13_a_loss_does_not_depend_on_the_others_of_its_micro_batch(
    norm: str, position: str
) -> None:
    options = {
        "decoder_norm_position": norm,
        "decoder_position": position,
        "encoder_position": position,
    }
    model, inputs = (
        small_captioner(parallel_share=0.5, **options).double(),
        batch(0.5, torch.float64),
    )
    loss_B = model(**inputs)
    for order in ([4, 2, 0, 3, 1], [1], [2, 0]):
        torch.testing.assert_close(
            model(**rows(inputs, torch.tensor(order))), loss_B[order], atol=1e-12, rtol=1e-12
        )


def raw_example(shade: int) -> RawExample:
    file = io.BytesIO()
    Image.new("RGB", (12, 12), (shade, shade, shade)).save(file, "PNG")
    return RawExample(file.getvalue(), {"txt": b"a gray picture"})


def test_contract_13_a_coin_comes_from_the_examples_own_key() -> None:
    """The same for every micro-batch size, order and neighbour; fair; and no function of the crop's coins."""
    make = CaptionExample(8, L, EMBEDDED_TOKENIZER, parallel_share=0.75)
    examples = [(raw_example(shade=40 * i), 1000 + i) for i in range(6)]
    whole = stack_examples(examples, make, 6).inputs["is_parallel_B"]
    assert whole.dtype == torch.bool and int(whole.sum()) > 0
    backwards = stack_examples(examples[::-1], make, 8).inputs["is_parallel_B"]
    assert backwards[:6].flip(0).tolist() == whole.tolist()
    alone = [
        bool(stack_examples([example], make, 1).inputs["is_parallel_B"]) for example in examples
    ]
    assert alone == whole.tolist()
    coins = torch.tensor([bool(make.coin(key)["is_parallel"]) for key in range(4000)])
    assert abs(float(coins.double().mean()) - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5
    always = CaptionExample(8, L, EMBEDDED_TOKENIZER, parallel_share=1.0)
    assert all(always.coin(key)["is_parallel"] for key in range(50))
    last = [bool(make.coin(2**64 - 1 - i)["is_parallel"]) for i in range(64)]
    assert len(set(last)) == 2, "large keys are not rounded"


def test_evaluation_is_always_causal() -> None:
    assert CaptionExample(8, L, EMBEDDED_TOKENIZER, train=False, parallel_share=1.0).coin(3) == {}
    assert CaptionExample(8, L, EMBEDDED_TOKENIZER).coin(3) == {}
    model, inputs = small_captioner(parallel_share=1.0, tied_head=True), batch(0)
    causal_B = model(**inputs, is_parallel_B=torch.zeros(B, dtype=torch.bool))
    torch.testing.assert_close(model(**inputs), causal_B, atol=1e-6, rtol=1e-6)
    assert greedy_captions(model, inputs["images_BCHW"], max_tokens=3).shape == (B, 3)


@torch.no_grad()
def test_a_parallel_example_is_shown_no_token() -> None:
    """Every place sees every other (its logits differ from those under a causal mask), and none sees a token."""
    model, inputs = small_captioner(parallel_share=0.5), batch(0.5)
    memory_BTD, tokens_BL = model.encode(inputs["images_BCHW"]), inputs["tokens_BL"][:, :-1]
    is_parallel_B = inputs["is_parallel_B"]
    before = model.decoder(tokens_BL, memory_BTD, is_parallel_B=is_parallel_B)
    after = model.decoder((tokens_BL + 1) % V, memory_BTD, is_parallel_B=is_parallel_B)
    assert torch.equal(before[is_parallel_B], after[is_parallel_B])
    assert (before - after)[~is_parallel_B].abs().amax(dim=(1, 2)).min() > 1e-3
    causal = model.decoder(tokens_BL, memory_BTD)
    torch.testing.assert_close(before[~is_parallel_B], causal[~is_parallel_B], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kept", [0, 1], ids=["no token at all", "only the first token"])
def test_row_without_targets_has_zero_loss_and_zero_gradient(kept: int) -> None:
    model, inputs = small_captioner(), batch(0)
    inputs["token_mask_BL"][2] = torch.arange(L) < kept
    loss_B = model(**inputs)
    assert loss_B[2] == 0 and loss_B.isfinite().all()
    assert not any(g.any() for g in torch.autograd.grad(loss_B[2], list(model.parameters())))


def test_captions_of_other_lengths_and_without_a_mask_are_refused() -> None:
    """A parallel example sees all places: their number must not be that of the longest neighbour."""
    model, inputs = small_captioner(parallel_share=0.5), batch(0.5)
    short = inputs | {name: inputs[name][:, :4] for name in ("tokens_BL", "token_mask_BL")}
    with pytest.raises(ValueError, match="padded to num_tokens = 6"):
        model(**short)
    with pytest.raises(ValueError, match="parallel_share > 0"):
        small_captioner()(**inputs)
    plain, long = (
        small_captioner(),
        batch(0) | {"tokens_BL": torch.ones(B, L + 2, dtype=torch.long)},
    )
    with pytest.raises(ValueError, match="needs token_mask_BL"):
        plain(long["images_BCHW"], long["tokens_BL"])
    with pytest.raises(ValueError, match="7 tokens, but the model was built for at most 6"):
        plain(**long)


def test_a_tied_head_is_one_parameter_drawn_once() -> None:
    seen: list[nn.Module] = []
    config = captioner_config("pico", tied_head=True)
    model = build_captioner(
        config, generator=torch.Generator().manual_seed(3), module_hook=seen.append
    )
    embedding, head = model.decoder.token_embedding, model.decoder.head
    assert head.weight is embedding.weight and not head.weight.is_meta and head.bias is not None
    assert not any("head.weight" in name for name, _ in model.named_parameters())
    assert embedding.weight.std().item() == pytest.approx(config.decoder.embedding_std, rel=0.02)
    assert seen.index(embedding) < seen.index(head)
    direct = Captioner(config)
    direct.init_weights(torch.Generator().manual_seed(3))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True)
    )
    again = copy.deepcopy(model).to(torch.float64)
    assert again.decoder.head.weight is again.decoder.token_embedding.weight
