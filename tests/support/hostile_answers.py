"""Hostile answers to every data set of reasoning-gym, verified as in a run but without bubblewrap around.

Run as ``python -m tests.support.hostile_answers FOLDER PORT``: prints one JSON object with what became of
them. Answers try to write below FOLDER and to connect to PORT.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from reasoning_gym.factory import DATASETS

from forgeasync.config import ReasoningGymSource
from forgeasync.isolation import enter_isolation, read_only_roots
from forgeasync.rollouts import Task
from forgeasync.scoring import AnswerFork, ForkLimits, GymVerifier, GymVerifierChoice

# Mixes other data sets, which a config names by scalars only: it cannot be asked for.
EXCLUDED = frozenset({"composite"})
LIMITS = ForkLimits(
    answer_limit_s=0.2,
    answer_memory_bytes=256 * 2**20,
    read_roots=read_only_roots(),
    in_bubblewrap=False,
)


def hostile_answers(folder: Path, port: int) -> dict[str, str]:
    """Expressions, since several verifiers evaluate what they get; by what they try."""
    os_module, file = "__import__('os')", f"{folder}/file"
    return {
        "write": f"[[open('{file}-0', 'w').write('x')]]",
        "touch": f"[[{os_module}.open('{file}-1', 65)]]",
        "make folder": f"[[{os_module}.mkdir('{file}-2')]]",
        "shell": f"[[{os_module}.system('touch {file}-3')]]",
        "program": f"[[__import__('subprocess').run(['touch', '{file}-4'])]]",
        "spawn": f"[[{os_module}.posix_spawn('/usr/bin/touch', ['touch', '{file}-5'], {{}})]]",
        "fork": f"[[{os_module}.fork() or {os_module}.execv('/bin/sleep', ['{folder}', '1000'])]]",
        "kill": f"[[{os_module}.kill({os_module}.getppid(), 9)]]",
        "connect": f"[[__import__('socket').create_connection(('127.0.0.1', {port}))]]",
        "endless": "[[0 for _ in iter(int, 1)]]",
        "power": "9**9**9**9",
        "memory": "[[0] * 10**11]",
        "round brackets": "(" * 100_000,
        "square brackets": "[" * 100_000 + "]" * 100_000,
        "zeros": "\x00" * 1000,
        "surrogates": "\ud800" * 1000,
        "long": "Q " * 500_000,
    }


def verify_patiently(verifier: GymVerifier, loaded: dict[str, Any], answer: str) -> dict[str, Any]:
    fork = AnswerFork(verifier, loaded, dataclasses.replace(LIMITS, answer_limit_s=30.0))
    verdict, _ = fork.verify(answer)
    fork.close()
    return verdict


def main(folder: Path, port: int) -> dict[str, object]:
    """What became of the answers: counts of verdicts, data sets tried, and what scored 1 or above."""
    enter_isolation(in_bubblewrap=False)
    answers = hostile_answers(folder, port)
    became: dict[str, dict[str, Any]] = {}
    reference_failed: list[str] = []
    names = sorted(DATASETS.keys() - EXCLUDED)
    for name in names:
        source = ReasoningGymSource(kind="reasoning_gym", task=name)
        choice = GymVerifierChoice(source=source, num_train=1, num_held_out=1, seed=0)
        verifier = GymVerifier(choice)
        entry = verifier._problems.entry(0)
        loaded = verifier.load(
            Task(task_id=name, prompt=entry["question"], answer="", source_index=0, source=name)
        )
        fork: AnswerFork | None = None
        # The reference first and last: nothing that happened between may change its score.
        reference = "" if entry["answer"] is None else str(entry["answer"])
        verdicts = [verify_patiently(verifier, loaded, reference)]
        for kind, answer in answers.items():
            fork = fork or AnswerFork(verifier, loaded, LIMITS)
            verdict, is_clean = fork.verify(answer)
            if not is_clean:
                fork.close()
                fork = None
            became[f"{name}: {kind}"] = verdict
        if fork is not None:
            fork.close()
        verdicts.append(verify_patiently(verifier, loaded, reference))
        if verdicts[0] != verdicts[1] or (reference and verdicts[0].get("value") != 1.0):
            reference_failed.append(f"{name}: {verdicts}")
    return {
        "num_data_sets": len(names),
        "num_answers": len(answers),
        "became": Counter(next(iter(verdict)) for verdict in became.values()),
        "cut_off": [one for one, verdict in became.items() if "timeout" in verdict],
        "solved": [one for one, verdict in became.items() if verdict.get("value", 0.0) >= 1.0],
        "reference_failed": reference_failed,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
