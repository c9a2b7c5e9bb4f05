"""A checkpoint of ViP's published structure, made here by its names, against a plain computation of what they mean."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.converters import Unstated, read_foreign
from models.converters.names import TIMM, VIP
from models.converters.native import encoder_as, with_tables
from models.converters.official import from_vip
from models.converters.weights import WeightsError, count_blocks, mlp_ratio, read_weights, rename_back
from models.image_encoder import EncoderConfig, ImageEncoder
from models.mae_config import MAE_SIZES, MaskedAutoencoderConfig
from models.masked_autoencoder import MaskedAutoencoder

WIDTH, DEPTH, HEADS, PATCH, GRID = 48, 2, 4, 4, 4
DECODER_WIDTH, DECODER_HEADS = 32, 2
TOLD = Unstated(num_heads=HEADS, decoder_heads=DECODER_HEADS, norm_eps=1e-6, normalise_pixels=False, activation="gelu")
OF_AN_ENCODER = Unstated(num_heads=HEADS, norm_eps=1e-6, activation="gelu")


def block_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.fc1": (4 * width, width)}
    for name, shape in {**layers, "mlp.fc2": (width, 4 * width)}.items():
        shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    for name in ("norm1", "norm2"):
        shapes |= {f"{prefix}{name}.weight": (width,), f"{prefix}{name}.bias": (width,)}
    return shapes


def published(*, decoder: bool = True) -> dict[str, Tensor]:
    """The released names, filled with numbers."""
    tokens, pixels = 1 + GRID**2, PATCH * PATCH * 3
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH), "pos_embed": (1, tokens, WIDTH), "norm.weight": (WIDTH,), "norm.bias": (WIDTH,),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": (WIDTH,),
    }  # fmt: skip
    for number in range(DEPTH):
        shapes |= block_shapes(f"blocks.{number}.", WIDTH)
    if decoder:
        shapes |= {
            "mask_token": (1, 1, DECODER_WIDTH), "decoder_pos_embed": (1, tokens, DECODER_WIDTH),
            "decoder_embed.weight": (DECODER_WIDTH, WIDTH), "decoder_embed.bias": (DECODER_WIDTH,),
            "decoder_norm.weight": (DECODER_WIDTH,), "decoder_norm.bias": (DECODER_WIDTH,),
            "decoder_pred.weight": (pixels, DECODER_WIDTH), "decoder_pred.bias": (pixels,),
            **block_shapes("decoder_blocks.0.", DECODER_WIDTH),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def saved(path: Path, state: dict[str, Any], **others: Any) -> Path:
    torch.save({"model": state, **others}, path)
    return path


class Plain:
    """The published architecture in float64 numpy, one image at a time, without a line of ours."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.w = {name: value.double().numpy() for name, value in state.items()}

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def block(self, x: np.ndarray, name: str, heads: int) -> np.ndarray:
        q, k, v = np.split(self.linear(self.norm(x, f"{name}.norm1"), f"{name}.attn.qkv"), 3, axis=1)
        size = x.shape[1] // heads
        parts = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            scores = q[:, part] @ k[:, part].T / np.sqrt(size)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            parts.append(weights / weights.sum(1, keepdims=True) @ v[:, part])
        x = x + self.linear(np.concatenate(parts, 1), f"{name}.attn.proj")
        hidden = self.linear(self.norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        error_function = torch.erf(torch.from_numpy(hidden / np.sqrt(2))).numpy()
        return x + self.linear(hidden * 0.5 * (1 + error_function), f"{name}.mlp.fc2")

    def patches(self, image_CHW: np.ndarray) -> np.ndarray:
        """(P, p p 3): rows of the grid, then columns; in a patch rows, then columns, then colours."""
        tiles = []
        for row in range(GRID):
            for column in range(GRID):
                tile = image_CHW[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
                tiles.append(tile.transpose(1, 2, 0).reshape(-1))
        return np.stack(tiles)

    def encode(self, image_CHW: np.ndarray, visible: np.ndarray) -> np.ndarray:
        kernel = self.w["patch_embed.proj.weight"].transpose(0, 2, 3, 1).reshape(WIDTH, -1)
        x = self.patches(image_CHW) @ kernel.T + self.w["patch_embed.proj.bias"] + self.w["pos_embed"][0, 1:]
        x = np.concatenate([self.w["cls_token"][0] + self.w["pos_embed"][0, :1], x[visible]])
        for number in range(DEPTH):
            x = self.block(x, f"blocks.{number}", HEADS)
        return self.norm(x, "norm")

    def loss(self, image_CHW: np.ndarray, mask: np.ndarray) -> float:
        (visible,) = np.nonzero(~mask)
        tokens = self.linear(self.encode(image_CHW, visible), "decoder_embed")
        x = np.repeat(self.w["mask_token"][0], 1 + GRID**2, axis=0)
        x[0], x[1 + visible] = tokens[0], tokens[1:]
        x = self.block(x + self.w["decoder_pos_embed"][0], "decoder_blocks.0", DECODER_HEADS)
        predicted = self.linear(self.norm(x, "decoder_norm"), "decoder_pred")[1:]
        return float(((predicted - self.patches(image_CHW)) ** 2).mean(1)[mask].mean())


def model_of(config: Any, parameters: dict[str, Tensor]) -> Any:
    model = ImageEncoder(config) if isinstance(config, EncoderConfig) else MaskedAutoencoder(config)
    own = dict(model.named_parameters())
    assert own.keys() == parameters.keys()
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
    return model.eval()


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask_BP = torch.rand(3, GRID**2, generator=generator).argsort(1).argsort(1) >= GRID**2 // 4
    return torch.randn(3, 3, GRID * PATCH, GRID * PATCH, generator=generator), mask_BP


@torch.no_grad()
def test_features_and_losses_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    state = published()
    path = saved(tmp_path / "vip.pth", state, epoch=3, args=argparse.Namespace(lr=0.1))
    model, plain = model_of(*read_foreign("vip", path, TOLD)), Plain(state)
    images_BCHW, mask_BP = examples()
    every = np.arange(GRID**2)
    features = np.stack([plain.encode(image.double().numpy(), every) for image in images_BCHW])
    torch.testing.assert_close(model.encoder(images_BCHW).double(), torch.from_numpy(features), atol=1e-5, rtol=1e-5)
    losses = [plain.loss(i.double().numpy(), m.numpy()) for i, m in zip(images_BCHW, mask_BP, strict=True)]
    torch.testing.assert_close(
        model(images_BCHW, mask_BP).double(), torch.tensor(losses).double(), atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_an_encoder_alone_and_its_way_back(tmp_path: Path) -> None:
    state = published(decoder=False)
    config, parameters = read_foreign("vip", saved(tmp_path / "vip.pth", state), OF_AN_ENCODER)
    model = model_of(config, parameters)
    assert isinstance(config, EncoderConfig) and all(name.startswith("encoder.") for name in parameters)
    images_BCHW, _ = examples()
    features = Plain(state).encode(images_BCHW[0].double().numpy(), np.arange(GRID**2))
    torch.testing.assert_close(model(images_BCHW[:1])[0].double(), torch.from_numpy(features), atol=1e-5, rtol=1e-5)
    back = encoder_as(TIMM, model.encoder)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name].view(torch.int32), state[name].view(torch.int32)) for name in state)


def published_table(width: int) -> Tensor:
    """As the release computes it: half of the width for the column, half for the row, sines then cosines."""
    omega = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float64) / (width / 4.0))
    grid_w, grid_h = np.meshgrid(np.arange(GRID, dtype=np.float32), np.arange(GRID, dtype=np.float32))
    halves = []
    for positions in (grid_w, grid_h):
        angles = np.einsum("m,d->md", positions.reshape(-1), omega)
        halves.append(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))
    table = np.concatenate([np.zeros([1, width]), np.concatenate(halves, axis=1)])
    return torch.from_numpy(table).float()[None]


def test_fixed_positions_are_recognised() -> None:
    state = published() | {"pos_embed": published_table(WIDTH), "decoder_pos_embed": published_table(DECODER_WIDTH)}
    config, parameters = from_vip(state, "x", TOLD)
    assert (config.encoder.position, config.decoder.position) == ("sincos", "sincos")  # type: ignore[union-attr]
    assert not any(name.endswith("position.table") for name in parameters)
    state["pos_embed"] = state["pos_embed"] + 1e-5  # trained, as the release leaves them
    config, parameters = from_vip(state, "x", TOLD)
    assert config.encoder.position == "learned"
    assert torch.equal(parameters["encoder.position.table"], state["pos_embed"])


@pytest.mark.parametrize("left_out", ["num_heads", "decoder_heads", "norm_eps", "normalise_pixels", "activation"])
def test_what_no_tensor_tells_is_asked_for(left_out: str) -> None:
    """For shapes that are none of ViP's; of an encoder alone always, since timm's names may come from anywhere."""
    with pytest.raises(WeightsError, match=f"^x: no tensor tells --{left_out}, and its shapes"):
        from_vip(published(), "x", TOLD._replace(**{left_out: None}))
    encoder, line = (
        published(decoder=False),
        "no tensor tells" if left_out in ("num_heads", "norm_eps", "activation") else "decides nothing",
    )
    changed = OF_AN_ENCODER._replace(**{left_out: None if "tells" in line else getattr(TOLD, left_out)})
    with pytest.raises(WeightsError, match=line):
        from_vip(encoder, "x", changed)


@pytest.mark.parametrize("activation", ["relu", "quick_gelu", "gelu_tanh"])
def test_other_activations_are_refused(activation: Any) -> None:
    for state, told in ((published(), TOLD), (published(decoder=False), OF_AN_ENCODER)):
        with pytest.raises(WeightsError, match=f"with --activation {activation} cannot be imported"):
            from_vip(state, "x", told._replace(activation=activation))


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
SIZE_NAMES = [
    "vip_nano", "vip_tiny", *(pytest.param(f"vip_{n}", marks=pytest.mark.full) for n in ("small", "base", "large")),
]  # fmt: skip


def official_layout(width: int, depth: int, image_size: int = 224) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the release's masked autoencoder."""
    tokens = 1 + (image_size // 16) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width), "pos_embed": (1, tokens, width),
        "patch_embed.proj.weight": (width, 3, 16, 16), "patch_embed.proj.bias": (width,),
        "norm.weight": (width,), "norm.bias": (width,),
        "decoder_embed.weight": (512, width), "decoder_embed.bias": (512,),
        "mask_token": (1, 1, 512), "decoder_pos_embed": (1, tokens, 512),
        "decoder_norm.weight": (512,), "decoder_norm.bias": (512,),
        "decoder_pred.weight": (16 * 16 * 3, 512), "decoder_pred.bias": (16 * 16 * 3,),
    }  # fmt: skip
    for number in range(depth):
        shapes |= block_shapes(f"blocks.{number}.", width)
    for number in range(4):
        shapes |= block_shapes(f"decoder_blocks.{number}.", 512)
    return shapes


@pytest.mark.parametrize("name", OFFICIAL)
def test_sizes_have_the_official_layout(name: str) -> None:
    width, depth, heads, in_encoder, in_decoder = OFFICIAL[name]
    size = MAE_SIZES[name]
    with torch.device("meta"):
        state = rename_back(with_tables(MaskedAutoencoder(size)), VIP)
    assert {key: tuple(value.shape) for key, value in state.items()} == official_layout(width, depth)
    numbers = {key: value.numel() for key, value in state.items() if "pos_embed" not in key}
    decoder = sum(number for key, number in numbers.items() if key.startswith(("decoder_", "mask_token")))
    assert (sum(numbers.values()) - decoder, decoder) == (in_encoder, in_decoder)
    assert (size.encoder.num_heads, size.decoder.num_heads) == (heads, 16)
    assert size.encoder.norm_eps == size.decoder.norm_eps == 1e-6 and not size.normalise_pixels


@pytest.mark.parametrize("name", SIZE_NAMES)
def test_the_published_sizes_are_known(name: str) -> None:
    """By all of their shapes; what is stated goes first."""
    size = MAE_SIZES[name]
    small = replace(size, encoder=replace(size.encoder, image_size=64))
    width, depth = OFFICIAL[name][:2]
    state = {key: torch.zeros(shape) for key, shape in official_layout(width, depth, image_size=64).items()}
    config, _ = from_vip(state, "x")
    assert isinstance(config, MaskedAutoencoderConfig) and not config.normalise_pixels
    assert replace(config.encoder, position="sincos") == small.encoder
    assert replace(config.decoder, position="sincos") == small.decoder
    assert from_vip(state, "x", Unstated(num_heads=8, normalise_pixels=True))[0].encoder.num_heads == 8
    shorter = {name: value for name, value in state.items() if not name.startswith("decoder_blocks.3.")}
    with pytest.raises(
        WeightsError, match="no tensor tells --num_heads, --decoder_heads, --norm_eps, --normalise_pixels"
    ):
        from_vip(shorter, "x")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("blocks.1.norm2.bias", None, "x lacks blocks.1.norm2.bias"),
        ("decoder_pred.weight", None, "x lacks decoder_pred.weight"),
        ("pos_embed", None, "x lacks pos_embed"),
        ("blocks.0.gamma_1", torch.ones(3), "x has unknown blocks.0.gamma_1"),
        ("head.weight", torch.ones(3, 3), "x has unknown head.weight"),
        (
            "blocks.1.attn.qkv.weight",
            torch.ones(3, WIDTH),
            r"blocks.1.attn.qkv.weight has shape \(3, 48\), but \(144, 48\)",
        ),
        ("cls_token", torch.ones(WIDTH), "cls_token has shape"),
        ("cls_token", torch.tensor(1.0), r"cls_token has shape \(\), but"),
        ("pos_embed", torch.ones(1, 16, WIDTH), "pos_embed has 16 rows"),
        ("norm.bias", torch.ones(WIDTH, dtype=torch.int32), "norm.bias holds torch.int32"),
        ("patch_embed.proj.weight", torch.ones(WIDTH, 48), "4 dimensions were expected"),
    ],
)
def test_other_structures_are_refused(name: str, value: Tensor | None, line: str) -> None:
    state = {key: kept for key, kept in published().items() if key != name}
    if value is not None:
        state[name] = value
    with pytest.raises(WeightsError, match=line) as error:
        from_vip(state, "x", TOLD)
    assert "\n" not in str(error.value)


class Payload:
    """Unpickled by a careless loader, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"", "no torch file"), (b"PK\x03\x04 cut off", "no torch file"), (b"hello", "no torch file")],
)
def test_damaged_files_are_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=line) as error:
        read_weights(path)
    assert "\n" not in str(error.value)
    path = path.rename(tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match="no safetensors file"):
        read_weights(path)
    with pytest.raises(WeightsError, match="there is no weight file"):
        read_weights(tmp_path / "nothing.pth")


def test_what_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"a": 3}}, tmp_path / "numbers.pth")
    with pytest.raises(WeightsError, match="entry 'a' is a int"):
        read_weights(tmp_path / "numbers.pth")
    torch.save([torch.ones(2)], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="no dictionary of tensors"):
        read_weights(tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="do not count from 0"):
        count_blocks({"blocks.1.x": torch.ones(1)}, "blocks.", "x")


def test_every_hidden_width_has_its_ratio() -> None:
    for width in (7, 48, 100, 192):
        assert all(int(width * mlp_ratio(hidden, width)) == hidden for hidden in range(1, 6 * width))
