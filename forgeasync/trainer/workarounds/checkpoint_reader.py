"""Reader for torch.distributed.checkpoint that runs no code from the checkpoint. For torch 2.13.

In torch 2.13 ``FileSystemReader`` unpickles a checkpoint's ``.metadata`` without restrictions, and a pickle
can call any function: resuming from an untrusted folder would execute it. Tensors are safe, because torch
reads them with ``weights_only=True``. Other objects are not, and ``run_checkpoint.load`` reads none. Can go
when torch restricts the metadata too.
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
    # Folder that the checkpoint was written to; Python 3.13 and later have the class elsewhere.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Modules and names in the metadata of tensors, besides dtypes. Creating any of them has no side effect."""


class SafeFileSystemReader(FileSystemReader):
    """``FileSystemReader`` that accepts only metadata that DCP itself writes for tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / METADATA_FILE

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Read the metadata, which is one file for all ranks.

        Raises:
            ValueError: The file is damaged or has other content; the message names the file and what was
                found.
            OSError: The file cannot be read.
        """
        with self._file.open("rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except _NotAdmittedError as error:
                raise ValueError(
                    f"{self._file} names {error}, which is not part of a checkpoint's metadata: it was not "
                    "written by this package, and none of it was run"
                ) from None
            # Damaged bytes can raise anything in the classes above.
            except Exception as error:
                raise ValueError(f"{self._file} is damaged: {error!r}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self._file} holds a {type(metadata).__name__}, no checkpoint's metadata")
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata


class _NotAdmittedError(pickle.UnpicklingError):
    """A pickle refers to this module and name, which is not admitted."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _ADMITTED:
            raise _NotAdmittedError(f"{module}.{name}")
        return super().find_class(module, name)
