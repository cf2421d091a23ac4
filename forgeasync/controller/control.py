"""Changes a run in progress, through request and answer files in the run's folder ``control``.

``apps.control`` calls ``ask``, which writes a request under a new name. ``ControlServer``, in the run, looks
for requests twice a second and writes an answer for each one. Files get their final names when complete.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from forgeasync.config import RunConfig
from forgeasync.files import replacing
from forgeasync.processes import is_running
from forgeasync.runtime import GeneratorPool, Host, HostRole, ProcessManager

LOOK_S = 0.5
"""Seconds between two checks for requests."""

ANSWER_S = 60.0
"""Seconds to wait for the run's answer."""

MAX_GENERATORS = 64

MAX_REQUEST_BYTES = 4096

logger = logging.getLogger(__name__)

_REQUEST = re.compile(r"request-([0-9a-f]{16})\.json")


class Refused(ValueError):
    """Raised if the run cannot be changed as requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A run's answer to a request."""

    is_accepted: bool
    words: str


def parse_change(text: str) -> int:
    """Return N of a change ``generators=N``.

    Raises:
        Refused: ``text`` is not such a change, or N is out of range.
    """
    key, separator, value = text.partition("=")
    if not separator or key != "generators":
        raise Refused(f"{key!r}: must be generators=N, with N from 1 to {MAX_GENERATORS}")
    if re.fullmatch(r"[0-9]{1,6}", value) is None:
        raise Refused(f"generators={value}: must be a whole number from 1 to {MAX_GENERATORS}")
    return check_generators(int(value))


def check_generators(num: object) -> int:
    """Return ``num`` if it is an integer from 1 to ``MAX_GENERATORS``.

    Raises:
        Refused: ``num`` is anything else.
    """
    if not isinstance(num, int) or isinstance(num, bool) or not 1 <= num <= MAX_GENERATORS:
        raise Refused(f"generators={num}: must be a whole number from 1 to {MAX_GENERATORS}")
    return num


class ControlServer:
    """Answers the requests of one run."""

    def __init__(
        self, folder: Path, pool: GeneratorPool, *, add_place: Callable[[], Host], drain_s: float
    ) -> None:
        """``add_place`` allots a host for one more generator; ``drain_s`` is ``timeouts.generate_s``."""
        self._folder = folder
        self._pool = pool
        self._add_place = add_place
        self._drain_s = drain_s

    async def loop(self) -> None:
        """Answer requests until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Answer all requests in the folder."""
        if not self._folder.is_dir():
            return
        for file in sorted(self._folder.iterdir()):
            if (match := _REQUEST.fullmatch(file.name)) is None:
                continue
            try:
                answer = self._answer(file)
                # Before the answer is written, so that a failed write does not apply the request again.
                file.unlink(missing_ok=True)
                _write(self._folder / f"answer-{match[1]}.json", asdict(answer))
            except OSError as error:
                # The client gives up after its own time limit; the run continues.
                logger.warning("cannot answer %s: %s", file, error)

    def _answer(self, file: Path) -> Answer:
        try:
            num = check_generators(_read_request(file))
        except Refused as refused:
            return Answer(is_accepted=False, words=str(refused))
        try:
            words = self._pool.scale_to(num, self._add_place, drain_s=self._drain_s)
        except ValueError as error:
            return Answer(is_accepted=False, words=f"generators={num}: {error}")
        return Answer(is_accepted=True, words=f"generators={num}: {words}")


def build_control_server(
    folder: Path, processes: ProcessManager, pool: GeneratorPool, config: RunConfig
) -> ControlServer:
    """Return the control server of a run; ``folder`` is the run's folder ``control``."""
    return ControlServer(
        folder,
        pool,
        add_place=lambda: processes.hosts.allot_more(
            HostRole.GENERATORS, gpus_per_proc=config.generator.tensor_parallel
        ),
        drain_s=config.timeouts.generate_s,
    )


def _read_request(file: Path) -> object:
    if file.stat().st_size > MAX_REQUEST_BYTES:
        raise Refused(f"a request of {file.stat().st_size} bytes: must have at most {MAX_REQUEST_BYTES}")
    try:
        request = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refused(f"a request that is not JSON: {error}") from error
    if not isinstance(request, dict) or set(request) != {"generators"}:
        raise Refused('a request must be {"generators": N}')
    return request["generators"]


def ask(run: Path, num_generators: int, *, limit_s: float = ANSWER_S) -> Answer:
    """Request a number of generators from the run in the folder ``run``, and wait for its answer.

    Raises:
        Refused: the folder has no run in progress.
        TimeoutError: the run ends or does not answer within ``limit_s``.
    """
    listing = run / "procs.json"
    try:
        controller = json.loads(listing.read_text(encoding="utf-8"))["controller"]
    except FileNotFoundError:
        raise Refused(f"{run}: must be the folder of a running run; it has no {listing.name}") from None
    if not is_running(controller):
        raise Refused(f"{run}: must be the folder of a running run; its process {controller} has ended")
    folder = run / "control"
    folder.mkdir(exist_ok=True)
    name = secrets.token_hex(8)
    request, answer = folder / f"request-{name}.json", folder / f"answer-{name}.json"
    _write(request, {"generators": num_generators})
    end_s = time.monotonic() + limit_s
    while not answer.exists():
        if time.monotonic() > end_s or not is_running(controller):
            request.unlink(missing_ok=True)
            raise TimeoutError(f"{run}: the run has not answered within {limit_s:g} s, or has ended")
        time.sleep(0.05)
    said = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    return Answer(is_accepted=said["is_accepted"], words=said["words"])


def _write(file: Path, content: dict[str, object]) -> None:
    with replacing(file) as out:
        out.write(json.dumps(content).encode() + b"\n")
