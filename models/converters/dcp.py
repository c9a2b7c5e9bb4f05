"""Checkpoints of torch.distributed.checkpoint (DCP), which torchtitan and others write; read and written in one process.

Tensors lie in files that are read with `weights_only`, but the metadata beside them is a pickle. A file from elsewhere may name
any class in it, so only those that such metadata is made of are looked up.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

METADATA = ".metadata"
_BESIDE = ("optim", "lr_scheduler", "dataloader", "train_state")
"""How names begin of what torchtitan and others keep beside the weights."""
_CLASSES = "Metadata MetadataIndex StorageMeta TensorProperties BytesStorageMetadata TensorStorageMetadata"
_PLAIN = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((Metadata.__module__, name) for name in f"{_CLASSES} ChunkStorageMetadata _MEM_FORMAT_ENCODING".split()),
}  # fmt: skip


class _PlainMetadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata: Metadata = _PlainMetadata(file).load()
        metadata.storage_meta = StorageMeta()
        return metadata


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        """It would name the folder, and so perhaps its owner."""


def read_dcp(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors under `key`, or all but those of optimizer and loader where there are none.

    Raises:
        UnpicklingError: the metadata name more than plain classes. Any other error: the folder is damaged.
    """
    reader = _Reader(path)
    stored = {
        n: x for n, x in reader.read_metadata().state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)
    }
    own = [n for n in stored if n.startswith(f"{key}.")] or [n for n in stored if not n.startswith(_BESIDE)]
    state = {n: torch.empty(stored[n].size, dtype=stored[n].properties.dtype) for n in own}
    with warnings.catch_warnings(action="ignore"):  # that it is one process
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{key}."): value for name, value in state.items()}


def write_dcp(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Writes `.metadata` and the files beside it."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save({n: x.detach().cpu() for n, x in state.items()}, storage_writer=_Writer(folder), no_dist=True)
