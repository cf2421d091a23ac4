"""Problems of a rehearsal: fewer of them, generated ones for data sets of the hub, and scores that differ."""

from forgeasync.algorithms import DynamicSampling
from forgeasync.config import (
    EvaluationSet,
    HuggingFaceSource,
    PythonReward,
    ReasoningGymSource,
    Rewards,
    RunConfig,
    SourceSection,
    WeightedSource,
    default_name,
    name_of,
    named_sources,
    rewards_of,
)
from forgeasync.rehearsal.draft import Draft

MADE_UP_SCORE = PythonReward(factory="forgeasync.rehearsal.made_up_score.score", name="made_up")

GENERATED = ReasoningGymSource(
    kind="reasoning_gym",
    task="chain_sum",
    options={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
)

NUM_TRAIN, NUM_EVALUATED = 256, 8

_FEWER = "enough for three steps"


def rehearse_data(draft: Draft, local_paths: frozenset[str]) -> None:
    """Change data, rewards and evaluation; ``local_paths`` are the data sets that are on this machine."""
    data = draft.config.data
    draft.set("data.num_train", min(data.num_train, NUM_TRAIN), _FEWER)
    draft.set("data.num_held_out", min(data.num_held_out, NUM_EVALUATED), _FEWER)
    num_problems = min(draft.config.evaluation.num_problems, NUM_EVALUATED)
    draft.set("evaluation.num_problems", num_problems, _FEWER)
    if data.source is not None:
        update: dict[str, object] = {
            "source": _at_hand(draft, "data.source", data.source, local_paths),
            "reward": _differing(draft, "data.reward", data.reward, data.source),
        }
    else:
        sources = enumerate(data.sources or ())
        update = {"sources": tuple(_weighted(draft, index, one, local_paths) for index, one in sources)}
    sets = tuple(
        _evaluation_set(draft, f"evaluation.sets.{index}", one, local_paths)
        for index, one in enumerate(draft.config.evaluation.sets)
    )
    config = draft.config
    draft.config = config.model_copy(
        update={
            "data": config.data.model_copy(update=update),
            "evaluation": config.evaluation.model_copy(update={"sets": sets}),
        }
    )
    _drop_filters(draft)


def _weighted(draft: Draft, index: int, one: WeightedSource, local_paths: frozenset[str]) -> WeightedSource:
    field = f"data.sources.{index}"
    configured = draft.config.data.reward if one.reward is None else one.reward
    update = {
        "source": _at_hand(draft, f"{field}.source", one.source, local_paths),
        # Under its own name: two generated sources would have the same.
        "name": one.name or default_name(one.source),
        "reward": _differing(draft, f"{field}.reward", configured, one.source),
        "num_train": None if one.num_train is None else min(one.num_train, NUM_TRAIN),
        "num_held_out": None if one.num_held_out is None else min(one.num_held_out, NUM_EVALUATED),
    }
    return one.model_copy(update=update)


def _evaluation_set(
    draft: Draft, field: str, one: EvaluationSet, local_paths: frozenset[str]
) -> EvaluationSet:
    source = _at_hand(draft, f"{field}.source", one.source, local_paths)
    num_problems = min(one.num_problems, NUM_EVALUATED)
    draft.note(f"{field}.num_problems", one.num_problems, num_problems, _FEWER)
    # A generated source's own reward would be another one.
    keep = source == one.source or draft.config.environment is not None
    reward = one.reward if keep else rewards_of(one.reward, one.source)
    if reward is not None and reward != one.reward:
        names = " + ".join(map(name_of, rewards_of(reward, one.source)))
        draft.note(f"{field}.reward", "that of the data set", names, "generated problems have another one")
    return one.model_copy(update={"source": source, "num_problems": num_problems, "reward": reward})


def _at_hand(draft: Draft, field: str, source: SourceSection, local_paths: frozenset[str]) -> SourceSection:
    """Return the source, or a generated one for a data set of the hub."""
    if not isinstance(source, HuggingFaceSource) or source.path in local_paths:
        return source
    draft.note(
        field,
        source.path,
        GENERATED.task,
        "data sets of the hub are not downloaded for a rehearsal",
        f"the data set {source.path} and its fields",
    )
    return GENERATED


def _differing(draft: Draft, field: str, configured: Rewards | None, source: SourceSection) -> Rewards | None:
    """Return rewards that tell the responses of a random model apart; the user's own stay as they are."""
    rewards = rewards_of(configured, source)
    if draft.config.environment is not None or _has_own_code(rewards):
        return configured
    draft.note(
        field,
        " + ".join(map(name_of, rewards)),
        " + ".join(map(name_of, (*rewards, MADE_UP_SCORE))),
        "a random model is always wrong, and equal rewards give no gradient",
        "whether rewards rise",
    )
    return (*rewards, MADE_UP_SCORE)


def _has_own_code(rewards: tuple[object, ...]) -> bool:
    return any(isinstance(reward, PythonReward) and reward != MADE_UP_SCORE for reward in rewards)


def scores_are_own(config: RunConfig) -> bool:
    """Whether the user's own code alone scores some of the responses that are trained on."""
    return config.environment is not None or any(
        _has_own_code(source.rewards) for source in named_sources(config.data)
    )


def _drop_filters(draft: Draft) -> None:
    """Leave out what would drop every group of a random model, so that the run would have no batch."""
    filters = draft.config.algorithm.filters
    if not scores_are_own(draft.config):
        return
    draft.set(
        "algorithm.filters",
        tuple(one for one in filters if not isinstance(one, DynamicSampling)),
        "own scores of a random model's responses may all be equal",
        "the filter dynamic_sampling",
    )
