"""A prepared folder of the host as an archive, for a box to unpack."""

import os
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO

from forgeasync.config import SandboxLimits
from forgeasync.environments.sandboxes.results import SandboxError

_IN_MEMORY_BYTES = 2**24


def pack_workspace(folder: Path, limits: SandboxLimits) -> BinaryIO:
    """Pack a folder. Symbolic links are packed as links: nothing outside of the folder is read.

    Raises:
        SandboxError: it is no folder, has something other than files, folders and links, or is larger than a
            box may hold.
    """
    if not folder.is_dir():
        raise SandboxError(f"workspace {folder}: must be a folder")
    left_bytes, left_files = limits.disk_mib * 2**20, limits.max_files
    archive = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in _below(folder):
                member = tar.gettarinfo(path, arcname=os.path.relpath(path, folder))
                if member is None or not (
                    member.isfile() or member.isdir() or member.issym() or member.islnk()
                ):
                    raise SandboxError(f"workspace {folder}: {path} is neither file, folder nor link")
                left_bytes, left_files = left_bytes - member.size, left_files - 1
                if left_bytes < 0 or left_files < 0:
                    raise SandboxError(
                        f"workspace {folder}: has more than {limits.disk_mib} MiB (disk_mib) or "
                        f"{limits.max_files} files (max_files)"
                    )
                if member.isfile():
                    with open(path, "rb") as file:
                        tar.addfile(member, file)
                else:
                    tar.addfile(member)
    except BaseException:
        archive.close()
        raise
    archive.seek(0)
    return archive


def _below(folder: Path) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder):
        found += [os.path.join(parent, name) for name in (*folders, *files)]
    return sorted(found)
