"""benchmarks/prefix_sharing.py on a CPU and on a pretended GPU: losses, gradients and counts of tokens."""

import dataclasses
import json
from pathlib import Path

import prefix_sharing
import pytest
from gpu_probe_common import Device, trainer_process

from tests.support.layouts import attention_of
from tests.support.pretended_cuda import pretended_cuda
from tests.support.processes import run_apart

DENSE = {
    **{"num_layers": 2, "num_dense_layers": 2, "hidden_size": 64, "dense_hidden_size": 64},
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 4096},
}
COMPUTED = {
    # Groups of 8 responses of 6 tokens.
    "prompts of 512": (24 + 8 * 6) / (8 * (24 + 6)),
    "prompts of 8": (8 + 8 * 6) / (8 * (8 + 6)),
    # Groups of 2 episodes of 4 turns, with 4 tokens between them. Their branches part after 2 turns.
    "agents' branches": (24 + 2 * (20 + 2 * 16)) / (2 * 2 * (24 + 20 + 16)),
}


def _measure(kind: str, file: Path) -> None:
    patch = pytest.MonkeyPatch()
    patch.setitem(prefix_sharing.MODELS, "cuda", prefix_sharing.MODELS["cpu"] | {"Qwen3-0.6B": DENSE})
    patch.setattr(prefix_sharing, "TEXT", (4, 4))
    for name, work in prefix_sharing.WORKS.items():
        sizes = {"num_prompt": min(24, work.num_prompt), "num_turns": min(4, work.num_turns)}
        few = dataclasses.replace(work, **sizes, num_groups={kind: 3}, response=(6, 6))
        patch.setitem(prefix_sharing.WORKS, name, few)
    with trainer_process():
        if kind == "cpu":
            prefix_sharing.measure(Device(kind), file, 1)
        else:
            with attention_of(kind), pretended_cuda(patch):
                prefix_sharing.measure(Device(kind), file, 1)


@pytest.mark.parametrize(
    ("kind", "num_models", "tolerance"),
    [
        pytest.param("cpu", 1, 3e-6, id="CPU"),
        # In bfloat16.
        pytest.param("cuda", 2, 0.02, id="pretended GPU"),
    ],
)
def test_shared_rows_have_fewer_tokens_and_the_same_gradients(
    kind: str, num_models: int, tolerance: float, tmp_path: Path
) -> None:
    file = tmp_path / "out" / "result.json"
    run_apart(_measure, kind, file)
    results = json.loads(file.read_text())["results"]
    assert [one["work"] for one in results] == [*prefix_sharing.WORKS] * num_models
    for one in results:
        assert one["computed"] == one["one row"] == pytest.approx(COMPUTED[one["work"]], rel=1e-4)
        assert one["computed"] < one["ideal"] < 1.0
        assert 0.0 < one["difference"] < tolerance
        assert one["peak GiB"] == ("-" if kind == "cpu" else "2.00 > 2.00")
