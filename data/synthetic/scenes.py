"""Cluttered, coloured scenes with true captions, which teach facts that pixels do not state.

A scene is a function of (seed, index) alone, so ten million scenes need no storage. One or two
objects, photographs of clothes (`data/fashion`) or printed letters (`data/scenes`), are tinted in
one of ten colours, turned a little, and placed anywhere on a cluttered background. The caption
names colour, kind and place: "a red shirt at top left".
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
"""Kinds that neither captions name nor captioned scenes show."""
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
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "middle", "right")
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
        first: (kinds + 1,) the first picture of each kind.
        number: (kinds,) of each kind in KINDS, or -1. Captions and the pairs of kind and colour
            that are left out follow it.
        bounds: (kinds,) cumulative probabilities.
        leaves_out: True if one in eight pairs of kind and colour is left out.
        is_tinted: True if sprites take a colour.
    """

    names: tuple[str, ...]
    pictures: Tensor
    first: np.ndarray
    number: np.ndarray
    bounds: np.ndarray
    leaves_out: bool
    is_tinted: bool


class Placements(NamedTuple):
    """The objects of B scenes of at most M objects, in image sides and radians.

    Attributes:
        uniform: (B, U) random numbers of the background.
        number: (B,) of objects.
        kind: (B, M) of the pool.
        sprite: (B, M) of the pool.
        colour: (B, M) of COLOURS.
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
    """Returns a cut-out, (28, 28, 4) uint8, of a picture that is bright at its ink.

    It is as large as a margin of one pixel allows. A little ink is opaque already, and more ink is
    brighter.

    Args:
        least: brightness of the faintest ink, 0 to 1.
    """
    from PIL import Image

    light_HW = 255 * (least + (1 - least) * ink_HW / 255)
    opacity_HW = np.clip(4 * ink_HW.astype(np.float32), 0, 255)
    rgba_HWC = np.dstack([light_HW, light_HW, light_HW, opacity_HW]).astype(np.uint8)
    rows, columns = np.where(rgba_HWC[..., 3] > 24)
    cropped_HWC = rgba_HWC[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    image = Image.fromarray(cropped_HWC)
    scale = (SPRITE - 2) / max(image.size)
    resample = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    width = max(1, round(image.width * scale))
    height = max(1, round(image.height * scale))
    image = image.resize((width, height), resample)
    framed = Image.new("RGBA", (SPRITE, SPRITE), (0, 0, 0, 0))
    framed.paste(image, ((SPRITE - image.width) // 2, (SPRITE - image.height) // 2))
    return np.array(framed)


def pool(
    sprites: dict[str, np.ndarray], *, leaves_out: bool = False, is_tinted: bool = True
) -> Pool:
    """Returns a pool of sprites, (n, 28, 28, 4) uint8 by kind.

    Clothes and letters together are equally likely, and so are the kinds of each.
    """
    names = tuple(sprites)
    rgba_NHWC = torch.from_numpy(np.concatenate(list(sprites.values())))
    rgba_NCHW = rgba_NHWC.permute(0, 3, 1, 2).float() / 255
    rgba_NCHW[:, :3] *= rgba_NCHW[:, 3:]
    is_letter = np.array([name.startswith("letter ") for name in names])
    letter_share = 1 / max(1, is_letter.sum())
    clothes_share = 1 / max(1, (~is_letter).sum())
    shares = np.where(is_letter, letter_share, clothes_share)
    sizes = [len(pictures) for pictures in sprites.values()]
    numbers = [KINDS.index(name) if name in KINDS else -1 for name in names]
    return Pool(
        names=names,
        pictures=rgba_NCHW.half(),
        first=np.cumsum([0, *sizes]),
        number=np.array(numbers),
        bounds=np.cumsum(shares / shares.sum()),
        leaves_out=leaves_out,
        is_tinted=is_tinted,
    )


@cache
def pools() -> dict[str, Pool]:
    """Returns the pools by name.

    "captioned" is to train on, "new" has other sprites of its kinds, "never" has the kinds that no
    caption names, "clothes" and "letters" are its two parts, and "clip art" has other pictures.

    Raises:
        OSError: an embedded file is missing.
    """
    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as arrays:
        grey_NHW = arrays["shades_NHW"] * (255 / (NUM_SHADES - 1))
        ink_NHW = np.rint(255 - grey_NHW).astype(np.uint8)
        # Each kind has two embedded captions, a dark and a light one.
        kind_N = arrays["caption_N"] // 2
    with np.load(io.BytesIO(lzma.decompress(SPRITES_FILE.read_bytes()))) as arrays:
        captioned_letters_FLHW = arrays["letters_FLHW"]
        judged_letters_FLHW = arrays["other_letters_FLHW"]
        clip_art_NHWC = arrays["clip_art_NHWC"]
    # Captions and judges have separate photographs and separate fonts.
    captioned: dict[str, np.ndarray] = {}
    judged: dict[str, np.ndarray] = {}
    for sprites, span, letters_FLHW in (
        (captioned, slice(0, 5000), captioned_letters_FLHW),
        (judged, slice(PARTS["train"], None), judged_letters_FLHW),
    ):
        for number, name in enumerate(CLOTHES):
            inks_NHW = ink_NHW[span][kind_N[span] == number]
            sprites[name] = np.stack([from_ink(ink_HW) for ink_HW in inks_NHW])
        for number, letter in enumerate(LETTERS):
            opacity_FHW1 = letters_FLHW[:, number, ..., None]
            white_FHWC = np.full_like(opacity_FHW1, 255).repeat(3, axis=-1)
            sprites[f"letter {letter}"] = np.concatenate([white_FHWC, opacity_FHW1], axis=-1)
    clip_art = {f"picture-{n}": rgba_HWC[None] for n, rgba_HWC in enumerate(clip_art_NHWC)}
    all_pools = {
        "captioned": pool({kind: captioned[kind] for kind in CAPTIONED}, leaves_out=True),
        "new": pool({kind: judged[kind] for kind in CAPTIONED}),
    }
    letters = KINDS[len(CLOTHES) :]
    for name, kinds in (("clothes", CLOTHES), ("letters", letters), ("never", KINDS)):
        all_pools[name] = pool({kind: judged[kind] for kind in kinds if kind in NEVER})
    all_pools["clip art"] = pool(clip_art, is_tinted=False)
    return all_pools


def uniforms(seed: int, index_B: np.ndarray, count: int) -> np.ndarray:
    """Returns random numbers, (B, count) float32 in [0, 1): splitmix64 of seed, index and place."""
    with np.errstate(over="ignore"):
        state = index_B.astype(np.uint64)[:, None] + np.uint64(seed) * np.uint64(0xA0761D6478BD642F)
        state = state * np.uint64(0x9E3779B97F4A7C15)
        places = np.arange(1, count + 1, dtype=np.uint64)
        state = state ^ (places * np.uint64(0xD1B54A32D192ED03))
        state += np.uint64(0x632BE59BD9B4E019)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


class Scenes:
    """A world of scenes, rendered in blocks.

    The pixels do not depend on the block: sines, which a processor may round otherwise in vectors
    than one by one, are computed in float64 once a scene, and the rest is sums and products.
    """

    BACKGROUND = 24
    """Random numbers of a background."""
    OBJECT = 12
    """Random numbers of an object."""

    def __init__(
        self, seed: int = 0, size: int = 32, objects: int = 1, clutter: float = 0.5
    ) -> None:
        """Stores the settings, which determine the world.

        Args:
            seed: of the world.
            size: side in pixels.
            objects: 1, or 2 for one or two.
            clutter: of the background, 0 to 1.
        """
        self.seed = seed
        self.size = size
        self.objects = objects
        self.clutter = clutter
        self.num_tokens = 9 if objects == 1 else 17

    def placements(self, index_B: np.ndarray, sprites: Pool) -> Placements:
        """Returns the objects of scenes, with sprites of a pool."""
        M = self.objects
        uniform_BU = uniforms(self.seed, index_B, self.BACKGROUND + self.OBJECT * M)
        count_B = 1 + (uniform_BU[:, 0] * M).astype(int)
        uniform_BMU = uniform_BU[:, self.BACKGROUND :].reshape(-1, M, self.OBJECT)
        kind = np.searchsorted(sprites.bounds[:-1], uniform_BMU[..., 1], side="right")
        first = sprites.first[kind]
        num_sprites = sprites.first[kind + 1] - first
        sprite = first + (uniform_BMU[..., 2] * num_sprites).astype(int)
        colour = (uniform_BMU[..., 3] * len(COLOURS)).astype(int)
        if sprites.leaves_out:
            # The next colour of the same kind is never left out too.
            next_colour = (colour + 1) % len(COLOURS)
            colour = np.where(is_left_out(sprites.number[kind], colour), next_colour, colour)
        pure_rgb = np.array(list(COLOURS.values()), np.float32)[colour]
        rgb = np.clip(pure_rgb + 0.12 * (uniform_BMU[..., 4:7] - 0.5), 0, 1)
        is_single = (count_B == 1)[:, None]
        single_size = 0.4375 + 0.3125 * uniform_BMU[..., 7]
        paired_size = 0.34 + 0.16 * uniform_BMU[..., 7]
        size = np.where(is_single, single_size, paired_size)
        turn = (uniform_BMU[..., 8] - 0.5) * 2 * np.deg2rad(20)
        x = size / 2 + (1 - size) * uniform_BMU[..., 9]
        y = size / 2 + (1 - size) * uniform_BMU[..., 10]
        if M == 2:
            # Each of two objects has one half of the picture.
            slack = np.maximum(0.5 - size, 0)
            half_place = size / 2 + slack * uniform_BMU[..., 11] + 0.5 * np.arange(2)
            is_row = (uniform_BU[:, 1] < 0.5)[:, None]
            x = np.where(is_single | ~is_row, x, half_place)
            y = np.where(is_single | is_row, y, half_place)
        return Placements(
            uniform=uniform_BU,
            number=count_B,
            kind=kind,
            sprite=sprite,
            colour=colour,
            rgb=rgb,
            size=size.astype(np.float32),
            x=x,
            y=y,
            turn=turn,
        )

    def render(self, placements: Placements, sprites: Pool) -> Tensor:
        """Returns the pictures of scenes, (B, 3, S, S) uint8."""
        image = self._background(placements.uniform)
        B = len(placements.number)
        S = self.size
        # Pixel centres from -1 to 1.
        line_S = torch.from_numpy((np.arange(S) * 2 + 1) / S - 1)
        for m in range(self.objects):
            size_B = placements.size[:, m].astype(np.float64)
            turn_B = placements.turn[:, m].astype(np.float64)
            cos_B = np.cos(turn_B) / size_B
            sin_B = np.sin(turn_B) / size_B
            x_B = placements.x[:, m] * 2.0 - 1
            y_B = placements.y[:, m] * 2.0 - 1
            # Sprite coordinates are sums of pixel coordinates with these factors.
            u_offset_B = -cos_B * x_B - sin_B * y_B
            v_offset_B = sin_B * x_B - cos_B * y_B
            factors = np.stack([cos_B, sin_B, u_offset_B, -sin_B, cos_B, v_offset_B], 1)
            factors_B2311 = torch.from_numpy(factors.reshape(-1, 2, 3))[..., None, None]
            # Every pixel is one sum of products, whatever the number of scenes.
            sums = []
            for k in (0, 1):
                x_factor, y_factor, offset = factors_B2311[:, k].unbind(1)
                sums.append(x_factor * line_S + y_factor * line_S[:, None] + offset)
            grid = torch.stack(sums, -1).float()
            pictures = sprites.pictures[placements.sprite[:, m]].float()
            rgba = F.grid_sample(pictures, grid, align_corners=False)
            is_drawn_B = torch.from_numpy((placements.number > m).astype(np.float32))
            rgba *= is_drawn_B.view(B, 1, 1, 1)
            light = rgba[:, :3]
            if sprites.is_tinted:
                light *= torch.from_numpy(placements.rgb[:, m]).view(B, 3, 1, 1)
            image.mul_(1 - rgba[:, 3:]).add_(light)
        return image.clamp_(0, 1).mul_(255).round_().to(torch.uint8)

    def tokens(self, placements: Placements, sprites: Pool) -> Tensor:
        """Returns the captions of scenes, (B, num_tokens) int64, of WORDS."""
        colour_ids = [[_ID["an" if name == "orange" else "a"], _ID[name]] for name in COLOURS]
        kind_ids = [
            [_ID.get(word, _ID["<unk>"]) for word in name.split()] for name in sprites.names
        ]
        tokens_BL = np.zeros((len(placements.number), self.num_tokens), np.int64)
        # Lists, since single elements of arrays are slow to read.
        colour_BM = placements.colour.tolist()
        kind_BM = placements.kind.tolist()
        row_BM = third_of(placements.y).tolist()
        column_BM = third_of(placements.x).tolist()
        for scene, count in enumerate(placements.number.tolist()):
            caption_ids = [_ID["<bos>"]]
            for m in range(count):
                if m > 0:
                    caption_ids.append(_ID["and"])
                caption_ids += colour_ids[colour_BM[scene][m]]
                caption_ids += kind_ids[kind_BM[scene][m]]
                row = ROWS[row_BM[scene][m]]
                column = COLUMNS[column_BM[scene][m]]
                caption_ids += [_ID["at"], _ID[row], _ID[column]]
            caption_ids.append(_ID["<eos>"])
            tokens_BL[scene, : len(caption_ids)] = caption_ids
        return torch.from_numpy(tokens_BL)

    def pairs(self, index_B: np.ndarray, sprites: Pool | None = None) -> tuple[Tensor, Tensor]:
        """Returns pictures (B, 3, S, S) uint8 and tokens (B, num_tokens) of scenes.

        Their sprites are those of captioned scenes by default.
        """
        if sprites is None:
            sprites = pools()["captioned"]
        placements = self.placements(index_B, sprites)
        return self.render(placements, sprites), self.tokens(placements, sprites)

    def _background(self, uniform: np.ndarray) -> Tensor:
        """Returns backgrounds of gradients, stripes, noise and bars, (B, 3, S, S) float32."""
        B = len(uniform)
        S = self.size
        u = uniform[:, 2:]
        line_S = torch.from_numpy(((np.arange(S) * 2 + 1) / S - 1).astype(np.float32))

        def distance_along(turns: np.ndarray) -> Tensor:
            """Returns (B, S, S): the distance of each pixel from the centre in a direction."""
            angle = 2 * np.pi * turns.astype(np.float64)
            cosine = torch.from_numpy(np.cos(angle).astype(np.float32)).view(-1, 1, 1)
            sine = torch.from_numpy(np.sin(angle).astype(np.float32)).view(-1, 1, 1)
            return cosine * line_S + sine * line_S[:, None]

        def per_pixel(values: np.ndarray) -> Tensor:
            """Returns (B, C, 1, 1) float32."""
            return torch.from_numpy(np.ascontiguousarray(values, np.float32))[:, :, None, None]

        base_grey = 0.25 + 0.5 * u[:, :1]
        first_rgb = base_grey + 0.25 * (u[:, 1:4] - 0.5)
        last_rgb = base_grey + 0.35 * (u[:, 4:5] - 0.5) + 0.25 * (u[:, 5:8] - 0.5)
        distance = distance_along(u[:, 8])[:, None]
        frequency = (1 + 6 * u[:, 9:10] ** 2) / 2
        cycles = distance * per_pixel(frequency) + per_pixel(u[:, 11:12])
        stripes = (cycles - cycles.floor() - 0.5).abs() * 2
        has_stripes = per_pixel(u[:, 10:11] < 0.5 * self.clutter) > 0
        share = torch.where(has_stripes, stripes, distance * 0.35 + 0.5)
        image = (per_pixel(last_rgb - first_rgb) * share).add_(per_pixel(first_rgb))
        # Indexes beyond those of scenes.
        noise_index = (u[:, 12] * (1 << 24)).astype(np.uint64) + np.uint64(1 << 40)
        noise = uniforms(self.seed, noise_index, 64)
        coarse_noise = torch.from_numpy(noise - 0.5).view(B, 1, 8, 8)
        smooth_noise = F.interpolate(coarse_noise, size=S, mode="bilinear")
        image.add_(per_pixel(0.3 * self.clutter * u[:, 13:14]) * smooth_noise)
        for bar in (u[:, 14:18], u[:, 18:22]):
            scenes_with_bar = np.flatnonzero(bar[:, 0] < 0.5 * self.clutter)
            bar = bar[scenes_with_bar]
            bar_place = per_pixel(bar[:, 2:3] * 1.6 - 0.8)
            bar_distance = (distance_along(bar[:, 1])[:, None] - bar_place).abs_()
            opacity = 0.8 - 0.8 * ((bar_distance - 0.03) * (S / 2)).clamp_(0, 1)
            covered = image[scenes_with_bar] * (1 - opacity)
            image[scenes_with_bar] = covered.add_(opacity * per_pixel(bar[:, 3:]))
        return image


def third_of(centre: np.ndarray) -> np.ndarray:
    """Returns 0, 1 or 2 for the first, middle or last part of the side.

    The middle is a sixth of the side, since no centre is near an edge.
    """
    return (centre > 0.42).astype(int) + (centre > 0.58).astype(int)


def is_left_out(number: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Returns whether a pair of kind (in KINDS) and colour is never in captioned scenes."""
    return (number * 7 + colour * 3) % 8 == 0


def caption(tokens: Sequence[int]) -> str:
    """Returns the words of tokens."""
    return " ".join(WORDS[token] for token in tokens if token > 2)
