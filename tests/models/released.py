"""Files of ViP's and DP-Cap's released structure with made-up numbers, and what they mean: float64, without a line of ours."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

D, DEPTH, HEADS, PATCH, GRID = 16, 2, 4, 4, 3
"""Width, blocks and heads of the encoder; pixels of a patch and patches of a side."""
E, LAYERS, DECODER_HEADS = 24, 3, 3
V, L = 110, 9
"""Words and tokens of a caption."""
SIDE, T = GRID * PATCH, GRID**2 + 1
ENCODER = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "encoder_width": D,
    "encoder_depth": DEPTH,
    "encoder_num_heads": HEADS,
}
OF_ENCODER: dict[str, Any] = ENCODER | {"encoder_norm_eps": 1e-6}
OF_VIP: dict[str, Any] = ENCODER | {
    "decoder_width": E,
    "decoder_depth": LAYERS,
    "decoder_num_heads": DECODER_HEADS,
}
OF_DPCAP: dict[str, Any] = OF_VIP | {"vocab_size": V, "num_tokens": L}
"""What is overridden in sizes of the release, of which any will do."""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "vip": ("vip_nano", OF_VIP),
    "dpcap": ("dpcap_nano", OF_DPCAP),
}


def arguments(kind: str, overrides: Mapping[str, Any] | None = None) -> list[str]:
    """The same on the command line."""
    size, usual = FILES[kind]
    told = [
        f"--override={field}={value}"
        for field, value in (usual if overrides is None else overrides).items()
    ]
    return ["--size", size, *told]


Shapes = dict[str, tuple[int, ...]]


def _layer(name: str, rows: int, *columns: int, bias: bool = True) -> Shapes:
    """A norm has no columns."""
    return {f"{name}.weight": (rows, *columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _block(name: str, width: int, *, qkv_bias: bool) -> Shapes:
    return {
        **_layer(f"{name}.norm1", width),
        **_layer(f"{name}.attn.qkv", 3 * width, width, bias=qkv_bias),
        **_layer(f"{name}.attn.proj", width, width),
        **_layer(f"{name}.norm2", width),
        **_layer(f"{name}.mlp.fc1", 4 * width, width),
        **_layer(f"{name}.mlp.fc2", width, 4 * width),
    }


def _encoder(*, qkv_bias: bool) -> Shapes:
    shapes = {"cls_token": (1, 1, D), "pos_embed": (1, T, D)} | _layer(
        "patch_embed.proj", D, 3, PATCH, PATCH
    )
    for i in range(DEPTH):
        shapes |= _block(f"blocks.{i}", D, qkv_bias=qkv_bias)
    return shapes | _layer("norm", D)


def _drawn(shapes: Shapes) -> dict[str, Tensor]:
    """Random numbers; those that a norm multiplies by are around one."""
    generator, made = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        scale = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.3
        made[name] = scale * torch.randn(shape, generator=generator) + (
            len(shape) == 1 and name.endswith(".weight")
        )
    return made


def vip_file(*, decoder: bool = True) -> dict[str, Tensor]:
    """A masked autoencoder, or its encoder alone."""
    shapes = _encoder(qkv_bias=True)
    if decoder:
        shapes |= {"mask_token": (1, 1, E), "decoder_pos_embed": (1, T, E)} | _layer(
            "decoder_embed", E, D
        )
        for i in range(LAYERS):
            shapes |= _block(f"decoder_blocks.{i}", E, qkv_bias=True)
        shapes |= _layer("decoder_norm", E) | _layer("decoder_pred", PATCH**2 * 3, E)
    return _drawn(shapes)


def dpcap_file(*, biases: bool = False) -> dict[str, Tensor]:
    """A captioner, its masks and unused tensors included; the release's models without "nobias" in their name have biases."""
    shapes = _encoder(qkv_bias=biases) | _layer("decoder_embed", E, D)
    shapes |= {"decoder_pos_embed": (1, T, E), "text_decoder_pos_embed": (1, L, E)}
    shapes |= {"text_embedding_layer_SimVLM.weight": (V, E)}
    of_layer = {
        "self_attn.c_attn": (3 * E, E),
        "self_attn.c_proj": (E, E),
        "multihead_attn.q_proj": (E, E),
        "multihead_attn.kv_proj": (2 * E, E),
        "multihead_attn.c_proj": (E, E),
        "linear1": (4 * E, E),
        "linear2": (E, 4 * E),
    }
    for i in range(LAYERS):
        for name, (rows, columns) in of_layer.items():
            shapes |= _layer(f"decoder.layers.{i}.{name}", rows, columns, bias=biases)
        for norm in ("norm1", "norm2", "norm3"):
            shapes |= _layer(f"decoder.layers.{i}.{norm}", E)
    shapes |= _layer("decoder_pred_text.0", E) | _layer("decoder_pred_text.1", V, E)
    for kind, size in (("encoder", D), ("decoder", E)):
        shapes |= {f"{kind}_{what}_type_embedding": (1, 1, size) for what in ("image", "text")}
    made = _drawn(
        shapes
        | {"text_pos_embed": (1, L, D), "mask_token": (1, 1, E), "mask_token_text": (1, 1, E)}
    )
    mask = torch.ones(128, 128).tril().view(1, 1, 128, 128)
    return made | {f"decoder.layers.{i}.self_attn.bias": mask for i in range(LAYERS)}


def waves(positions: Tensor, width: int) -> Tensor:
    """The published sin-cos table of positions: sines, then cosines."""
    angles = positions.double()[:, None] / 10000 ** (
        torch.arange(width // 2).double() / (width / 2)
    )
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def image_table(width: int) -> Tensor:
    """Half of the width for the column, half for the row; zeros for the class token."""
    place = torch.arange(GRID**2)
    table = torch.cat([waves(place % GRID, width // 2), waves(place // GRID, width // 2)], dim=1)
    return torch.cat([torch.zeros(1, width), table.float()])[None]


def fixed_tables(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file with sin-cos positions."""
    tables = {"pos_embed": image_table(D), "decoder_pos_embed": image_table(E)}
    tables["text_decoder_pos_embed"] = waves(torch.arange(L), E).float()[None]
    return {name: tables.get(name, value) for name, value in state.items()}


def attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool = False
) -> Tensor:
    """(B, L, D) each, softmax written out."""
    size, out = query.shape[2] // heads, []
    for h in range(heads):
        q, k, v = (x[:, :, h * size : (h + 1) * size] for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        out.append(scores.softmax(-1) @ v)
    return torch.cat(out, dim=2)


class Released:
    """The forward passes of the released models, from their tensors by name."""

    def __init__(
        self, state: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        self.state = {name: value.double() for name, value in state.items()}
        self.activation = activation

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps
        )

    def block(self, name: str, x: Tensor, heads: int) -> Tensor:
        q, k, v = self.linear(f"{name}.attn.qkv", self.norm(f"{name}.norm1", x)).chunk(3, dim=2)
        x = x + self.linear(f"{name}.attn.proj", attention(q, k, v, heads))
        return x + self.linear(
            f"{name}.mlp.fc2", F.gelu(self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.norm2", x)))
        )

    def tokens(self, images: Tensor, visible_K: Tensor | None = None) -> Tensor:
        """The encoder's, of all patches or of these."""
        s = self.state
        x = F.conv2d(
            images.double(), s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=PATCH
        )
        x = x.flatten(2).transpose(1, 2) + s["pos_embed"][:, 1:]
        x = x if visible_K is None else x[:, visible_K]
        first = (s["cls_token"] + s["pos_embed"][:, :1]).expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1) + s.get("encoder_image_type_embedding", torch.zeros(()))
        for i in range(DEPTH):
            x = self.block(f"blocks.{i}", x, HEADS)
        return self.norm("norm", x)

    def reconstruction_loss(self, image_CHW: Tensor, mask_P: Tensor) -> float:
        """ViP's, of one image; pixels of a patch are rows, then columns, then colours."""
        (visible_K,) = (~mask_P).nonzero(as_tuple=True)
        seen = self.linear("decoder_embed", self.tokens(image_CHW[None], visible_K))[0]
        x = self.state["mask_token"][0].repeat(T, 1)
        x[0], x[1 + visible_K] = seen[0], seen[1:]
        x = (x + self.state["decoder_pos_embed"][0])[None]
        for i in range(LAYERS):
            x = self.block(f"decoder_blocks.{i}", x, DECODER_HEADS)
        predicted = self.linear("decoder_pred", self.norm("decoder_norm", x))[0, 1:]
        tiles = [
            image_CHW[:, r : r + PATCH, c : c + PATCH]
            for r in range(0, SIDE, PATCH)
            for c in range(0, SIDE, PATCH)
        ]
        target = torch.stack([tile.permute(1, 2, 0).flatten() for tile in tiles]).double()
        return float((predicted - target).square().mean(1)[mask_P].mean())

    def memory(self, images: Tensor) -> Tensor:
        x = self.linear("decoder_embed", self.tokens(images))
        return x + self.state["decoder_pos_embed"] + self.state["decoder_image_type_embedding"]

    def logits(self, images: Tensor, tokens: Tensor) -> Tensor:
        """DP-Cap's."""
        s, memory = self.state, self.memory(images)
        x = (
            s["text_embedding_layer_SimVLM.weight"][tokens]
            + s["text_decoder_pos_embed"][:, : tokens.shape[1]]
        )
        x = x + s["decoder_text_type_embedding"]
        for i in range(LAYERS):
            d = f"decoder.layers.{i}"
            q, k, v = self.linear(f"{d}.self_attn.c_attn", x).chunk(3, dim=2)
            own = self.linear(
                f"{d}.self_attn.c_proj", attention(q, k, v, DECODER_HEADS, causal=True)
            )
            x = self.norm(f"{d}.norm1", x + own, 1e-5)
            key, value = self.linear(f"{d}.multihead_attn.kv_proj", memory).chunk(2, dim=2)
            seen = attention(
                self.linear(f"{d}.multihead_attn.q_proj", x), key, value, DECODER_HEADS
            )
            x = self.norm(f"{d}.norm2", x + self.linear(f"{d}.multihead_attn.c_proj", seen), 1e-5)
            hidden = self.activation(self.linear(f"{d}.linear1", x))
            x = self.norm(f"{d}.norm3", x + self.linear(f"{d}.linear2", hidden), 1e-5)
        return self.linear("decoder_pred_text.1", self.norm("decoder_pred_text.0", x, 1e-5))

    def caption_loss(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the tokens that are not padding, of each caption."""
        labels = tokens[:, 1:]
        logits = self.logits(images, tokens)[:, :-1].transpose(1, 2)
        losses = F.cross_entropy(logits, labels, ignore_index=0, reduction="none")
        return losses.sum(1) / (labels != 0).sum(1)


def pairs() -> tuple[Tensor, Tensor]:
    """Images and captions."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, V, (3, L), generator=generator)
    tokens[1, 5:] = 0
    tokens[2, 3:] = 0
    return torch.randn(3, 3, SIDE, SIDE, generator=generator, dtype=torch.float64), tokens


def masks() -> Tensor:
    """(3, P), of which a quarter is visible."""
    return (
        torch.rand(3, GRID**2, generator=torch.Generator().manual_seed(1)).argsort(1).argsort(1)
        >= GRID**2 // 4
    )
