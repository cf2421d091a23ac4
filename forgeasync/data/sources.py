"""From the ``data`` section of a config to its problems."""

from forgeasync.config.schema import DataSection, HuggingFaceSource, ReasoningGymSource
from forgeasync.data.split import SplitSource


def build_source(data: DataSection, *, seed: int) -> SplitSource:
    """All training and held-out problems of a run with ``seed``.

    Held-out problems depend on ``data`` alone. Raises ValueError, naming the config field, for whatever
    the section asks for that does not exist.
    """
    # Each builder imports a library that takes seconds to load: a run pays for the one it uses.
    match data.source:
        case ReasoningGymSource():
            from forgeasync.data.reasoning_gym_source import ReasoningGymProblems

            return ReasoningGymProblems(
                data.source, num_train=data.num_train, num_held_out=data.num_held_out, seed=seed
            ).split()
        case HuggingFaceSource():
            from forgeasync.data.huggingface_source import split_records

            return split_records(
                data.source, num_train=data.num_train, num_held_out=data.num_held_out, seed=seed
            )
