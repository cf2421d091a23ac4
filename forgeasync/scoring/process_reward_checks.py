"""What of a process reward model's folder can be checked without loading its weights."""

import json
from pathlib import Path

from forgeasync.config import ProcessRewardModel
from forgeasync.rollouts import Task
from forgeasync.schema import Problem
from forgeasync.scoring.process_reward_tokens import StepTokenizer, TagRefused, TemplateRefused

ARCHITECTURES = ("Qwen2ForProcessRewardModel", "Qwen2ForRewardModel")
"""Architectures that vLLM's task ``token_classify`` serves with a score for every token."""


def problem_of_model(section: ProcessRewardModel, task: Task | None, field: str) -> Problem | None:
    """What is wrong with the model at ``field`` of the config; ``task`` is one that it will score."""
    folder = Path(section.model_path)

    def of_folder(remedy: str) -> Problem:
        return Problem(field=f"{field}.model_path", value=section.model_path, remedy=remedy)

    if not folder.is_dir():
        return of_folder("must be a Hugging Face folder; there is none")
    try:
        config = json.loads((folder / "config.json").read_bytes())
        architectures, positions = config["architectures"], config["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return of_folder(f"must have a config.json of a model: {type(error).__name__}: {error}")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        return of_folder(f"must be a model of {' or '.join(ARCHITECTURES)}, not {architectures!r}"[:300])
    if not any(folder.glob("*.safetensors")):
        return of_folder("must have its weights as .safetensors; there are none")
    context = section.max_context_length
    if isinstance(positions, int) and context > positions:
        remedy = f"must be at most {positions}, the max_position_embeddings of {section.model_path}"
        return Problem(field=f"{field}.max_context_length", value=context, remedy=remedy)
    return _problem_of_tokenizer(section, task, field)


def _problem_of_tokenizer(section: ProcessRewardModel, task: Task | None, field: str) -> Problem | None:
    try:
        tokenizer = StepTokenizer(section)
    except TagRefused as error:
        return Problem(field=f"{field}.step_tag", value=section.step_tag, remedy=str(error))
    except TemplateRefused as error:
        return Problem(field=f"{field}.chat_template", value=section.chat_template, remedy=str(error))
    except (OSError, ValueError) as error:
        remedy = f"must have a tokenizer (tokenizer.json): {error}"
        return Problem(field=f"{field}.model_path", value=section.model_path, remedy=remedy[:500])
    prompt, what = ("1", "a task") if task is None else (task.prompt, f"task {task.task_id}")
    num_tokens = len(tokenizer.tagged(prompt, ["1"]).ids)
    if num_tokens <= section.max_context_length:
        return None
    return Problem(
        field=f"{field}.max_context_length",
        value=section.max_context_length,
        remedy=f"must be at least {num_tokens}, which {what} takes with the shortest step",
    )
