"""Words of synthetic captions and their meanings: colours, sizes, counts, places."""

import numpy as np

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "green": (35, 155, 60),
    "blue": (35, 75, 215),
    "yellow": (248, 222, 40),
    "orange": (250, 135, 20),
    "purple": (125, 45, 160),
    "pink": (250, 145, 190),
    "brown": (120, 72, 35),
    "black": (15, 15, 18),
    "white": (248, 248, 248),
    "gray": (135, 135, 138),
    "cyan": (30, 215, 235),
    "magenta": (225, 30, 200),
    "turquoise": (60, 205, 185),
    "teal": (10, 125, 125),
    "navy": (18, 25, 95),
    "maroon": (115, 10, 30),
    "olive": (125, 125, 25),
    "gold": (225, 175, 35),
    "beige": (232, 218, 188),
    "lavender": (195, 175, 240),
    "violet": (150, 85, 235),
    "indigo": (70, 20, 135),
    "crimson": (175, 15, 55),
    "coral": (252, 120, 95),
    "salmon": (250, 160, 135),
    "peach": (253, 208, 170),
    "lime green": (130, 225, 40),
    "dark green": (10, 75, 35),
    "mint green": (165, 240, 195),
    "light blue": (150, 200, 245),
    "sky blue": (95, 175, 240),
    "dark blue": (20, 40, 130),
    "dark gray": (70, 70, 75),
    "light gray": (205, 205, 208),
    "dark red": (140, 15, 20),
    "tan": (205, 165, 115),
    "chocolate brown": (85, 45, 20),
    "cream": (250, 240, 210),
    "rust": (175, 75, 25),
}
BASIC = (
    "red",
    "green",
    "blue",
    "yellow",
    "orange",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "gray",
    "cyan",
)
"""Colours whose names all people agree on: content "shapes" has no others."""

COUNTS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SIZES = (("tiny", 0.0, 0.065), ("small", 0.065, 0.105), ("large", 0.2, 0.28), ("huge", 0.28, 1.0))
"""Words, and the radii that they mean, in image sides; radii between them have no word."""
PLACES = {
    (0, 0): ("in the top left corner", "in the upper left"),
    (1, 0): ("at the top", "near the top edge"),
    (2, 0): ("in the top right corner", "in the upper right"),
    (0, 1): ("on the left side", "near the left edge"),
    (1, 1): ("in the center", "in the middle"),
    (2, 1): ("on the right side", "near the right edge"),
    (0, 2): ("in the bottom left corner", "in the lower left"),
    (1, 2): ("at the bottom", "near the bottom edge"),
    (2, 2): ("in the bottom right corner", "in the lower right"),
}
RELATIONS = {
    "left": ("left of", "to the left of", "on the left side of"),
    "right": ("right of", "to the right of", "on the right side of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath", "lower than"),
    "inside": ("inside", "within", "enclosed by"),
    "around": ("around", "surrounding", "enclosing"),
}
_PAIRS = (("left", "right"), ("above", "below"), ("inside", "around"))
OPPOSITES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
INTRODUCTIONS = (
    *[""] * 4,
    "a picture of ",
    "an image of ",
    "a drawing of ",
    "an illustration of ",
    "a graphic of ",
    "artwork showing ",
    "a design with ",
    "a simple picture showing ",
)
ABSTRACT_INTRODUCTIONS = (
    *[""] * 3,
    "an abstract pattern of ",
    "an abstract image of ",
    "a texture of ",
    "a background of ",
    "digital art with ",
    "a computer generated image of ",
    "wallpaper with ",
)


def rgb(name: str) -> np.ndarray:
    """Returns the value of a colour name, float32 (3,), 0 to 1."""
    return np.array(COLOURS[name], dtype=np.float32) / 255


def colour_distance(first: str, second: str) -> float:
    """Returns the approximate difference that people see between two colours, 0 to about 1.

    It is weighted RGB, by Riemersma's red mean.
    """
    first_3 = np.array(COLOURS[first], dtype=float)
    second_3 = np.array(COLOURS[second], dtype=float)
    red = (first_3[0] + second_3[0]) / 2
    weights_3 = np.array([2 + red / 256, 4, 2 + (255 - red) / 256])
    squares_3 = weights_3 * (first_3 - second_3) ** 2
    return float(np.sqrt(squares_3.sum())) / 765


def with_article(phrase: str) -> str:
    """Returns the phrase with its indefinite article."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def enumeration(names: list[str] | tuple[str, ...]) -> str:
    """Returns the names as text: "red", "red and blue", "red, blue and green"."""
    if len(names) == 1:
        return names[0]
    first_names = ", ".join(names[:-1])
    return f"{first_names} and {names[-1]}"


def size_word(radius: float) -> str:
    """Returns the word for a radius, or ""."""
    return next((word for word, low, high in SIZES if low <= radius < high), "")
