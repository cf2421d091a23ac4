"""Measures a run against what was predicted of it, and has the prediction made anew as lengths change."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from forgeasync.config import LocalLauncher, PredictionSection, RunConfig, num_hosts
from forgeasync.controller.simulating import Simulating
from forgeasync.observability import RunDir
from forgeasync.planning import GPU_GIB
from forgeasync.prediction import (
    Growth,
    MeasuredSteps,
    MeasuredWindow,
    Prediction,
    PredictionRequest,
    SampledLengths,
    SplitAdvice,
    bound_words,
    origin_words,
    verdict_lines,
)
from forgeasync.profile import num_steps_ahead, read_profile
from forgeasync.rollouts import Group

END_S = 10.0
"""Longest time for which the end of a run waits for what is being simulated."""

GroupLengths = tuple[str, int, tuple[int, ...]]
"""Of one group: its source, the tokens of its prompt, the tokens of its responses."""


class Desk(Protocol):
    """Where a run asks for another number of generators: ``ControlDesk``."""

    @property
    def num_wanted(self) -> int:
        """Generators that were asked for last."""
        ...

    def want(self, num: int) -> str:
        """Have so many from now on; returns in words what is done for it.

        Raises:
            ValueError: there is no room for them, or it cannot be done now.
        """
        ...


class PredictionWatch:
    """The times of one run; without a ``prediction`` section it only measures."""

    def __init__(self, config: RunConfig, run_dir: RunDir, tell: Callable[[str], None]) -> None:
        """A prediction begins to be made at once, in a process of its own.

        Raises:
            ConfigError: the profile cannot be read any more.
        """
        self._config = config
        self._tell = tell
        self._window = MeasuredWindow.of_run(
            config.max_steps,
            num_steps_ahead=num_steps_ahead(
                max_off_policy_steps=config.max_off_policy_steps,
                max_groups=config.buffer.max_groups,
                groups_per_step=config.algorithm.groups_per_step,
            ),
        )
        self._advice = SplitAdvice()
        self._section = config.prediction
        self._simulating: Simulating | None = None
        self._is_told = False
        self._num_told_problems = 0
        self._refit_step: int | None = None
        """The step of the newest lengths; before there are any, the one before the first."""
        self._recent: deque[tuple[GroupLengths, ...]] = deque()
        self._num_hosts = _num_generator_hosts(config)
        self._desk: Desk | None = None
        self._growth: Growth | None = None
        """None: the run adds no generators, or was refused one."""
        self._num_added = 0
        # One that an earlier start has left would be taken for this one's.
        run_dir.prediction.unlink(missing_ok=True)
        if self._section is not None:
            self._recent = deque(maxlen=self._section.refit_every_steps or 1)
            if self._section.max_replicas is not None:
                self._growth = Growth(max_replicas=self._section.max_replicas, num_each=self._num_hosts)
            profile = self._section.profile
            self._simulating = Simulating(
                run_dir.prediction,
                run_dir.log("prediction"),
                profile=profile,
                profile_of=origin_words(read_profile(Path(profile))),
            )
            self._simulating.begin(self._request(self._section, after_step=0))

    def step(
        self, step: int, metrics: Mapping[str, float | int], groups: Sequence[Group]
    ) -> dict[str, float | int]:
        """Take the line of a step and its groups; returns further metrics of the line. Tells what is new."""
        self._window.add(metrics)
        if self._section is None or self._simulating is None:
            return {}
        self._recent.append(tuple(map(_lengths, groups)))
        if self._refit_step is None:
            self._refit_step = step - 1
        self._tell_news(self._simulating)
        has_grown = self._grow(self._simulating)
        every = self._section.refit_every_steps
        is_due = every is not None and step - self._refit_step >= every
        if (is_due or has_grown) and not self._simulating.is_busy:
            self._refit_step = step
            self._simulating.begin(self._request(self._section, after_step=step))
        return self._metrics(self._simulating)

    def let_grow(self, desk: Desk) -> None:
        """Predict the number of generators that ``desk`` has, and add some where the config lets the run."""
        self._desk = desk

    def closing_lines(self) -> list[str]:
        """What bounds the run, how it compares with its prediction, and what changes would bring."""
        if self._simulating is None:
            return verdict_lines(self._window.measured(), None)
        self._simulating.wait(END_S)
        self._tell_news(self._simulating)
        record = self._simulating.record
        if record is None:
            return [bound_words(self._window.measured()), "nothing was predicted in time"]
        return verdict_lines(self._window.measured(), record)

    def close(self) -> None:
        """End what is being simulated; a second call does nothing."""
        if self._simulating is not None:
            self._simulating.close()

    def _tell_news(self, simulating: Simulating) -> None:
        for problem in simulating.problems[self._num_told_problems :]:
            self._num_told_problems += 1
            self._tell(f"the run's times are not predicted: {problem}; the run goes on")
        record = simulating.record
        if record is None:
            return
        if not self._is_told:
            self._is_told = True
            self._tell(f"predicted: {record.start.run.words} ({record.profile}, {record.profile_of})")
            for note in record.start.run.notes:
                self._tell(f"predicted with less certainty: {note}")
        if (words := self._advice.news(record.newest)) is not None:
            step = record.newest.after_step
            self._tell(words if not step else f"with lengths of the groups up to step {step}: {words}")

    def _grow(self, simulating: Simulating) -> bool:
        """Add a generator on every host if that is predicted to help; returns whether that was done."""
        record = simulating.record
        # A growth has to be predicted at once, which it cannot be beside another request.
        if record is None or self._desk is None or self._growth is None or simulating.is_busy:
            return False
        found = self._growth.wanted(record.newest, self._desk.num_wanted)
        if found is None:
            return False
        num, why = found
        try:
            words = self._desk.want(num)
        except ValueError as error:
            self._growth = None
            self._tell(f"no generator is added, although it would help ({why}): {error}")
            return False
        self._num_added += self._num_hosts
        self._tell(f"{num} generators from now on: {words} ({why})")
        return True

    def _metrics(self, simulating: Simulating) -> dict[str, float | int]:
        metrics: dict[str, float | int] = {
            "prediction/num_failures": len(simulating.problems),
            "prediction/num_faster_splits": self._advice.num_told,
            "prediction/num_added_replicas": self._num_added,
        }
        record = simulating.record
        if record is None:
            return metrics
        run = record.start.run
        metrics["prediction/step_s"] = run.step_s
        metrics["prediction/tokens_per_s"] = run.trained_tokens_per_s
        metrics |= _ratios(run.step_s, run.trained_tokens_per_s, self._window.measured())
        return metrics | _refitted(record.newest)

    def _request(self, section: PredictionSection, *, after_step: int) -> PredictionRequest:
        config, desk = self._config, self._desk
        # A number that is none for every host, as ``apps.control`` may ask for, cannot be simulated.
        if desk is not None and desk.num_wanted % self._num_hosts == 0:
            generator = config.generator.model_copy(update={"num_replicas": desk.num_wanted})
            config = config.model_copy(update={"generator": generator})
        return PredictionRequest(
            config_json=config.model_dump_json(),
            profile=section.profile,
            after_step=after_step,
            recent=_by_source([group for of_step in self._recent for group in of_step]),
            gpu_bytes=_gpu_bytes(),
        )


def _num_generator_hosts(config: RunConfig) -> int:
    launcher = config.launcher
    return 1 if isinstance(launcher, LocalLauncher) else num_hosts(launcher).generators


def _ratios(step_s: float, tokens_per_s: float, measured: MeasuredSteps | None) -> dict[str, float]:
    if measured is None:
        return {}
    return {
        "prediction/step_ratio": measured.step_s / step_s,
        "prediction/tokens_ratio": measured.trained_tokens_per_s / tokens_per_s,
    }


def _refitted(newest: Prediction) -> dict[str, float | int]:
    if not newest.after_step:
        return {}
    return {
        "prediction/refitted_at_step": newest.after_step,
        "prediction/refitted_step_s": newest.run.step_s,
        "prediction/refitted_tokens_per_s": newest.run.trained_tokens_per_s,
    }


def _lengths(group: Group) -> GroupLengths:
    return (
        group.task.source,
        group.rollouts[0].branches[0].num_prompt_tokens,
        tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
    )


def _by_source(groups: Sequence[GroupLengths]) -> dict[str, SampledLengths]:
    found: dict[str, list[GroupLengths]] = {}
    for group in groups:
        found.setdefault(group[0], []).append(group)
    return {
        source: SampledLengths(
            prompts=tuple(prompt for _, prompt, _ in of_source),
            responses=tuple(responses for _, _, responses in of_source),
        )
        for source, of_source in found.items()
    }


def _gpu_bytes() -> int:
    """Memory of this machine's smallest GPU, or what is planned for where there is none."""
    gpus = range(torch.cuda.device_count())
    planned = round(GPU_GIB * 2**30)
    return min((torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), default=planned)
