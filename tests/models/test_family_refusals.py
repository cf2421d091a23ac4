"""What is refused of a model before any weight is read: field, value found, and what would be right."""

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import sentencepiece
import torch
from omegaconf import OmegaConf
from transformers import BertGenerationTokenizer

from forgeasync.config import ModelFacts, RoutingReplay, RunConfig, resolve
from forgeasync.controller import prepare
from forgeasync.models import check_config, parse_model_facts
from forgeasync.schema import ConfigError
from tests.support.config_samples import FACTS, HF_CONFIG, MINIMAL, only
from tests.support.families import GPT_OSS_SCALING, LLAMA3_SCALING, YARN_SCALING, config_json, write_family


def raw_config(variant: str, **changes: object) -> dict[str, object]:
    """The config.json of a variant, with changes; ``...`` takes a key out."""
    own = HF_CONFIG if variant == "qwen3_moe" else config_json(variant)
    raw = own | {"vocab_size": 100} | changes
    if isinstance(text := own.get("text_config"), dict):
        raw |= {"text_config": text | {"vocab_size": 100}}
    return {name: value for name, value in raw.items() if value is not ...}


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("qwen3_moe", {"hidden_size": ...}, r"lacks hidden_size.*positive whole number"),
        ("qwen3_moe", {"num_experts": ...}, r"lacks num_experts or num_local_experts"),
        ("qwen3_moe", {"head_dim": 32.5}, r"head_dim = 32.5.*expected a positive whole number"),
        ("qwen3_moe", {"rope_theta": ...}, r"lacks rope_theta.*positive number"),
        ("qwen3_moe", {"rms_norm_eps": 0}, r"rms_norm_eps = 0.*expected a positive number"),
        ("qwen3_moe", {"tie_word_embeddings": 1}, r"tie_word_embeddings = 1.*expected true or false"),
        (
            "qwen3_moe",
            {"model_type": "mistral"},
            r"'mistral'; Qwen3MoeForCausalLM has 'qwen3_moe'",
        ),
        (
            "qwen3_moe",
            {"architectures": ["Other"]},
            r"\['Other'\]; only Qwen3For.*, Glm4Moe.*models.md#new",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, r"norm_topk_prob = False.*only True is supported"),
        ("qwen3_moe", {"norm_topk_prob": ...}, r"lacks norm_topk_prob.*must be true"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\].*only \[\] is supported"),
        ("qwen3_moe", {"rope_scaling": {"type": "yarn"}}, r"rope_scaling.type = 'yarn'.*only 'default'"),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_theta": 1.0, "rope_type": "yarn"}},
            r"rope_type = 'yarn'.*'default'",
        ),
        ("qwen3", {"use_sliding_window": True}, r"use_sliding_window = True.*only False"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types.*'sliding_attention'.*only 'full_attention'",
        ),
        ("qwen3", {"attention_bias": True}, r"attention_bias = True.*only False"),
        ("qwen3", {"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*only 'silu'"),
        ("qwen3", {"intermediate_size": ...}, r"lacks intermediate_size"),
        ("qwen3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5.*only 1.0"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config.*'fp8'.*None"),
        ("llama", {"mlp_bias": True}, r"mlp_bias = True.*only False"),
        ("llama", {"attention_bias": True}, r"attention_bias = True.*only False"),
        ("llama", {"architectures": ["LlamaModel"]}, r"\['LlamaModel'\].*LlamaForCausalLM,"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            r"rope_parameters.rope_type = 'linear'.*'default' or 'llama3'",
        ),
        (
            "llama",
            {"rope_parameters": LLAMA3_SCALING | {"factor": -1}},
            r"rope_parameters.factor = -1.*expected a positive number",
        ),
        ("qwen3_moe", {"architectures": ...}, r"architectures = None; only Qwen3ForCausalLM"),
        # Whatever no family reads, whether it is known to change what a model computes or not.
        ("llama", {"attn_logit_softcapping": 30.0}, r"attn_logit_softcapping = 30.0; this key is not"),
        ("llama", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30.0; this key is not"),
        ("llama", {"residual_multiplier": 0.22}, r"residual_multiplier = 0.22; this key is not supported"),
        ("llama", {"sliding_window": 64}, r"sliding_window = 64; this key is not supported"),
        ("llama", {"rope_interleaved": True}, r"rope_interleaved = True; only False is supported"),
        ("qwen3", {"logit_scale": 0.5}, r"logit_scale = 0.5; this key is not supported"),
        ("qwen3_moe", {"use_qk_norm": False}, r"use_qk_norm = False; this key is not supported"),
        ("deepseek_v3", {"attention_bias": True}, r"attention_bias = True; only False is supported"),
        ("kimi_k2", {"mup_base_width": 256}, r"mup_base_width = 256; this key is not supported"),
        ("glm4_moe", {"my_own": [1]}, r"my_own = \[1\]; this key is not supported"),
        (
            "llama3_rope",
            {"rope_parameters": LLAMA3_SCALING | {"attention_factor": 1.1}},
            r"rope_parameters.attention_factor = 1.1; this key is not supported",
        ),
        ("deepseek_v3", {"scoring_func": ...}, r"lacks scoring_func.*'sigmoid'.*softmax to vLLM"),
        ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func = 'softmax'.*only 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, r"topk_method = 'greedy'.*only 'noaux_tc'"),
        ("deepseek_v3", {"q_lora_rank": ...}, r"lacks q_lora_rank \(absent means 1536 to transformers"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, r"first_k_dense_replace = 3; must be less than .* = 3"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, r"num_nextn_predict_layers = -1.*expected"),
        ("glm4_moe", {"head_dim": 34}, r"rotates 17 of 34 dimensions of a head \(head_dim, partial_rotary"),
        ("llama", {"head_dim": 33}, r"rotates 33 of 33 dimensions of a head.*must be an even part"),
        ("deepseek_v3", {"qk_rope_head_dim": 31}, r"rotates 31 of 63 dimensions of a head \(qk_rope"),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}},
            r"rotates 64 of 32 dimensions",
        ),
        (
            "llama",
            {"rope_parameters": ..., "rope_scaling": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 0.5; only 1.0",
        ),
        ("gpt_oss", {"rope_parameters": GPT_OSS_SCALING | {"factor": 0.5}}, r"factor = 0.5.*at least 1"),
        ("glm4_moe", {"partial_rotary_factor": ..., "rope_parameters": {}}, r"lacks rope_theta"),
        ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave = False.*only True"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, r"rms_norm_eps = 1e-05.*only 1e-06"),
        (
            "deepseek_v3",
            {"rope_parameters": YARN_SCALING | {"mscale": 0.5}},
            r"mscale = 0.5.*mscale_all_dim = 0.8.*must be equal",
        ),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 5}, r"'sliding_attention'.*'linear_attention'"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, r"layer_types.*expected a list of 5"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 5}, r"with linear_attention only; must have"),
        (
            "qwen3_5",
            {"layer_types": ["full_attention"] * 5},
            r"with full_attention only; must have layers of",
        ),
        ("qwen3_5", {"attn_output_gate": False}, r"attn_output_gate = False.*only True"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, r"output_gate_type = 'sigmoid'.*only 'silu'"),
        ("qwen3_5", {"linear_num_key_heads": 4}, r"linear_num_key_heads = 4; must divide.* = 6"),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}},
            r"rotates 3 of 32 dimensions",
        ),
        ("qwen3_5_moe", {"num_experts": ...}, r"lacks num_experts"),
        ("gpt_oss", {"hidden_act": "gelu"}, r"hidden_act = 'gelu'; only 'silu' is supported"),
        ("gpt_oss", {"swiglu_limit": 6.0}, r"swiglu_limit = 6.0; only 7.0 is supported"),
        ("gpt_oss", {"rms_norm_eps": 1e-6}, r"rms_norm_eps = 1e-06; only 1e-05 is supported"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha = 1.5; only 1.702 is supported"),
        ("gpt_oss", {"attention_bias": False}, r"attention_bias = False; only True is supported"),
        ("gpt_oss", {"tie_word_embeddings": True}, r"tie_word_embeddings = True; only False"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, r"layer_types = .*only \['sliding_attention'"),
        ("gpt_oss", {"experts_per_token": 5}, r"experts_per_token = 5; only 3 is supported"),
        ("gpt_oss", {"sliding_window": None}, r"sliding_window = None; expected a positive whole number"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "gptq"}},
            r"quant_method = 'gptq'; only 'mxfp4'",
        ),
        ("gpt_oss", {"quantization_config": {"bits": 4}}, r"bits = 4; this key is not supported"),
        (
            "gpt_oss",
            {"rope_parameters": GPT_OSS_SCALING | {"rope_type": "linear"}},
            r"rope_parameters.rope_type = 'linear'; only 'yarn' is supported",
        ),
        (
            "gpt_oss",
            {"rope_parameters": GPT_OSS_SCALING | {"truncate": 0}},
            r"rope_parameters.truncate = 0; expected true or false",
        ),
        (
            "qwen3_5_vision",
            {"tie_word_embeddings": True},
            r"text_config of its config.json has tie_word_embeddings = False; only True",
        ),
    ],
)
def test_variants_that_the_trainer_has_not(variant: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_facts(raw_config(variant, **changes), "some/folder")
    assert re.match(rf"model.path = 'some/folder': .*{words}", only(list(caught.value.problems)))


def run_config(**changes: object) -> RunConfig:
    values = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(MINIMAL), OmegaConf.create(changes)))
    assert isinstance(values, dict)
    values["data"]["source"] = {"kind": "reasoning_gym", "task": "chain_sum"}
    return RunConfig.model_validate(values)


DENSE = parse_model_facts(raw_config("qwen3"), "dense")


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("qwen3", {"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False}),
        ("qwen3_moe", {"intermediate_size": 6144, "router_aux_loss_coef": 0.001, "rope_scaling": None}),
        ("llama", {"rope_parameters": ...}),
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
        ("kimi_k2", {"aux_loss_alpha": 0.001, "auto_map": {}, "ep_size": 1, "seq_aux": True}),
        ("deepseek_v3", {"moe_layer_freq": 1, "pretraining_tp": 1, "head_dim": 7, "some_option": None}),
        ("glm4_moe", {"torch_dtype": "bfloat16", "eos_token_id": [1, 2], "transformers_version": "4.54.0"}),
    ],
)
def test_keys_that_change_nothing_are_not_read(variant: str, found: dict[str, object]) -> None:
    """Those that published models have."""
    without = parse_model_facts(raw_config(variant), variant)
    assert parse_model_facts(raw_config(variant, **found), variant) == without


GLM = parse_model_facts(raw_config("glm4_moe"), "glm")
DEEPSEEK = parse_model_facts(raw_config("deepseek_v3"), "deepseek")
YARN = parse_model_facts(raw_config("deepseek_v3_yarn"), "yarn")
UPDATED_BIAS = {"trainer": {"router_bias": "updated"}}


def with_routing(**changes: int) -> ModelFacts:
    assert DEEPSEEK.routing is not None
    return dataclasses.replace(DEEPSEEK, routing=dataclasses.replace(DEEPSEEK.routing, **changes))


@pytest.mark.parametrize(
    ("facts", "changes", "words"),
    [
        (
            DENSE,
            {"trainer": {"parallel": {"num_procs": 2, "expert": 2}}},
            r"parallel.expert = 2: must be 1.*'qwen3' has no experts",
        ),
        (
            dataclasses.replace(DENSE, dense_hidden_size=95),
            {"trainer": {"parallel": {"num_procs": 2, "tensor": 2}}},
            r"trainer.parallel.tensor = 2.*intermediate_size = 95",
        ),
        (DENSE, UPDATED_BIAS, r"router_bias = 'updated': must be frozen.*'qwen3' have no bias"),
        (FACTS, UPDATED_BIAS, r"trainer.router_bias = 'updated'.*'qwen3_moe' have no bias"),
        (with_routing(num_groups=3), {}, r"n_group = 3.*n_routed_experts = 8"),
        (with_routing(num_limited_groups=5), {}, r"topk_group = 5.*at most n_group = 4"),
        (
            with_routing(num_limited_groups=1),
            {},
            r"topk_group = 1.*groups of 2 experts.*num_experts_per_tok = 3",
        ),
        # Biases are not rounded.
        (
            DEEPSEEK,
            {"generator": {"dtype": "bfloat16"}},
            r"generator.dtype = 'bfloat16'.*must be float32",
        ),
        (
            DEEPSEEK,
            {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}},
            r"'deepseek_v3' cannot have adapters",
        ),
        (
            dataclasses.replace(FACTS, hidden_size=66),
            {},
            r"model.path = .*hidden_size = 66; must be a multiple of 4 for its experts",
        ),
        (
            dataclasses.replace(GLM, expert_hidden_size=36),
            {"trainer": {"dtype": "bfloat16"}},
            r"moe_intermediate_size = 36; must be a multiple of 8",
        ),
        # vLLM would read cosines of positions that it does not have.
        (
            dataclasses.replace(YARN, rope_scaling=dataclasses.replace(YARN.rope_scaling, factor=2.0)),
            {"model": {"max_context_length": 81}},
            r"model.max_context_length = 81.*factor \* original_max_position_embeddings = 80",
        ),
        (GLM, {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}}, r"'glm4_moe' cannot have adapters"),
        (GLM, {"generator": {"dtype": "bfloat16"}}, r"must be float32.*'glm4_moe' have float32 biases"),
        (
            DEEPSEEK,
            {"fidelity": "bitwise", "generator": {"batch_invariant": True}},
            r"'deepseek_v3', which fidelity = 'bitwise' does not support",
        ),
    ],
)
def test_settings_that_a_model_has_no_use_for(
    facts: ModelFacts, changes: dict[str, object], words: str
) -> None:
    assert re.search(words, only(check_config(run_config(**changes), facts)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": {"share_prefixes": True}}, r"trainer.share_prefixes = True: must be false"),
        ({"trainer": {"compile": True}}, r"trainer.compile = True: must be false"),
        ({"trainer": {"parallel": {"num_procs": 2, "context": 2}}}, r"parallel.context = 2: must be 1"),
        ({"trainer": {"parallel": {"num_procs": 2, "expert": 2}}}, r"parallel.expert = 2: must be 1"),
        (
            {"trainer": {"parallel": {"num_procs": 2, "tensor": 2, "sequence": False}}},
            r"parallel.tensor = 2: must be 1",
        ),
        ({"trainer": {"dtype": "bfloat16"}}, r"generator.dtype = 'float32': must be bfloat16.*for GPUs"),
        ({"generator": {"kv_cache_gib": 1e-5}}, r"generator.kv_cache_gib = 1e-05: must be at least"),
        ({"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}}, r"lora: .*no adapters"),
        ({"fidelity": "bitwise", "generator": {"batch_invariant": True}}, r"fidelity = 'bitwise'"),
    ],
)
def test_what_recurrent_states_do_not_allow(changes: dict[str, object], words: str) -> None:
    for variant in ("qwen3_5_moe", "qwen3_5_vision"):
        facts = parse_model_facts(raw_config(variant), "hybrid")
        if "expert" in words and not facts.num_experts:
            continue
        assert re.search(words, only(check_config(run_config(**changes), facts)))


def test_prefixes_are_not_shared_if_layers_have_windows() -> None:
    facts = parse_model_facts(raw_config("gpt_oss"), "windows")
    assert check_config(run_config(), facts) == []
    assert not resolve(run_config(), facts).trainer.shares_prefixes
    for changes, words in (
        ({"trainer": {"share_prefixes": True}}, r"trainer.share_prefixes = True: must be null or false"),
        (
            {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "up_proj"]}},
            r"lora.targets = .*must not have up_proj: experts of model_type 'gpt_oss'",
        ),
        (
            {
                "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj"]},
                "trainer": {"parallel": {"num_procs": 2, "tensor": 2, "sequence": False}},
            },
            r"trainer.parallel.tensor = 2: must be 1 with lora",
        ),
    ):
        assert re.search(words, only(check_config(run_config(**changes), facts)))


def test_prefixes_are_not_shared_if_layers_have_states() -> None:
    facts = parse_model_facts(raw_config("qwen3_5_moe"), "hybrid")
    config = run_config()
    assert check_config(config, facts) == [] and config.trainer.shares_prefixes
    assert not resolve(config, facts).trainer.shares_prefixes


def test_dense_models_may_be_split_along_sequences() -> None:
    parallel = {"num_procs": 2, "tensor": 2}
    assert check_config(run_config(trainer={"parallel": parallel | {"sequence": True}}), DENSE) == []
    assert check_config(run_config(trainer={"parallel": parallel | {"sequence": False}}), DENSE) == []


def test_nothing_is_replayed_where_there_are_no_experts() -> None:
    config = run_config()
    assert config.trainer.routing_replay is RoutingReplay.ALL
    assert check_config(config, DENSE) == []
    assert resolve(config, DENSE).trainer.routing_replay is RoutingReplay.OFF
    assert resolve(config, DENSE).trainer.replay_probe_share == 0.0
    assert resolve(config, FACTS) == config


def run_of(folder: Path) -> RunConfig:
    return run_config(model={"path": str(folder), "max_context_length": 150}, trainer={"tokens_per_row": 192})


def test_untrained_layers_are_announced_and_others_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "deepseek_v3_yarn")
    (warning,) = prepare(run_of(folder)).warnings
    assert re.search(r"^4 tensors for multi-token prediction, .*not trained.*unchanged", warning)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.enorm\.weight.*no place in its config\.json"):
        prepare(run_of(folder))


def test_heads_that_engines_on_cpus_do_not_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    folder = write_family(tmp_path / "model", "llama")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"head_dim": 48}))
    with pytest.raises(ConfigError, match=r"model\.path = .* has head_dim = 48; vLLM's CPU build .*32, 64,"):
        prepare(run_of(folder))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "llama")
    config = run_of(folder)
    assert prepare(config).config.trainer.routing_replay is RoutingReplay.OFF
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = tokenizer["added_tokens"][0] | {"id": 23, "content": "<another>"}
    tokenizer["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"^model\.path = .*24 token ids.*vocab_size = 23"):
        prepare(config)


def test_a_tokenizer_that_the_package_tokenizers_does_not_run_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "llama")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["1 + 2 = 3", "4 - 5"]),
        model_writer=pieces,
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "pieces").write_bytes(pieces.getvalue())
    BertGenerationTokenizer(str(tmp_path / "pieces")).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"^model\.path = .*BertGenerationTokenizer.*tokenizer\.json"):
        prepare(run_of(folder))
