"""The embedded pictures of clothes with captions, and how they become tar shards where a recipe names them.

`data/fashion/pairs.npz.xz` (data/fashion/README.md) is an xz-compressed `.npz` of three arrays: `shades_NHW`, grey values from
0 (black) to `NUM_SHADES` - 1; `caption_N`, each picture's caption as a number; `captions`, the captions.
"""

import io
import lzma
import shutil
import tempfile
from pathlib import Path

from data.errors import DataError
from data.index.tar_writer import write_shard

FASHION_FILE = Path(__file__).resolve().parent / "fashion" / "pairs.npz.xz"
FASHION_FOLDER = Path("runs/fashion")
"""Where the shards lie, relative to the project's root."""
NUM_SHADES = 32
PARTS = {"train": 10_000, "choice": 500, "test": 1000}
"""Pairs in the file's order: to train on, to choose recipes by, and to test with once everything is chosen."""
_SHARD_EXAMPLES = 2000


def unpack_fashion(root: Path) -> Path:
    """Makes `root/runs/fashion` with train-*.tar, choice-00000.tar and test-00000.tar, unless it is there; returns it.

    Several processes may do so at the same time: each writes a folder of its own, and the first to rename it has made it.

    Raises:
        DataError: the embedded file is missing, or the folder cannot be written.
    """
    folder = root / FASHION_FOLDER
    if folder.is_dir():
        return folder
    import numpy as np  # here, since every command that names shards imports this module
    from PIL import Image

    from data.examples.transforms import encoded

    try:
        folder.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="fashion-", dir=folder.parent))
        try:
            made.chmod(0o755)
            with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
                shades_NHW, caption_N, captions = (
                    held["shades_NHW"],
                    held["caption_N"],
                    held["captions"],
                )

            def members(i: int) -> dict[str, bytes]:
                grey_HW = np.rint(shades_NHW[i] * (255 / (NUM_SHADES - 1))).astype(np.uint8)
                return {
                    "png": encoded(Image.fromarray(grey_HW), "png"),
                    "txt": str(captions[caption_N[i]]).encode(),
                }

            first = 0
            for part, size in PARTS.items():
                for number, start in enumerate(range(first, first + size, _SHARD_EXAMPLES)):
                    ids = range(start, min(start + _SHARD_EXAMPLES, first + size))
                    write_shard(
                        made / f"{part}-{number:05d}.tar", ((f"{i:05d}", members(i)) for i in ids)
                    )
                first += size
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)  # where it has not become the folder
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"cannot unpack {FASHION_FILE} into {folder}: {error}") from error
    return folder
