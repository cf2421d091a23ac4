"""The tools with which a model works on a repository in its box."""

from forgeasync.environments.tools.tool import Tool, ToolFailed
from forgeasync.isolation import FileTooLarge, Sandbox, SandboxError, Shell, ShellResult

MAX_FILE_BYTES = 2**20
"""Largest file that the tools read or write."""
DEFAULT_LINES = 200


class Workbench:
    """The tools of one episode. Calls must follow each other: they share a shell and its files."""

    def __init__(self, box: Sandbox, *, command_s: float) -> None:
        """``command_s`` is the time for one command."""
        self._box = box
        self._command_s = command_s
        self._shell: Shell | None = None
        self.is_submitted = False
        functions = (self.run, self.view, self.edit, self.write, self.submit)
        self.tools = tuple(Tool.from_function(function) for function in functions)

    async def close(self) -> None:
        """End the shell and all that it has started."""
        if self._shell is not None:
            await self._shell.close()
            self._shell = None

    async def run(self, command: str) -> str:
        """Run a command in a shell. Directory and variables last from call to call.

        Args:
            command: The command, for bash.
        """
        if self._shell is None:
            self._shell = await self._box.shell()
        result = await self._shell.run(command, timeout_s=self._command_s)
        if result.session_ended:
            self._shell = None
        return _told(result, self._command_s)

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
            return (await self._box.read(path, max_bytes=MAX_FILE_BYTES)).decode()
        except UnicodeDecodeError:
            raise ToolFailed(f"Error: {path} is no UTF-8 text") from None
        except (FileNotFoundError, FileTooLarge, SandboxError, ValueError) as error:
            raise ToolFailed(f"Error: {error}") from None

    async def _put(self, path: str, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise ToolFailed("Error: the text has half a character; must be valid Unicode") from None
        if len(data) > MAX_FILE_BYTES:
            raise ToolFailed(f"Error: the file would have {len(data)} bytes; at most {MAX_FILE_BYTES}")
        try:
            await self._box.write(path, data)
        except (SandboxError, ValueError) as error:
            raise ToolFailed(f"Error: {error}") from None


def _told(result: ShellResult, limit_s: float) -> str:
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
