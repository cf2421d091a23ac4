"""Files that an episode keeps for people: patches, logs, outputs of tests."""

import contextlib
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from forgeasync.faults import is_refusal
from forgeasync.rollouts import EpisodeId

MAX_FILES = 32
"""Most files of one attempt at an episode."""

MAX_BYTES = 8 * 2**20
"""Most bytes of all of them together."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


def artifact_folder_name(episode: EpisodeId) -> str:
    """Return the name of the folder of one attempt: ``<group>-<episode>-<attempt>``.

    Groups of evaluations have negative ids, which are written as ``evaluation_1``.
    """
    group = str(episode.group_id) if episode.group_id >= 0 else f"evaluation_{-episode.group_id}"
    return f"{group}-{episode.index}-{episode.attempt}"


@dataclass(slots=True)
class EpisodeArtifacts:
    """The files of one attempt at an episode; all its agents share them."""

    folder: Path | None
    """Where they are written; None: nowhere, because nobody keeps a record of the episode."""
    num_refused: int = 0
    """Files that were too many or too large, or that the disk has refused."""
    _sizes: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """Write a file, or replace the one of this name; see ``Agent.keep``."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(
                f"name of an artifact = {name!r:.80}; must be 1 to 100 letters, digits, '_', '-' or '.', and "
                "not begin with '-' or '.'"
            )
        if not isinstance(data, bytes | str):
            raise ValueError(f"data of artifact {name!r} is {type(data).__name__}; must be bytes or a string")
        if self.folder is None:
            return None
        content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
        with self._lock:
            others = {other: size for other, size in self._sizes.items() if other != name}
            if len(others) >= MAX_FILES or sum(others.values()) + len(content) > MAX_BYTES:
                self.num_refused += 1
                return None
            file = self.folder / name
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            except OSError as error:
                if not is_refusal(error):
                    raise
                # A full disk is nothing that the episode has done. Half a file must not stay.
                with contextlib.suppress(OSError):
                    file.unlink()
                self._sizes.pop(name, None)
                self.num_refused += 1
                return None
            self._sizes[name] = len(content)
        return file

    @property
    def num_files(self) -> int:
        """Number of files written."""
        return len(self._sizes)

    @property
    def paths(self) -> list[str]:
        """The files, as paths below the folder of the run."""
        if self.folder is None:
            return []
        return [f"{self.folder.parent.name}/{self.folder.name}/{name}" for name in self._sizes]
