"""Computes the memory of the engines of teachers."""

from collections.abc import Iterator

from forgeasync.config import ModelFacts, RunConfig
from forgeasync.models import BYTES_PER_ELEMENT, read_model_facts
from forgeasync.planning.memory.generator import engine_memory, generator_memory
from forgeasync.planning.memory.items import Machine, MemoryItem
from forgeasync.planning.memory.parameters import count_parameters, generator_parameters_per_rank
from forgeasync.schema import ConfigError, Problem


def teacher_memory(config: RunConfig, machine: Machine) -> Iterator[tuple[str, list[MemoryItem]]]:
    """Items of one engine rank of each teacher that the run starts engines for, with the teacher's name.

    Raises:
        ConfigError: a teacher's folder has no config.json that can be read.
    """
    for name, facts, own in _engines(config):
        counts, section = count_parameters(facts), f"teachers.{name}.engine"
        if config.teachers[name].moves:
            yield name, generator_memory(own, facts, counts, machine, section=section)
        else:
            yield name, engine_memory(own, facts, counts, section=section)


def all_teacher_bytes(config: RunConfig) -> int:
    """Bytes of weights and KV caches of all engines of all teachers; raises as ``teacher_memory``."""
    total = 0
    for name, facts, own in _engines(config):
        engine = own.generator
        weights = generator_parameters_per_rank(own, facts, count_parameters(facts))
        each = weights * BYTES_PER_ELEMENT[engine.dtype] + round(engine.kv_cache_gib * 2**30)
        total += config.teachers[name].num_engines * engine.tensor_parallel * each
    return total


def teacher_facts(config: RunConfig, name: str) -> ModelFacts:
    """Read the shape of a teacher that the run starts engines for.

    Raises:
        ConfigError: its folder has no config.json that can be read.
    """
    path = config.teachers[name].path(config.model.path)
    try:
        return read_model_facts(path)
    except ConfigError as error:
        field = f"teachers.{name}.model_path"
        raise ConfigError(
            [Problem(field=field, value=path, remedy=problem.remedy) for problem in error.problems]
        ) from error


def _engines(config: RunConfig) -> Iterator[tuple[str, ModelFacts, RunConfig]]:
    """Each teacher with engines: its name, its shape, and the config as if it were the generator."""
    for name, teacher in config.teachers.items():
        if not teacher.num_engines:
            continue
        lora = config.lora if teacher.moves else None
        yield (
            name,
            teacher_facts(config, name),
            config.model_copy(update={"generator": teacher.engine, "lora": lora}),
        )
