"""Weights of other projects: computed as they are meant, every bit back, and whatever else a file holds is one line.

The released files against a plain re-computation (`released.py`), folders of transformers and adapters of peft against these.
"""

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from data.examples.transforms import IMAGENET_MEAN, IMAGENET_STD, eval_image
from models.base import ImageEncoder
from models.captioner import Captioner
from models.classifier import add_adapters, without_adapters
from models.config import (
    MAE_SIZES,
    SIZES,
    EncoderConfig,
    MaskedAutoencoderConfig,
    ModelConfigError,
    PixelDecoderConfig,
    VitConfig,
    masked_autoencoder_config,
)
from models.converters import read_foreign
from models.converters.huggingface import (
    CONFIG,
    WEIGHTS,
    from_huggingface,
    image_processor,
    to_vit_mae,
    to_vit_model,
)
from models.converters.names import TIMM, VIP
from models.converters.native import (
    encoder_tensors,
    load_model,
    model_facts,
    parameters_and_tables,
    save_model,
)
from models.converters.official import from_dpcap, from_vip
from models.converters.peft import BASE, to_peft
from models.converters.weights import WeightsError, read_weights, rename_back, write_weights
from models.masked_autoencoder import MaskedAutoencoder
from tests.models.released import (
    FILES,
    OF_DPCAP,
    OF_ENCODER,
    OF_VIP,
    D,
    E,
    L,
    Released,
    dpcap_file,
    fixed_tables,
    masks,
    pairs,
    vip_file,
)

State = dict[str, Tensor]


def model_of(read: tuple[Any, State]) -> Any:
    """The model of what was read; every parameter must have its value."""
    config, parameters = read
    kinds: dict[type, type] = {
        EncoderConfig: ImageEncoder,
        MaskedAutoencoderConfig: MaskedAutoencoder,
    }
    model = kinds.get(type(config), Captioner)(config)
    own = dict(model.named_parameters())
    assert own.keys() == parameters.keys()
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
    return model.eval()


def captioner(state: State, **overrides: Any) -> Captioner:
    model: Captioner = model_of(from_dpcap(state, "x", "dpcap_nano", OF_DPCAP | overrides))
    return model.double()


def same_bits(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)), name


@pytest.mark.parametrize(("fixed", "with_type"), [(False, True), (True, True), (False, False)])
@torch.no_grad()
def test_an_imported_captioner_computes_what_the_release_computes(
    fixed: bool, with_type: bool
) -> None:
    """To fp32 where fixed tables and the type at encoder width are rounded, exactly where nothing is."""
    state = fixed_tables(dpcap_file()) if fixed else dpcap_file()
    if not with_type:
        del state["encoder_image_type_embedding"]
    before = {name: value.clone() for name, value in state.items()}
    model, released, (images, tokens) = captioner(state), Released(state), pairs()
    tolerance = (1e-5 if fixed else 1e-6) if with_type else 1e-12
    assert (model.encoder(images) - released.tokens(images)).abs().max() < tolerance
    assert (model.encode(images) - released.memory(images)).abs().max() < tolerance
    assert (model.logits(images, tokens) - released.logits(images, tokens)).abs().max() < tolerance
    assert (
        model(images, tokens, tokens != 0) - released.caption_loss(images, tokens)
    ).abs().max() < tolerance
    assert (
        model.config.encoder.position
        == model.config.decoder.position
        == ("sincos" if fixed else "learned")
    )
    assert all(torch.equal(before[name], state[name]) for name in state), (
        "the checkpoint was changed"
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_captioners_with_biases_are_taken_too(activation: Literal["relu", "gelu"]) -> None:
    """The release's compute ReLU; ours computes what it is told, to rounding, and the other one is far away."""
    state, (images, tokens) = dpcap_file(biases=True), pairs()
    told = {"decoder_bias": True, "encoder_qkv_bias": True, "decoder_activation": activation}
    logits = captioner(state, **told).logits(images, tokens)
    for name, function in (("relu", F.relu), ("gelu", F.gelu)):
        difference = (logits - Released(state, function).logits(images, tokens)).abs().max()
        assert difference < 1e-5 if name == activation else difference > 1e-2
    with pytest.raises(WeightsError, match=r"has unknown .*bias"):
        captioner(state)


@torch.no_grad()
def test_an_imported_masked_autoencoder_and_its_encoder_alone(tmp_path: Path) -> None:
    state, (images, _), mask_BP = vip_file(), pairs(), masks()
    torch.save({"model": state, "epoch": 3}, tmp_path / "vip.pth")
    model, released = (
        model_of(read_foreign("vip", tmp_path / "vip.pth", "vip_nano", OF_VIP)).double(),
        Released(state),
    )
    torch.testing.assert_close(
        model.encoder(images), released.tokens(images), atol=1e-12, rtol=1e-12
    )
    losses = [
        released.reconstruction_loss(image, mask)
        for image, mask in zip(images, mask_BP, strict=True)
    ]
    assert model(images, mask_BP).tolist() == pytest.approx(losses, rel=1e-5)
    alone = vip_file(decoder=False)
    encoder = model_of(from_vip(alone, "x", "vip_nano", OF_ENCODER))
    features = Released(alone).tokens(images)
    torch.testing.assert_close(encoder(images.float()).double(), features, atol=1e-5, rtol=1e-5)
    same_bits(encoder_tensors(TIMM, encoder.encoder), alone)


def test_what_no_tensor_tells_is_asked_for(tmp_path: Path) -> None:
    """An official file states no model, an encoder alone not even whose; folders state theirs."""
    for kind in ("vip", "dpcap"):
        with pytest.raises(
            WeightsError, match=f"give --size, e.g. {kind}_base, because tensors do not state all"
        ):
            read_foreign(kind, tmp_path / "x")  # type: ignore[arg-type]
    for left_out in ("encoder_num_heads", "encoder_norm_eps"):
        told = {name: value for name, value in OF_ENCODER.items() if name != left_out}
        with pytest.raises(
            WeightsError, match=f"is an encoder alone, of any project: state --override {left_out}="
        ):
            from_vip(vip_file(decoder=False), "x", "vip_nano", told)
    for kind in ("hf", "safetensors"):
        with pytest.raises(
            WeightsError, match=r"states its model in its config.json: leave --size"
        ):
            read_foreign(kind, tmp_path, "vip_base")  # type: ignore[arg-type]
    with pytest.raises(ModelConfigError, match=r"model size 'dpcap_base' .*is unknown"):
        from_vip(vip_file(), "x", "dpcap_base", {})


# The release's models: width, blocks and heads of the encoder; parameters of encoder and decoder, without position tables.
# All have 224 pixels in patches of 16, MLPs of four times the width, biases everywhere, norms with an epsilon of 1e-6, exact
# GELU, and a decoder of four blocks, 512 wide, with 16 heads.
OFFICIAL = {
    "vip_nano": (192, 12, 12, 5_524_416 - 197 * 192, 13_204_736 - 197 * 512),
    "vip_tiny": (384, 12, 12, 21_665_664 - 197 * 384, 13_303_040 - 197 * 512),
    "vip_small": (576, 12, 12, 48_423_744 - 197 * 576, 13_401_344 - 197 * 512),
    "vip_base": (768, 12, 12, 85_798_656 - 197 * 768, 13_499_648 - 197 * 512),
    "vip_large": (1024, 24, 16, 303_301_632 - 197 * 1024, 13_630_720 - 197 * 512),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_sizes_of_vip_are_the_official_ones(name: str) -> None:
    width, depth, heads, in_encoder, in_decoder = OFFICIAL[name]
    size = MAE_SIZES[name]
    with torch.device("meta"):
        state = rename_back(parameters_and_tables(MaskedAutoencoder(size)), VIP)
    named = {
        name.replace(".0.", f".{number}.", 1)
        for name in vip_file()
        for number in range(
            (4 if name.startswith("decoder_") else depth) if "blocks." in name else 1
        )
        if "blocks." not in name or "blocks.0." in name
    }
    assert state.keys() == named
    numbers = {key: value.numel() for key, value in state.items() if "pos_embed" not in key}
    decoder = sum(
        number for key, number in numbers.items() if key.startswith(("decoder_", "mask_token"))
    )
    assert (sum(numbers.values()) - decoder, decoder) == (in_encoder, in_decoder)
    assert (size.encoder.width, size.encoder.num_heads, size.decoder.num_heads) == (
        width,
        heads,
        16,
    )
    assert size.encoder.norm_eps == size.decoder.norm_eps == 1e-6 and not size.normalise_pixels


DAMAGE: list[tuple[str, str, Tensor | None, str]] = [
    ("vip", "blocks.1.norm2.bias", None, "x lacks blocks.1.norm2.bias"),
    ("vip", "pos_embed", None, "x lacks pos_embed"),
    ("vip", "blocks.0.gamma_1", torch.ones(3), "x has unknown blocks.0.gamma_1"),
    ("vip", "cls_token", torch.tensor(1.0), r"cls_token has shape \(\), but"),
    (
        "vip",
        "pos_embed",
        torch.ones(1, 16, D),
        r"pos_embed has shape \(1, 16, 16\), but \(1, 10, 16\)",
    ),
    ("vip", "norm.bias", torch.ones(D, dtype=torch.int32), "norm.bias holds torch.int32"),
    ("vip", "blocks.2.norm1.weight", torch.ones(D), "x has unknown blocks.2.norm1.weight"),
    (
        "dpcap",
        "decoder.layers.2.multihead_attn.c_proj.weight",
        None,
        "x lacks decoder.layers.2.multihead",
    ),
    (
        "dpcap",
        "decoder.layers.1.self_attn.c_attn.weight",
        torch.ones(2 * E, E),
        r"c_attn.weight has shape \(48, 24\)",
    ),
    (
        "dpcap",
        "encoder_image_type_embedding",
        torch.ones(1, 1, E),
        "encoder_image_type_embedding has shape",
    ),
    ("dpcap", "text_decoder_pos_embed", torch.ones(L, E), "text_decoder_pos_embed has shape"),
    ("dpcap", "norm.weight", torch.full((D,), torch.nan), "norm.weight holds NaN or infinity"),
]


@pytest.mark.parametrize(("kind", "name", "value", "line"), DAMAGE)
def test_other_files_are_refused_by_name(
    kind: str, name: str, value: Tensor | None, line: str
) -> None:
    state = vip_file() if kind == "vip" else dpcap_file()
    state = {key: kept for key, kept in state.items() if key != name} | (
        {} if value is None else {name: value}
    )
    with pytest.raises(WeightsError, match=line) as error:
        (from_vip if kind == "vip" else from_dpcap)(state, "x", *FILES[kind])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"hello"])
def test_damaged_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="not a torch file") as error:
        read_weights(path)
    assert "\n" not in str(error.value)
    with pytest.raises(WeightsError, match="not a safetensors file"):
        read_weights(path.rename(tmp_path / "x.safetensors"))
    for held, line in (
        ({"model": {"a": 3}}, "entry 'a' is a int"),
        ([torch.ones(2)], "no dictionary of tensors"),
    ):
        torch.save(held, tmp_path / "y.pth")
        with pytest.raises(WeightsError, match=line):
            read_weights(tmp_path / "y.pth")


SHAPE = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "num_heads": 4}
THEIRS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 4,
    "layer_norm_eps": 1e-6,
}


def randomised(model: nn.Module, std: float = 0.2) -> Any:
    """Biases, norms and positions away from 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def our_encoder(**fields: Any) -> ImageEncoder:
    config = VitConfig(**(SHAPE | fields))
    return randomised(
        ImageEncoder(EncoderConfig(encoder=config)), 0.2 if config.width < 64 else 0.05
    )


def our_autoencoder(position: Any = "sincos", **fields: Any) -> MaskedAutoencoder:
    encoder = VitConfig(**SHAPE, qkv_bias=True, position=position)
    decoder = PixelDecoderConfig(width=16, depth=1, num_heads=2, position=position)
    return randomised(
        MaskedAutoencoder(MaskedAutoencoderConfig(encoder=encoder, decoder=decoder, **fields))
    )


ONE_BLOCK = {"depth": 1, "image_size": 32}


def of_size(size: str) -> MaskedAutoencoder:
    """The size's widths, heads and patches, with one block in each stack."""
    side = 4 * MAE_SIZES[size].encoder.patch_size
    return randomised(
        MaskedAutoencoder(
            masked_autoencoder_config(size, image_size=side, encoder_depth=1, decoder_depth=1)
        ),
        0.05,
    )


def write(folder: Path, written: tuple[dict[str, Any], State]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(written[0]))
    write_weights(folder / WEIGHTS, written[1])
    return folder


def loaded(kind: str, folder: Path, **options: Any) -> Any:
    """As a user of transformers loads it; every weight must have found its place."""
    transformers = pytest.importorskip("transformers")
    model, found = getattr(transformers, kind).from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert (
        not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    ), found
    return model.eval()


def images(side: int = 16) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(5))


MADE: dict[str, Callable[[], Any]] = {
    "encoder": lambda: our_encoder(qkv_bias=False, mlp_ratio=3.0),
    "encoder, learned": lambda: our_encoder(qkv_bias=True, position="learned"),
    "autoencoder": our_autoencoder,
    "autoencoder, learned": lambda: our_autoencoder("learned", normalise_pixels=True),
    **{name: partial(of_size, name) for name in MAE_SIZES if name.startswith("vip_")},
    **{
        name: partial(our_encoder, **vars(size.encoder) | ONE_BLOCK) for name, size in SIZES.items()
    },
}
AT_ONCE = (
    "encoder",
    "encoder, learned",
    "autoencoder",
    "autoencoder, learned",
    "vip_nano",
    "dpcap_nano",
)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if name in AT_ONCE else pytest.mark.full)
        for name, make in MADE.items()
    ],
)
@torch.no_grad()
def test_a_round_trip_through_transformers(tmp_path: Path, make: Callable[[], Any]) -> None:
    """It computes what ours computes, and every bit and option comes back; our own folders keep both too."""
    model = make()
    x = images(model.config.encoder.image_size)
    if isinstance(model, ImageEncoder):
        theirs = loaded(
            "ViTModel", write(tmp_path / "hf", to_vit_model(model.encoder)), add_pooling_layer=False
        )
        torch.testing.assert_close(theirs(x).last_hidden_state, model(x), atol=1e-5, rtol=1e-5)
    else:
        theirs = loaded("ViTMAEForPreTraining", write(tmp_path / "hf", to_vit_mae(model)))
        noise = torch.rand(
            2, model.config.encoder.num_patches, generator=torch.Generator().manual_seed(1)
        )
        mask_BP = (
            noise.argsort(1).argsort(1) >= model.config.num_visible
        )  # the smallest stay visible
        found = theirs(x, noise=noise)
        assert torch.equal(found.mask.bool(), mask_BP)
        predicted = model(x, mask_BP, output="patches")
        torch.testing.assert_close(found.logits, predicted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.loss, model(x, mask_BP).mean(), atol=1e-5, rtol=1e-5)
    (tmp_path / "own").mkdir()
    save_model(tmp_path / "own", model, model_facts(model.config, "custom"), {"run": "x"})
    for back in (model_of(from_huggingface(tmp_path / "hf")), load_model(tmp_path / "own")):
        assert back.config == model.config
        same_bits(parameters_and_tables(back), parameters_and_tables(model))


@pytest.mark.parametrize(
    "kind", ["ViTModel", "ViTForImageClassification", "ViTMAEModel", "ViTMAEForPreTraining"]
)
@torch.no_grad()
def test_we_load_their_folders(tmp_path: Path, kind: str) -> None:
    """Under the names of files and under those of version 5 in memory."""
    transformers = pytest.importorskip("transformers")
    of_decoder = {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 48,
        "norm_pix_loss": True,
    }
    config = (
        transformers.ViTMAEConfig(**THEIRS, **of_decoder)
        if "MAE" in kind
        else transformers.ViTConfig(**THEIRS)
    )
    if kind == "ViTMAEModel":
        config.mask_ratio = 0.0
    theirs = randomised(getattr(transformers, kind)(config))
    theirs.save_pretrained(tmp_path)
    model = model_of(from_huggingface(tmp_path))
    assert model.config.encoder.position == "learned" and model.config.encoder.mlp_ratio == 3.0
    if kind == "ViTMAEForPreTraining":
        noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
        mask_BP = noise.argsort(1).argsort(1) >= model.config.num_visible
        found = theirs(images(), noise=noise)
        torch.testing.assert_close(
            model(images(), mask_BP, output="patches"), found.logits, atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            model(images(), mask_BP).mean(), found.loss, atol=1e-5, rtol=1e-5
        )
    else:
        body = theirs.vit if kind == "ViTForImageClassification" else theirs
        order = {"noise": torch.arange(16.0).expand(2, -1)} if "MAE" in kind else {}
        expected = body(images(), **order).last_hidden_state
        torch.testing.assert_close(model(images()), expected, atol=1e-5, rtol=1e-5)
    write_weights(tmp_path / WEIGHTS, theirs.state_dict())
    same_bits(
        parameters_and_tables(model_of(from_huggingface(tmp_path))), parameters_and_tables(model)
    )


ATTENTION = "encoder.layer.0.attention.attention.key"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda _, w: w.pop("encoder.layer.1.output.dense.bias"),
            "lacks encoder.layer.1.output.dense.bias",
        ),
        (
            lambda _, w: w.update({f"{ATTENTION}.weight": torch.ones(32, 16)}),
            "attention.key.weight",
        ),
        (lambda _, w: w.update({f"{ATTENTION}.bias": torch.ones(16)}), "attention.key.bias"),
        (lambda c, _: c.update(model_type="swin"), "model_type 'swin' cannot be imported"),
        (lambda c, _: c.update(hidden_act="relu"), "hidden_act 'relu'"),
        (lambda c, _: c.pop("hidden_act"), "hidden_act = None, but a str is needed"),
        (lambda c, _: c.pop("layer_norm_eps"), "layer_norm_eps = None, but a float is needed"),
        (lambda c, _: c.update(image_size=[16, 32]), r"image_size = \[16, 32\]"),
        (lambda c, _: c.update(num_hidden_layers=1), "has unknown encoder.layer.1"),
    ],
)
def test_other_folders_are_refused(
    tmp_path: Path, change: Callable[[Any, Any], Any], line: str
) -> None:
    config, state = to_vit_model(our_encoder(qkv_bias=True).encoder)
    change(config, state)
    with pytest.raises(WeightsError, match=line) as error:
        from_huggingface(write(tmp_path, (config, state)))
    assert "\n" not in str(error.value)


def test_the_processor_is_our_preprocessing(tmp_path: Path) -> None:
    """To the last bit of a pixel, for pictures of any shape and size, noise included."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(image_processor(16, IMAGENET_MEAN, IMAGENET_STD))
    )
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    known = [
        (40, 40),
        (16, 16),
        (16, 41),
        (60, 40),
        (40, 61),
        (333, 500),
        (1, 1),
        (7, 90),
        (300, 3),
    ]
    for width, height in [*known, *rng.integers(1, 200, (40, 2))]:
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for form in ("PNG", "JPEG"):
            data = io.BytesIO()
            picture.save(data, form)
            made = processor(
                Image.open(data), return_tensors="np", input_data_format="channels_last"
            )
            (found,) = made["pixel_values"]
            assert (
                found.shape == (3, 16, 16)
                and np.abs(found - eval_image(data.getvalue(), 16)).max() < 1e-5
            )


def adapted(rank: int, alpha: float, layers: Any) -> Any:
    encoder = our_encoder().encoder
    add_adapters(encoder, rank=rank, alpha=alpha, layers=layers)
    return randomised(encoder)


@torch.no_grad()
@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "alpha", "layers"), [(1, 3.0, "attention"), (4, 8.0, "all"), (3, 0.5, "all")]
)
def test_peft_computes_what_our_adapters_compute(
    rank: int, alpha: float, layers: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    encoder, folder = adapted(rank, alpha, layers), tmp_path / "out"
    config, tensors = to_peft(encoder)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    write(folder / BASE, to_vit_model(without_adapters(encoder, merged=False)))
    theirs = peft.PeftModel.from_pretrained(
        loaded("ViTModel", folder / BASE, add_pooling_layer=False), folder
    ).eval()
    torch.testing.assert_close(
        theirs(images()).last_hidden_state, encoder(images()), atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
@pytest.mark.full
def test_adapters_of_peft_come_in_merged_by_peft(tmp_path: Path) -> None:
    """Separate adapters of query, key and value, which no fused adapter of the same rank could hold."""
    peft = pytest.importorskip("peft")
    model = loaded(
        "ViTModel",
        write(tmp_path / "base", to_vit_model(our_encoder().encoder)),
        add_pooling_layer=False,
    )
    theirs = peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj", "o_proj", "fc1"])
    )
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    expected = theirs.eval()(images()).last_hidden_state
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    ours = model_of(read_foreign("hf", tmp_path / "merged"))
    torch.testing.assert_close(ours(images()), expected, atol=1e-5, rtol=1e-5)


def test_the_adapters_are_low_rank_parts_of_what_they_compute() -> None:
    """The three parts of a fused layer, put together from peft's factors, add what our adapter adds."""
    encoder = adapted(4, 8.0, "all")
    config, tensors = to_peft(encoder)
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == sorted(
        ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    )
    where = "base_model.model.layers.1.attention"
    added = [
        2.0 * tensors[f"{where}.{name}.lora_B.weight"] @ tensors[f"{where}.{name}.lora_A.weight"]
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    layer, x = encoder.blocks[1].get_submodule("attention.qkv"), torch.randn(5, 32)
    torch.testing.assert_close(
        layer(x), x @ (layer.weight + torch.cat(added)).T, atol=1e-5, rtol=1e-5
    )
    with pytest.raises(WeightsError, match="was trained without adapters"):
        to_peft(our_encoder().encoder)
