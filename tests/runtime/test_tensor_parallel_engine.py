"""Processes of engines: what they import; two tensor-parallel workers that a Monarch proc has to spawn."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from forgeasync.config import RunConfig, SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.engines import start_engine
from tests.support.processes import run_alone

GREEDY = SamplingSection(top_k=1, max_response_tokens=24)
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 17)]


def texts_of_one_worker(folder: Path) -> list[str]:
    return asyncio.run(_texts_of_one_worker(folder))


async def _texts_of_one_worker(folder: Path) -> list[str]:
    config = tiny_config(folder)
    engine = await start_engine(folder, config.generator, config.weights)
    groups = [await engine.generate(prompt_ids_P=one, num_samples=1, sampling=GREEDY) for one in PROMPTS]
    engine.shutdown()
    return [rollout.text for (rollout,) in groups]


async def _two_workers(config: RunConfig, folder: Path, logs: Path) -> tuple[list[str], list[bool]]:
    """Texts; and of every worker of the engine, whether it is a fork of its parent."""
    # Not at the top: the engine of one worker runs in a process that reads this file, and vLLM looks at all
    # that it has imported, where Monarch's web server has objects that refuse to be looked at.
    from forgeasync.runtime import ProcessManager, RefusedGroup, start_generators

    processes = ProcessManager(logs)
    try:
        generators = await start_generators(processes, config, read_model_facts(str(folder)), folder)
        texts = []
        for number, prompt in enumerate(PROMPTS):
            answer = await generators.sample_group(number, prompt, num_samples=1, sampling=GREEDY)
            assert not isinstance(answer, RefusedGroup), answer
            texts.append(answer[0].text)
        workers = list(workers_of(logs))
        return texts, [library_address(one.pid) == library_address(one.ppid()) for one in workers]
    finally:
        await processes.close()


def workers_of(logs: Path) -> Iterator[psutil.Process]:
    """Processes that write into the generator's log because their parent does."""
    writing = {}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(logs):
                writing[process.pid] = process
    for process in writing.values():
        # A program that an engine runs for a moment may end meanwhile.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            # Python's own process that watches over shared memory.
            is_tracker = b"resource_tracker" in read(process.pid, "cmdline")
            if process.ppid() in writing and not is_tracker:
                yield process


def read(pid: int, file: str) -> bytes:
    return Path(f"/proc/{pid}/{file}").read_bytes()


def library_address(pid: int) -> bytes:
    """Where libc lies in memory: at random in every program that starts, but in a fork as in its parent."""
    return next(line for line in read(pid, "maps").splitlines() if b"/libc.so" in line).split()[0]


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_its_workers_are_spawned_and_sample_what_one_worker_does(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", scale=12.0)
    config = tiny_config(folder)
    generator = config.generator.model_copy(update={"tensor_parallel": 2})
    timeouts = config.timeouts.model_copy(update={"setup_s": 800.0})
    config = config.model_copy(update={"generator": generator, "timeouts": timeouts})
    alone = run_alone(texts_of_one_worker, folder)
    texts, are_forks = asyncio.run(_two_workers(config, folder, tmp_path / "logs"))
    assert texts == alone and all(len(text) > 3 for text in texts), "greedy, in float32"
    assert are_forks == [False, False], "a fork of a proc with threads may hang"


def test_the_process_of_an_engine_imports_no_web_server() -> None:
    """vLLM asks every global of every module for its attributes, and some of werkzeug's refuse to answer."""
    code = (
        "import sys, forgeasync.runtime.teacher as t; print(sorted({'flask', 'werkzeug'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
