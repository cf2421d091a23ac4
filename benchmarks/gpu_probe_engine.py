"""Part of ``gpu_probe.py`` that needs vLLM: whole runs in which trainer and engine share the GPU."""

import dataclasses
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_probe_common import Device, Report, Skipped

if TYPE_CHECKING:
    from forgeasync.rollouts import Response, Task

MODELS = {
    "moe": ("Qwen--Qwen3-30B-A3B", {"num_layers": 2, "expert_hidden_size": 256}),
    "dense": ("Qwen--Qwen3-0.6B", {}),
}
"""Shape of each case's model, with changes that make it fit into 24 GB."""

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SMALL_INNER = {"expert_hidden_size": 32, "dense_hidden_size": 64, "num_dense_layers": 2}
"""On a CPU. What the family does not have stays 0."""

OVERRIDES = """max_steps=4 max_off_policy_steps=0 sampling.top_k=20 algorithm.group_size=8
    algorithm.groups_per_step=8 generator.max_num_seqs=64 trainer.optimizer.learning_rate=1e-3
    trainer.parallel.num_procs=1 trainer.parallel.expert=1""".split()

OVERRIDES_ON_GPU = """launcher.share_gpu=true trainer.dtype=bfloat16 generator.dtype=bfloat16
    generator.kv_cache_gib=1 generator.compile=true trainer.recovery.snapshot_every_steps=null""".split()

NUM_LOG_CHARS = 3000
"""Characters of each log of a run that failed or was stopped."""

MAX_ERROR_NATS = 0.05
"""Largest mean difference of log-probabilities between trainer and engine in bfloat16."""


def engine(device: Device, report: Report) -> None:
    """Train random models on 64 sequences a step. Without age, each step needs a swap before it."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    if device.is_gpu and shutil.disk_usage("/dev/shm").free < 4 * 2**30:
        raise Skipped("needs 4 GiB of /dev/shm")
    for name, (model, changes) in MODELS.items():
        with report.case(name), tempfile.TemporaryDirectory(prefix="gpu_probe-") as scratch:
            _run(device, report, name, _write_model(Path(scratch) / "model", device, model, changes))


def _write_model(folder: Path, device: Device, model: str, changes: dict[str, int]) -> Path:
    from forgeasync.models import NUM_CHARACTER_TOKENS, SHIPPED_MODELS, parse_model_facts
    from forgeasync.planning import write_model

    raw = json.loads((SHIPPED_MODELS / model / "config.json").read_text(encoding="utf-8"))
    facts = parse_model_facts(raw, model)
    if not device.is_gpu:
        inner = {key: size for key, size in SMALL_INNER.items() if getattr(facts, key)}
        changes = changes | SMALL | inner
    changes = changes | {"vocab_size": NUM_CHARACTER_TOKENS, "max_position_embeddings": 160}
    facts = dataclasses.replace(facts, **changes)
    write_model(folder, raw, facts, chat_template=False, template_arguments=(), seed=0)
    return folder


def _run(device: Device, report: Report, name: str, model: Path) -> None:
    from forgeasync.testing import tiny_config
    from forgeasync.training import train

    folder = model.parent / "run"
    overrides = [f"run_dir={folder}", *OVERRIDES, *(OVERRIDES_ON_GPU if device.is_gpu else ())]
    try:
        _, *steps = train(tiny_config(model), overrides, reward=digits).metrics
    except BaseException:
        # Also at the part's limit, which interrupts it: the folder is removed afterwards.
        logs = {
            file.name: file.read_text(errors="replace") for file in folder.glob("logs/*") if file.is_file()
        }
        report.put(name, ends_of_logs={file: text[-NUM_LOG_CHARS:] for file, text in logs.items()})
        raise
    report.put(
        name,
        error_nats=(error := max(step["mismatch/fresh_logprob_abs_mean"] for step in steps)),
        pause_ms=1e3 * max(step["generator/max_pause_s"] for step in steps),
        step_s=min(step["time/step_s"] for step in steps),
        publish_s=max(step["weights/max_publish_s"] for step in steps),
    )
    report.check(f"{name}_logprobs", error < MAX_ERROR_NATS)
    report.check(f"{name}_learns", all(step["grad_norm"] > 0.0 for step in steps))
    if name == "moe":
        report.check("moe_routing", all(step["routing/recorded_share"] == 1.0 for step in steps))


def digits(task: "Task", response: "Response") -> float:
    """Reward random text for what it has by chance, so that every step changes the weights."""
    return sum(map(str.isdigit, response.text)) / (1 + len(response.text))
