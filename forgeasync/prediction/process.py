"""The process that simulates for a run: a request on stdin; on stdout a prediction a line, each one fuller.

It simulates in a process of its own, at the lowest priority, so that the run's event loop and its training go
on meanwhile. It ends with the run, also if that is killed.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from pydantic import Field

from forgeasync.config import RunConfig
from forgeasync.models import read_model_facts
from forgeasync.prediction.simulated import SampledLengths, predictions, with_lengths
from forgeasync.profile import read_profile
from forgeasync.schema import CountOrZero, Section

LOWEST_PRIORITY = 19

_PR_SET_PDEATHSIG = 1
"""Of ``prctl``, in <linux/prctl.h>."""


class PredictionRequest(Section):
    """What is to be simulated."""

    config_json: str
    """The run's config, as the run uses it."""
    profile: str
    """File of the profile."""
    after_step: CountOrZero
    recent: dict[str, SampledLengths]
    """Groups that lengths are fitted to, by source; empty: the profile's lengths."""
    gpu_bytes: int = Field(gt=0, le=2**60)
    """Memory of a GPU."""


def main() -> None:
    """Answer one request."""
    # A simulation takes minutes, and may not say anything for as long.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(LOWEST_PRIORITY)
    request = PredictionRequest.model_validate_json(sys.stdin.buffer.read(), strict=True)
    config = RunConfig.model_validate_json(request.config_json, strict=True)
    profile = with_lengths(read_profile(Path(request.profile)), request.recent)
    facts = read_model_facts(config.model.path)
    for found in predictions(
        config, facts, profile, after_step=request.after_step, gpu_bytes=request.gpu_bytes
    ):
        print(found.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
