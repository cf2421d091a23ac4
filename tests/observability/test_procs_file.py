"""The list of a run's processes."""

import json
import os
from pathlib import Path

from forgeasync.observability import ProcsFile


def test_the_file_has_the_processes_of_this_moment(tmp_path: Path) -> None:
    file = tmp_path / "procs.json"
    listing = ProcsFile(file)
    listing.put("generator", 0, pid=10, host="host-0")
    listing.put("generator", 1, pid=11, host="host-0")
    listing.put("generator", 0, pid=12, host="host-0")
    listing.remove("generator", 1)
    listing.remove("generator", 1)
    read = json.loads(file.read_text())
    assert read["controller"] == os.getpid()
    assert [(one["role"], one["rank"], one["pid"]) for one in read["procs"]] == [("generator", 0, 12)]
    assert [one.pid for one in listing.entries] == [12] and list(tmp_path.iterdir()) == [file]
