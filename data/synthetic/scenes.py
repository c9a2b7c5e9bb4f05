"""Cluttered, coloured scenes with true captions: a small world in which captions can teach what pixels do not say.

A scene is a function of (seed, index) alone, so a world of ten million scenes costs nothing. One or two objects lie anywhere
on a background of gradients, stripes, noise and bars: photographs of clothes (`data/fashion`) or printed letters
(`data/scenes`), each tinted in one of ten colours and turned a little. The caption names colour, kind and place: "a red shirt
at top left". Three kinds of clothes, eight letters, the judges' fonts, and one in eight pairs of kind and colour are in no
captioned scene.

Pictures are rendered in blocks; the pixels do not depend on the block: what a processor may round otherwise in vectors than
one by one (sines) is computed in float64 once a scene, and the rest is sums and products.
"""

import io
import lzma
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.embedded import FASHION_FILE, NUM_SHADES, PARTS

SPRITES_FILE = Path(__file__).resolve().parents[1] / "scenes" / "sprites.npz.xz"
SPRITE = 28
"""Side of a sprite in pixels."""
CLOTHES = (
    "tee",
    "trousers",
    "jumper",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NEVER = frozenset(("jumper", "sandal", "bag", *(f"letter {letter}" for letter in "aekqruwz")))
"""Kinds that no caption names and no captioned scene shows."""
COLOURS = {
    "red": (0.88, 0.12, 0.12),
    "orange": (0.97, 0.55, 0.08),
    "yellow": (0.95, 0.9, 0.15),
    "green": (0.12, 0.62, 0.2),
    "cyan": (0.2, 0.85, 0.9),
    "blue": (0.12, 0.25, 0.9),
    "purple": (0.5, 0.15, 0.65),
    "pink": (0.98, 0.55, 0.75),
    "white": (0.97, 0.97, 0.97),
    "black": (0.06, 0.06, 0.06),
}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
KINDS = (*CLOTHES, *(f"letter {letter}" for letter in LETTERS))
CAPTIONED = tuple(kind for kind in KINDS if kind not in NEVER)
WORDS = (
    *SPECIAL,
    "a",
    "an",
    "at",
    "letter",
    "and",
    *COLOURS,
    *ROWS,
    "left",
    "right",
    *(kind.removeprefix("letter ") for kind in CAPTIONED if kind != "letter a"),
)
"""The tokens of `data/tokenizer/scenes.json`, in order."""
_ID = {word: number for number, word in enumerate(WORDS)}


class Pool(NamedTuple):
    """Sprites that scenes may show.

    Attributes:
        names: of the kinds.
        pictures: (N, 4, 28, 28) half, premultiplied RGBA, ordered by kind.
        first: (kinds + 1,) where each kind begins.
        number: (kinds,) of each kind in KINDS, by which pairs with colours are left out and captions are written; -1 has none.
        bounds: (kinds,) cumulative probabilities.
        leaves_out: whether one in eight pairs of kind and colour is left out.
        is_tinted: whether sprites take a colour.
    """

    names: tuple[str, ...]
    pictures: Tensor
    first: np.ndarray
    number: np.ndarray
    bounds: np.ndarray
    leaves_out: bool
    is_tinted: bool


class Placed(NamedTuple):
    """What B scenes of at most M objects show, in image sides and radians.

    Attributes:
        uniform: (B, U) the numbers of the background.
        number: (B,) of objects.
        kind, sprite, colour: (B, M) of the pool, of the pool, of COLOURS.
        rgb: (B, M, 3).
        size, x, y, turn: (B, M).
    """

    uniform: np.ndarray
    number: np.ndarray
    kind: np.ndarray
    sprite: np.ndarray
    colour: np.ndarray
    rgb: np.ndarray
    size: np.ndarray
    x: np.ndarray
    y: np.ndarray
    turn: np.ndarray


def from_ink(ink_HW: np.ndarray, least: float = 0.35) -> np.ndarray:
    """A cut-out, (28, 28, 4) uint8, of a picture that is bright where there is ink, as large as a margin of one pixel allows.

    A little ink is opaque already, and more of it is brighter.
    """
    from PIL import Image

    light = 255 * (least + (1 - least) * ink_HW / 255)
    opaque = np.clip(4 * ink_HW.astype(np.float32), 0, 255)
    rgba_HWC = np.dstack([light, light, light, opaque]).astype(np.uint8)
    rows, columns = np.where(rgba_HWC[..., 3] > 24)
    image = Image.fromarray(
        rgba_HWC[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    )
    scale = (SPRITE - 2) / max(image.size)
    resample = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    image = image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))), resample
    )
    framed = Image.new("RGBA", (SPRITE, SPRITE), (0, 0, 0, 0))
    framed.paste(image, ((SPRITE - image.width) // 2, (SPRITE - image.height) // 2))
    return np.array(framed)


def pool(
    sprites: dict[str, np.ndarray], *, leaves_out: bool = False, is_tinted: bool = True
) -> Pool:
    """A pool of (n, 28, 28, 4) uint8 by kind; clothes and letters together are equally likely, and all kinds within."""
    names = tuple(sprites)
    rgba = (
        torch.from_numpy(np.concatenate(list(sprites.values()))).permute(0, 3, 1, 2).float() / 255
    )
    rgba[:, :3] *= rgba[:, 3:]
    letters = np.array([name.startswith("letter ") for name in names])
    shares = np.where(letters, 1 / max(1, letters.sum()), 1 / max(1, (~letters).sum()))
    return Pool(
        names,
        rgba.half(),
        np.cumsum([0, *(len(one) for one in sprites.values())]),
        np.array([KINDS.index(name) if name in KINDS else -1 for name in names]),
        np.cumsum(shares / shares.sum()),
        leaves_out,
        is_tinted,
    )


@cache
def pools() -> dict[str, Pool]:
    """By name: "captioned" to train on, "new" (other sprites of its kinds), "never" with its "clothes" and "letters", "clip art".

    Raises:
        OSError: an embedded file is missing.
    """
    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
        ink = np.rint(255 - held["shades_NHW"] * (255 / (NUM_SHADES - 1))).astype(np.uint8)
        kinds = held["caption_N"] // 2
    with np.load(io.BytesIO(lzma.decompress(SPRITES_FILE.read_bytes()))) as held:
        alpha, clip_art = (held["letters_FLHW"], held["other_letters_FLHW"]), held["clip_art_NHWC"]
    sprites: list[dict[str, np.ndarray]] = []
    for span, letters in zip(
        (slice(0, 5000), slice(PARTS["train"], None)), alpha, strict=True
    ):  # of captions, of judges
        found = {
            name: np.stack([from_ink(one) for one in ink[span][kinds[span] == number]])
            for number, name in enumerate(CLOTHES)
        }
        for number, letter in enumerate(LETTERS):
            one = letters[:, number, ..., None]
            found[f"letter {letter}"] = np.concatenate(
                [np.full_like(one, 255).repeat(3, axis=-1), one], axis=-1
            )
        sprites.append(found)
    never = {"clothes": CLOTHES, "letters": KINDS[len(CLOTHES) :], "never": KINDS}
    return {
        "captioned": pool({kind: sprites[0][kind] for kind in CAPTIONED}, leaves_out=True),
        "new": pool({kind: sprites[1][kind] for kind in CAPTIONED}),
        **{
            name: pool({one: sprites[1][one] for one in some if one in NEVER})
            for name, some in never.items()
        },
        "clip art": pool(
            {f"picture-{n}": one[None] for n, one in enumerate(clip_art)}, is_tinted=False
        ),
    }


def uniforms(seed: int, index_B: np.ndarray, count: int) -> np.ndarray:
    """(B, count) float32 in [0, 1): splitmix64 of seed, index and place."""
    with np.errstate(over="ignore"):
        x = index_B.astype(np.uint64)[:, None] + np.uint64(seed) * np.uint64(0xA0761D6478BD642F)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = x ^ (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03))
        x += np.uint64(0x632BE59BD9B4E019)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


class Scenes:
    """A world of scenes."""

    BACKGROUND, OBJECT = 24, 12
    """Random numbers of a background and of an object."""

    def __init__(
        self, seed: int = 0, size: int = 32, objects: int = 1, clutter: float = 0.5
    ) -> None:
        """Says what the world is a function of.

        Args:
            seed: of the world.
            size: side in pixels.
            objects: 1, or 2 for one or two.
            clutter: of the background, 0 to 1.
        """
        self.seed, self.size, self.objects, self.clutter = seed, size, objects, clutter
        self.num_tokens = 9 if objects == 1 else 17

    def placed(self, index_B: np.ndarray, among: Pool) -> Placed:
        """What scenes show, from a pool."""
        M = self.objects
        u = uniforms(self.seed, index_B, self.BACKGROUND + self.OBJECT * M)
        count = 1 + (u[:, 0] * M).astype(int)
        v = u[:, self.BACKGROUND :].reshape(-1, M, self.OBJECT)
        kind = np.searchsorted(among.bounds[:-1], v[..., 1], side="right")
        first, last = among.first[kind], among.first[kind + 1]
        colour = (v[..., 3] * len(COLOURS)).astype(int)
        if among.leaves_out:  # the next colour is never left out, too
            colour = np.where(
                is_left_out(among.number[kind], colour), (colour + 1) % len(COLOURS), colour
            )
        rgb = np.clip(
            np.array(list(COLOURS.values()), np.float32)[colour] + 0.12 * (v[..., 4:7] - 0.5), 0, 1
        )
        is_one = (count == 1)[:, None]
        size = np.where(is_one, 0.4375 + 0.3125 * v[..., 7], 0.34 + 0.16 * v[..., 7])
        x, y = (size / 2 + (1 - size) * v[..., 9 + axis] for axis in (0, 1))
        if M == 2:  # each in a half of its own
            free = size / 2 + np.maximum(0.5 - size, 0) * v[..., 11] + 0.5 * np.arange(2)
            is_row = (u[:, 1] < 0.5)[:, None]
            x, y = np.where(is_one | ~is_row, x, free), np.where(is_one | is_row, y, free)
        return Placed(
            u,
            count,
            kind,
            first + (v[..., 2] * (last - first)).astype(int),
            colour,
            rgb,
            size.astype(np.float32),
            x,
            y,
            (v[..., 8] - 0.5) * 2 * np.deg2rad(20),
        )

    def render(self, placed: Placed, among: Pool) -> Tensor:
        """(B, 3, S, S) uint8."""
        image, B, S = self._background(placed.uniform), len(placed.number), self.size
        for m in range(self.objects):
            size, turn = placed.size[:, m].astype(np.float64), placed.turn[:, m].astype(np.float64)
            cos, sin = np.cos(turn) / size, np.sin(turn) / size
            x, y = placed.x[:, m] * 2.0 - 1, placed.y[:, m] * 2.0 - 1
            rows = np.stack(
                [cos, sin, -cos * x - sin * y, -sin, cos, sin * x - cos * y], 1
            ).reshape(-1, 2, 3)
            # Both factors of the grid's product, so that every pixel is one sum of products for any number of scenes.
            line = torch.from_numpy((np.arange(S) * 2 + 1) / S - 1)
            t = torch.from_numpy(rows)[..., None, None]
            sums = [t[:, k, 0] * line + t[:, k, 1] * line[:, None] + t[:, k, 2] for k in (0, 1)]
            grid = torch.stack(sums, -1).float()
            drawn = F.grid_sample(
                among.pictures[placed.sprite[:, m]].float(), grid, align_corners=False
            )
            drawn *= torch.from_numpy((placed.number > m).astype(np.float32)).view(B, 1, 1, 1)
            light = drawn[:, :3]
            if among.is_tinted:
                light *= torch.from_numpy(placed.rgb[:, m]).view(B, 3, 1, 1)
            image.mul_(1 - drawn[:, 3:]).add_(light)
        return image.clamp_(0, 1).mul_(255).round_().to(torch.uint8)

    def tokens(self, placed: Placed, among: Pool) -> Tensor:
        """(B, num_tokens) int64, of WORDS."""
        words = [[_ID["an" if colour == "orange" else "a"], _ID[colour]] for colour in COLOURS]
        names = [[_ID.get(word, _ID["<unk>"]) for word in name.split()] for name in among.names]
        rows = np.zeros((len(placed.number), self.num_tokens), np.int64)
        columns = placed.number, placed.kind, placed.colour, place(placed.y), place(placed.x)
        for row, count, kinds, colours, ys, xs in zip(
            rows, *(column.tolist() for column in columns), strict=True
        ):
            said = [1]
            for m in range(count):
                said += [_ID["and"]] * (m > 0) + words[colours[m]] + names[kinds[m]]
                said += [_ID["at"], _ID[ROWS[ys[m]]], _ID[COLUMNS[xs[m]]]]
            row[: len(said) + 1] = [*said, 2]
        return torch.from_numpy(rows)

    def pairs(self, index_B: np.ndarray, among: Pool | None = None) -> tuple[Tensor, Tensor]:
        """Pictures (B, 3, S, S) uint8 and tokens (B, num_tokens); of captioned scenes by default."""
        among = pools()["captioned"] if among is None else among
        placed = self.placed(index_B, among)
        return self.render(placed, among), self.tokens(placed, among)

    def _background(self, uniform: np.ndarray) -> Tensor:
        B, S, u = len(uniform), self.size, uniform[:, 2:]
        line = torch.from_numpy(((np.arange(S) * 2 + 1) / S - 1).astype(np.float32))

        def along(turns: np.ndarray) -> Tensor:
            """(B, S, S): how far each pixel is in a direction."""
            angle = 2 * np.pi * turns.astype(np.float64)
            cos, sin = (
                torch.from_numpy(f(angle).astype(np.float32)).view(-1, 1, 1)
                for f in (np.cos, np.sin)
            )
            return cos * line + sin * line[:, None]

        def row(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.float32))[:, :, None, None]

        base = 0.25 + 0.5 * u[:, :1]
        near, far = (
            base + 0.25 * (u[:, 1:4] - 0.5),
            base + 0.35 * (u[:, 4:5] - 0.5) + 0.25 * (u[:, 5:8] - 0.5),
        )
        t = along(u[:, 8])[:, None]
        cycles = t * row((1 + 6 * u[:, 9:10] ** 2) / 2) + row(u[:, 11:12])
        stripes = (cycles - cycles.floor() - 0.5).abs() * 2
        t = torch.where(row(u[:, 10:11] < 0.5 * self.clutter) > 0, stripes, t * 0.35 + 0.5)
        image = (row(far - near) * t).add_(row(near))
        noise = uniforms(
            self.seed, (u[:, 12] * (1 << 24)).astype(np.uint64) + np.uint64(1 << 40), 64
        )
        smooth = F.interpolate(
            torch.from_numpy(noise - 0.5).view(B, 1, 8, 8), size=S, mode="bilinear"
        )
        image.add_(row(0.3 * self.clutter * u[:, 13:14]) * smooth)
        for bar in (u[:, 14:18], u[:, 18:22]):
            shown = np.flatnonzero(bar[:, 0] < 0.5 * self.clutter)
            bar = bar[shown]
            away = (along(bar[:, 1])[:, None] - row(bar[:, 2:3] * 1.6 - 0.8)).abs_()
            mask = 0.8 - 0.8 * ((away - 0.03) * (S / 2)).clamp_(0, 1)
            image[shown] = (image[shown] * (1 - mask)).add_(mask * row(bar[:, 3:]))
        return image


def place(centre: np.ndarray) -> np.ndarray:
    """0, 1 or 2: first, middle or last; the middle is a sixth of the side, since no centre is near an edge."""
    return (centre > 0.42).astype(int) + (centre > 0.58).astype(int)


def is_left_out(number: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Whether a pair of kind (in KINDS) and colour is in no captioned scene."""
    return (number * 7 + colour * 3) % 8 == 0


def caption(tokens: Sequence[int]) -> str:
    """Tokens as words."""
    return " ".join(WORDS[token] for token in tokens if token > 2)
