"""Files of JSON lines that a run appends to: one object a line, never half of one.

A process that is killed leaves whole lines behind, because each line is one write. A file on a failing disk
can still end in half of a line, and so can a file that another process is writing at this moment.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgeasync.files import AppendedFile, Refusal, is_refusal


class JsonLines:
    """Appends objects to a file. Lines that the disk refuses are kept, and written once it takes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: AppendedFile | None = AppendedFile.open(path)

    def append(self, record: Mapping[str, object]) -> None:
        """Append a line, now or once the disk takes it.

        Raises:
            ValueError: the record has a number that is not finite.
            OSError: the file can never be written.
        """
        self._write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def flush(self) -> Refusal | None:
        """Write what was kept; return what is in the way."""
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
        """Close the file; a second call does nothing.

        Raises:
            OSError: lines are missing that the disk has refused to the end.
        """
        if self._file is None:
            return
        refusal, num_bytes = self.flush(), self._file.num_kept_bytes
        self._file.close()
        self._file = None
        if refusal is not None:
            raise OSError(f"{self._path} lacks its last {num_bytes} bytes: {refusal.reason}")


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their newlines, without a last line that has none."""
    lines = path.read_bytes().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, without a last line that is being written or was cut.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no JSON object. The message names the file and the line.
    """
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            # Not msgspec: texts of a model can have lone surrogates, which it refuses.
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: no JSON object")
        records.append(record)
    return records
