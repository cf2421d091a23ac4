"""Permissions of files that a library has written for their owner alone.

safetensors writes into a temporary file, which nobody else may read (mode 0600), and renames it. An exported
model could then be served by nobody but who trained it, though all its other files can be read.
"""

from pathlib import Path


def use_umask(file: Path) -> None:
    """Give a file the permissions that the process's umask gives to new ones."""
    # Asking for the umask would change it for a moment, for all threads; a new file tells as well.
    probe = file.with_name(file.name + ".mode")
    probe.touch(exist_ok=False)
    try:
        file.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink()
