"""The embedded pictures of clothes with captions, and how they become tar shards for a recipe.

`data/fashion/pairs.npz.xz` (data/fashion/README.md) is an xz-compressed `.npz` of three arrays:
`shades_NHW`, grey values from 0 (black) to `NUM_SHADES` - 1; `caption_N`, the number of each
picture's caption; `captions`, the captions.
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
"""The folder of the shards, relative to the project's root."""
NUM_SHADES = 32
PARTS = {"train": 10_000, "choice": 500, "test": 1000}
"""Number of pairs of each part, in the file's order.

`train` is for training, `choice` for choosing recipes, `test` for testing once all are chosen.
"""
_SHARD_EXAMPLES = 2000


def unpack_fashion(root: Path) -> Path:
    """Returns `root/runs/fashion`, which is made if it is missing.

    The folder has train-*.tar, choice-00000.tar and test-00000.tar. Several processes may call
    this at the same time: each writes a folder of its own, and the first to rename its folder wins.

    Raises:
        DataError: the embedded file is missing, or the folder cannot be written.
    """
    folder = root / FASHION_FOLDER
    if folder.is_dir():
        return folder
    # Imported here, since every command that names shards imports this module.
    import numpy as np
    from PIL import Image

    from data.examples.transforms import encode_image

    try:
        folder.parent.mkdir(exist_ok=True)
        unpacked = Path(tempfile.mkdtemp(prefix="fashion-", dir=folder.parent))
        try:
            unpacked.chmod(0o755)
            archive_bytes = lzma.decompress(FASHION_FILE.read_bytes())
            with np.load(io.BytesIO(archive_bytes)) as arrays:
                shades_NHW = arrays["shades_NHW"]
                caption_N = arrays["caption_N"]
                captions = arrays["captions"]

            def members(i: int) -> dict[str, bytes]:
                grey_HW = np.rint(shades_NHW[i] * (255 / (NUM_SHADES - 1))).astype(np.uint8)
                caption = str(captions[caption_N[i]])
                return {
                    "png": encode_image(Image.fromarray(grey_HW), "png"),
                    "txt": caption.encode(),
                }

            first = 0
            for part, size in PARTS.items():
                stop = first + size
                for number, start in enumerate(range(first, stop, _SHARD_EXAMPLES)):
                    ids = range(start, min(start + _SHARD_EXAMPLES, stop))
                    examples = ((f"{i:05d}", members(i)) for i in ids)
                    write_shard(unpacked / f"{part}-{number:05d}.tar", examples)
                first = stop
            try:
                unpacked.rename(folder)
            except OSError:
                # Another process may have been first.
                if not folder.is_dir():
                    raise
        finally:
            # The renamed folder has left this path.
            shutil.rmtree(unpacked, ignore_errors=True)
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"cannot unpack {FASHION_FILE} into {folder}: {error}") from error
    return folder
