"""Whole episodes with real sessions and a model that follows a script: everything but the engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forgeasync.config import EpisodesSection
from forgeasync.environments import Environment, SessionServer, TurnRequest
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, SampledTurn, Task
from forgeasync.testing import ScriptedGenerator
from tests.support.episodes import TOKENIZER, make_episodes


def task(**record: Any) -> Task:
    return Task(
        task_id="t7",
        prompt=record.pop("prompt", "say it"),
        answer=record.pop("answer", "it"),
        source_index=7,
        source="words",
        record=record,
    )


def run_episodes(
    environment: Environment,
    tasks: Sequence[Task],
    texts: Sequence[str],
    *,
    section: Mapping[str, Any] | None = None,
    max_context_length: int = 2000,
    before_turn: Callable[[int], None] = lambda number: None,
    limit_s: float = 60.0,
) -> tuple[list[EpisodeOutcome], list[ScriptedGenerator]]:
    """Run one episode for each task, all at once; every episode's model says ``texts``.

    ``before_turn`` is called with the number of turns so far, on a thread of its own.
    """

    async def go() -> tuple[list[EpisodeOutcome], list[ScriptedGenerator]]:
        async with SessionServer() as sessions:
            episodes = make_episodes(
                environment,
                max_context_length=max_context_length,
                section=EpisodesSection(**(section or {})),
                limit_s=limit_s,
                open_session=sessions.open,
            )
            models = [ScriptedGenerator(TOKENIZER, texts) for _ in tasks]

            async def sample(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
                model = models[episode.index]
                await asyncio.to_thread(before_turn, len(model.paths))
                return await model(request)

            outcomes = await asyncio.gather(
                *(
                    episodes.run(
                        one,
                        EpisodeId(group_id=9, index=index),
                        max_turn_tokens=50,
                        sample=sample,
                        keeps_record=True,
                    )
                    for index, one in enumerate(tasks)
                )
            )
            assert episodes.num_stuck == 0
            return outcomes, models

    return asyncio.run(go())
