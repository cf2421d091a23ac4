"""What is refused before anything starts: one table of overrides, the field that is named, and the remedy."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgeasync.config import (
    AgeOf,
    LocalLauncher,
    ModelFacts,
    RunConfig,
    check_gpus,
    check_without_model,
    load_config,
    num_gpus_needed,
)
from forgeasync.models import check_config, parse_model_facts, read_model_facts
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, FACTS, MINIMAL, WARMUP, only

SHORT = {
    "$WARMUP": WARMUP,
    "$LORA": "lora={rank: 4, alpha: 8.0, targets: [q_proj]}",
    "$OWN": "environment={kind: python, factory: tests.support.environments.TryAgain}",
    "$TOPK": "algorithm.terms=[{kind: topk_kl, top_k: 5}]",
    "$CHAT": "data.chat_template=true",
    "$CODE": "kind: python, factory: a.b",
    "$PRM": "kind: process_reward_model, model_path: m",
    "$SET": "num_problems: 3, source: {kind: python, factory: a.b}",
    "$TOOL": "environment={kind: python_tool",
    "$MCP": "environment={kind: mcp, servers:",
    "$STDIO": "kind: stdio, command: [x]",
    "$SUMS": "{kind: reasoning_gym, task: chain_sum}",
    "$SERVED": "data={source: {kind: served}, num_train: 1, num_held_out: 0}; environment={kind: served}; "
    "algorithm={advantage: reinforce_pp, group_size: 1, groups_per_step: 2}; buffer.stale_groups=drop; "
    "evaluation={num_problems: 0}; episodes.num_workers=1",
    "$JUDGED": "serving.score_from=[feedback, judge]",
    "$CODING": "data.source={kind: coding, path: t}; data.chat_template=true; environment={kind: coding}",
    "$REMOTE": "environment={kind: remote, url: 'http://127.0.0.1:9000'",
}
"""What many rows have."""

REFUSED = """
# Lengths, batches and meshes.
sampling.max_response_tokens=64 => sampling.max_response_tokens = 64 | max_context_length = 64
trainer.tokens_per_row=63 => trainer.tokens_per_row = 63 | model.max_context_length = 64
model.max_context_length=257; trainer.tokens_per_row=512
    => model.max_context_length = 257 | max_position_embeddings = 256
trainer.parallel={num_procs: 16} => algorithm.groups_per_step = 2 | at least 16, one for each data-parallel
trainer.parallel={num_procs: 3, tensor: 2, expert: 2} => trainer.parallel.num_procs = 3 | tensor * context = 2
trainer.parallel={num_procs: 3, context: 3} => trainer.parallel.context = 3 | tensor * context = 3 must divide
trainer.parallel={expert: 2} => trainer.parallel.expert = 2 | data_shard * tensor * context = 1
trainer.parallel={num_procs: 6, expert: 3} => trainer.parallel.expert = 3 | num_experts = 8
# Experts are laid over the ranks of one replica: 8 processes in 2 replicas leave 4.
trainer.parallel={num_procs: 8, data_replicate: 2, expert: 8}
    => trainer.parallel.expert = 8 | = 4, the ranks that experts
trainer.parallel={num_procs: 2, tensor: 2} => trainer.parallel.sequence = True | false if it is 1; it is 1
trainer.parallel={num_procs: 2, tensor: 2, expert: 2, sequence: false}
    => trainer.parallel.sequence = False | must be true
trainer.parallel={num_procs: 4, tensor: 4, expert: 4} => trainer.parallel.tensor = 4 | num_key_value_heads = 2
generator.tensor_parallel=8 => generator.tensor_parallel = 8 | num_attention_heads = 4
generator.max_num_batched_tokens=32 => generator.max_num_batched_tokens = 32 | max_num_seqs = 64
generator.kv_cache_gib=1e-5 => generator.kv_cache_gib = 1e-05 | max_context_length = 64
payload.capacity_gib=1e-6 => payload.capacity_gib = 1e-06 | groups at their largest
payload.capacity_gib=1e-6; sampling.top_p=0.9 => payload.capacity_gib = 1e-06 | sampling.top_k > 0 would bound
sampling.top_k=101 => sampling.top_k = 101 | 100 tokens
# The trainer and its adapters.
trainer.bad_steps.on_nan=rollback; trainer.recovery.snapshot_every_steps=2
    => trainer.bad_steps.on_nan = 'rollback' | snapshot_every_steps = 1, which is 2
trainer.bad_steps.on_spike=rollback; trainer.recovery.snapshot_every_steps=null
    => trainer.bad_steps.on_spike = 'rollback' | snapshot_every_steps = 1, which is null
trainer.optimizer.decay_steps=[9,9] => trainer.optimizer.decay_steps = [9, 9] | the first less than the second
trainer.cpu_offload=true; $LORA => trainer.cpu_offload = True | must be false with a lora section
$LORA; lora.targets=[q_proj, gate] => lora.targets = 'gate' | must be among q_proj, k_proj
$LORA; lora.targets=[q_proj, q_proj] => lora.targets = 'q_proj' | listed once
lora={rank: 3, alpha: 4, targets: [q_proj, up_proj]}; trainer.parallel={num_procs: 32, expert: 8}
algorithm.groups_per_step=8
    => lora.rank = 3 | multiple of 4
# The buffer, weights and scorers.
buffer.max_groups=1 => buffer.max_groups = 1 | groups_per_step = 2, one batch
weights.interruption=cancel_stale
    => weights.interruption = 'cancel_stale' | needs buffer.stale_groups = 'drop'
weights.interruption=cancel_stale; buffer={stale_groups: drop, age_of: mean}
    => buffer.age_of = 'mean' | must be 'oldest_token'
weights.interruption=cancel_stale; buffer.stale_groups=drop; accounting.replacement=weight
    => accounting.replacement = 'weight' | use 'reissue'
weights={prefix_cache_across_versions: true, kv_cache: recompute}
    => weights.prefix_cache_across_versions = True | must be false with weights.kv_cache = 'recompute'
weights.archive=true => weights.archive = True | must be false with weights.delta = 'off'
weights.delta=exact; generator.dtype=float32 => weights.delta = 'exact' | must be off with generator.dtype
scorer.answer_limit_s=30
    => timeouts.score_s = 60.0
    | must be more than 60: 4 answers of a group (algorithm.group_size), 2 at once (scorer.num_workers)
timeouts.score_s=6; scorer.num_workers=2 => timeouts.score_s = 6 | must be more than 6:
scorer.max_lost=10 => scorer.max_lost = 10 | less than scorer.max_restarts = 10
evaluation.num_problems=21 => evaluation.num_problems = 21 | data.num_held_out = 20
evaluation.num_problems=0 => evaluation.num_problems = 0 | must be at least 1; only a run that serves
# The warm-up.
$WARMUP; warmup.shape.top_k=5 => warmup.shape.top_k = 5 | warmup.shape.num_experts = 4
$WARMUP; warmup.shape.num_kv_heads=3 => warmup.shape.num_kv_heads = 3 | num_heads = 2
$WARMUP; warmup.shape.full_attention_interval=9
    => warmup.shape.full_attention_interval = 9 | must be at most warmup.shape.num_layers
$WARMUP; warmup.wrong_step_share=0.3 => warmup.wrong_step_share = 0.3 | warmup.guess_error = 0
$WARMUP; warmup.guesses_per_step=1 => warmup.guesses_per_step = 1 | left out
$WARMUP; warmup.examples_per_step=8; warmup.direct_share=0.5; warmup.guesses_per_step=8
    => warmup.guesses_per_step = 8 | less than warmup.examples_per_step = 8: with warmup.direct_share = 0.5
$WARMUP; warmup.examples_per_step=8; warmup.direct_share=0.01 => warmup.guesses_per_step = 0 | at least 1
# Objectives, corrections, aggregations and KL penalties.
algorithm.objective={kind: supervised} => algorithm.objective.kind = 'supervised' | wrong answers
algorithm.objective={kind: kimi15, tau: 0.1}; algorithm.corrections=[{kind: icepop}]
    => algorithm.corrections.0 = 'icepop' | 'kimi15' is defined on whole sequences
algorithm.objective={kind: reinforce}; algorithm.corrections=[{kind: icepop}, {kind: truncated_is}]
    => algorithm.corrections.1 = 'truncated_is' | 'icepop' is the same ratio
algorithm.corrections=[{kind: age_weight, half_life: 2}, {kind: age_weight, half_life: 3}]
    => algorithm.corrections.1 = 'age_weight' | is listed twice
algorithm.objective={kind: reinforce}; algorithm.corrections=[{kind: masked_is, low: 2, high: 1}]
    => algorithm.corrections.0.low = 2.0 | must be below high = 1.0
algorithm.objective={kind: gspo}
    => algorithm.aggregation.kind = 'token_mean' | must be 'sequence_mean_of_token_mean'
algorithm.aggregation={kind: constant_length, length: 31}
    => algorithm.aggregation.length = 31 | at least sampling.max_response_tokens = 32
algorithm.kl={estimator: k1, coefficient: 0.1} => algorithm.kl.estimator = 'k1' | gradient of mean zero
algorithm.kl={estimator: unbiased_k3, coefficient: 0.1, where: reward}
    => algorithm.kl.estimator = 'unbiased_k3' | Use 'k1', 'k2' or 'k3'
algorithm.objective={kind: topr}; algorithm.kl={estimator: k1, coefficient: 0.1, where: reward}
    => algorithm.kl.where = 'reward' | one per sequence
# Advantages and filters.
algorithm.group_size=1 => algorithm.group_size = 1 | at least 2: advantage 'grpo' compares
algorithm={group_size: 1, advantage: reinforce_pp, filters: [{kind: dynamic_sampling}]}
algorithm.groups_per_step=2
    => algorithm.group_size = 1 | (algorithm.filters.0), which drops every group of 1: the run would starve
algorithm.advantage={kind: group_pass_at_k, pass_at_k: 5} => algorithm.advantage.pass_at_k = 5 | from 1 to 4
algorithm.advantage={kind: group_pass_at_k, pass_at_k: 3}; algorithm.filters=[{kind: overlong_filter}]
    => algorithm.advantage.pass_at_k = 3 | from 1 to 2
algorithm.filters=[{kind: resample_on_correct, num_kept: 4}]
    => algorithm.filters.0.num_kept = 4 | less than algorithm.group_size = 4
# Code of one's own.
algorithm.objective={kind: python, factory: nowhere.at_all.loss}
    => algorithm.objective.factory = 'nowhere.at_all.loss'
    | cannot be imported (ModuleNotFoundError: No module named 'nowhere'
algorithm.objective={kind: python, factory: math.cosine}
    => algorithm.objective.factory = 'math.cosine' | has no 'cosine'
algorithm.objective={kind: python, factory: math.pi}
    => algorithm.objective.factory = 'math.pi' | is a float; must be a class or a function
algorithm.objective={kind: python, factory: loss}
    => algorithm.objective.factory = 'loss' | package.module.name
algorithm.objective={kind: python, factory: forgeasync.algorithms.objectives.Kimi15, options: {tow: 1}}
    => algorithm.objective.factory = 'forgeasync.algorithms.objectives.Kimi15'
    | options lacks 'tau', options.tow is none
# Agents and endings.
agents={solver: {}} => agents = 'solver' | needs an environment
$OWN; agents={judge: {trainable: false}} => agents = 'judge' | at least one agent with trainable
$OWN; agents={a: {}, b: {}}; buffer.age_of=newest_token
    => buffer.age_of = 'newest_token' | with agents: one can end
$OWN; episodes.endings.infrastructure=zero
    => episodes.endings.infrastructure = 'zero' | must be one of run_again, mask
# Teachers and terms of the loss.
$TOPK => teachers = {} | algorithm.terms has topk_kl, which needs one
teachers={a: {model_path: t}} => teachers = ['a'] | no term of algorithm.terms uses them
$TOPK; teachers={a: {model_path: t}, b: {model_path: t}}
    => teachers = ['a', 'b'] | source 'chain_sum' has a and b; must have exactly one
$TOPK; teachers={a: {source: {ema: 0.1}, sources: [chain_sum]}, b: {source: {ema: 0.2}, sources: [x]}}
    => teachers.b.sources = 'x' | is not a data source; must be one of 'chain_sum'
$TOPK; teachers={a: {source: {ema: 0.1}, sources: [chain_sum]}, b: {source: {ema: 0.2}, sources: [x]}}
    => teachers = [0.1, 0.2] | must be the same for every teacher with ema
$TOPK; teachers={a: {model_path: t, prompt: $sibling $prompt}}; algorithm.group_size=1
algorithm.advantage=reinforce_pp
    => algorithm.group_size = 1 | must be at least 2: teachers.a.prompt has $sibling
$TOPK; teachers={a: {model_path: t, prompt: $answer $prompt}}; $WARMUP; warmup.examples_per_step=8
warmup.shown_per_step=1
    => warmup.shown_per_step = 1
    | must be 0, or one prompt of a teacher must have $sibling and no $feedback; found none
$TOPK; teachers={a: {model_path: t, prompt: $feedback $sibling}}; $WARMUP; warmup.examples_per_step=8
warmup.shown_per_step=1
    => warmup.shown_per_step = 1
    | must be 0, or one prompt of a teacher must have $sibling and no $feedback; found none
$TOPK; teachers={a: {model_path: t, prompt: $feedback $prompt}}
data.reward={kind: process_reward_model, model_path: prm}
    => teachers.a.prompt = '$feedback $prompt'
    | has $feedback, but the reward of 'chain_sum' gives only numbers
algorithm.objective={kind: none} => algorithm.objective.kind = 'none' | algorithm.terms is empty
$TOPK; teachers={a: {source: live, engine: {dtype: bfloat16}}}
    => teachers.a.engine.dtype = 'bfloat16' | must be generator.dtype = 'float32'
$TOPK; teachers={a: {source: live, model_path: t}}; $LORA
    => teachers.a.model_path = 't' | must be null with lora
$TOPK; teachers={a: {model_path: t}}; launcher={kind: process}
    => launcher.kind = 'process' | must be 'local' with teachers
trainer.share_prefixes=true; trainer.parallel={num_procs: 2, context: 2}
    => trainer.share_prefixes = True | must be null or false with parallel.context above 1
fidelity=bitwise => generator.batch_invariant = False | must be true with fidelity = 'bitwise'
fidelity=bitwise; generator.batch_invariant=true; trainer.compile=true
    => trainer.compile = True | must be false with fidelity = 'bitwise'
fidelity=bitwise; generator.batch_invariant=true; generator.dtype=bfloat16
    => generator.dtype = 'bfloat16' | must be float32 with fidelity
fidelity=bitwise; generator.batch_invariant=true; trainer.parallel={num_procs: 2, expert: 2}
    => trainer.parallel.expert = 2 | must be 1 with fidelity = 'bitwise': several ranks add up
fidelity=bitwise; generator.batch_invariant=true; $LORA
    => lora | must be left out with fidelity = 'bitwise'
fidelity=bitwise; generator.batch_invariant=true; trainer.dtype=bfloat16
    => generator.dtype = 'float32' | must be bfloat16 with fidelity = 'bitwise': the trainer has it
fidelity=bitwise; generator.batch_invariant=true; trainer.dtype=bfloat16; generator.dtype=bfloat16
trainer.cpu_offload=true
    => trainer.cpu_offload = True | must be false with fidelity = 'bitwise': GPUs have other cosines
record_execution=true; fidelity=bitwise; generator.batch_invariant=true; trainer.dtype=bfloat16
generator.dtype=bfloat16
    => trainer.dtype = 'bfloat16' | must be float32 with record_execution: gradients differ each time on GPUs
record_execution=true => fidelity = 'replay' | must be bitwise with record_execution
record_execution=true; fidelity=bitwise; generator.batch_invariant=true; buffer.keep_groups=false
    => buffer.keep_groups = False | must be true with record_execution: the record has the groups' files
record_execution=true; fidelity=bitwise; generator.batch_invariant=true; trainer.steps_per_batch=2
    => trainer.steps_per_batch = 2 | must be 1 with record_execution
record_execution=true; fidelity=bitwise; generator.batch_invariant=true; generator.kv_cache_gib=0.001
    => generator.kv_cache_gib = 0.001 | must be at least 0.00793 with record_execution
generator.colocated=sleep; max_off_policy_steps=1
    => generator.colocated = 'sleep' | must be share without launcher.share_gpu=true
generator.colocated=sleep; max_off_policy_steps=2; launcher={kind: local, share_gpu: true}
    => max_off_policy_steps = 2 | must be 0 or 1 with generator.colocated = 'sleep'
generator.colocated=sleep; max_off_policy_steps=0; launcher={kind: local, share_gpu: true}
weights.shadow=device
    => weights.shadow = 'device' | must be host with generator.colocated = 'sleep'
$TOPK; teachers={a: {model_path: t}}; launcher={kind: local, share_gpu: true}
    => launcher.share_gpu = True | must be false with a teacher that runs here
algorithm.terms=[{kind: topk_kl, top_k: 4, ids: student}]; teachers={a: {model_path: t}}; sampling.top_k=5
    => algorithm.terms: top_k = 4 | must be sampling.top_k = 5
algorithm.terms=[{kind: topk_kl, top_k: 5, ids: student}, {kind: topk_kl, top_k: 5}]
teachers={a: {model_path: t}}; sampling.top_k=5
    => algorithm.terms: ids = ['student', 'teacher'] | every topk_kl must have the same
algorithm.terms=[{kind: topk_kl, top_k: 5, ids: student}]; teachers={a: {model_path: t}}; sampling.top_k=5
trainer.keep_sampling_mask=false
    => trainer.keep_sampling_mask = False | must be true for ids: student
algorithm.terms=[{kind: topk_kl, top_k: 5, ids: student}]
teachers={a: {endpoint: {base_url: 'http://t/v1', model: t}}}; sampling.top_k=5
    => teachers.a.endpoint = 'http://t/v1' | must be null with ids: student
$TOPK; teachers={a: {model_path: t, engine: {max_num_batched_tokens: 32}}}
    => teachers.a.engine.max_num_batched_tokens = 32 | max_num_seqs = 64
# Rewards, sources and evaluation sets.
data.reward={kind: mth} => data.reward.kind = 'mth' | expected one of 'reasoning_gym', 'math',
data.reward=[{kind: math, wight: 1}] => data.reward.0.wight = 1 | unknown key; did you mean data.
data.reward={kind: python} => data.reward.factory | required key is missing
data.reward=3 => data.reward = 3 | expected a section with the keys kind
data.reward=[] => data.reward = [] | must have at least one reward
data.reward={kind: math, name: mean} => data.reward.name = 'mean' | becomes the metric
data.reward={$CODE, limit_s: 60} => data.reward.limit_s = 60.0 | must be less
data.reward={$PRM, limit_s: 60} => data.reward.limit_s = 60.0 | must be less than timeouts.
data.source={$CODE}; data.reward={kind: reasoning_gym}
    => data.reward.kind = 'reasoning_gym' | needs a source of kind 'reasoning_gym'
data.reward=[{kind: math}, {$PRM}] => data.reward.1.kind = 'process_reward_model' | scores
data.reward={$PRM}; algorithm.advantage=rloo
    => algorithm.advantage = 'rloo' | has no formula for rewards of steps
data.sources=[] => data.source | cannot be given beside data.sources
data.sources=[{source: {$CODE}}] => data.source | cannot be given beside data.sources
data.source=null => data.source | is required: give data.source, or data.sources
data.template_arguments={x: [1]} => data.template_arguments.x = [1] |
$CHAT; data.template_arguments={tokenize: true}
    => data.template_arguments.tokenize = True | is set by the
data.system_prompt=Hi => data.system_prompt = 'Hi' | is used by the chat template only
evaluation.sets=[{name: a, num_problems: 3}] => evaluation.sets.0.source | required key is missing
evaluation.sets=[{name: reward, $SET}] => evaluation.sets.0.name = 'reward' | becomes part of
evaluation.sets=[{name: a, $SET, sampling: {max_response_tokens: 64}}]
    => evaluation.sets.0.sampling.max_response_tokens = 64 | must be less than
# Environments and their tools.
environment={kind: pyton_tool} => environment.kind |
$TOOL, max_rounds: 0} => environment.max_rounds |
$TOOL, plain_calls: {call_prefix: x, call_suffix: x}} => environment.plain_calls.call_suffix |
$TOOL, answer: {match: close}} => environment.answer.match |
environment={kind: mcp} => environment.servers |
$MCP null} => environment.servers |
$MCP {}} => environment.servers | must have at least one entry (Servers by name.
$MCP {a: [x]}} => environment.servers.a |
$MCP {a: {kind: pipe}}} => environment.servers.a.kind |
$MCP {a: {kind: stdio, command: []}}} => environment.servers.a.command |
$MCP {a: {kind: stdio, command: [' ']}}} => environment.servers.a.command |
$MCP {a: {kind: stdio}}} => environment.servers.a.command | required key is missing
$MCP {a: {$STDIO, ur: y}}} => environment.servers.a.ur |
$MCP {a: {$STDIO, env: {'A=B': c}}}} => environment.servers.a.env |
$MCP {A: {$STDIO}}} => environment.servers.A |
$MCP {a-b: {$STDIO}}} => environment.servers.a-b | 30 lowercase letters, digits and '_'
$MCP {a: {kind: http, url: 'h:80'}}} => environment.servers.a.url | a URL of http or https
agents=a => agents | expected sections by name, such as {a: {...}}
agents={a: {trainabel: true}} => agents.a.trainabel | did you mean agents.a.trainable?
$TOOL, max_rounds: 4} => data.chat_template |
$MCP {a: {$STDIO}}} => data.chat_template |
$TOOL, max_rounds: 4}; $CHAT; episodes.max_turns=4 => environment.max_rounds |
$TOOL, max_rounds: 4}; $CHAT; episodes.tool_s=120 => episodes.tool_s |
$MCP {a: {$STDIO}}, start_s: 60}; $CHAT; episodes.setup_s=60 => environment.start_s |
$TOOL, max_rounds: 4}; $CHAT; agents={a: {}, b: {}} => agents |
$OWN; data.renderer=qwen3 => data.renderer | needs data.chat_template = true
$CHAT; data.renderer=template => data.renderer | the messages of an environment
$OWN; $CHAT; data.system_prompt=Hi => data.system_prompt | must be left out
$OWN; data.reward={$CODE} => data.reward | environment
environment={kind: remote, url: '127.0.0.1:9000'} => environment.url | http://127.0.0.1:9000
environment={kind: remote, url: 'https://127.0.0.1:9000'} => environment.url | http://127.0.0.1:9000
environment={kind: remote, url: 'http://127.0.0.1'} => environment.url | http://127.0.0.1:9000
environment={kind: remote, url: 'http://127.0.0.1:9000/x'} => environment.url | http://127.0.0.1:9000
environment={kind: remote, url: 'http://10.0.0.1:9'} => environment.url | http://127.0.0.1:9000
$REMOTE, task_fields: {a: text}} => environment.task_fields.a = 'text' | record
$REMOTE}; agents={a: {}, b: {}} => agents | 'remote' talks to one agent
# People as the source, and coding tasks.
$SERVED; environment=null; buffer.age_of=token => environment.kind | must be 'served'
$SERVED; data={source: $SUMS, num_train: 9, num_held_out: 9}; evaluation.num_problems=9
    => data.source.kind | must be 'served'
$SERVED; data.num_held_out=3 => data.num_held_out | must be 0
$SERVED; evaluation.sets=[{name: s, source: $SUMS, num_problems: 2}] => evaluation.sets | must be left out
$SERVED; algorithm.group_size=4 => algorithm.group_size | must be 1
$SERVED; algorithm.advantage=grpo => algorithm.advantage | 'reinforce_pp'
$SERVED; episodes.num_workers=2 => episodes.num_workers | must be 1
$SERVED; buffer.stale_groups=wait => buffer.stale_groups | must be 'drop'
$SERVED; buffer.age_of=oldest_token => buffer.age_of | must be 'token'
$SERVED; serving.host=10.0.0.1 => serving.token_env | can be reached from other machines
$SERVED; serving.host=0.0.0.0; serving.token_env=T => serving.public_host | stands for all
$SERVED; serving.idle_session_s=100; serving.session_s=50 => serving.idle_session_s | at most
$SERVED; serving.score_from=[environment] => serving.score_from | needs an environment of your own
$SERVED; $JUDGED => agents | must be {policy: {}, judge: {trainable: false}}
$SERVED; $JUDGED; agents={solver: {}, judge: {trainable: false}} => agents | must be {policy
$SERVED; agents={policy: {}, judge: {trainable: false}} => agents | must be left out
$CODING; environment=null => data.source.kind = 'coding' | needs environment: {kind: coding}
$CODING; data.source=$SUMS => data.source.kind = 'reasoning_gym' | must be 'coding'
$CODING; environment.tests_s=120 => environment.tests_s = 120.0 | must be less than episodes.step_s = 120
$CODING; data.chat_template=false => data.chat_template = False | must be true
"""
"""What is typed => the field and its value | words of the remedy; semicolons or lines part overrides."""


def typed(text: str) -> list[str]:
    written = re.sub(r"\$[A-Z]+", lambda name: SHORT[name[0]], text.strip())
    return [override for override in re.split(r";\s+|\n", written) if override]


def refusals() -> Iterator[tuple[list[str], str, str]]:
    row = ""
    for line in REFUSED.splitlines():
        if not line.startswith("#"):
            row += f"{line}\n"
        if " |" in line:
            overrides, said = row.split("=> ")
            field, remedy = said.split(" |")
            yield typed(overrides), field.strip(), remedy.strip()
            row = ""
    for kind in ("ppo_clip", "cispo, clip_high: 3", "decoupled_ppo", "topr", "gspo"):
        for correction in ("truncated_is", "masked_is, low: 0.5, high: 2", "icepop"):
            factors = [
                f"algorithm.objective={{kind: {kind}}}",
                f"algorithm.corrections=[{{kind: {correction}}}]",
                "algorithm.aggregation={kind: sequence_mean_of_token_mean}",
            ]
            field = f"algorithm.corrections.0 = '{correction.partition(',')[0]}'"
            twice = f"would count the importance ratio twice: with objective '{kind.partition(',')[0]}'"
            yield factors, field, twice


@pytest.mark.parametrize(("overrides", "field", "remedy"), [*refusals()], ids=lambda value: str(value)[:60])
def test_refused(config_file: Path, overrides: list[str], field: str, remedy: str) -> None:
    try:
        problems = check_config(load_config(config_file, overrides), FACTS)
    except ConfigError as refused:
        problems = refused.problems
    found = [str(problem) for problem in problems]
    (message,) = [one for one in found if one.startswith((f"{field}: ", f"{field} = ", f"{field}.0: "))]
    assert remedy in message
    assert len(found) == 1 or overrides[0] == SHORT["$TOPK"], found


ACCEPTED = """
$WARMUP
trainer.parallel={num_procs: 8, data_replicate: 2, expert: 4}
algorithm.group_size=1; algorithm.advantage=reinforce_pp
algorithm.corrections=[{kind: off_policy_sequence_mask, threshold: 0.1}, {kind: age_weight, half_life: 2}]
algorithm.objective={kind: reinforce}; algorithm.corrections=[{kind: truncated_is, level: sequence}]
algorithm.objective={kind: kimi15, tau: 0.1};
algorithm.corrections=[{kind: masked_is, low: 0, high: 2, level: geometric}]
algorithm.aggregation={kind: constant_length, length: 32}
algorithm.kl={estimator: unbiased_k3, coefficient: 0.1}
algorithm.objective={kind: reinforce}; algorithm.kl={estimator: k1, coefficient: 0.1, where: reward}
$OWN; agents={solver: {}, judge: {trainable: false}}; episodes.endings.infrastructure=mask
$TOPK; teachers={a: {model_path: t}}
$TOPK; teachers={a: {model_path: t, sources: [chain_sum]}}
algorithm.terms=[{kind: cross_entropy}]
algorithm.terms=[{kind: topk_kl, top_k: 5, ids: student}]; teachers={a: {model_path: t}}; sampling.top_k=5
$TOPK; teachers={a: {model_path: t}}; trainer.keep_sampling_mask=false
$TOOL, max_rounds: 4}; $CHAT
$TOOL, plain_calls: {call_prefix: '[', call_suffix: ']'}}
$OWN; $CHAT; data.renderer=glm-4.5
$SERVED
$SERVED; $JUDGED; agents={policy: {}, judge: {trainable: false}}
$SERVED; serving.host=0.0.0.0; serving.token_env=T; serving.public_host=h
$CODING
"""


@pytest.mark.parametrize("overrides", re.split(r"(?<!;)\n", ACCEPTED.strip()))
def test_not_refused(config_file: Path, overrides: str) -> None:
    assert check_config(load_config(config_file, typed(overrides)), FACTS) == []


def test_names_of_agents_are_names_of_metrics(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="agents"):
        load_config(config_file, [SHORT["$OWN"], "agents={Not A Name: {}}"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, "num_experts_per_tok = 9 experts; must be at most num_experts = 8"),
        ({"num_kv_heads": 3}, "num_key_value_heads = 3; must divide num_attention_heads = 4"),
    ],
)
def test_model_that_contradicts_itself(config_file: Path, changes: dict[str, int], words: str) -> None:
    facts: ModelFacts = dataclasses.replace(FACTS, **changes)
    message = only(check_config(load_config(config_file), facts))
    assert message.startswith("model.path = 'models/none'") and words in message


@given(
    num_procs=st.integers(1, 16),
    replicate=st.integers(1, 4),
    tensor=st.integers(1, 4),
    expert=st.integers(1, 16),
)
@settings(max_examples=60, deadline=None)
def test_accepted_meshes_are_torchtitans(num_procs: int, replicate: int, tensor: int, expert: int) -> None:
    values = OmegaConf.to_container(OmegaConf.create(MINIMAL))
    assert isinstance(values, dict)
    values["algorithm"]["groups_per_step"] = 64
    values["trainer"]["parallel"] = {
        "num_procs": num_procs,
        "data_replicate": replicate,
        "tensor": tensor,
        "expert": expert,
    }
    config = RunConfig.model_validate(values)
    problems = check_config(config, dataclasses.replace(FACTS, num_experts=16))
    shard = config.trainer.parallel.data_shard
    fits = replicate * shard * tensor == num_procs and (shard * tensor) % expert == 0
    divides = 2 % tensor == 0 and 16 % expert == 0 and 128 % tensor == 0
    exact = tensor == 1 or expert > 1
    assert (problems == []) == (fits and divides and exact)


@pytest.mark.parametrize(
    ("overrides", "age_of"),
    [
        ("", AgeOf.OLDEST_TOKEN),
        ("$OWN", AgeOf.TOKEN),
        ("$OWN; buffer.age_of=mean", AgeOf.MEAN),
        ("$OWN; buffer.max_groups=20", AgeOf.TOKEN),
        ("$OWN; weights.interruption=cancel_stale", AgeOf.OLDEST_TOKEN),
    ],
)
def test_ages_are_of_tokens_in_long_episodes(config_file: Path, overrides: str, age_of: AgeOf) -> None:
    assert load_config(config_file, typed(overrides)).buffer.age_of is age_of


# --- GPUs ---

MOE = dataclasses.replace(FACTS, max_position_embeddings=1024)
DENSE = dataclasses.replace(
    MOE,
    model_type="qwen3",
    num_experts=0,
    top_k=0,
    expert_hidden_size=0,
    num_dense_layers=2,
    dense_hidden_size=128,
)


def tiny(**generator: object) -> RunConfig:
    changes = [f"generator.{name}={value}" for name, value in generator.items()]
    changes += ["trainer.parallel={num_procs: 2, expert: 1}", "trainer.dtype=bfloat16"]
    return load_config(CONFIGS / "tiny_moe_cpu.yaml", changes)


def test_experts_are_dealt_out_whole() -> None:
    config = tiny(tensor_parallel=2, expert_parallel=True)
    assert check_config(config, MOE) == [] == list(check_gpus(config, 8))
    message = only(list(check_gpus(config, 0)))
    assert "generator.expert_parallel" in message and "without GPUs" in message
    # Slices of 33 would not be equal; whole experts are not sliced. The trainer refuses 33 by itself.
    odd = dataclasses.replace(MOE, expert_hidden_size=33)
    assert "multiple of 8" in only(check_config(config, odd))
    fields = [problem.field for problem in check_config(tiny(tensor_parallel=2), odd)]
    assert fields == ["model.path", "generator.tensor_parallel"]
    seven = check_config(config, dataclasses.replace(MOE, num_experts=7))
    (message,) = (str(problem) for problem in seven if problem.field == "generator.tensor_parallel")
    assert "num_experts = 7" in message


@pytest.mark.parametrize("name", ["openai--gpt-oss-120b", "zai-org--GLM-4.5-Air", "Qwen--Qwen3-30B-A3B"])
def test_refused_sizes_have_the_names_of_config_json(name: str) -> None:
    raw = json.loads((CONFIGS / "models" / name / "config.json").read_text(encoding="utf-8"))
    facts = dataclasses.replace(parse_model_facts(raw, name), num_experts=3, expert_hidden_size=33)
    whole = tiny(tensor_parallel=2, expert_parallel=True)
    sliced = load_config(
        CONFIGS / "tiny_moe_cpu.yaml", ["trainer.parallel={num_procs: 2, tensor: 2, expert: 1}"]
    )
    problems = [*check_config(whole, facts), *check_config(sliced, facts)]
    words = r"must (?:divide the model's|be at most) (\w+) = (3|33)\b"
    found = [match.groups() for problem in problems if (match := re.search(words, str(problem)))]
    assert sorted(size for _, size in found) == ["3", "3", "3", "33"]
    assert {key for key, _ in found} <= raw.keys()


@pytest.mark.parametrize(
    ("facts", "tensor_parallel", "reason"),
    [(DENSE, 2, "model_type 'qwen3' has no experts"), (MOE, 1, "generator.tensor_parallel = 1")],
)
def test_expert_parallelism_needs_experts(facts: ModelFacts, tensor_parallel: int, reason: str) -> None:
    config = tiny(tensor_parallel=tensor_parallel, expert_parallel=True)
    message = only(check_config(config, facts))
    assert "generator.expert_parallel" in message and reason in message


def test_gpus_are_counted_before_the_start() -> None:
    config = tiny(num_replicas=3, tensor_parallel=2)
    assert num_gpus_needed(config) == 3 * 2 + 2
    assert list(check_gpus(config, 8)) == [], "just enough"
    assert list(check_gpus(config, 0)) == [], "CPU processes"
    message = only(list(check_gpus(config, 7)))
    assert message.startswith("generator.num_replicas = 3: ") and "launcher.share_gpu=true" in message
    assert "8 GPUs (3 x 2 + 2)" in message and "at most the 7 of this host" in message


def test_roles_that_share_gpus_need_as_many_as_the_larger_one() -> None:
    config = tiny(num_replicas=3, tensor_parallel=2)
    config = config.model_copy(update={"launcher": LocalLauncher(share_gpu=True)})
    assert num_gpus_needed(config) == 3 * 2
    assert list(check_gpus(config, 6)) == []
    message = only(list(check_gpus(config, 5)))
    assert "6 GPUs (the larger of 3 x 2 and 2)" in message and "share_gpu" not in message


def test_equal_bits_need_the_dtype_of_the_machine() -> None:
    overrides = ["fidelity=bitwise", "generator.batch_invariant=true", "generator.compile=false"]
    config = load_config(CONFIGS / "qwen3_0.6b_1gpu.yaml", [*overrides, "trainer.compile=false"])
    facts = read_model_facts(config.model.path)
    assert check_config(config, facts) == [] == list(check_gpus(config, 1))
    assert "trainer.dtype = 'bfloat16': must be float32" in only(list(check_gpus(config, 0)))
    for head_dim in (16, 256):
        message = only(check_config(config, dataclasses.replace(facts, head_dim=head_dim)))
        assert f"has head_dim = {head_dim}; must be 32 to 255 with fidelity = 'bitwise' on GPUs" in message


LORA = "lora={rank: 12, alpha: 24, targets: [q_proj, down_proj]}"
FLOAT32 = "generator.dtype=float32"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.dtype=float32"], "trainer.dtype = 'float32': must be bfloat16 on GPUs"),
        ([LORA, FLOAT32], "generator.dtype = 'float32': must be bfloat16 on GPUs with a lora section"),
        ([], None),
        (["trainer.parallel.context=2"], None),
        ([LORA], None),
        ([FLOAT32], None),
    ],
)
def test_what_gpus_cannot_compute_is_refused(overrides: list[str], words: str | None) -> None:
    file, overlay = CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"
    here = load_config(file, overrides)
    there = load_config([file, overlay], overrides)
    for problems in (check_without_model(there), list(check_gpus(here, 32))):
        assert problems == [] if words is None else words in only(problems)
    assert list(check_gpus(here, 0)) == [], "CPU processes"
