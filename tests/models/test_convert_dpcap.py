"""Checkpoints with the structure of DP-Cap's release, against a plain re-computation from their own tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.captioner import Captioner
from models.config import SIZES
from models.converters import Unstated, read_foreign
from models.converters.official import from_dpcap
from models.converters.weights import WeightsError

D, E, V, L, PATCH, GRID = 16, 24, 110, 9, 4, 3
T = GRID**2 + 1
DEPTH, LAYERS, HEADS, DECODER_HEADS = 2, 3, 4, 3
TOLD = Unstated(
    num_heads=HEADS, decoder_heads=DECODER_HEADS, decoder_activation="gelu", norm_eps=1e-6, activation="gelu"
)


def checkpoint(
    *, width: int = D, decoder_width: int = E, sincos: bool = False, depth: int = DEPTH, layers: int = LAYERS,
    patch: int = PATCH,
) -> dict[str, Tensor]:  # fmt: skip
    """Random tensors under the published names, biases, masks and unused ones included."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        scale = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.3
        state[name] = scale * torch.randn(shape, generator=generator)

    def add_layer(name: str, rows: int, *columns: int, bias: bool = True) -> None:
        add(f"{name}.weight", rows, *columns)
        if bias:
            add(f"{name}.bias", rows)

    def add_norm(name: str, size: int) -> None:
        add(f"{name}.weight", size)
        state[f"{name}.weight"] += 1
        add(f"{name}.bias", size)

    add("cls_token", 1, 1, width)
    add("pos_embed", 1, T, width)
    add_layer("patch_embed.proj", width, 3, patch, patch)
    for i in range(depth):
        add_norm(f"blocks.{i}.norm1", width)
        add_layer(f"blocks.{i}.attn.qkv", 3 * width, width, bias=False)
        add_layer(f"blocks.{i}.attn.proj", width, width)
        add_norm(f"blocks.{i}.norm2", width)
        add_layer(f"blocks.{i}.mlp.fc1", 4 * width, width)
        add_layer(f"blocks.{i}.mlp.fc2", width, 4 * width)
    add_norm("norm", width)
    add_layer("decoder_embed", decoder_width, width)
    add("decoder_pos_embed", 1, T, decoder_width)
    add("text_decoder_pos_embed", 1, L, decoder_width)
    add("text_embedding_layer_SimVLM.weight", V, decoder_width)
    for i in range(layers):
        layer = f"decoder.layers.{i}"
        add_layer(f"{layer}.self_attn.c_attn", 3 * decoder_width, decoder_width, bias=False)
        add_layer(f"{layer}.self_attn.c_proj", decoder_width, decoder_width, bias=False)
        state[f"{layer}.self_attn.bias"] = torch.ones(128, 128).tril().view(1, 1, 128, 128)
        add_layer(f"{layer}.multihead_attn.q_proj", decoder_width, decoder_width, bias=False)
        add_layer(f"{layer}.multihead_attn.kv_proj", 2 * decoder_width, decoder_width, bias=False)
        add_layer(f"{layer}.multihead_attn.c_proj", decoder_width, decoder_width, bias=False)
        add_layer(f"{layer}.linear1", 4 * decoder_width, decoder_width, bias=False)
        add_layer(f"{layer}.linear2", decoder_width, 4 * decoder_width, bias=False)
        for norm in ("norm1", "norm2", "norm3"):
            add_norm(f"{layer}.{norm}", decoder_width)
    add_norm("decoder_pred_text.0", decoder_width)
    add_layer("decoder_pred_text.1", V, decoder_width)
    for kind, size in (("encoder", width), ("decoder", decoder_width)):
        add(f"{kind}_image_type_embedding", 1, 1, size)
        add(f"{kind}_text_type_embedding", 1, 1, size)
    add("text_pos_embed", 1, L, width)
    add("mask_token", 1, 1, decoder_width)
    add("mask_token_text", 1, 1, decoder_width)
    if sincos:
        state |= {"pos_embed": image_table(width), "decoder_pos_embed": image_table(decoder_width)}
        state["text_decoder_pos_embed"] = torch.from_numpy(waves(np.arange(L), decoder_width)).float()[None]
    return state


def waves(positions: np.ndarray, width: int) -> np.ndarray:
    angles = np.outer(positions, 1 / 10000 ** (np.arange(width // 2) / (width / 2)))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def image_table(width: int) -> Tensor:
    rows, columns = np.divmod(np.arange(GRID**2), GRID)
    table = np.concatenate([waves(columns, width // 2), waves(rows, width // 2)], axis=1)
    return torch.from_numpy(np.concatenate([np.zeros((1, width)), table])).float()[None]


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool) -> Tensor:
    """(B, L, D) each, softmax written out."""
    size = query.shape[2] // heads
    out = []
    for h in range(heads):
        q, k, v = (x[:, :, h * size : (h + 1) * size] for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        out.append(scores.softmax(-1) @ v)
    return torch.cat(out, dim=2)


class Released:
    """The forward pass of the released model, from its tensors by name."""

    def __init__(self, state: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        self.state = {name: value.double() for name, value in state.items()}
        self.activation = activation

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)

    def tokens(self, images: Tensor) -> Tensor:
        s = self.state
        x = F.conv2d(images, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=PATCH)
        x = x.flatten(2).transpose(1, 2) + s["pos_embed"][:, 1:]
        first = (s["cls_token"] + s["pos_embed"][:, :1]).expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1) + s.get("encoder_image_type_embedding", torch.zeros(()))
        for i in range(DEPTH):
            b = f"blocks.{i}"
            q, k, v = self.linear(f"{b}.attn.qkv", self.norm(f"{b}.norm1", x, 1e-6)).chunk(3, dim=2)
            x = x + self.linear(f"{b}.attn.proj", attention(q, k, v, HEADS, causal=False))
            inner = self.linear(f"{b}.mlp.fc1", self.norm(f"{b}.norm2", x, 1e-6))
            x = x + self.linear(f"{b}.mlp.fc2", F.gelu(inner))
        return self.norm("norm", x, 1e-6)

    def memory(self, images: Tensor) -> Tensor:
        x = self.linear("decoder_embed", self.tokens(images))
        return x + self.state["decoder_pos_embed"] + self.state["decoder_image_type_embedding"]

    def logits(self, images: Tensor, tokens: Tensor) -> Tensor:
        s, memory = self.state, self.memory(images)
        x = s["text_embedding_layer_SimVLM.weight"][tokens] + s["text_decoder_pos_embed"][:, : tokens.shape[1]]
        x = x + s["decoder_text_type_embedding"]
        for i in range(LAYERS):
            d = f"decoder.layers.{i}"
            q, k, v = self.linear(f"{d}.self_attn.c_attn", x).chunk(3, dim=2)
            own = self.linear(f"{d}.self_attn.c_proj", attention(q, k, v, DECODER_HEADS, causal=True))
            x = self.norm(f"{d}.norm1", x + own, 1e-5)
            key, value = self.linear(f"{d}.multihead_attn.kv_proj", memory).chunk(2, dim=2)
            query = self.linear(f"{d}.multihead_attn.q_proj", x)
            seen = attention(query, key, value, DECODER_HEADS, causal=False)
            x = self.norm(f"{d}.norm2", x + self.linear(f"{d}.multihead_attn.c_proj", seen), 1e-5)
            hidden = self.activation(self.linear(f"{d}.linear1", x))
            x = self.norm(f"{d}.norm3", x + self.linear(f"{d}.linear2", hidden), 1e-5)
        return self.linear("decoder_pred_text.1", self.norm("decoder_pred_text.0", x, 1e-5))

    def loss(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the tokens that are not padding, of each caption."""
        labels = tokens[:, 1:]
        logits = self.logits(images, tokens)[:, :-1].transpose(1, 2)
        losses = F.cross_entropy(logits, labels, ignore_index=0, reduction="none")
        return losses.sum(1) / (labels != 0).sum(1)


def imported(state: Mapping[str, Tensor], told: Unstated = TOLD) -> Captioner:
    config, weights = from_dpcap(state, "x", told)
    model = Captioner(config).double()
    model.load_state_dict(weights)
    return model


def pairs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, V, (3, L), generator=generator)
    tokens[1, 5:] = 0
    tokens[2, 3:] = 0
    return torch.randn(3, 3, PATCH * GRID, PATCH * GRID, generator=generator, dtype=torch.float64), tokens


@pytest.mark.parametrize("sincos", [False, True])
@torch.no_grad()
def test_an_imported_checkpoint_computes_what_the_release_computes(sincos: bool) -> None:
    state = checkpoint(sincos=sincos)
    before = {name: value.clone() for name, value in state.items()}
    model, released, (images, tokens) = imported(state), Released(state), pairs()
    tolerance = 1e-5 if sincos else 1e-6  # the fixed tables and the two sums with the type are rounded to fp32
    assert (model.encoder(images) - released.tokens(images)).abs().max() < tolerance
    assert (model.encode(images) - released.memory(images)).abs().max() < tolerance
    assert (model.logits(images, tokens) - released.logits(images, tokens)).abs().max() < tolerance
    assert (model(images, tokens, tokens != 0) - released.loss(images, tokens)).abs().max() < tolerance
    assert model.config.encoder.position == model.config.decoder.position == ("sincos" if sincos else "learned")
    assert any("position.table" in name for name, _ in model.named_parameters()) != sincos
    assert all(torch.equal(before[name], state[name]) for name in state), "the checkpoint was changed"


@torch.no_grad()
def test_without_a_type_at_encoder_width_nothing_is_rounded() -> None:
    state = checkpoint()
    del state["encoder_image_type_embedding"]
    model, released, (images, tokens) = imported(state), Released(state), pairs()
    assert (model.encoder(images) - released.tokens(images)).abs().max() < 1e-12
    assert (model.encode(images) - released.memory(images)).abs().max() < 1e-12
    assert (model.logits(images, tokens) - released.logits(images, tokens)).abs().max() < 1e-12
    assert (model(images, tokens, tokens != 0) - released.loss(images, tokens)).abs().max() < 1e-12


@torch.no_grad()
def test_what_the_release_does_not_use_changes_nothing() -> None:
    state, (images, tokens) = checkpoint(), pairs()
    before = imported(state).logits(images, tokens)
    unused = [
        n for n in state if n.endswith("self_attn.bias") or n.startswith(("text_pos", "mask_token", "encoder_text"))
    ]
    assert len(unused) == 4 + LAYERS
    for name in unused:
        state[name] = state[name] + 1
    assert torch.equal(imported(state).logits(images, tokens), before)
    for name in unused:
        del state[name]
    assert torch.equal(imported(state).logits(images, tokens), before)


def test_missing_and_unknown_names_are_one_error_that_lists_them() -> None:
    state = checkpoint()
    del state["blocks.1.norm2.bias"], state["decoder.layers.2.multihead_attn.c_proj.weight"]
    state |= {"optimizer": torch.zeros(1), "decoder.layers.0.self_attn.c_attn.bias": torch.zeros(3 * E)}
    with pytest.raises(WeightsError) as raised:
        imported(state)
    for name in ("blocks.1.norm2.bias", "decoder.layers.2.multihead_attn.c_proj.weight", "optimizer", "c_attn.bias"):
        assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("decoder.layers.1.self_attn.c_attn.weight", (2 * E, E)),
        ("encoder_image_type_embedding", (1, 1, E)),
        ("decoder_pos_embed", (1, T + 1, E)),
        ("pos_embed", (1, T + 1, D)),
        ("text_decoder_pos_embed", (L, E)),
        ("patch_embed.proj.weight", (D, 3 * PATCH**2)),
    ],
)
def test_another_shape_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        imported(checkpoint() | {name: torch.zeros(shape)})


def with_biases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The release's models without "nobias" in their name have a bias wherever a matrix is."""
    generator = torch.Generator().manual_seed(7)
    state = dict(state)
    for name in [n for n in state if n.endswith(".weight") and n.startswith(("decoder.layers.", "blocks."))]:
        bias = name.removesuffix("weight") + "bias"
        if bias not in state:
            state[bias] = 0.3 * torch.randn(len(state[name]), generator=generator)
    return state


@pytest.mark.parametrize("state", [checkpoint(), with_biases(checkpoint())], ids=["no biases", "biases"])
@pytest.mark.parametrize("left_out", ["num_heads", "decoder_heads", "decoder_activation", "norm_eps", "activation"])
def test_what_no_tensor_tells_is_asked_for(left_out: str, state: dict[str, Tensor]) -> None:
    """For shapes that nobody published, biases or not."""
    with pytest.raises(WeightsError, match=f"^x: no tensor tells --{left_out}, and its shapes") as refused:
        from_dpcap(state, "x", TOLD._replace(**{left_out: None}))
    assert "\n" not in str(refused.value)


def test_what_decides_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="--normalise_pixels decides nothing here"):
        from_dpcap(checkpoint(), "x", TOLD._replace(normalise_pixels=False))
    for kind in ("hf", "safetensors"):
        with pytest.raises(
            WeightsError, match=r"whose config.json states its model: --decoder_heads decides nothing here"
        ):
            read_foreign(kind, tmp_path, Unstated(decoder_heads=2))  # type: ignore[arg-type]


SIZE_NAMES = [
    "dpcap_nano",
    *(pytest.param(f"dpcap_{n}", marks=pytest.mark.full) for n in ("tiny", "small", "base", "large")),
]


@pytest.mark.parametrize("name", SIZE_NAMES)
def test_the_published_sizes_are_known(name: str) -> None:
    """By all of their shapes and biases: the same widths with another depth, or with biases, are asked for."""
    size = SIZES[name]
    shape: Any = {"width": size.encoder.width, "decoder_width": size.decoder.width, "sincos": True, "patch": 16}
    state = checkpoint(**shape, depth=size.encoder.depth, layers=size.decoder.depth)
    config, _ = from_dpcap(state)
    assert config.encoder == replace(size.encoder, image_size=16 * GRID)
    assert config.decoder == size.decoder and config.decoder.activation == "gelu"
    assert (config.pad_id, config.bos_id, config.eos_id) == (0, 101, 102)
    for other in (
        checkpoint(**shape, depth=1, layers=size.decoder.depth), checkpoint(**shape, depth=size.encoder.depth, layers=1),
        with_biases(state),
    ):  # fmt: skip
        with pytest.raises(
            WeightsError, match="no tensor tells --num_heads, --decoder_heads, --decoder_activation, --norm_eps"
        ):
            from_dpcap(other)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_models_with_biases_are_taken_too(activation: Literal["relu", "gelu"]) -> None:
    """The release's compute ReLU; ours computes what it is told, to rounding, and the other one is far away."""
    state, (images, tokens) = with_biases(checkpoint()), pairs()
    model = imported(state, TOLD._replace(decoder_activation=activation))
    assert model.config.decoder.bias and model.config.encoder.qkv_bias and model.config.decoder.activation == activation
    for name, function in (("relu", F.relu), ("gelu", F.gelu)):
        released = Released(state, function)
        logits = (model.logits(images, tokens) - released.logits(images, tokens)).abs().max()
        losses = (model(images, tokens, tokens != 0) - released.loss(images, tokens)).abs().max()
        assert (logits < 1e-5 and losses < 1e-5) if name == activation else (logits > 1e-2 and losses > 1e-3)
