"""Recorded runs executed again with ``apps.reexecute``, and changes planted in their records."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import forgeasync as fa
from forgeasync.rollouts import encode_facts, file_name, read_spilled, write_spilled
from forgeasync.testing import train_three_steps
from tests.end_to_end.test_mismatch import num_digits

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = {
    "fidelity": "bitwise",
    "record_execution": True,
    "generator.batch_invariant": True,
    "generator.num_replicas": 2,
    "trainer.parallel.expert": 1,
    "sampling.top_k": 9,
    "max_steps": 4,
    "max_off_policy_steps": 2,
    "checkpoint.every_steps": 2,
    "payload.capacity_gib": 0.1,
}


class TwoTurns(fa.Environment):
    """The score is the number of digits in both turns, so that groups differ."""

    async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
        messages = [{"role": "user", "content": task.prompt}]
        first = await agent.respond(messages)
        messages += [first.message, {"role": "user", "content": "again"}]
        second = await agent.respond(messages)
        return fa.Score(float(sum(map(str.isdigit, first.text + second.text))), False)


def execute_again(run: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit code, and the lines that were printed."""
    done = subprocess.run(
        [sys.executable, "-m", "apps.reexecute", str(run), *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    train_three_steps(folder, RECORDED, reward=num_digits)
    return folder / "run"


def first_draw(run: Path) -> int:
    """A group of the first step; which ones are in it depends on which were complete first."""
    lines = map(json.loads, (run / "execution.jsonl").read_text().splitlines())
    return next(line["draws"][0] for line in lines if line["event"] == "step" and line["step"] == 1)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(recorded, tmp_path / "run")


def test_a_run_is_the_same_on_another_number_of_generators(recorded: Path) -> None:
    code, lines = execute_again(recorded, "generator.num_replicas=1")
    assert (code, lines[-1]) == (0, "4 of 4 steps are the same, bit for bit"), lines


def test_the_steps_after_a_checkpoint_are_the_same(recorded: Path) -> None:
    code, lines = execute_again(recorded, "--from", "2", "--to", "3", "generator.num_replicas=1")
    assert (code, lines[-1]) == (0, "1 of 1 steps are the same, bit for bit"), lines


def test_an_episode_is_the_same_with_what_its_environment_said(tmp_path: Path) -> None:
    changes = {"max_steps": 2, "max_off_policy_steps": 1, "sampling.max_response_tokens": 12}
    train_three_steps(tmp_path, RECORDED | changes, environment=TwoTurns)
    code, lines = execute_again(tmp_path / "run", "generator.num_replicas=1")
    assert (code, lines[-1]) == (0, "2 of 2 steps are the same, bit for bit"), lines


def test_another_score_is_found(run: Path) -> None:
    file = run / "payloads" / file_name(first_draw(run))
    one = read_spilled(file)
    arrays = run / "arrays"
    # The arrays are the last part of the file, and ``read_spilled`` has moved what refers to them.
    _, _, num_bytes = struct.unpack_from("<8sQQ", file.read_bytes())
    start = file.stat().st_size - num_bytes
    arrays.write_bytes(file.read_bytes()[start:])
    moved = one.with_refs(lambda ref: dataclasses.replace(ref, offset=ref.offset - start))
    score = dataclasses.replace(one.scores[1], value=one.scores[1].value + 1)
    changed = dataclasses.replace(moved, scores=(one.scores[0], score, *one.scores[2:]))
    write_spilled(file, encode_facts(changed), str(arrays))
    code, lines = execute_again(run, "--to", "1", "generator.num_replicas=1")
    assert code == 1
    assert (
        f"step 1: score of rollout 1, group of draw {first_draw(run)}: recorded {score.value!r}" in lines[-1]
    )


def test_a_damaged_record_is_refused(run: Path) -> None:
    file = run / "payloads" / file_name(first_draw(run))
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    code, lines = execute_again(run)
    assert code == 2 and "has other arrays than were written" in lines[-1]
    file.unlink()
    code, lines = execute_again(run)
    assert code == 2 and "is missing: step 1 trained on it" in lines[-1]


def test_a_machine_whose_kernels_round_differently_is_refused(run: Path) -> None:
    lines = list(map(json.loads, (run / "execution.jsonl").read_text().splitlines()))
    lines[0] |= {"machine": "Another Processor", "kernels": f"{int(lines[0]['kernels'], 16) ^ 1:016x}"}
    (run / "execution.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, said = execute_again(run)
    assert code == 2 and "was recorded on a Another Processor, whose kernels round differently" in said[-1]


def test_the_last_bit_of_a_weight_is_found(run: Path) -> None:
    shard = next((run / "checkpoints" / "step-00000002" / "trainer").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 & ~3] ^= 1
    shard.write_bytes(content)
    code, lines = execute_again(run, "--from", "2", "generator.num_replicas=1")
    assert code == 1 and lines[-1].startswith("different: weights after step 2: recorded digest"), lines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--from", "3"], "must be 0 or the step of a checkpoint of the run, which are: 2, 4"),
        (["--to", "5"], "must be a step after 0; the run has recorded 4 steps"),
        (["--token", "2"], "must be DRAW/ROLLOUT/POSITION"),
        (["--token", "0/99/0"], "has no such token"),
    ],
)
def test_what_the_record_does_not_have_is_refused(
    recorded: Path, arguments: list[str], expected: str
) -> None:
    code, lines = execute_again(recorded, *arguments)
    assert code == 2 and expected in lines[-1]


def test_a_run_without_a_record_is_refused(tmp_path: Path) -> None:
    code, lines = execute_again(tmp_path)
    assert code == 2 and "the run needs record_execution=true" in lines[-1]


def test_a_token_is_shown_with_its_record(recorded: Path) -> None:
    code, lines = execute_again(recorded, "--token", f"{first_draw(recorded)}/1/0")
    text = "\n".join(lines)
    assert code == 0 and "sampled under version 0" in text and "by request 0" in text
    assert "drawn from 9 ids" in text and "its group in step 1" in text
