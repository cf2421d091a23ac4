"""The sections on coding tasks: where their records are, and how the model works on them."""

from typing import Annotated, Literal

from pydantic import Field

from forgeasync.schema import Seconds, Section

HOW_TO_WORK = (
    "You are in the root folder of a repository. Change its code so that the issue below is resolved, and "
    "call submit when you are done. Your changes are judged by tests that you cannot see; changes to test "
    "files and to the configuration of tests do not count."
)


class CodingSource(Section):
    """Coding tasks of a JSON or JSONL file with records like those of SWE-Gym and SWE-bench; needs
    ``environment: {kind: coding}``. docs/coding.md lists their fields."""

    kind: Literal["coding"]
    path: str
    """The file."""
    checkouts: str | None = None
    """Folder that the records' ``checkout`` and ``packages`` are relative to; null: that of the file."""


class CodingAgent(Section):
    """The model works on a repository in a sandbox until it submits; the tasks come from sources of kind
    ``coding``. The score is 1 if all tests of the record pass with what it changed, else 0."""

    kind: Literal["coding"]
    system_prompt: str | None = HOW_TO_WORK
    """Text of a system message before every task."""
    max_rounds: Annotated[int, Field(gt=0, le=10_000)] = 50
    """Most turns of the model; after them its changes are judged as they are."""
    max_result_characters: Annotated[int, Field(gt=0, le=10_000_000)] = 10_000
    """Most characters that the model is told of one call."""
    max_patch_kib: Annotated[int, Field(gt=0, le=16_384)] = 1024
    """Most that all files which the model has changed or added may have together, in KiB. With more its
    changes are not judged, and the score is 0."""
    max_changed_files: Annotated[int, Field(gt=0, le=10_000)] = 200
    """Most files that it may change, add and delete, likewise."""
    tests_s: Seconds = 90.0
    """Time for all tests of a record, in seconds; those that have not passed by then have failed."""
