"""The environment of ``kind: coding``: a model changes a repository, and hidden tests judge what it did."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import CodingAgent, Docker, Podman, SandboxLimits, SandboxSection
from forgeasync.environments.coding.changes import Changes, Refusal, take_changes
from forgeasync.environments.coding.grading import Verdict, grade
from forgeasync.environments.coding.hidden_tests import hidden_tests
from forgeasync.environments.coding.record import CodingRecord, read_record
from forgeasync.environments.coding.workbench import Workbench
from forgeasync.environments.environment import (
    Agent,
    ContextFull,
    Environment,
    EpisodeInterrupted,
    TooManyTurns,
)
from forgeasync.environments.messages import Message
from forgeasync.environments.tools.forms import TEMPLATE_FORM
from forgeasync.environments.tools.toolbox import Toolbox
from forgeasync.isolation import Sandbox, SandboxUnavailable
from forgeasync.rollouts import Score, Task, ToolStatus

PACKAGES_FOLDER = "/packages"
GRACE_S = 15.0
"""What a call of a tool may take longer than its command, before it is cut off with its shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of one episode."""

    score: Score
    changes: Changes
    patch: str
    """The changes that were judged, as a unified diff; before it, those that were not, and why."""
    test_log: str

    @property
    def artifacts(self) -> dict[str, str]:
        """What is worth keeping of it, by the name of a file."""
        return {"changes.patch": self.patch, "tests.log": self.test_log}


class CodingEnvironment(Environment):
    """The score is 1 if all tests of the record pass, else 0.

    Its parts are the shares of ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` that passed, whether there were changes
    to judge, and the numbers of changes that did not count and of those among them that could have decided
    how the solution is tested.
    """

    def __init__(self, section: CodingAgent, sandbox: SandboxSection) -> None:
        self._section = section
        self._sandbox = sandbox

    async def rollout(self, task: Task, agent: Agent) -> Score:
        attempt = await self.attempt(task, agent)
        for name, text in attempt.artifacts.items():
            agent.keep(name, text)
        return attempt.score

    async def attempt(self, task: Task, agent: Agent) -> Attempt:
        """Let the model work on a task, and judge what it has changed.

        Raises:
            ValueError: the task's record is wrong.
            EpisodeInterrupted: no box could be started.
        """
        record = read_record(task.record, Path("/"))
        hidden = hidden_tests(record)
        sandbox = _sandbox_for(record, self._sandbox)
        try:
            async with Sandbox(sandbox, workspace=record.checkout) as box:
                bench = Workbench(box, command_s=agent.tool_limit_s)
                try:
                    await self._work(task, agent, bench)
                finally:
                    await bench.close()
                changes = await take_changes(box, record, hidden, self._section)
            if changes.is_empty:
                return _attempt(record, changes, None)
            verdict = await grade(record, hidden, changes, sandbox=sandbox, section=self._section)
        except SandboxUnavailable as error:
            raise EpisodeInterrupted(f"no box for the task could be started: {error}") from error
        return _attempt(record, changes, verdict)

    async def _work(self, task: Task, agent: Agent, bench: Workbench) -> None:
        toolbox = Toolbox(bench.tools, max_characters=self._section.max_result_characters)
        messages: list[Message] = [{"role": "user", "content": task.prompt}]
        if self._section.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._section.system_prompt})
        for _ in range(self._section.max_rounds):
            try:
                turn = await agent.respond(messages, tools=toolbox.specs)
            except (ContextFull, TooManyTurns):
                # What it has done until then is judged.
                return
            messages.append(turn.message)
            # One after the other: a command may need what an earlier call of the turn has written.
            for call in turn.tool_calls:
                result = await toolbox.call(call, limit_s=agent.tool_limit_s + GRACE_S)
                agent.count_tool_call(result.status, took_s=result.took_s)
                messages.append(result.message)
                if bench.is_submitted:
                    return
            for broken in turn.broken_tool_calls:
                agent.count_tool_call(ToolStatus.UNREADABLE)
                messages.append(TEMPLATE_FORM.answer_broken(broken))
            if not turn.tool_calls and not turn.broken_tool_calls:
                return


def _sandbox_for(record: CodingRecord, sandbox: SandboxSection) -> SandboxSection:
    """The section of a record's boxes, with its image and packages."""
    if record.image is not None:
        if not isinstance(sandbox, Docker | Podman):
            raise ValueError(
                f"record {record.instance_id!r} names an image, which needs sandbox.kind docker or podman; "
                f"it is {sandbox.kind!r}"
            )
        sandbox = sandbox.model_copy(update={"image": record.image})
    if record.packages is not None:
        if not isinstance(sandbox, SandboxLimits):
            raise ValueError(
                f"record {record.instance_id!r} names packages, which a sandbox of your own cannot mount"
            )
        path = ":".join([PACKAGES_FOLDER, *filter(None, [sandbox.env.get("PYTHONPATH")])])
        sandbox = sandbox.model_copy(
            update={
                "mounts": {**sandbox.mounts, str(record.packages): PACKAGES_FOLDER},
                "env": {**sandbox.env, "PYTHONPATH": path},
            }
        )
    return sandbox


def _attempt(record: CodingRecord, changes: Changes, verdict: Verdict | None) -> Attempt:
    refused: Mapping[str, Refusal] = changes.refused
    parts = {"has_changes": float(verdict is not None)}
    if verdict is None:
        is_solved, patch = False, ""
        log = f"[no tests were run: {changes.problem or 'there are no changes to judge'}]\n"
    else:
        refused = {**refused, **dict.fromkeys(verdict.without_place, Refusal.NO_PLACE)}
        patch, log = verdict.patch, verdict.log
        is_solved = verdict.passed == frozenset(record.tests)
        parts["fail_to_pass"] = verdict.share(record.fail_to_pass)
        parts["pass_to_pass"] = verdict.share(record.pass_to_pass)
    parts["num_refused_changes"] = float(len(refused))
    parts["num_tampered"] = float(changes.num_tampered)
    told = "".join(f"# not judged ({why}): {path!a}\n" for path, why in sorted(refused.items()))
    score = Score(float(is_solved), is_solved, parts=parts, has_answer=verdict is not None)
    return Attempt(score=score, changes=changes, patch=told + patch, test_log=log)
