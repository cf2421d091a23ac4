"""Rules between numbers that are each in their range, but together overflow or keep a run from learning."""

from collections.abc import Iterator

from forgeasync.config.data_schema import MAX_TASKS
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.problems import Problem
from forgeasync.config.schema import OptimizerSection, RunConfig
from forgeasync.config.section import MAX_SEED


def check_numbers(config: RunConfig) -> Iterator[Problem]:
    """Seeds, schedules, weight decay and what a warm-up has to hold in memory."""
    last_replica = config.generator.num_replicas - 1
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
            remedy="must be 0 or at least 2: of one kept token the probability is always 1, so that no "
            "gradient comes of it",
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


def check_nucleus(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """The most likely token has at least the mean probability."""
    top_p = config.sampling.top_p
    if facts.vocab_size > 1 and top_p * facts.vocab_size <= 1.0:
        yield Problem(
            field="sampling.top_p",
            value=top_p,
            remedy=f"must be greater than 1 / {facts.vocab_size} (the vocabulary): otherwise only the most "
            "likely token is ever kept, its probability is 1, and no gradient comes of it",
        )


def _check_optimizer(
    field: str, optimizer: OptimizerSection, steps_field: str, num_steps: int
) -> Iterator[Problem]:
    if optimizer.learning_rate * optimizer.weight_decay >= 1.0:
        yield Problem(
            field=f"{field}.weight_decay",
            value=optimizer.weight_decay,
            remedy=f"times learning_rate = {optimizer.learning_rate:g} must be less than 1: a step would "
            "take all of every parameter off",
        )
    decay = optimizer.decay_steps
    if decay is None:
        return
    if decay[0] >= decay[1]:
        yield Problem(
            field=f"{field}.decay_steps",
            value=list(decay),
            remedy="must be two steps, the first before the second",
        )
    elif decay[1] < num_steps:
        yield Problem(
            field=f"{field}.decay_steps",
            value=list(decay),
            remedy=f"must end at {steps_field} = {num_steps} or later: the learning rate is 0 from the "
            "second step on, and nothing would be learned",
        )
