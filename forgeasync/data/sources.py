"""From the ``data`` section of a config to its problems."""

from forgeasync.config.data_schema import HuggingFaceSource, ReasoningGymSource
from forgeasync.config.schema import DataSection
from forgeasync.data.split import SplitSource

MAX_GENERATED = 20_000
"""Problems that a first look generates at most: about half a second."""


def build_source(data: DataSection, *, seed: int) -> SplitSource:
    """All training and held-out problems of a run with ``seed``.

    Held-out problems depend on ``data`` alone.

    Raises:
        ConfigError: names the config field that asks for what does not exist, and the line or record of what
            cannot be a problem.
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


def look_at_data(data: DataSection, *, seed: int) -> str:
    """A look at the problems without the whole cost of ``build_source``; says what was looked at.

    Local files are read whole, and problems are generated up to ``MAX_GENERATED``. Data sets of the hub
    stay where they are.

    Raises:
        ConfigError: as ``build_source``.
    """
    match data.source:
        case ReasoningGymSource(task=task):
            sizes = {
                "num_train": min(data.num_train, MAX_GENERATED),
                "num_held_out": min(data.num_held_out, MAX_GENERATED),
            }
            build_source(data.model_copy(update=sizes), seed=seed)
            numbers = "{num_train:,} and {num_held_out:,}".format(**sizes)
            whole = sizes["num_train"] == data.num_train and sizes["num_held_out"] == data.num_held_out
            return f"{task}; {'all' if whole else 'the first'} {numbers} were generated now"
        case HuggingFaceSource(path=path):
            from forgeasync.data.huggingface_source import is_local

            if not is_local(data.source):
                return f"{path}; of the hub: not looked at now"
            build_source(data, seed=seed)
            return f"{path}; read now, and drawn"
