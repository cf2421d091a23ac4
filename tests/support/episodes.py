"""Episodes of one process, whose deadlines are far away unless a test sets them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from forgeasync.config import EpisodesSection
from forgeasync.environments import AgentRole, Environment, Episodes, choose_renderer
from tests.support.chat import make_tokenizer

TOKENIZER = make_tokenizer(None)
AGENT = (AgentRole(name="agent", is_trainable=True),)


def make_episodes(
    environment: Environment,
    *,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    name: str = "my.Env",
    section: EpisodesSection | None = None,
    limit_s: float = 300.0,
    max_context_length: int = 200,
    roles: Sequence[AgentRole] = AGENT,
    now_s: Callable[[], float] = time.perf_counter,
    **more: Any,
) -> Episodes:
    """``more`` are arguments of ``Episodes``."""
    return Episodes(
        environment,
        choose_renderer(tokenizer, chat_template=False).renderer,
        name=name,
        roles=roles,
        has_one_agent=len(roles) == 1,
        max_context_length=max_context_length,
        section=section or EpisodesSection(),
        limit_s=limit_s,
        now_s=now_s,
        **more,
    )
