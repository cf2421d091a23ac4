"""What Chat Completions and Responses ask for in the same words."""

from forgeasync.environments.sessions.fields import Fields, may_call_tools

_WITHOUT_EFFECT = (
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)


def check_common_fields(fields: Fields) -> None:
    """Refuse what neither API can be served with here; raises RequestError."""
    fields.only("parallel_tool_calls", True, why="must be true: a turn may have several calls")
    fields.only("top_logprobs", 0, why="must be 0: log-probabilities are not given out")
    fields.given(_WITHOUT_EFFECT)


def read_tool_choice(fields: Fields) -> bool:
    """Return whether the model may call tools; raises RequestError if a call is forced."""
    choice = fields.take("tool_choice")
    return choice is None or may_call_tools("tool_choice", choice)


def read_stream_options(fields: Fields, *flags: str) -> frozenset[str]:
    """Return which of the flags in ``stream_options`` are set."""
    value = fields.take("stream_options")
    if value is None:
        return frozenset()
    options = fields.inner("stream_options", value)
    chosen = frozenset(name for name in flags if options.flag(name))
    options.ignore_rest()
    return chosen
