"""Rules on environments that come with the package and concern several sections."""

from collections.abc import Iterator
from typing import Protocol

from forgeasync.config.environments import McpEnvironment, PythonTool, RemoteEnvironment
from forgeasync.config.plugin_sections import InstalledEnvironment
from forgeasync.config.run import RunConfig
from forgeasync.schema import Problem, PythonCode


def check_built_in(config: RunConfig) -> Iterator[Problem]:
    """Check what environments of the package need of the rest of the config."""
    environment = config.environment
    # Environments of plug-ins check themselves (installed.py).
    if environment is None or isinstance(environment, PythonCode | InstalledEnvironment):
        return
    yield from check_one_agent(config, environment.kind)
    # The programs behind a URL decide for themselves whether they offer tools.
    if not isinstance(environment, RemoteEnvironment):
        yield from check_tools(config, environment)


def check_one_agent(config: RunConfig, kind: str) -> Iterator[Problem]:
    """Check that the config names no agents, for an environment that talks to one."""
    if config.agents is not None:
        yield Problem(
            field="agents",
            value=", ".join(config.agents),
            remedy=f"must be left out: the environment {kind!r} talks to one agent",
        )


class HasRounds(Protocol):
    """A section ``environment`` whose model calls tools in rounds."""

    @property
    def kind(self) -> str:
        """Kind of the environment."""
        ...

    @property
    def max_rounds(self) -> int:
        """Most turns that may call tools."""
        ...


def check_tools(config: RunConfig, environment: HasRounds) -> Iterator[Problem]:
    """Check what tools need of prompts, of time and of turns."""
    needs_no_template, other = False, ""
    if isinstance(environment, PythonTool):
        needs_no_template, other = environment.plain_calls is not None, ", or give environment.plain_calls"
    if not config.data.chat_template and not needs_no_template:
        yield Problem(
            field="data.chat_template",
            value=config.data.chat_template,
            remedy=f"must be true with environment.kind = {environment.kind!r}, whose tools are told by the "
            f"chat template{other}",
        )
    episodes = config.episodes
    if episodes.tool_s >= episodes.step_s:
        yield Problem(
            field="episodes.tool_s",
            value=episodes.tool_s,
            remedy=f"must be less than episodes.step_s = {episodes.step_s:g}: a model can be told "
            "that a call took too long only while its episode goes on",
        )
    if isinstance(environment, McpEnvironment) and environment.start_s >= episodes.setup_s:
        yield Problem(
            field="environment.start_s",
            value=environment.start_s,
            remedy=f"must be less than episodes.setup_s = {episodes.setup_s:g}, the limit for all that "
            "precedes the first turn",
        )
    if environment.max_rounds >= episodes.max_turns:
        yield Problem(
            field="environment.max_rounds",
            value=environment.max_rounds,
            remedy=f"must be less than episodes.max_turns = {config.episodes.max_turns}: one more turn "
            "follows the last round",
        )
