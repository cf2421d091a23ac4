"""Judges a model's changes: its repository's tests run in fresh boxes that the model has never been in."""

import base64
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forgeasync.config import CodingAgent, SandboxLimits, SandboxSection
from forgeasync.environments.coding.changes import Changes, run_command
from forgeasync.environments.coding.hidden_tests import HiddenTests
from forgeasync.environments.coding.record import CodingRecord, TestRunner
from forgeasync.isolation import ExecResult, Sandbox, SandboxError

PLACE_LIMIT_S = 60.0
DIFFERENCE_LIMIT_S = 10.0
"""A model can write texts whose comparison takes very long."""
MAX_DIFFERENCE_BYTES = 4 * 2**20
REPORT_KIB = 4096
MAX_LOG_CHARACTERS = 2**20
"""Most that is kept of what tests have printed: artifacts of an episode are bounded too."""
_PYTEST_HAS_RUN = (0, 1)
"""``pytest.ExitCode``: all tests passed; some did not. Others say that pytest itself did not get through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests say."""

    passed: frozenset[str]
    """Listed tests that passed."""
    log: str
    """What the tests have printed, and how their processes ended."""
    patch: str
    """The changes as a unified diff."""
    without_place: tuple[str, ...]
    """Changed files that could not be put anywhere."""

    def share(self, tests: Sequence[str]) -> float:
        """Share of these tests that passed; 1 of none."""
        return sum(test in self.passed for test in tests) / len(tests) if tests else 1.0


class _Grader:
    def __init__(
        self,
        record: CodingRecord,
        hidden: HiddenTests,
        changes: Changes,
        *,
        sandbox: SandboxSection,
        section: CodingAgent,
    ) -> None:
        self._record = record
        self._sandbox = _with_room_for_reports(sandbox)
        self._section = section
        self._placed = json.dumps(
            {
                "files": {
                    path: (base64.b64encode(one.content).decode(), one.is_executable)
                    for path, one in changes.files.items()
                },
                "deleted": changes.deleted,
                "tests": {path: base64.b64encode(content).decode() for path, content in hidden.files.items()},
                "tests_deleted": hidden.deleted,
            }
        ).encode()
        self._patch: str | None = None
        self._without_place: tuple[str, ...] = ()

    async def grade(self) -> Verdict:
        passed: set[str] = set()
        log: list[str] = []
        left_s = self._section.tests_s
        for target, tests in _by_target(self._record).items():
            async with Sandbox(self._sandbox, workspace=self._record.checkout) as box:
                await self._place(box)
                if left_s > 0:
                    began_s = time.perf_counter()
                    of_target, words = await self._run(box, target, tests, left_s)
                    left_s -= time.perf_counter() - began_s
                else:
                    of_target, words = set(), "not run: environment.tests_s had passed"
            passed |= of_target
            log.append(f"==== {target}: {len(of_target)} of {len(tests)} passed\n{words}\n")
        return Verdict(
            passed=frozenset(passed),
            log=_cut("".join(log)),
            patch=self._patch or "",
            without_place=self._without_place,
        )

    async def _place(self, box: Sandbox) -> None:
        """Bring a new box to the state that is tested; nothing that the model wrote runs meanwhile."""
        folder = f".coding-{secrets.token_hex(8)}"
        changes, result = f"{folder}/changes", f"{folder}/difference"
        await box.write(changes, self._placed)
        if self._patch is None:
            done = await box.exec(
                run_command("difference", changes, result, MAX_DIFFERENCE_BYTES), timeout_s=DIFFERENCE_LIMIT_S
            )
            if done.exit_code or done.timed_out:
                self._patch = f"# no difference was computed within {DIFFERENCE_LIMIT_S:g} s\n"
            else:
                read = await box.read(result, max_bytes=MAX_DIFFERENCE_BYTES)
                self._patch = read.decode(errors="replace")
        done = await box.exec(run_command("place", changes), timeout_s=PLACE_LIMIT_S)
        if done.exit_code or done.timed_out:
            raise SandboxError(f"the changes could not be put in place: {done.stderr.strip()[-300:]}")
        self._without_place = tuple(json.loads(done.stdout))
        await box.exec(["rm", "-rf", folder], timeout_s=PLACE_LIMIT_S)

    async def _run(
        self, box: Sandbox, target: str, tests: Sequence[str], limit_s: float
    ) -> tuple[set[str], str]:
        nonce = secrets.token_hex(16)
        path = f"/tmp/{secrets.token_hex(8)}"
        request = {
            "nonce": nonce,
            "runner": self._record.runner.value,
            "target": target,
            "tests": tests,
            "python_path": self._record.python_path,
        }
        await box.write(path, json.dumps(request).encode())
        done = await box.exec(run_command("run_tests", path), timeout_s=limit_s)
        reports = list(_reports(done.stdout, nonce))
        passed, problem = _passed(reports, tests, done, self._record.runner)
        log = f"{done.stderr}\n[exit code {done.exit_code}, {done.duration_s:.1f} s]"
        if done.num_stderr_bytes_cut:
            log += f"\n[{done.num_stderr_bytes_cut} more bytes were cut]"
        return passed, log if problem is None else f"{log}\n[{problem}]"


def _cut(log: str) -> str:
    num_cut = len(log) - MAX_LOG_CHARACTERS
    return log if num_cut <= 0 else f"{log[:MAX_LOG_CHARACTERS]}\n[{num_cut} more characters were cut]\n"


def _with_room_for_reports(sandbox: SandboxSection) -> SandboxSection:
    if isinstance(sandbox, SandboxLimits):
        return sandbox.model_copy(update={"output_kib": max(sandbox.output_kib, REPORT_KIB)})
    return sandbox


def _by_target(record: CodingRecord) -> dict[str, list[str]]:
    """The tests by the file or module that they are in: each gets a box and a process of its own."""
    found: dict[str, list[str]] = {}
    for test in record.tests:
        found.setdefault(record.target(test), []).append(test)
    return found


def _reports(output: str, nonce: str) -> Iterator[Mapping[str, object]]:
    for line in output.split("\n"):
        mark, _, rest = line.partition(" ")
        if mark == nonce:
            try:
                report = json.loads(rest)
            except (ValueError, RecursionError):
                continue
            if isinstance(report, dict):
                yield report


def _passed(
    reports: Sequence[Mapping[str, object]], tests: Sequence[str], done: ExecResult, runner: TestRunner
) -> tuple[set[str], str | None]:
    """Return the tests that passed, and what is wrong with the process as a whole.

    A process counts only if it came to its own end: solutions can leave it as if nothing had happened.
    """
    if done.timed_out:
        return set(), "killed: environment.tests_s had passed"
    last = reports[-1] if reports else {}
    if done.exit_code or last.get("end") is not True:
        return set(), "the process ended before the tests did"
    if runner is TestRunner.PYTEST and last.get("status") not in _PYTEST_HAS_RUN:
        return set(), f"pytest ended with status {last.get('status')}"
    if replaced := [one["replaced"] for one in reports if one.get("replaced") is not None]:
        return set(), f"{replaced[0]} of the test runner was replaced"
    outcomes: dict[object, set[object]] = {}
    for report in reports[:-1]:
        outcomes.setdefault(report.get("test"), set()).add(report.get("outcome"))
    return {test for test in tests if outcomes.get(test) == {"passed"}}, None


async def grade(
    record: CodingRecord,
    hidden: HiddenTests,
    changes: Changes,
    *,
    sandbox: SandboxSection,
    section: CodingAgent,
) -> Verdict:
    """Run the record's tests on the checkout with the model's changes and, placed last, the hidden tests.

    Every file of tests has a box of its own, so that what runs with one cannot change another. All together
    have ``section.tests_s``.

    Raises:
        SandboxError: a box could not be made; nothing of the model's ran in it.
    """
    return await _Grader(record, hidden, changes, sandbox=sandbox, section=section).grade()
