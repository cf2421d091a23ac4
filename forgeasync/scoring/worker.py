"""Process that verifies answers: reads JSON requests from stdin and writes replies to stdout, one per line.

Started by ``forgeasync.scoring.verifier_pool`` as ``python -m forgeasync.scoring.worker``. It imports the
verifier and generates problems, once for all answers.

    {"setup": {...}}        ->  {"ready": [<layers>]}      or {"refused": "<reason>"}
    {"task": {...}}         ->  {"loaded": true}           or {"refused": "<reason>"}
    {"answer": "<text>"}    ->  {"value": 1.0, "is_correct": true, "has_answer": true},
                                {"error": "<reason>"}, {"timeout": true} or {"crash": <exit status>}

Only forks of this process read answers, so an answer can affect nothing outside of its fork. A fork serves
one answer after another until one of them runs code: the audit hook reports every compilation and execution
through a pipe immediately, so that no code can revoke the report. After such an answer, and after any that
was cut off, the next one gets a new fork. So an answer can stall, crash or tamper with nothing but its own
verification. (It can forge its own score if a verifier evaluates it as code.)

Several of reasoning-gym's verifiers evaluate the response as Python code, and others compute its powers.

A fork costs far more than a plain answer: 12 ms instead of 0.5 ms of processor time for sums, on a virtual
machine. So a fork also serves other problems, which are sent to it as the bytes of plain values.
"""

import gc
import io
import json
import os
import pickle
import select
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from pydantic import TypeAdapter

from forgeasync.config import ReasoningGymSource
from forgeasync.isolation import (
    address_space_bytes,
    enter_isolation,
    lock_down,
    open_channel,
    read_only_roots,
    write_line,
)
from forgeasync.rollouts import NO_ANSWER, Score, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class MathVerifierChoice:
    """Choice of math-verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymVerifierChoice:
    """Choice of the verifier of one reasoning-gym data set, with the settings that generate its problems."""

    source: ReasoningGymSource
    num_train: int
    num_held_out: int
    seed: int


VerifierChoice = GymVerifierChoice | MathVerifierChoice


class Verifier(Protocol):
    """Scores answers inside a process of verifiers, without any limits."""

    def load(self, task: Task) -> Any:
        """Prepare a task, once for all its answers; raises ValueError if it differs here."""
        ...

    def score(self, loaded: Any, response: str) -> Score:
        """Score one response to a loaded task; may raise any exception."""
        ...


SOLVED = 1.0
"""Score of a full solution by reasoning-gym's verifiers; less is partial credit."""
MAX_ABS_SCORE = 1.0


class GymVerifier:
    """Verifier of the reasoning-gym data set that made the problem."""

    def __init__(self, choice: GymVerifierChoice) -> None:
        """Open the data set.

        Raises:
            ValueError: A field of ``data.source`` is invalid; the message names it.
        """
        self._source = choice.source
        self._is_warm = False
        # Slow to import, and only processes that verify answers need it.
        from forgeasync.environments import ReasoningGymProblems, final_answer

        self._final_answer = final_answer
        self._problems = ReasoningGymProblems(
            choice.source, num_train=choice.num_train, num_held_out=choice.num_held_out, seed=choice.seed
        )

    def load(self, task: Task) -> dict[str, Any]:
        """Return reasoning-gym's own record of a task, generated again.

        Raises:
            ValueError: The task differs from what its index generates. This prevents scoring an answer
                against another problem.
        """
        entry = self._problems.entry(task.source_index)
        if entry["question"] != task.prompt:
            raise ValueError(
                f"data.source.task: {self._source.task!r} generates another problem than task "
                f"{task.task_id!r} at index {task.source_index}"
            )
        if not self._is_warm:
            self._warm_up(entry)
        return entry

    def _warm_up(self, entry: dict[str, Any]) -> None:
        """Run the verifier on the reference, so that its late imports do not slow down the first answer."""
        self._is_warm = True
        # Some verifiers fail on an answer of None, which puzzles with many solutions have.
        with suppress(Exception):
            self._problems.score_answer(str(entry["answer"]), entry)

    def score(self, entry: dict[str, Any], response: str) -> Score:
        """Return the verifier's score, or ``NO_ANSWER`` without an answer.

        The verifier may raise any exception.
        """
        source = self._source
        answer = self._final_answer(response, prefix=source.answer_prefix, part=source.answer_part)
        if answer is None:
            return NO_ANSWER
        value = self._problems.score_answer(answer, entry)
        if not abs(value) <= MAX_ABS_SCORE:
            raise ValueError(f"the verifier of {source.task} gave {value!r}, which is not from -1 to 1")
        return Score(value=value, is_correct=value >= SOLVED)


CHOICE_CODEC: TypeAdapter[VerifierChoice] = TypeAdapter(VerifierChoice)
"""Converts a verifier's choice to JSON and back."""


def build_verifier(choice: VerifierChoice) -> Verifier:
    """Build the verifier of a choice; imports packages that evaluate text written by models.

    Raises:
        ValueError: A config field makes the choice impossible; the message names it.
    """
    match choice:
        case GymVerifierChoice():
            return GymVerifier(choice)
        case MathVerifierChoice():
            from forgeasync.scoring.math_answers import MathVerifier

            return MathVerifier()


LOAD_LIMIT_S = 60.0
"""Seconds within which a problem must be generated; after that, this process ends."""
MAX_VERDICT_BYTES = 4096
MAX_REASON_CHARS = 500
MAX_ANSWERS = 64
"""Maximum number of answers that one fork serves."""

_ORPHAN_GRACE_S = 2.0
"""Seconds by which an answer's own alarm follows the parent's kill; it is for orphans only."""
_ANSWERS, _VERDICTS, _REPORTS = 3, 4, 5
"""Descriptors in the fork."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Settings of a process of verifiers."""

    choice: dict[str, Any]
    """Choice of verifier, encoded by ``CHOICE_CODEC``."""
    answer_limit_s: float
    answer_memory_bytes: int
    scratch_folder: str | None
    """Folder of the host, removed after all imports; None within bubblewrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkLimits:
    """Limits of answers, and the folders that they may read."""

    answer_limit_s: float
    answer_memory_bytes: int
    read_roots: tuple[str, ...]
    in_bubblewrap: bool


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for numbers, texts and containers of them only."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a plain value")


def plain_bytes(loaded: Any) -> bytes | None:
    """Return a problem as bytes that can be read without running code; None if that is not possible."""
    try:
        content = pickle.dumps(loaded)
        _PlainUnpickler(io.BytesIO(content)).load()
    except Exception:  # Pickling an object can raise any exception.
        return None
    return content


def reason(error: BaseException) -> str:
    """Describe an exception briefly, for a reply."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]


class AnswerFork:
    """Forks on creation; ``close`` ends the fork and must be called."""

    def __init__(self, verifier: Verifier, loaded: Any, limits: ForkLimits) -> None:
        """Fork; answers are verified for the problem ``loaded``, until ``verify`` gets another one."""
        self._limits = limits
        self._num_answers = 0
        answers, self._answers = os.pipe()
        self._verdicts, verdicts = os.pipe()
        self._reports, reports = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _serve(verifier, loaded, limits, answers=answers, verdicts=verdicts, reports=reports)
            finally:
                os._exit(1)
        for descriptor in (answers, verdicts, reports):
            os.close(descriptor)

    def verify(self, answer: str, other: bytes = b"") -> tuple[dict[str, Any], bool]:
        """Return the verdict, in a form of the worker's protocol, and whether the fork can be used again.

        ``other`` is another problem, from ``plain_bytes``, that this answer and the next ones are for.
        """
        self._num_answers += 1
        content = answer.encode(errors="surrogatepass")
        deadline_s = time.monotonic() + self._limits.answer_limit_s
        with suppress(BrokenPipeError):  # it has died: reported as a crash
            for part in (other, content):
                _write_all(self._answers, len(part).to_bytes(_LENGTH_BYTES) + part)
        said = self._read_verdict(deadline_s)
        if said is None:
            return {"timeout": True}, False
        if not said.endswith(b"\n"):
            return {"crash": "killed" if self.has_ended() else "it said too much"}, False
        verdict, wants_to_retire = _checked(said)
        has_run_code, _, _ = select.select([self._reports], [], [], 0.0)
        is_clean = not has_run_code and not wants_to_retire and self._num_answers < MAX_ANSWERS
        return verdict, is_clean

    def close(self) -> None:
        """Kill the fork, and all processes that it may have started."""
        for descriptor in (self._answers, self._verdicts, self._reports):
            os.close(descriptor)
        os.kill(self._pid, signal.SIGKILL)
        if self._limits.in_bubblewrap and _process_1_is_bubblewrap():
            # In a separate process namespace, this kills everything but bubblewrap, its first process, and
            # this process.
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def has_ended(self) -> bool:
        """Return whether the fork's process has ended."""
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return ended is not None

    def _read_verdict(self, deadline_s: float) -> bytes | None:
        """Read up to the end of a line, the end of the process or the size limit; None after the deadline."""
        said = b""
        while len(said) <= MAX_VERDICT_BYTES and not said.endswith(b"\n"):
            ready, _, _ = select.select([self._verdicts], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._verdicts, MAX_VERDICT_BYTES)
            if not part:
                break
            said += part
        return said


def _process_1_is_bubblewrap() -> bool:
    """Return whether this process is in a process namespace of bubblewrap.

    Elsewhere kill(-1) ends the machine.
    """
    with open("/proc/1/comm", encoding="ascii") as comm:
        return comm.read().strip() == "bwrap"


_SCORED = ("value", "is_correct", "has_answer")
"""Fields of a verdict about an answer."""


def _verdict(score: Score) -> dict[str, Any]:
    return {"value": score.value, "is_correct": score.is_correct, "has_answer": score.has_answer}


def _checked(said: bytes) -> tuple[dict[str, Any], bool]:
    """Convert any output of the fork to a verdict of the protocol; also return whether the fork must end."""
    try:
        verdict = json.loads(said)
        if "error" in verdict:
            return {"error": str(verdict["error"])[:MAX_REASON_CHARS]}, True
        return _verdict(Score(**{name: verdict[name] for name in _SCORED})), bool(verdict["retire"])
    except Exception as error:  # an answer may forge anything
        return {"error": reason(error)}, True


def _serve(
    verifier: Verifier, loaded: Any, limits: ForkLimits, *, answers: int, verdicts: int, reports: int
) -> NoReturn:
    """Verify incoming answers, inside the fork; the first ones are for the problem ``loaded``."""
    # It keeps only these descriptors: requests and replies of its parent, and the log, are out of reach.
    kept = [os.dup(descriptor) for descriptor in (answers, verdicts, reports)]
    nowhere = os.open(os.devnull, os.O_RDWR)
    low = [os.dup2(descriptor, 100 + index) for index, descriptor in enumerate(kept)]
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    for index, descriptor in enumerate(low):
        os.dup2(descriptor, _ANSWERS + index)
    os.closerange(_REPORTS + 1, 1 << 16)

    before = address_space_bytes()
    grace_s = limits.answer_limit_s + _ORPHAN_GRACE_S
    statm = lock_down(
        memory_bytes=limits.answer_memory_bytes,
        cpu_limit_s=int(MAX_ANSWERS * limits.answer_limit_s + grace_s) + 1,
        read_roots=limits.read_roots,
        report=_REPORTS,
    )
    while True:
        other = _read_exactly(int.from_bytes(_read_exactly(_LENGTH_BYTES)))
        content = _read_exactly(int.from_bytes(_read_exactly(_LENGTH_BYTES)))
        if other:
            loaded = pickle.loads(other)  # from the parent, which has checked that it is plain
        signal.setitimer(signal.ITIMER_REAL, grace_s)
        verdict: dict[str, Any]
        try:
            score = verifier.score(loaded, content.decode(errors="surrogatepass"))
            verdict = _verdict(score)
            # Memory that stays allocated would starve later, harmless answers.
            verdict["retire"] = statm() - before > limits.answer_memory_bytes // 2
        except Exception as error:  # any error of untrusted text is reported, and counted by the parent
            verdict = {"error": reason(error)}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _write_all(_VERDICTS, json.dumps(verdict).encode()[: MAX_VERDICT_BYTES - 1] + b"\n")


def _read_exactly(num_bytes: int) -> bytes:
    """Read bytes; ends the process if the parent has closed its end."""
    parts = []
    while num_bytes:
        part = os.read(_ANSWERS, num_bytes)
        if not part:
            os._exit(0)
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class _Answers:
    """Current task, and the fork that reads answers to it."""

    def __init__(self, verifier: Verifier, limits: ForkLimits) -> None:
        self._verifier = verifier
        self._limits = limits
        self._task: Task | None = None
        self._loaded: Any = None
        self._news = b""
        """Problem that the fork has not received yet; empty if none."""
        self._fork: AnswerFork | None = None
        # The forks share its pages until one side writes to them.
        gc.collect()
        gc.freeze()

    def load(self, task: Task) -> dict[str, Any]:
        if task == self._task:
            return {"loaded": True}
        signal.setitimer(signal.ITIMER_REAL, LOAD_LIMIT_S)
        try:
            self._loaded = self._verifier.load(task)
        except ValueError as error:
            return {"refused": str(error)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._task = task
        if self._fork is not None:
            plain = plain_bytes(self._loaded)
            if plain is None:
                self._end_fork()
            else:
                self._news = plain
        return {"loaded": True}

    def verify(self, answer: str) -> dict[str, Any]:
        if self._fork is not None and self._fork.has_ended():
            # It ended between two answers, which is not the fault of the next one.
            self._end_fork()
        if self._fork is None:
            self._fork, self._news = AnswerFork(self._verifier, self._loaded, self._limits), b""
        news, self._news = self._news, b""
        verdict, is_clean = self._fork.verify(answer, news)
        if not is_clean:
            self._end_fork()
        return verdict

    def _end_fork(self) -> None:
        if self._fork is not None:
            self._fork.close()
            self._fork = None


def serve() -> None:
    """Answer requests until stdin ends."""
    requests, replies = open_channel()
    setup = WorkerSetup(**json.loads(requests.readline())["setup"])
    # Before any library can start a thread.
    in_bubblewrap = setup.scratch_folder is None
    layers = enter_isolation(in_bubblewrap=in_bubblewrap)

    limits = ForkLimits(
        answer_limit_s=setup.answer_limit_s,
        answer_memory_bytes=setup.answer_memory_bytes,
        read_roots=read_only_roots(),
        in_bubblewrap=in_bubblewrap,
    )
    try:
        answers = _Answers(build_verifier(CHOICE_CODEC.validate_python(setup.choice)), limits)
    except ValueError as error:
        write_line(replies, {"refused": str(error)})
        return
    if setup.scratch_folder is not None:
        shutil.rmtree(setup.scratch_folder)
    write_line(replies, {"ready": layers})
    for line in requests:
        request = json.loads(line)
        if "task" in request:
            write_line(replies, answers.load(Task(**request["task"])))
        else:
            write_line(replies, answers.verify(request["answer"]))


if __name__ == "__main__":
    serve()
