"""The sections on coding tasks: where their records are, and how the model works on them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from forgeasync.config import (
    InstalledEnvironment,
    InstalledSource,
    RunConfig,
    SandboxSection,
    check_one_agent,
    check_tools,
    named_sets,
    named_sources,
)
from forgeasync.schema import Problem, PythonCode, Seconds

if TYPE_CHECKING:
    from forgeasync.plugins.coding.environment import CodingEnvironment
    from forgeasync.plugins.coding.tasks import CodingProblems

HOW_TO_WORK = (
    "You are in the root folder of a repository. Change its code so that the issue below is resolved, and "
    "call submit when you are done. Your changes are judged by tests that you cannot see; changes to test "
    "files and to the configuration of tests do not count."
)


class CodingSource(InstalledSource):
    """Coding tasks of a JSON or JSONL file with records like those of SWE-Gym and SWE-bench; needs
    ``environment: {kind: coding}``. docs/coding.md lists their fields."""

    kind: Literal["coding"]
    path: str
    """The file."""
    checkouts: str | None = None
    """Folder that the records' ``checkout`` and ``packages`` are relative to; null: that of the file."""

    @property
    def name(self) -> str:
        """The file."""
        return self.path

    def check(self, config: RunConfig, field: str) -> Iterator[Problem]:
        """Check that repositories meet the environment that works on them."""
        if not isinstance(config.environment, CodingAgent | PythonCode):
            yield Problem(
                field=f"{field}.kind",
                value=self.kind,
                remedy="needs environment: {kind: coding}, in which the model works on repositories",
            )

    def problems(self, *, num_train: int, num_held_out: int, seed: int) -> "CodingProblems":
        """Read the file and check its records, see ``CodingProblems``."""
        from forgeasync.plugins.coding.tasks import CodingProblems

        return CodingProblems(self, num_train=num_train, num_held_out=num_held_out, seed=seed)


class CodingAgent(InstalledEnvironment):
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

    runs_code: ClassVar[bool] = True

    def check(self, config: RunConfig) -> Iterator[Problem]:
        """Check its tools, that all sources have repositories, and that the tests end in time."""
        yield from check_one_agent(config, self.kind)
        yield from check_tools(config, self)
        for source in (*named_sources(config.data), *named_sets(config.evaluation)):
            if not isinstance(source.source, CodingSource):
                yield Problem(
                    field=f"{source.field}.kind",
                    value=source.source.kind,
                    remedy="must be 'coding' with environment.kind = 'coding'",
                )
        if self.tests_s >= config.episodes.step_s:
            yield Problem(
                field="environment.tests_s",
                value=self.tests_s,
                remedy=f"must be less than episodes.step_s = {config.episodes.step_s:g}, which bounds all "
                "that follows the last turn",
            )

    def check_here(self, sandbox: SandboxSection) -> Iterator[Problem]:
        """Start a box."""
        from forgeasync.isolation import check_sandbox

        yield from check_sandbox(sandbox)

    def build(self, sandbox: SandboxSection) -> "CodingEnvironment":
        """Build the environment, whose boxes are those of ``sandbox``."""
        from forgeasync.plugins.coding.environment import CodingEnvironment

        return CodingEnvironment(self, sandbox)
