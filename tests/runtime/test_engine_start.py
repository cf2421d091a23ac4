"""How the process of an engine starts: what it imports, and that it answers while the engine is built."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from monarch.actor import ActorError, this_host

from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec
from forgeasync.runtime import GeneratorActor, GeneratorSetup, spawn_role
from forgeasync.testing import tiny_config, write_tiny_model

DEADLINE_S = 120.0


class BuildsOnDemand(GeneratorActor):
    """Its engine's core is built while somebody holds a pipe open, and fails then."""

    def __init__(self, log_dir: Path, rank: int, pipe: Path) -> None:
        super().__init__(log_dir, rank)
        from forgeasync.generator.workarounds import inprocess_client

        def build(*_: object) -> None:
            with pipe.open("rb") as file:
                raise ValueError(f"told {file.read().decode()}")

        inprocess_client.EngineCore = build


async def _answer_while_building(folder: Path, pipe: Path, logs: Path) -> tuple[int, str]:
    """The process id, asked for in the midst of building; and how building ends."""
    config = tiny_config(folder)
    setup = GeneratorSetup(
        model_path=folder,
        facts=read_model_facts(str(folder)),
        section=config.generator,
        max_context_length=config.model.max_context_length,
        seed=0,
        records=CaptureSpec(routing=True, kept_tokens=False),
        weights=config.weights,
        lora=None,
        payload_capacity_bytes=2**20,
        gpu_bytes=0,
    )
    mesh = spawn_role(this_host(), "generator", num_procs=1)
    actor = mesh.spawn("generator", BuildsOnDemand, logs, 0, pipe)
    building = asyncio.ensure_future(actor.setup.call_one(setup, "host-0", logs))
    try:
        # Opened once the other end is, in the midst of building.
        held = await asyncio.to_thread(pipe.open, "wb", buffering=0)
        with held:
            async with asyncio.timeout(DEADLINE_S):
                pid = await actor.pid.call_one()
            held.write(b"to fail")
        with pytest.raises(ActorError) as failed:
            await building
    finally:
        await mesh.stop()
    return pid, str(failed.value)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_a_process_answers_while_its_engine_is_built(tmp_path: Path) -> None:
    folder, pipe = write_tiny_model(tmp_path / "hf"), tmp_path / "pipe"
    os.mkfifo(pipe)
    pid, message = asyncio.run(_answer_while_building(folder, pipe, tmp_path))
    assert pid != os.getpid() and "ValueError: told to fail" in message


def test_the_process_of_an_engine_imports_no_web_server() -> None:
    """vLLM asks every global of every module for its attributes, and some of werkzeug's refuse to answer."""
    code = (
        "import sys, forgeasync.runtime.teacher as t; print(sorted({'flask', 'werkzeug'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
