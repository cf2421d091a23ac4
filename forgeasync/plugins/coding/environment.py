"""The environment of ``kind: coding``: a model changes a repository, and hidden tests judge what it did."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import Docker, Podman, SandboxLimits, SandboxSection
from forgeasync.environments import (
    TEMPLATE_FORM,
    Agent,
    ContextFull,
    Environment,
    EpisodeInterrupted,
    Message,
    Tool,
    Toolbox,
    ToolFailed,
    TooManyTurns,
)
from forgeasync.isolation import (
    FileTooLarge,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    Shell,
    ShellResult,
)
from forgeasync.plugins.coding.grading import Changes, Refusal, Verdict, grade, take_changes
from forgeasync.plugins.coding.section import CodingAgent
from forgeasync.plugins.coding.tasks import CodingRecord, hidden_tests, read_record
from forgeasync.rollouts import Score, Task, ToolStatus

MAX_FILE_BYTES = 2**20
"""Largest file that the tools read or write."""
DEFAULT_LINES = 200
PACKAGES_FOLDER = "/packages"
GRACE_S = 15.0
"""Extra seconds that a tool call has beyond the time limit of its command, before the call is cut off."""


class CodingTools:
    """The tools of one episode. Calls must not overlap: they share one shell and its files.

    The docstrings of ``run``, ``view``, ``edit``, ``write`` and ``submit`` are part of the model's prompt.
    """

    def __init__(self, sandbox: Sandbox, *, command_s: float) -> None:
        """``command_s`` is the time limit of one command, in seconds."""
        self._sandbox = sandbox
        self._command_s = command_s
        self._shell: Shell | None = None
        self.is_submitted = False
        functions = (self.run, self.view, self.edit, self.write, self.submit)
        self.tools = tuple(Tool.from_function(function) for function in functions)

    async def close(self) -> None:
        """End the shell and all processes that it started."""
        if self._shell is not None:
            await self._shell.close()
            self._shell = None

    async def run(self, command: str) -> str:
        """Run a command in a shell. Directory and variables last from call to call.

        Args:
            command: The command, for bash.
        """
        if self._shell is None:
            self._shell = await self._sandbox.shell()
        result = await self._shell.run(command, timeout_s=self._command_s)
        if result.session_ended:
            self._shell = None
        return _shell_output(result, self._command_s)

    async def view(self, path: str, start: int = 1, end: int | None = None) -> str:
        """Show lines of a text file, with their numbers.

        Args:
            path: The file, relative to the repository.
            start: The first line; 1 is the first of the file.
            end: The last line; without it, 200 lines are shown.
        """
        lines = (await self._text(path)).split("\n")
        if lines[-1] == "":
            lines.pop()
        last = min(start + DEFAULT_LINES - 1 if end is None else end, len(lines))
        if not 1 <= start <= max(last, 1):
            raise ToolFailed(f"Error: lines {start} to {end or 'end'}: {path} has {len(lines)} lines")
        shown = [f"{number:6}\t{lines[number - 1]}" for number in range(start, last + 1)]
        return "\n".join([*shown, f"[lines {start} to {last} of {len(lines)}]"])

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file. It must occur exactly once; white space counts.

        Args:
            path: The file, relative to the repository.
            old: The text to replace.
            new: The text to put in its place.
        """
        if not old:
            raise ToolFailed("Error: old is empty; must be the text to replace")
        text = await self._text(path)
        if (num_found := text.count(old)) != 1:
            raise ToolFailed(f"Error: old occurs {num_found} times in {path}; must occur exactly once")
        await self._put(path, text.replace(old, new))
        return f"{path} was changed"

    async def write(self, path: str, content: str) -> str:
        """Write a file, new or in place of the one that is there.

        Args:
            path: The file, relative to the repository.
            content: Its whole content.
        """
        await self._put(path, content)
        return f"{path} was written"

    async def submit(self) -> str:
        """Submit the repository as it is now, and end."""
        self.is_submitted = True
        return "submitted"

    async def _text(self, path: str) -> str:
        try:
            return (await self._sandbox.read(path, max_bytes=MAX_FILE_BYTES)).decode()
        except UnicodeDecodeError:
            raise ToolFailed(f"Error: {path} is not UTF-8 text") from None
        except (FileNotFoundError, FileTooLarge, SandboxError, ValueError) as error:
            raise ToolFailed(f"Error: {error}") from None

    async def _put(self, path: str, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise ToolFailed("Error: the text has a lone surrogate; must be valid Unicode") from None
        if len(data) > MAX_FILE_BYTES:
            raise ToolFailed(f"Error: the file would have {len(data)} bytes; at most {MAX_FILE_BYTES}")
        try:
            await self._sandbox.write(path, data)
        except (SandboxError, ValueError) as error:
            raise ToolFailed(f"Error: {error}") from None


def _shell_output(result: ShellResult, limit_s: float) -> str:
    parts = [text if text.endswith("\n") else f"{text}\n" for text in (result.stdout, result.stderr) if text]
    if num_cut := result.num_stdout_bytes_cut + result.num_stderr_bytes_cut:
        parts.append(f"[{num_cut} more bytes were cut]\n")
    end = f"exit code {result.exit_code}"
    if result.timed_out:
        end = f"killed after {limit_s:g} s"
    elif result.killed_by is not None:
        end = f"killed: {result.killed_by}"
    if result.session_ended:
        end += "; the shell has ended, and the next command begins with a new one"
    return "".join([*parts, f"[{end}]"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The outcome of one episode."""

    score: Score
    changes: Changes
    patch: str
    """A ``#`` line with the reason for each change that was not judged, then the judged changes as a diff."""
    test_log: str

    @property
    def artifacts(self) -> dict[str, str]:
        """Texts to store with the rollout, by file name."""
        return {"changes.patch": self.patch, "tests.log": self.test_log}


class CodingEnvironment(Environment):
    """Lets a model change a repository; the score is 1 if all tests of the record pass, else 0.

    Parts of the score: ``has_changes`` (1 if there were changes to judge), ``fail_to_pass`` and
    ``pass_to_pass`` (shares of these tests that passed; absent without changes), ``num_refused_changes``
    (changes that were not judged), and ``num_tampered`` (refused changes that could have decided how the
    solution is tested).
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
        """Let the model work on a task, and judge its changes.

        Raises:
            ValueError: the task's record is wrong.
            EpisodeInterrupted: no sandbox could be started.
        """
        record = read_record(task.record, Path("/"))
        hidden = hidden_tests(record)
        section = _sandbox_for(record, self._sandbox)
        try:
            async with Sandbox(section, workspace=record.checkout) as sandbox:
                tools = CodingTools(sandbox, command_s=agent.tool_limit_s)
                try:
                    await self._work(task, agent, tools)
                finally:
                    await tools.close()
                changes = await take_changes(sandbox, record, hidden, self._section)
            if changes.is_empty:
                return _attempt(record, changes, None)
            verdict = await grade(record, hidden, changes, sandbox_section=section, section=self._section)
        except SandboxUnavailable as error:
            raise EpisodeInterrupted(f"no sandbox for the task could be started: {error}") from error
        return _attempt(record, changes, verdict)

    async def _work(self, task: Task, agent: Agent, tools: CodingTools) -> None:
        toolbox = Toolbox(tools.tools, max_characters=self._section.max_result_characters)
        messages: list[Message] = [{"role": "user", "content": task.prompt}]
        if self._section.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._section.system_prompt})
        for _ in range(self._section.max_rounds):
            try:
                turn = await agent.respond(messages, tools=toolbox.specs)
            except (ContextFull, TooManyTurns):
                # The changes so far are judged.
                return
            messages.append(turn.message)
            # One after the other: a command may need what an earlier call of the turn has written.
            for call in turn.tool_calls:
                result = await toolbox.call(call, limit_s=agent.tool_limit_s + GRACE_S)
                agent.count_tool_call(result.status, took_s=result.took_s)
                messages.append(result.message)
                if tools.is_submitted:
                    return
            for broken in turn.broken_tool_calls:
                agent.count_tool_call(ToolStatus.UNREADABLE)
                messages.append(TEMPLATE_FORM.answer_broken(broken))
            if not turn.tool_calls and not turn.broken_tool_calls:
                return


def _sandbox_for(record: CodingRecord, sandbox: SandboxSection) -> SandboxSection:
    """Return the sandbox section for a record, with the record's image and packages."""
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
    refusals = "".join(f"# not judged ({why}): {path!a}\n" for path, why in sorted(refused.items()))
    score = Score(float(is_solved), is_solved, parts=parts, has_answer=verdict is not None)
    return Attempt(score=score, changes=changes, patch=refusals + patch, test_log=log)
