"""Rules on coding tasks."""

from collections.abc import Iterator

from forgeasync.config.coding import CodingAgent, CodingSource
from forgeasync.config.data import named_sources
from forgeasync.config.evaluation import named_sets
from forgeasync.config.run import RunConfig
from forgeasync.schema import Problem, PythonCode


def check_coding(config: RunConfig) -> Iterator[Problem]:
    """Check that repositories meet the environment that works on them, and that its tests end in time."""
    environment = config.environment
    for source in (*named_sources(config.data), *named_sets(config.evaluation)):
        is_coding = isinstance(source.source, CodingSource)
        if is_coding and not isinstance(environment, CodingAgent | PythonCode):
            yield Problem(
                field=f"{source.field}.kind",
                value=source.source.kind,
                remedy="needs environment: {kind: coding}, in which the model works on repositories",
            )
        if not is_coding and isinstance(environment, CodingAgent):
            yield Problem(
                field=f"{source.field}.kind",
                value=source.source.kind,
                remedy="must be 'coding' with environment.kind = 'coding'",
            )
    if isinstance(environment, CodingAgent) and environment.tests_s >= config.episodes.step_s:
        yield Problem(
            field="environment.tests_s",
            value=environment.tests_s,
            remedy=f"must be less than episodes.step_s = {config.episodes.step_s:g}, which bounds all that "
            "follows the last turn",
        )
