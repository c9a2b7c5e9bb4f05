"""Draws scenes with OpenGL shaders, without a screen (EGL): a graphics card or, on a plain machine, Mesa's llvmpipe.

Many pictures share one atlas. Every layer is one draw call per program, with a rectangle per picture. A pixel's
coordinates come from its whole-numbered place inside of its own picture, so that a picture does not depend on where in
the atlas, or with which others, it was drawn.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.synthetic import shapes
from data.synthetic.fields import noise_table
from data.synthetic.render_numpy import HOLLOW_WIDTH, palette, pixel_box, shape_box
from data.synthetic.scene import FILLS, Scene, Shape, Texture
from data.synthetic.vocabulary import rgb

INSTALL_HINT = "apt-get install libegl1 libgl1-mesa-dri (Debian, Ubuntu), or use --backend numpy"
_SHADERS = Path(__file__).parent / "shaders"
_ATTRIBUTES = ("rect", "cell", "a", "b", "c0", "c1", "c2")
_SIZES = (4, 2, 4, 4, 3, 3, 3)
_MAX_SIDE = 4096


class GlslRenderer:
    """Holds a context; one per process and thread.

    Attributes:
        name: for provenance.
        description: the graphics driver, in its own words.
    """

    name = "glsl"

    def __init__(self, image_size: int, *, columns: int = 8):
        """Opens a context.

        Args:
            image_size: side of a picture in pixels.
            columns: pictures side by side in the atlas, which is square.

        Raises:
            DataError: no EGL or no OpenGL 3.3 here; says what to install.
        """
        self._context = _create_context()
        self._size = image_size
        self._columns = max(1, min(columns, _MAX_SIDE // image_size))
        side = self._columns * image_size
        self._target = self._context.framebuffer(self._context.texture((side, side), 4))
        self._noise = self._context.texture((256, 256), 2, noise_table().tobytes(), dtype="f4")
        table = shapes.distance_table()
        self._shapes = self._context.texture_array(table.shape[::-1], 1, table.tobytes(), dtype="f4")
        self._shapes.repeat_x = self._shapes.repeat_y = False
        self._programs: dict[str, Any] = {}
        self.description = f"{self._context.info['GL_RENDERER']}, OpenGL {self._context.version_code / 100:g}"

    def render(self, scenes: Sequence[Scene]) -> np.ndarray:
        """Pictures, uint8 (N, H, W, 3)."""
        capacity = self._columns**2
        parts = [self._draw(scenes[start : start + capacity]) for start in range(0, len(scenes), capacity)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Gives the context back."""
        self._context.release()

    def _draw(self, scenes: Sequence[Scene]) -> np.ndarray:
        self._target.use()
        self._target.clear()
        context = self._context
        context.disable(context.BLEND)
        for layer in range(max(len(scene.textures) for scene in scenes)):
            rows: defaultdict[str, list[np.ndarray]] = defaultdict(list)
            for place, scene in enumerate(scenes):
                if layer < len(scene.textures):
                    texture = scene.textures[layer]
                    rows[texture.program].append(self._texture_row(place, texture))
            for program, instances in rows.items():
                self._draw_instances(program, instances)
        context.enable(context.BLEND)
        drawn = [self._shape_row(place, shape) for place, scene in enumerate(scenes) for shape in scene.shapes]
        if drawn:
            self._draw_instances("shape", drawn)
        return self._read(len(scenes))

    def _read(self, count: int) -> np.ndarray:
        size, columns = self._size, self._columns
        rows = -(-count // columns)
        data = self._target.read(viewport=(0, 0, columns * size, rows * size), components=4)
        atlas = np.frombuffer(data, dtype=np.uint8).reshape(rows, size, columns, size, 4)
        pictures = np.empty((count, size, size, 3), dtype=np.uint8)
        for place in range(count):
            pictures[place] = atlas[place // columns, :, place % columns, :, :3]
        return pictures

    def _draw_instances(self, program: str, instances: list[np.ndarray]) -> None:
        shader = self._program(program)
        buffer = self._context.buffer(np.stack(instances).astype("f4").tobytes())
        used = [(name if name in shader else None) for name in _ATTRIBUTES]
        content = [(buffer, _layout(used), *(name for name in used if name))]
        vertices = self._context.vertex_array(shader, content)
        self._noise.use(0)
        self._shapes.use(1)
        vertices.render(self._context.TRIANGLE_STRIP, vertices=4, instances=len(instances))
        vertices.release()
        buffer.release()

    def _program(self, name: str) -> Any:
        if name not in self._programs:
            shader = self._context.program(vertex_shader=_source("vertex"), fragment_shader=_fragment(name))
            side = float(self._columns * self._size)
            uniforms = {"size": float(self._size), "PX": 1.0 / self._size, "atlas": (side, side)}
            for uniform, value in (uniforms | {"noise_table": 0, "shape_table": 1}).items():
                if uniform in shader:
                    shader[uniform].value = value
            self._programs[name] = shader
        return self._programs[name]

    def _texture_row(self, place: int, texture: Texture) -> np.ndarray:
        values = np.zeros(8, dtype=np.float32)
        values[: len(texture.values)] = texture.values
        return self._row(place, texture.box, values, palette(texture.colours))

    def _shape_row(self, place: int, shape: Shape) -> np.ndarray:
        values = np.array(
            [
                shape.x,
                shape.y,
                shape.radius,
                shape.angle,
                shapes.NAMES.index(shape.name),
                FILLS.index(shape.fill),
                0,
                0,
            ],
            dtype=np.float32,
        )
        first = rgb(shape.colour)
        return self._row(place, shape_box(shape), values, np.stack([first, first, rgb(shape.second or shape.colour)]))

    def _row(
        self, place: int, box: tuple[float, float, float, float], values: np.ndarray, colours: np.ndarray
    ) -> np.ndarray:
        cell = np.array([place % self._columns, place // self._columns], dtype=np.float32) * self._size
        rect = np.array(pixel_box(box, self._size), dtype=np.float32) + np.tile(cell, 2)
        return np.concatenate([rect, cell, values, colours.ravel()])


def _create_context() -> Any:
    try:
        import moderngl
    except ImportError as error:
        raise DataError(f"moderngl is not installed ({error}); pip install -r requirements.txt") from error
    try:
        settings: dict[str, Any] = {"backend": "egl"}  # its annotation says that every setting is a dict
        return moderngl.create_context(require=330, standalone=True, **settings)
    except Exception as error:  # glcontext raises bare Exceptions for whatever the driver lacks
        raise DataError(f"no OpenGL 3.3 by EGL on this machine ({error}); {INSTALL_HINT}") from error


def _layout(used: Sequence[str | None]) -> str:
    """The buffer's layout; attributes that the compiler dropped become padding."""
    parts = [f"{size}f" if name else f"{size}x4" for size, name in zip(_SIZES, used, strict=True)]
    return " ".join(parts) + " /i"


def _source(name: str) -> str:
    return "#version 330\n" + (_SHADERS / f"{name}.glsl").read_text()


def _fragment(name: str) -> str:
    common = _source("common")
    if name == "shape":
        constants = f"#define EXTENT {shapes.TABLE_EXTENT:.6f}\n#define HOLLOW {HOLLOW_WIDTH:.6f}\n"
        return common + constants + (_SHADERS / "shape.glsl").read_text()
    body = (_SHADERS / "fields.glsl").read_text()
    if name == "plain":
        body = "float plain(vec2 p, vec4 a, vec4 b) { return 0.0; }\n"
    return common + body + f"#define FIELD {name}\n" + (_SHADERS / "texture.glsl").read_text()
