"""Rules on environments that come with the package and concern several sections."""

from collections.abc import Iterator

from forgeasync.config.coding import CodingAgent
from forgeasync.config.environments import McpEnvironment, PythonTool, RemoteEnvironment
from forgeasync.config.run import RunConfig
from forgeasync.config.serving import ServedEnvironment
from forgeasync.schema import Problem, PythonCode


def check_built_in(config: RunConfig) -> Iterator[Problem]:
    """Check what environments of the package need of the rest of the config."""
    environment = config.environment
    # Rules on people who are served are in serving_rules.py.
    if environment is None or isinstance(environment, PythonCode | ServedEnvironment):
        return
    if config.agents is not None:
        yield Problem(
            field="agents",
            value=", ".join(config.agents),
            remedy=f"must be left out: the environment {environment.kind!r} talks to one agent",
        )
    # The programs behind a URL decide for themselves whether they offer tools.
    if isinstance(environment, RemoteEnvironment):
        return
    yield from _check_tools(config, environment)


def _check_tools(
    config: RunConfig, environment: PythonTool | McpEnvironment | CodingAgent
) -> Iterator[Problem]:
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
