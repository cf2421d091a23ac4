"""A model of random weights, the config of a run on it, and the run: half a minute on two CPU cores."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forgeasync.config import (
    AlgorithmSection,
    DataSection,
    EvaluationSection,
    GeneratorSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PayloadSection,
    ReasoningGymSource,
    RunConfig,
    SamplingSection,
    TrainerSection,
)
from forgeasync.models import build_tokenizer, save_tokenizer
from forgeasync.schema import Section
from forgeasync.training import Overrides, TrainResult, train

_TEXTS = (
    "State the final answer to the following arithmetic problem: 0123456789 + 4 - 5 =",
    "0123456789+1=2;3-4=5#6",
)


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tie: bool = False,
    scale: float = 1.0,
    num_experts: int = 4,
    top_k: int = 2,
) -> Path:
    """Write a Qwen3-MoE of two layers and 64 dimensions as a Hugging Face folder, and return the folder.

    The weights are random, in float32. The tokenizer has a token for each character of sums such as ``1+2=``.

    Args:
        seed: What the weights are drawn from.
        tie: Whether the output layer is the embedding.
        scale: Factor on the standard deviation 0.02 of the weights; larger ones make outputs less uniform.
        num_experts: Experts of each layer.
        top_k: Experts that each token takes.
    """
    tokenizer = build_tokenizer(_TEXTS)
    # transformers does not declare head_dim, which every model of this class has.
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=160,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Anew, since transformers leaves the padding token's embedding at zero.
                parameter.normal_(std=0.02 * scale)
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    return folder


def tiny_config(model: Path) -> RunConfig:
    """Return the config of a run of three steps on sums: two trainer processes and one generator.

    ``model`` is a folder that ``write_tiny_model`` has written.
    """
    return RunConfig(
        name="tiny",
        max_steps=3,
        model=ModelSection(path=str(model), max_context_length=160),
        data=DataSection(
            source=ReasoningGymSource(
                kind="reasoning_gym",
                task="chain_sum",
                options={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
                answer_prefix="#",
            ),
            num_train=64,
            num_held_out=8,
        ),
        sampling=SamplingSection(max_response_tokens=24),
        generator=GeneratorSection(max_num_seqs=32, max_num_batched_tokens=512, kv_cache_gib=0.05),
        trainer=TrainerSection(
            parallel=ParallelSection(num_procs=2, expert=2),
            tokens_per_row=256,
            optimizer=OptimizerSection(learning_rate=1e-3),
        ),
        algorithm=AlgorithmSection(group_size=4, groups_per_step=4),
        payload=PayloadSection(capacity_gib=0.02),
        evaluation=EvaluationSection(num_problems=8),
    )


def train_three_steps(
    folder: Path,
    overrides: Overrides = (),
    *,
    reward: Callable[..., object] | Section | None = None,
    environment: Callable[..., object] | Section | None = None,
    objective: Callable[..., object] | Section | None = None,
    advantage: Callable[..., object] | Section | None = None,
) -> TrainResult:
    """Train a tiny random model for three steps, with every process of a run. It takes half a minute.

    ``folder`` takes the model and the run. The other arguments are those of ``fa.train``.

        result = train_three_steps(tmp_path, environment=TryAgain)
        assert result.metrics[-1]["step"] == 3

    Raises:
        ConfigError: an override or what you gave is wrong.
        TrainingFailed: the run ended before its last step; your code may have raised.
    """
    config = tiny_config(write_tiny_model(folder / "model"))
    return train(
        config.model_copy(update={"run_dir": str(folder / "run")}),
        overrides,
        reward=reward,
        environment=environment,
        objective=objective,
        advantage=advantage,
    )
