"""Append-only files of JSON lines, with one object per line.

A killed process leaves complete lines behind, because each line is one write. The last line can still be
incomplete if the disk failed, or if another process is writing the file at the moment.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgeasync.files import AppendedFile, Refusal, is_refusal


class JsonLines:
    """Appends objects to a file. While the disk is full or fails, lines are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: AppendedFile | None = AppendedFile.open(path)

    def append(self, record: Mapping[str, object]) -> None:
        """Append a line. If the disk is full or fails, the line is written with a later call.

        Raises:
            ValueError: The record has a number that is not finite.
            OSError: The file cannot be written, for a reason that a retry cannot remove.
        """
        self._write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def flush(self) -> Refusal | None:
        """Write the kept lines. Returns the reason if the disk still does not accept them."""
        return self._write(b"")

    def _write(self, data: bytes) -> Refusal | None:
        assert self._file is not None, "not after it was closed"
        try:
            self._file.write(data)
        except OSError as error:
            if not is_refusal(error):
                raise
            return Refusal(path=str(self._path), reason=error.strerror or str(error))
        return None

    def close(self) -> None:
        """Write the kept lines and close the file. A second call does nothing.

        Raises:
            OSError: The disk did not accept the kept lines, which are lost.
        """
        if self._file is None:
            return
        refusal, num_bytes = self.flush(), self._file.num_kept_bytes
        self._file.close()
        self._file = None
        if refusal is not None:
            raise OSError(f"{self._path} lacks its last {num_bytes} bytes: {refusal.reason}")


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their newlines, without a last line that lacks one."""
    lines = path.read_bytes().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, without an incomplete last line.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not a JSON object. The message names the file and the line.
    """
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            # Not msgspec, which refuses the lone surrogates that a model's text can contain.
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: no JSON object")
        records.append(record)
    return records
