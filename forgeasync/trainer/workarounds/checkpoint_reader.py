"""A reader of torch.distributed.checkpoint that runs nothing of what it reads. For torch 2.13.

There ``FileSystemReader`` unpickles a checkpoint's ``.metadata`` as it is, and a pickle can name any function
to call: resuming from a foreign folder would execute it. Tensors are safe: torch reads them with
``weights_only=True``; objects other than tensors are not, and ``run_checkpoint.load`` asks for none. Can go
when torch reads the metadata in such a way too.
"""

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

METADATA_FILE = ".metadata"


_DCP = "torch.distributed.checkpoint"

_ADMITTED = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    # The folder that it was written to; Python 3.13 and later have the class elsewhere.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Module and name of all that the metadata of tensors consists of, besides dtypes. None of them does anything
when it is made."""


class SafeFileSystemReader(FileSystemReader):
    """A ``FileSystemReader`` whose metadata may only consist of what DCP itself writes of tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / METADATA_FILE

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """As of every rank: the metadata of a checkpoint is one file.

        Raises:
            ValueError: the file is damaged, or holds something else; names the file and what was found.
            OSError: the file cannot be read.
        """
        with self._file.open("rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except _NotAdmittedError as error:
                raise ValueError(
                    f"{self._file} names {error}, which is no part of a checkpoint's metadata: it was not "
                    "written by this package, and nothing of it was run"
                ) from None
            # Whatever bytes make of the classes above.
            except Exception as error:
                raise ValueError(f"{self._file} is damaged: {error!r}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self._file} holds a {type(metadata).__name__}, no checkpoint's metadata")
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata


class _NotAdmittedError(pickle.UnpicklingError):
    """The module and name that a pickle asks for."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _ADMITTED:
            raise _NotAdmittedError(f"{module}.{name}")
        return super().find_class(module, name)
