"""Builds the model of a run with a ``warmup`` section: random weights, then a short supervised training.

    python -m apps.warmup --config configs/tiny_moe_cpu.yaml [key.path=value ...]

Writes ``model.path`` as a Hugging Face folder for vLLM, TorchTitan and transformers. Training maximizes the
likelihood of worked examples. As in the RL run, it uses packed rows and ``trainer.parallel.num_procs``
processes. Each process holds the whole model, because gathering shards of such a small model in every layer
would take a fifth of a step.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3_5MoeTextConfig, Qwen3MoeConfig

from forgeasync.algorithms import Loss, Supervised
from forgeasync.config import (
    BadStepsSection,
    ModelFacts,
    ParallelSection,
    PlainCalls,
    PythonTool,
    RunConfig,
    WarmupSection,
)
from forgeasync.controller import run_app, run_main
from forgeasync.environments import (
    Example,
    TaskOrder,
    build_source,
    mixed_examples,
    tool_example,
    worked_example,
)
from forgeasync.models import build_tokenizer, read_model_facts, save_tokenizer
from forgeasync.observability import exit_with
from forgeasync.rollouts import PromptEncoder, Task, teacher_prompt
from forgeasync.runtime import ProcessManager, start_trainer
from forgeasync.schema import ConfigError, Problem
from forgeasync.trainer import TrainerSetup, TrainingSequence, pack_rows

REPORT_EVERY = 20
"""Steps between two progress lines."""


def main(config: RunConfig) -> None:
    """Build ``model.path`` unless it exists."""
    if config.warmup is None:
        raise ConfigError([Problem(field="warmup", remedy="this config does not say how to build its model")])
    if Path(config.model.path).exists():
        print(f"{config.model.path} exists already")
        return
    run_main(warm_up(config, config.warmup))


async def warm_up(config: RunConfig, warmup: WarmupSection) -> None:
    """Train on worked examples and write the model's folder.

    Each step draws tasks, packs worked examples of them into rows, and waits for the optimizer step. Nothing
    runs concurrently.
    """
    target = Path(config.model.path)
    num_examples = warmup.num_steps * warmup.examples_per_step
    data = config.data.model_copy(update={"num_train": num_examples})
    tasks = build_source(data, seed=warmup.seed).train
    calls, shown = calls_of(config), shown_prompt(config)
    tokenizer = build_tokenizer(text for task in tasks for text in texts_of(task, calls, shown))
    prompts = PromptEncoder.from_section(tokenizer, config.data)
    num_procs = config.trainer.parallel.num_procs
    parallel = ParallelSection(num_procs=num_procs, data_replicate=num_procs)
    # The warm-up has no snapshots to roll back to, and no check for spikes.
    changes = {"optimizer": warmup.optimizer, "parallel": parallel, "bad_steps": BadStepsSection()}
    section = config.trainer.model_copy(update=changes)

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "initial"
        facts = write_initial_folder(source, warmup, tokenizer, config.model.max_context_length)
        manager = ProcessManager(Path(scratch) / "logs")
        try:
            setup = TrainerSetup(
                section=section,
                facts=facts,
                temperature=config.sampling.temperature,
                loss=Loss(objective=Supervised()),
                seed=warmup.seed,
                checkpoint=None,
            )
            trainer = await start_trainer(manager, setup, config.timeouts)
            rng = random.Random(warmup.seed)
            order = TaskOrder(tasks, seed=warmup.seed)
            for step in range(1, warmup.num_steps + 1):
                of_step = [order.next() for _ in range(warmup.examples_per_step)]
                rows = pack_rows(
                    [
                        supervised_sequence(example, prompts, tokenizer)
                        for example in mixed_examples(of_step, warmup, rng, calls=calls, shown=shown)
                    ],
                    tokens_per_row=section.tokens_per_row,
                    num_ranks=trainer.num_data_ranks,
                )
                result = await trainer.train_rows(rows, step=step)
                if step % REPORT_EVERY == 0 or step == warmup.num_steps:
                    print(f"warm-up step {step}/{warmup.num_steps}  loss {result.metrics['loss']:.4f}")
            trained = Path(scratch) / "trained"
            await trainer.save_hf(trained, source=source)
        finally:
            await manager.close()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(trained, target)
    print(f"wrote {target}")


def supervised_sequence(
    example: Example, prompts: PromptEncoder, tokenizer: PreTrainedTokenizerFast
) -> TrainingSequence:
    """Return a training sequence for an example.

    The model's turns and the end of the last one are trained on; the prompt and the output of tools are not.
    """
    response_ids: list[int] = []
    is_sampled: list[bool] = []
    for piece in example.pieces:
        ids = tokenizer(piece.text, add_special_tokens=False)["input_ids"]
        response_ids += ids
        is_sampled += [not piece.is_given] * len(ids)
    response_ids.append(tokenizer.eos_token_id)
    is_sampled.append(True)
    return TrainingSequence(
        prompt_ids_P=prompts.encode(example.task.prompt),
        response_ids_T=np.asarray(response_ids, np.int32),
        behavior_logprobs_T=np.zeros(len(response_ids), np.float32),
        ages_T=np.zeros(len(response_ids), np.int32),
        advantage=1.0,
        weight=example.weight,
        is_sampled_T=np.asarray(is_sampled),
    )


def texts_of(task: Task, calls: PlainCalls | None, shown: str | None = None) -> list[str]:
    """Return the texts of a task that the tokenizer is trained on."""
    if shown is not None:
        worked = worked_example(task)
        return [task.prompt, worked, teacher_prompt(shown, task, sibling=worked)]
    if calls is None:
        return [task.prompt, worked_example(task)]
    return [task.prompt, *(piece.text for piece in tool_example(task, calls)), calls.error_text or ""]


def calls_of(config: RunConfig) -> PlainCalls | None:
    """Return the form in which examples call a tool; None without an environment.

    Raises:
        ConfigError: the warm-up has no examples for the run's environment.
    """
    match config.environment:
        case None:
            return None
        case PythonTool(plain_calls=PlainCalls() as calls):
            return calls
        case _:
            remedy = "the warm-up has examples for kind: python_tool with plain_calls, and for no environment"
            raise ConfigError([Problem(field="environment", remedy=remedy)])


def shown_prompt(config: RunConfig) -> str | None:
    """Return the prompt of the teacher that shows a sibling and no feedback, if the run has one."""
    return next((one.prompt for one in config.teachers.values() if one.shows_only_sibling), None)


def write_initial_folder(
    folder: Path, warmup: WarmupSection, tokenizer: PreTrainedTokenizerFast, max_context_length: int
) -> ModelFacts:
    """Write config and tokenizer of a model without weights; return its shape."""
    shape = warmup.shape
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.expert_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": max_context_length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    config: PreTrainedConfig
    if shape.full_attention_interval is None:
        config = Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            intermediate_size=shape.expert_hidden_size,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            **sizes,
        )
    else:
        sizes["full_attention_interval"] = shape.full_attention_interval
        config = Qwen3_5MoeTextConfig(
            architectures=["Qwen3_5MoeForCausalLM"],
            shared_expert_intermediate_size=shape.expert_hidden_size,
            linear_num_key_heads=shape.num_heads,
            linear_num_value_heads=2 * shape.num_heads,
            linear_key_head_dim=shape.head_dim,
            linear_value_head_dim=shape.head_dim,
            **sizes,
        )
    config.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    # Lists no tensors, such as those of multi-token prediction, which would be copied.
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    save_tokenizer(tokenizer, folder)
    return read_model_facts(str(folder))


if __name__ == "__main__":
    exit_with(lambda: run_app(main, description="Build a tiny model from worked examples."))
