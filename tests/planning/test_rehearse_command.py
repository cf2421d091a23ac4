"""``--rehearse`` as it is typed: what it refuses, and topologies in real processes."""

import re
from pathlib import Path

import pytest

from forgeasync.config import HostCounts, ProcessLauncher, RunConfig, load_config, shares_gpus
from forgeasync.controller import parse_arguments
from forgeasync.models import read_model_facts
from tests.support.app_runs import finish, read_lines, run_here, start, write_tiny_run
from tests.support.config_samples import CONFIGS

LARGE = CONFIGS / "qwen3_30b_a3b.yaml"
SLURM = CONFIGS / "launchers" / "slurm.yaml"
OF_TWO_HOSTS = (
    "trainer.parallel.num_procs=4",
    "trainer.parallel.expert=2",
    "generator.num_replicas=2",
    "launcher.hosts={trainer: 1, generators: 1}",
    "algorithm.group_size=4",
    # Kept sets are part of the path too, and the config keeps the whole vocabulary.
    "sampling.top_k=20",
)
"""Four trainer processes, two engines of two processes, two hosts; the rest is as in the config."""

PATIENCE_S = 900.0
"""For a dozen processes that import torch or vLLM on few cores."""


@pytest.mark.parametrize(
    ("app", "arguments", "message"),
    [
        ({"can_rehearse": True}, ["--hosts"], "--hosts: needs --rehearse"),
        ({"can_rehearse": True}, ["--rehearse", "--dry-run"], "not allowed with argument"),
        # An app that cannot be rehearsed does not know the option.
        ({}, ["--rehearse"], "--rehearse: no such option; see --help"),
    ],
)
def test_what_does_not_go_together_is_refused(
    app: dict[str, bool],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["grpo", "--config", str(LARGE), *arguments])
    with pytest.raises(SystemExit) as ended:
        parse_arguments("", starts_run=True, **app)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_config_with_problems_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err = run_here(
        "--config", str(LARGE), "--rehearse", "trainer.parallel.expert=3", f"run_dir={run_dir}"
    )
    assert code == 2 and "trainer.parallel.expert = 3" in err
    assert out == "" and not list(tmp_path.glob("run*"))


def rehearse(tmp_path: Path, file: Path, *arguments: str, **limits: float) -> tuple[str, Path, RunConfig]:
    """What a rehearsal has printed, its folder and the config there."""
    code, out, err = finish(start(file, *arguments, "--rehearse", f"run_dir={tmp_path / 'run'}"), **limits)
    assert code == 0, out + err
    assert not (tmp_path / "run").exists()
    (folder,) = tmp_path.glob("run-rehearsal-*")
    return out, folder, load_config(folder / "config.yaml")


@pytest.mark.exhaustive
def test_a_small_run_is_rehearsed_beside_its_own_folder(tmp_path: Path) -> None:
    one_proc = "trainer.parallel={num_procs: 1, expert: 1}"
    out, folder, config = rehearse(tmp_path, write_tiny_run(tmp_path), one_proc)
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (folder / "checkpoints" / "step-00000002").is_dir()
    assert config.model.path == str(folder / "model")
    before, after = out.split(f"run directory {folder}")
    assert re.search(r"model: vocab_size +│ \d+ +│ 128 ", before)
    assert re.search(r"steps +│ exercised +│ 3 of 3", after)
    assert "failed" not in after


@pytest.mark.exhaustive
def test_a_config_for_one_gpu_is_rehearsed(tmp_path: Path) -> None:
    overrides = ("generator.colocated=sleep", "max_off_policy_steps=1")
    out, folder, config = rehearse(tmp_path, CONFIGS / "qwen3_1.7b_1gpu.yaml", *overrides)
    assert re.search(r"export +│ exercised", out) and "failed" not in out
    assert shares_gpus(config)
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.exhaustive
@pytest.mark.timeout(PATIENCE_S + 60.0)
def test_a_large_topology_is_rehearsed_on_one_machine(tmp_path: Path) -> None:
    overrides = ("--config", str(SLURM), *OF_TWO_HOSTS)
    out, folder, config = rehearse(tmp_path, LARGE, *overrides, deadline_s=PATIENCE_S)
    assert config.launcher == ProcessLauncher(kind="process", hosts=HostCounts(trainer=1, generators=1))
    assert config.trainer.parallel.expert == 2 and config.generator.tensor_parallel == 2
    assert config.trainer.dtype == config.generator.dtype == "bfloat16"
    facts = read_model_facts(str(folder / "model"))
    assert facts.model_type == "qwen3_moe"
    names = {file.stem for file in (folder / "logs").glob("*.log")}
    assert {f"trainer-{rank}" for rank in range(4)} | {"generator-0", "generator-1"} <= names
    initial, *steps = read_lines(folder / "metrics.jsonl")
    assert "eval/accuracy" in initial and len(steps) == 3
    for line in steps:
        assert line["routing/recorded_share"] == 1.0
        assert line["payload/num_read_remote"] > 0 == line["payload/num_read_shared"]
        assert line["grad_norm"] > 0
    assert steps[0]["off_policy/age_max"] == 0 and steps[0]["mismatch/logprob_abs_mean"] < 0.05
    assert sum(line["weights/num_swaps"] for line in steps) >= 2
    for part in ("replay of routed experts", "replay of kept tokens", "publish, fetch, swap", "checkpoint"):
        assert re.search(rf"{part} +│ exercised", out), part
    assert re.search(r"launcher +│ not exercised", out)
