"""Config sections for coding tasks: the source of the tasks, and the environment that works on them."""

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
from forgeasync.schema import Problem, PythonCode, Seconds, refuse

if TYPE_CHECKING:
    from forgeasync.plugins.coding.environment import CodingEnvironment
    from forgeasync.plugins.coding.tasks import CodingProblems

HOW_TO_WORK = (
    "You are in the root folder of a repository. Change its code so that the issue below is resolved, and "
    "call submit when you are done. Your changes are judged by tests that you cannot see; changes to test "
    "files and to the configuration of tests do not count."
)
"""Default instructions for the model at the start of each coding task."""


class CodingSource(InstalledSource):
    """Coding tasks of a JSON or JSONL file with records like those of SWE-Gym and SWE-bench; needs
    ``environment: {kind: coding}``. docs/coding.md lists their fields."""

    kind: Literal["coding"]
    path: str
    """Path of the file."""
    checkouts: str | None = None
    """Folder to which the records' ``checkout`` and ``packages`` are relative; null: that of the file."""

    @property
    def name(self) -> str:
        """Default name in metrics: the path of the file."""
        return self.path

    def check(self, config: RunConfig, field: str) -> Iterator[Problem]:
        """Yield a problem if the environment does not work on repositories."""
        if not isinstance(config.environment, CodingAgent | PythonCode):
            remedy = "needs environment: {kind: coding}, in which the model works on repositories"
            yield refuse(config, f"{field}.kind", remedy)

    def problems(self, *, num_train: int, num_held_out: int, seed: int) -> "CodingProblems":
        """Read the file and check its records; see ``CodingProblems``."""
        from forgeasync.plugins.coding.tasks import CodingProblems

        return CodingProblems(self, num_train=num_train, num_held_out=num_held_out, seed=seed)


class CodingAgent(InstalledEnvironment):
    """The model works on a repository in a sandbox until it submits; the tasks come from sources of kind
    ``coding``. The score is 1 if all tests of the record pass with its changes, else 0."""

    kind: Literal["coding"]
    system_prompt: str | None = HOW_TO_WORK
    """Text of a system message before every task."""
    max_rounds: Annotated[int, Field(gt=0, le=10_000)] = 50
    """Maximum number of the model's turns; after them its changes are judged as they are."""
    max_result_characters: Annotated[int, Field(gt=0, le=10_000_000)] = 10_000
    """Maximum number of characters of a call's result that the model receives."""
    max_patch_kib: Annotated[int, Field(gt=0, le=16_384)] = 1024
    """Maximum total size of changed and added files, in KiB. Larger changes are not judged and score 0."""
    max_changed_files: Annotated[int, Field(gt=0, le=10_000)] = 200
    """Maximum number of changed, added and deleted files. More are not judged and score 0."""
    tests_s: Seconds = 90.0
    """Time limit of all tests of a record, in seconds; tests that have not passed by then have failed."""

    runs_code: ClassVar[bool] = True

    def check(self, config: RunConfig) -> Iterator[Problem]:
        """Check the tools, that all sources have repositories, and that the tests end in time."""
        yield from check_one_agent(config, self.kind)
        yield from check_tools(config, self)
        for source in (*named_sources(config.data), *named_sets(config.evaluation)):
            if not isinstance(source.source, CodingSource):
                remedy = "must be 'coding' with environment.kind = 'coding'"
                yield refuse(config, f"{source.field}.kind", remedy)
        if self.tests_s >= config.episodes.step_s:
            step_s = f"episodes.step_s = {config.episodes.step_s:g}"
            remedy = f"must be less than {step_s}, which bounds all that follows the last turn"
            yield refuse(config, "environment.tests_s", remedy)

    def check_here(self, sandbox: SandboxSection) -> Iterator[Problem]:
        """Start a sandbox to check that it works."""
        from forgeasync.isolation import check_sandbox

        yield from check_sandbox(sandbox)

    def build(self, sandbox: SandboxSection) -> "CodingEnvironment":
        """Build the environment, which works in sandboxes of ``sandbox``."""
        from forgeasync.plugins.coding.environment import CodingEnvironment

        return CodingEnvironment(self, sandbox)
