"""Against transformers itself: its features from our files, ours from its files, and every bit back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.config import VitConfig
from models.converters.huggingface import CONFIG, WEIGHTS, from_huggingface, image_processor, to_vit_mae, to_vit_model
from models.converters.native import build_empty, load_model, model_facts, save_model
from models.converters.weights import WeightsError, read_weights, write_weights
from models.image_encoder import EncoderConfig, ImageEncoder
from models.mae_config import MaskedAutoencoderConfig, PixelDecoderConfig
from models.masked_autoencoder import MaskedAutoencoder

transformers = pytest.importorskip("transformers")

SHAPE = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "num_heads": 4}
THEIRS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 16,
    "patch_size": 4, "layer_norm_eps": 1e-6,
}  # fmt: skip


def randomised(model: nn.Module) -> Any:
    """Biases, norms and positions away from 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def our_encoder(**fields: Any) -> ImageEncoder:
    return randomised(ImageEncoder(EncoderConfig(encoder=VitConfig(**(SHAPE | fields)))))


def our_autoencoder(position: Any = "sincos", **fields: Any) -> MaskedAutoencoder:
    encoder = VitConfig(**SHAPE, qkv_bias=True, position=position)
    decoder = PixelDecoderConfig(width=16, depth=1, num_heads=2, position=position)
    return randomised(MaskedAutoencoder(MaskedAutoencoderConfig(encoder=encoder, decoder=decoder, **fields)))


def write(folder: Path, written: tuple[dict[str, Any], dict[str, Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(written[0]))
    write_weights(folder / WEIGHTS, written[1])
    return folder


def loaded(kind: Any, folder: Path, **options: Any) -> Any:
    """As a user loads it; every weight must have found its place."""
    model, found = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"], found
    return model.eval()


def ours_from(folder: Path) -> Any:
    config, parameters = from_huggingface(folder)
    model = type(our_encoder())(config) if isinstance(config, EncoderConfig) else MaskedAutoencoder(config)
    own = dict(model.named_parameters())
    assert own.keys() == parameters.keys()
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
    return model.eval()


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)), name


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("qkv_bias", "position"), [(False, "sincos"), (True, "learned")])
@torch.no_grad()
def test_transformers_loads_our_encoder(tmp_path: Path, qkv_bias: bool, position: str) -> None:
    model = our_encoder(qkv_bias=qkv_bias, position=position, mlp_ratio=3.0)
    theirs = loaded(transformers.ViTModel, write(tmp_path, to_vit_model(model.encoder)), add_pooling_layer=False)
    features = theirs(images()).last_hidden_state
    torch.testing.assert_close(features, model(images()), atol=1e-5, rtol=1e-5)
    back = ours_from(tmp_path)
    assert back.config == model.config
    same_bits(dict(back.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize(("position", "normalise"), [("sincos", False), ("learned", True)])
@torch.no_grad()
def test_transformers_loads_our_masked_autoencoder(tmp_path: Path, position: str, normalise: bool) -> None:
    model = our_autoencoder(position, normalise_pixels=normalise)
    theirs = loaded(transformers.ViTMAEForPreTraining, write(tmp_path, to_vit_mae(model)))
    noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(1))
    mask_BP = noise.argsort(1).argsort(1) >= model.config.num_visible  # the smallest stay visible
    found = theirs(images(), noise=noise)
    assert torch.equal(found.mask.bool(), mask_BP)
    predicted = model(images(), mask_BP, output="patches")
    torch.testing.assert_close(found.logits, predicted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, model(images(), mask_BP).mean(), atol=1e-5, rtol=1e-5)
    back = ours_from(tmp_path)
    assert back.config == model.config
    same_bits(dict(back.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification", "ViTMAEModel"])
@torch.no_grad()
def test_we_load_their_encoders(tmp_path: Path, kind: str) -> None:
    config = transformers.ViTMAEConfig if "MAE" in kind else transformers.ViTConfig
    options = {"mask_ratio": 0.0} if "MAE" in kind else {}
    theirs = randomised(getattr(transformers, kind)(config(**THEIRS, **options)))
    theirs.save_pretrained(tmp_path)
    model = ours_from(tmp_path)
    assert model.config.encoder.position == "learned" and model.config.encoder.mlp_ratio == 3.0
    body = theirs.vit if kind == "ViTForImageClassification" else theirs
    order = {"noise": torch.arange(16.0).expand(2, -1)} if "MAE" in kind else {}
    features = body(images(), **order).last_hidden_state
    torch.testing.assert_close(model(images()), features, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_we_load_their_masked_autoencoder_and_give_every_bit_back(tmp_path: Path) -> None:
    config = transformers.ViTMAEConfig(
        **THEIRS, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=48, norm_pix_loss=True,
    )  # fmt: skip
    theirs = randomised(transformers.ViTMAEForPreTraining(config))
    theirs.save_pretrained(tmp_path)
    model = ours_from(tmp_path)
    noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    mask_BP = noise.argsort(1).argsort(1) >= model.config.num_visible
    found = theirs(images(), noise=noise)
    torch.testing.assert_close(model(images(), mask_BP, output="patches"), found.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(images(), mask_BP).mean(), found.loss, atol=1e-5, rtol=1e-5)
    again = loaded(transformers.ViTMAEForPreTraining, write(tmp_path / "again", to_vit_mae(model)))
    same_bits(again.state_dict(), theirs.state_dict())


def test_names_of_version_5_in_memory_are_read_too(tmp_path: Path) -> None:
    theirs = randomised(transformers.ViTModel(transformers.ViTConfig(**THEIRS)))
    assert "layers.0.attention.q_proj.weight" in theirs.state_dict()
    theirs.save_pretrained(tmp_path)
    before = ours_from(tmp_path)
    write_weights(tmp_path / WEIGHTS, theirs.state_dict())
    same_bits(dict(ours_from(tmp_path).named_parameters()), dict(before.named_parameters()))


def test_parts_that_one_class_cannot_hold_are_refused() -> None:
    encoder = VitConfig(**SHAPE, qkv_bias=False)
    model = MaskedAutoencoder(MaskedAutoencoderConfig(encoder=encoder))
    with pytest.raises(WeightsError, match="one qkv_bias for encoder and decoder"):
        to_vit_mae(model)


def lacking(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    del state["encoder.layer.1.output.dense.bias"]


def unknown(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    state["encoder.layer.0.gamma"] = torch.ones(32)


def reshaped(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    state["encoder.layer.0.attention.attention.key.weight"] = torch.ones(32, 16)


def unequal(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    state["encoder.layer.0.attention.attention.key.bias"] = torch.ones(16)


def integers(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    state["layernorm.bias"] = torch.ones(32, dtype=torch.int64)


def other_type(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    config["model_type"] = "swin"


def other_activation(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    config["hidden_act"] = "relu"


def without_activation(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    del config["hidden_act"]


def without_epsilon(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    del config["layer_norm_eps"]


def oblong(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    config["image_size"] = [16, 32]


def shallower(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    config["num_hidden_layers"] = 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lacking, "lacks encoder.layer.1.output.dense.bias"),
        (unknown, "has unknown encoder.layer.0.gamma"),
        (reshaped, "attention.key.weight"),
        (unequal, "attention.key.bias"),
        (integers, "layernorm.bias holds torch.int64"),
        (other_type, "model_type 'swin' cannot be imported"),
        (other_activation, "hidden_act 'relu'"),
        (without_activation, "hidden_act = None, but a str is needed"),
        (without_epsilon, "layer_norm_eps = None, but a float is needed"),
        (oblong, r"image_size = \[16, 32\]"),
        (shallower, "states 1 layers, but the weights have 2"),
    ],
)
def test_other_structures_are_refused(tmp_path: Path, change: Any, line: str) -> None:
    config, state = to_vit_model(our_encoder(qkv_bias=True).encoder)
    change(config, state)
    with pytest.raises(WeightsError, match=line) as error:
        from_huggingface(write(tmp_path, (config, state)))
    assert "\n" not in str(error.value)


def test_own_folders_keep_every_bit(tmp_path: Path) -> None:
    model = our_autoencoder("learned")
    save_model(tmp_path, model, model_facts(model.config, "custom"), {"run": "x"})
    back = load_model(tmp_path)
    same_bits(dict(back.named_parameters()), dict(model.named_parameters()))
    same_bits(dict(back.named_buffers()), dict(model.named_buffers()))
    assert build_empty(model.config).config == back.config
    stated = json.loads((tmp_path / CONFIG).read_text())
    for part, name in (
        (None, "mask_ratio"),
        (None, "normalise_pixels"),
        ("encoder", "num_heads"),
        ("decoder", "norm_eps"),
    ):
        facts = json.loads(json.dumps(stated))
        del (facts["model"][part] if part else facts["model"])[name]
        (tmp_path / CONFIG).write_text(json.dumps(facts))
        with pytest.raises(WeightsError, match=f"does not state .*{name} of its model"):
            load_model(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(stated))
    state = read_weights(tmp_path / WEIGHTS)
    write_weights(tmp_path / WEIGHTS, {name: value for name, value in state.items() if name != "decoder.head.bias"})
    with pytest.raises(WeightsError, match=r"lacks decoder\.head\.bias"):
        load_model(tmp_path)


def test_the_processor_is_our_preprocessing(tmp_path: Path) -> None:
    """To the last bit of a pixel, for pictures of any shape and size, noise included."""
    import io

    import numpy as np
    from PIL import Image

    from data.examples.transforms import IMAGENET_MEAN, IMAGENET_STD, eval_image

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processor(16, IMAGENET_MEAN, IMAGENET_STD)))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    known = [(40, 40), (16, 16), (16, 41), (60, 40), (40, 61), (333, 500), (1, 1), (7, 90), (300, 3)]
    for width, height in [*known, *rng.integers(1, 200, (40, 2))]:
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for form in ("PNG", "JPEG"):
            data = io.BytesIO()
            picture.save(data, form)
            (found,) = processor(Image.open(data), return_tensors="np", input_data_format="channels_last")[
                "pixel_values"
            ]
            assert found.shape == (3, 16, 16) and np.abs(found - eval_image(data.getvalue(), 16)).max() < 1e-5
