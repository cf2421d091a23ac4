"""How much of a GPU must be free before an engine starts there: what the plan says, by vLLM's own check."""

import asyncio
import dataclasses
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.numpy import load_file
from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

from forgeasync.config import (
    Dtype,
    FlashAttention,
    LocalLauncher,
    ProcessRewardModel,
    RunConfig,
    load_config,
)
from forgeasync.controller import generator_plan
from forgeasync.generator import engine, process_reward_engine
from forgeasync.generator.workarounds import vllm_process
from forgeasync.models import SHIPPED_MODELS, read_model_facts
from forgeasync.planning import (
    Machine,
    count_parameters,
    least_bytes,
    teacher_memory,
    total_bytes,
    trainer_gpu_share,
    trainer_memory,
)
from forgeasync.rollouts import CaptureSpec
from forgeasync.runtime import (
    HostGpus,
    HostRole,
    ProcessManager,
    check_hosts_gpus,
    start_generators,
    start_teachers,
)
from forgeasync.testing import write_tiny_model
from tests.runtime.test_host_checks import H100, facts
from tests.support.config_samples import CONFIGS
from tests.support.families import write_process_reward_model

GIB = 2**30
NUM_BYTES = 79 * GIB
"""Memory of each GPU."""


class Gpu:
    """What vLLM's platform says of a GPU."""

    @staticmethod
    def is_cpu() -> bool:
        return False

    @staticmethod
    def get_device_total_memory() -> int:
        return NUM_BYTES


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "current_platform", Gpu)
    monkeypatch.setattr(process_reward_engine, "current_platform", Gpu)


def starts(share: float, *, free_bytes: int) -> bool:
    """Whether vLLM starts an engine with that share on a GPU of which so much is free."""
    snapshot = MemorySnapshot(
        total_memory=NUM_BYTES, free_memory=free_bytes, device="cpu", auto_measure=False
    )
    try:
        request_memory(snapshot, CacheConfig(gpu_memory_utilization=share))
    except ValueError as error:
        assert "Free memory on device" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b", "qwen3_235b_a22b"])
def test_vllm_starts_wherever_our_own_check_has_passed(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    model = SHIPPED_MODELS / config.model.path.replace("/", "--")
    plan = generator_plan(config, read_model_facts(str(model)))
    args = engine.engine_args(
        model_path=model,
        generator=config.generator,
        max_context_length=config.model.max_context_length,
        seed=0,
        records=CaptureSpec(routing=True, kept_tokens=False, num_dense_layers=0),
        adapters=None,
        is_cpu=False,
        gpu_bytes=least_bytes(plan.num_bytes),
    )
    needed = least_bytes(plan.num_bytes)
    for free_bytes, passes in ((needed + 1, True), (needed - GIB, False)):
        gpu = dataclasses.replace(H100, memory_bytes=NUM_BYTES, free_bytes=free_bytes)
        host = HostGpus(host="node0", facts=facts(gpu), num_needed=1, plans=(plan,), is_trainer=False)
        assert (list(check_hosts_gpus([host], FlashAttention.AUTO)) == []) is passes
        assert starts(args.gpu_memory_utilization, free_bytes=free_bytes) is passes
    assert not starts(CacheConfig.gpu_memory_utilization, free_bytes=needed + 1), "by its default"


def test_more_than_a_gpu_has_is_refused_with_both_figures() -> None:
    with pytest.raises(ValueError, match=r"needs 80 GiB of its GPU, which has 79; lower kv_cache_gib"):
        vllm_process.gpu_share(80 * GIB)
    assert vllm_process.gpu_share(NUM_BYTES) == 1.0


def test_the_trainer_leaves_a_shared_gpu_to_the_engine() -> None:
    """Both have at least their plans on a GPU of 24 GB, the engine also 2 GiB for CUDA contexts."""
    config = load_config(CONFIGS / "qwen3_0.6b_1gpu.yaml")
    model = read_model_facts(str(SHIPPED_MODELS / config.model.path.replace("/", "--")))
    share = trainer_gpu_share(config, model)
    assert share is not None
    planned = trainer_memory(config, model, count_parameters(model), Machine.GPU).total_bytes
    assert share * 24 * GIB > planned
    assert (1 - share) * 24 * GIB > generator_plan(config, model).num_bytes + 2 * GIB
    assert trainer_gpu_share(load_config(CONFIGS / "qwen3_0.6b_2gpu.yaml"), model) is None


class SetUp(Exception):
    """What engines would have been started with."""


def set_up(**fields: Any) -> None:
    raise SetUp(fields)


@pytest.mark.parametrize("share_gpu", [False, True])
async def test_engines_wait_for_the_trainer_only_on_a_shared_gpu(share_gpu: bool, tmp_path: Path) -> None:
    config, model = tiny(tmp_path)
    config = config.model_copy(update={"launcher": LocalLauncher(share_gpu=share_gpu)})

    def allot(role: HostRole, num_procs: int, *, gpus_per_proc: int) -> None:
        raise SetUp(role)

    trainer, failed = (asyncio.get_running_loop().create_future() for _ in range(2))
    failed.set_exception(ValueError("no weights"))
    manager = cast(ProcessManager, SimpleNamespace(hosts=SimpleNamespace(allot=allot)))
    shape = read_model_facts(str(model))
    starting, beside_a_failure = (
        asyncio.ensure_future(start_generators(manager, config, shape, model, starting_trainer=one))
        for one in (trainer, failed)
    )
    await asyncio.wait([starting], timeout=0.0)
    await asyncio.sleep(0)
    assert starting.done() is not share_gpu
    trainer.set_result(None)
    with pytest.raises(SetUp, match=HostRole.GENERATORS):
        await starting
    with pytest.raises(asyncio.CancelledError if share_gpu else SetUp):
        await beside_a_failure


def tiny(folder: Path) -> tuple[RunConfig, Path]:
    """A run with a teacher, both from a tiny model."""
    model = write_tiny_model(folder / "hf")
    file = CONFIGS / "distill_cpu.yaml"
    (name,) = load_config(file).teachers
    return load_config(file, [f"model.path={model}", f"teachers.{name}.model_path={model}"]), model


async def test_engines_are_started_with_their_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("router", "teachers"):
        monkeypatch.setattr(import_module(f"forgeasync.runtime.{module}"), "GeneratorSetup", set_up)
    config, model = tiny(tmp_path)
    shape = read_model_facts(str(model))
    (teacher,) = (items for _, items in teacher_memory(config, Machine.GPU))
    processes = ProcessManager(tmp_path / "logs")
    processes.payload_folders = [tmp_path]
    asked: list[int] = []
    for starting in (
        start_generators(processes, config, shape, model),
        start_teachers(processes, config, shape, prompts=None),
    ):
        try:
            await starting
        except* SetUp as stopped:
            asked.extend(error.args[0]["gpu_bytes"] for error in stopped.exceptions)
    await processes.close()
    assert asked == [least_bytes(generator_plan(config, shape).num_bytes), least_bytes(total_bytes(teacher))]


def test_process_reward_engines_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_process_reward_model(tmp_path)
    monkeypatch.setattr(process_reward_engine.LLMEngine, "from_engine_args", lambda args: args)
    section = ProcessRewardModel(
        kind="process_reward_model", model_path=str(folder), dtype=Dtype.BFLOAT16, kv_cache_gib=8.0
    )
    engine = process_reward_engine.ProcessRewardEngine(section, tag_id=1)
    share = engine._llm.gpu_memory_utilization
    weights = sum(tensor.size for tensor in load_file(folder / "model.safetensors").values()) * 2
    assert share * NUM_BYTES == pytest.approx(weights + 8 * GIB)
    # With nine of them there, a tenth does not fit.
    assert starts(share, free_bytes=NUM_BYTES - 8 * 9 * GIB) is False
    assert starts(share, free_bytes=NUM_BYTES - 8 * 8 * GIB)
