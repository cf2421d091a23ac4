"""Rules on teachers and on the terms of the loss that need them."""

from collections.abc import Iterator

from forgeasync.algorithms import IdsOf, NoObjective, TopkKl
from forgeasync.config.data import named_sources
from forgeasync.config.launcher import LocalLauncher
from forgeasync.config.process_reward_model import ProcessRewardModel
from forgeasync.config.run import RunConfig
from forgeasync.config.teacher_source import AveragedPolicy
from forgeasync.schema import Problem


def check_teachers(config: RunConfig) -> Iterator[Problem]:
    """Find terms without teachers, teachers without terms, and sources without exactly one teacher."""
    algorithm, teachers = config.algorithm, config.teachers
    if isinstance(algorithm.objective, NoObjective) and not algorithm.terms:
        remedy = "leaves nothing to train on: algorithm.terms is empty. List a term, or use another objective"
        yield Problem(field="algorithm.objective.kind", value="none", remedy=remedy)
    if algorithm.needs_teacher and not teachers:
        kinds = ", ".join(term.kind for term in algorithm.terms if term.needs_teacher)
        remedy = f"algorithm.terms has {kinds}, which needs one; must have at least one teacher"
        yield Problem(field="teachers", value={}, remedy=remedy)
    if teachers and not algorithm.needs_teacher:
        remedy = "no term of algorithm.terms uses them; list sampled_reverse_kl or topk_kl, or leave them out"
        yield Problem(field="teachers", value=sorted(teachers), remedy=remedy)
    if teachers and not isinstance(config.launcher, LocalLauncher):
        remedy = "must be 'local' with teachers: they run on the controller's machine"
        yield Problem(field="launcher.kind", value=config.launcher.kind, remedy=remedy)
    for name, teacher in teachers.items():
        if teacher.prompt is not None and config.environment is not None:
            remedy = "must be null with an environment, whose conversations have no single prompt"
            yield Problem(field=f"teachers.{name}.prompt", value=teacher.prompt, remedy=remedy)
        if teacher.shows_sibling and algorithm.group_size < 2:
            remedy = f"must be at least 2: teachers.{name}.prompt has $sibling, another response of the group"
            yield Problem(field="algorithm.group_size", value=algorithm.group_size, remedy=remedy)
        if teacher.shows_feedback:
            yield from _check_words(config, name)
        if teacher.moves:
            yield from _check_moving(config, name)
    alphas = {one.source.ema for one in teachers.values() if isinstance(one.source, AveragedPolicy)}
    if len(alphas) > 1:
        remedy = "must be the same for every teacher with ema: the trainer keeps one average"
        yield Problem(field="teachers", value=sorted(alphas), remedy=remedy)
    showing = sorted({one.prompt for one in teachers.values() if one.prompt and one.shows_only_sibling})
    if config.warmup is not None and config.warmup.shown_per_step and len(showing) != 1:
        found = " and ".join(map(repr, showing)) or "none"
        remedy = f"must be 0, or one prompt of a teacher must have $sibling and no $feedback; found {found}"
        yield Problem(field="warmup.shown_per_step", value=config.warmup.shown_per_step, remedy=remedy)
    yield from _check_student_ids(config)
    yield from _check_sources(config)


def _check_student_ids(config: RunConfig) -> Iterator[Problem]:
    """Find what keeps the policy's own likely ids from being known, or from being asked about."""
    field, sampling = "algorithm.terms", config.sampling
    terms = [term for term in config.algorithm.terms if isinstance(term, TopkKl)]
    if all(term.ids is IdsOf.TEACHER for term in terms):
        return
    if len({term.ids for term in terms}) > 1:
        remedy = "every topk_kl must have the same: a teacher is asked about one list of ids at each token"
        yield Problem(field=f"{field}: ids", value=[term.ids.value for term in terms], remedy=remedy)
    if sampling.top_k is None:
        remedy = "must be set for ids: student, which are those that top_k keeps"
        yield Problem(field="sampling.top_k", value=None, remedy=remedy)
    elif wrong := [term.top_k for term in terms if term.top_k != sampling.top_k]:
        remedy = f"must be sampling.top_k = {sampling.top_k} with ids: student: kept sets have no order"
        yield Problem(field=f"{field}: top_k", value=wrong[0], remedy=remedy)
    if not config.trainer.keep_sampling_mask:
        remedy = "must be true for ids: student, which are recorded with the kept sets"
        yield Problem(field="trainer.keep_sampling_mask", value=False, remedy=remedy)
    for name, teacher in config.teachers.items():
        if teacher.endpoint is not None:
            remedy = "must be null with ids: student: /v1/completions has no field for given ids"
            yield Problem(field=f"teachers.{name}.endpoint", value=teacher.endpoint.base_url, remedy=remedy)


def _check_words(config: RunConfig, name: str) -> Iterator[Problem]:
    """Find sources whose rewards never say anything."""
    teacher = config.teachers[name]
    for source in named_sources(config.data):
        is_seen = not teacher.sources or source.name in teacher.sources
        if is_seen and all(isinstance(reward, ProcessRewardModel) for reward in source.rewards):
            remedy = (
                f"has $feedback, and the reward of {source.name!r} gives numbers only; must be without "
                "it, or the source needs another reward"
            )
            yield Problem(field=f"teachers.{name}.prompt", value=teacher.prompt, remedy=remedy)


def _check_moving(config: RunConfig, name: str) -> Iterator[Problem]:
    """Find what keeps the policy's versions from a teacher's engines."""
    teacher = config.teachers[name]
    if config.lora is not None and teacher.model_path not in (None, config.model.path):
        remedy = f"must be null with lora: adapters are those of model.path = {config.model.path!r}"
        yield Problem(field=f"teachers.{name}.model_path", value=teacher.model_path, remedy=remedy)
    if teacher.engine.dtype is not config.generator.dtype:
        yield Problem(
            field=f"teachers.{name}.engine.dtype",
            value=teacher.engine.dtype.value,
            remedy=f"must be generator.dtype = {config.generator.dtype.value!r}: it takes the versions that "
            "are published for generators",
        )


def _check_sources(config: RunConfig) -> Iterator[Problem]:
    known = [source.name for source in named_sources(config.data)]
    teachers_of: dict[str, list[str]] = {name: [] for name in known}
    for teacher, section in config.teachers.items():
        for name in section.sources or known:
            if name not in teachers_of:
                yield Problem(
                    field=f"teachers.{teacher}.sources",
                    value=name,
                    remedy=f"is no source of data; must be of {', '.join(map(repr, known))}",
                )
            else:
                teachers_of[name].append(teacher)
    for name, teachers in teachers_of.items():
        if config.teachers and len(teachers) != 1:
            found = " and ".join(teachers) or "no teacher"
            yield Problem(
                field="teachers",
                value=sorted(config.teachers),
                remedy=f"source {name!r} has {found}; must have exactly one (teachers.<name>.sources)",
            )
