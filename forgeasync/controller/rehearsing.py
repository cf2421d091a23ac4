"""Rehearses a run: its own topology with a tiny model, three steps, then a table of what that has shown."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from forgeasync.config import HuggingFaceSource, RunConfig, is_served, named_sets, named_sources, resolve
from forgeasync.controller.cli import REPORT_COLUMNS
from forgeasync.controller.preparation import check
from forgeasync.environments import build_source
from forgeasync.models import character_tokenizer, model_config_file
from forgeasync.observability import RUNS_FOLDER, RunDir
from forgeasync.planning import available_host_bytes
from forgeasync.rehearsal import (
    Capacity,
    Draft,
    Stage,
    Verdict,
    changes_table,
    findings,
    findings_table,
    rehearse_data,
    rehearsed,
    write_model,
)
from forgeasync.rollouts import PromptEncoder
from forgeasync.schema import ConfigError, Problem


class RehearsalFailed(RuntimeError):
    """A part of the rehearsed run did not do what it should; the message names the parts."""


def rehearse(config: RunConfig, run: Callable[[RunConfig], None], *, on_hosts: bool) -> None:
    """Rehearse ``config`` by ``run``, on this machine or, with ``on_hosts``, where its launcher says.

    Raises:
        ConfigError: the config has problems, or this machine is too small for its parallel degrees.
        RehearsalFailed: the run ended by itself, and something in it did not work.
    """
    folder = rehearsal_folder(config, datetime.now())
    if is_served(config):
        remedy = "nobody comes to a rehearsal; rehearse the same sections with other data and environment"
        raise ConfigError([Problem(field="data.source.kind", value="served", remedy=remedy)])
    # The run's own folders may be in use: a rehearsal has others.
    elsewhere = {"run_dir": str(folder), "checkpoint": config.checkpoint.model_copy(update={"folder": None})}
    facts = check(config.model_copy(update=elsewhere))
    config = resolve(config, facts)
    raw = json.loads(model_config_file(config.model.path).read_text(encoding="utf-8"))
    stage = _look_around(config, folder, on_hosts=on_hosts)
    rehearsal = rehearsed(config, facts, stage)
    console = Console(width=REPORT_COLUMNS, markup=False)
    console.print(changes_table(config.name, rehearsal.changes))
    write_model(
        Path(rehearsal.config.model.path),
        raw,
        rehearsal.facts,
        chat_template=config.data.chat_template,
        template_arguments=config.data.template_arguments or (),
        seed=config.seed,
    )
    run(rehearsal.config)
    found = findings(rehearsal.config, rehearsal.facts, RunDir(path=folder))
    console.print(findings_table(config.name, found, rehearsal.changes))
    if failed := [finding for finding in found if finding.verdict is Verdict.FAILED]:
        parts = "; ".join(f"{finding.part} ({finding.measured})" for finding in failed)
        raise RehearsalFailed(f"the rehearsal ran to its end, but not all of it worked: {parts}")


def rehearsal_folder(config: RunConfig, now: datetime) -> Path:
    """Return the run folder of a rehearsal, beside that of the run itself."""
    base = RUNS_FOLDER / config.name if config.run_dir is None else Path(config.run_dir)
    return base.with_name(f"{base.name}-rehearsal-{now:%Y%m%d-%H%M%S}")


def _look_around(config: RunConfig, folder: Path, *, on_hosts: bool) -> Stage:
    local_paths = frozenset(
        source.source.path
        for source in (*named_sources(config.data), *named_sets(config.evaluation))
        if isinstance(source.source, HuggingFaceSource) and _is_local(source.source)
    )
    num_gpus = torch.cuda.device_count()
    return Stage(
        folder=folder,
        capacity=None if on_hosts else Capacity(memory_bytes=available_host_bytes(), num_gpus=num_gpus),
        num_gpus=num_gpus,
        local_paths=local_paths,
        longest_prompt=_longest_prompt(config, local_paths),
    )


def _is_local(source: HuggingFaceSource) -> bool:
    # Imported here: it takes a second, and few runs read data sets.
    from forgeasync.environments import is_local

    return is_local(source)


def _longest_prompt(config: RunConfig, local_paths: frozenset[str]) -> int:
    """Measure the prompts of the rehearsal's own problems."""
    draft = Draft(config)
    rehearse_data(draft, local_paths)
    data, sets = draft.config.data, named_sets(draft.config.evaluation)
    tokenizer = character_tokenizer(
        chat_template=data.chat_template, template_arguments=data.template_arguments or ()
    )
    prompts = PromptEncoder.of_section(tokenizer, data)
    problems = build_source(data, seed=config.seed, sets=sets)
    tasks = [*problems.train, *problems.held_out, *(task for one in problems.sets.values() for task in one)]
    return max(len(prompts.encode(task.prompt)) for task in tasks)
