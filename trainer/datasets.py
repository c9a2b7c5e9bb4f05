"""Opens the run's data: tar indexes, made once where the recipe names none, of exactly the shards that were asked for."""

import shutil
from pathlib import Path

from data.errors import DataError
from data.shards import common_root, expand_shards
from data.tar_index import MANIFEST, ExampleTable, build_index
from trainer.config import RunConfig
from trainer.distributed import first_on_main, on_main
from trainer.run_folder import RunFolder


def training_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable:
    """The private examples; collective, and slow the first time, since an index is built with hashes of all bytes.

    Raises:
        DataError: no shards, no examples, or an index of other shards.
    """
    shards = first_on_main(lambda: expand_shards(config.data.shards, root))
    if config.data.index is None:
        index = folder.index
        on_main(lambda: _index_once(shards, index))
    else:
        index = root / config.data.index
    table = first_on_main(lambda: _open_table(index, shards))
    if len(table) == 0:
        raise DataError(f"{config.data.shards} holds no examples")
    return table


def heldout_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable | None:
    """The held-out examples, if the recipe names any; collective.

    Raises:
        DataError: no shards, or training shards that are declared public.
    """
    if config.heldout is None:
        return None
    pattern = config.heldout.shards
    shards = first_on_main(lambda: expand_shards(pattern, root))
    private = {s.resolve() for s in first_on_main(lambda: expand_shards(config.data.shards, root))}
    if config.heldout.is_public and any(s.resolve() in private for s in shards):
        raise DataError("heldout.shards contains training shards, so it cannot be declared public (heldout.is_public)")
    index = folder.private / "heldout-index"
    on_main(lambda: _index_once(shards, index))
    return _open_table(index, shards)


def _index_once(shards: list[Path], index: Path) -> None:
    if not (index / MANIFEST).exists():  # without it an earlier start was cut short
        shutil.rmtree(index, ignore_errors=True)
        build_index(shards, index, progress=True)


def _open_table(index: Path, shards: list[Path]) -> ExampleTable:
    """The index, if it is one of exactly these shards: a changed pattern must never train on yesterday's files."""
    folder = common_root(shards)
    table = ExampleTable.open(index, folder)
    wanted, indexed = {str(s.relative_to(folder)) for s in shards}, {entry.name for entry in table.entries}
    if wanted != indexed:
        raise DataError(
            f"the index {index} is of other shards than those asked for (first difference: {min(wanted ^ indexed)}); "
            "build one for these shards with prepare.py index, or choose another run folder"
        )
    return table
