"""What a run that is resumed finds on the disk of groups that were finished before it was killed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forgeasync.buffer import (
    Candidate,
    LeftOut,
    LostSteps,
    attempt_and_prompt,
    plan_restore,
    reference_version,
)
from forgeasync.checkpoint import RunState, differences
from forgeasync.config import RunConfig
from forgeasync.rollouts import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    SpilledGroup,
    SpilledGroupTorn,
    file_name,
    read_kept,
)

DECIDES = (
    "model",
    "data",
    "sampling",
    "trainer",
    "algorithm",
    "max_off_policy_steps",
    "buffer",
    "accounting",
    "environment",
    "episodes",
    "agents",
)
"""Sections that a group, its score, its age or the weights of the lost steps follow from."""

_IRRELEVANT = frozenset({"buffer.keep_groups", "buffer.heartbeat_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroups:
    """Finished groups that are trained on without being sampled again."""

    groups: tuple[SpilledGroup, ...] = ()
    """In the data's order."""
    batches: tuple[tuple[int, ...], ...] = ()
    """Prompts of the next steps, which are made again with these groups."""
    left_out: Mapping[LeftOut, int] = field(default_factory=dict)
    why: str = ""
    """What stands behind a reason for leaving groups out that holds for all of them."""

    @property
    def num_left_out(self) -> int:
        """Groups that are sampled again although they were finished."""
        return sum(num for reason, num in self.left_out.items() if reason is not LeftOut.ENDED)

    @property
    def num_prompts(self) -> int:
        """The length of the data's order up to the last of their prompts."""
        return max((attempt_and_prompt(one.group.draw_id)[1] + 1 for one in self.groups), default=0)

    def messages(self, step: int) -> Iterator[str]:
        """Say what was found by a run that goes on after ``step``."""
        if self.groups:
            again = f"; steps {step + 1} to {step + len(self.batches)} are made again" if self.batches else ""
            yield f"{len(self.groups)} finished groups come back from the disk{again}"
        if self.num_left_out:
            reasons = ", ".join(
                f"{reason} {num}"
                for reason, num in sorted(self.left_out.items())
                if reason is not LeftOut.ENDED
            )
            yield f"{self.num_left_out} finished groups are sampled again ({reasons}){self.why}"


def find_groups(folder: Path, state: RunState, config: RunConfig, lost: LostSteps | None) -> FoundGroups:
    """Read the groups in ``folder``, and choose those that the run goes on with; removes nothing.

    ``lost`` is what the ledger says, None if there is none.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        return FoundGroups()
    if lost is None:
        return FoundGroups(left_out={LeftOut.NO_LEDGER: len(files)})
    if changed := _changed_settings(state.config, config):
        return FoundGroups(left_out={LeftOut.OTHER_CONFIG: len(files)}, why=f": {', '.join(changed)} changed")
    torn: Counter[LeftOut] = Counter()
    groups: dict[tuple[int, int], SpilledGroup] = {}
    for file in files:
        try:
            one = read_kept(file)
        except SpilledGroupTorn:
            torn[LeftOut.TORN] += 1
            continue
        attempt, prompt = attempt_and_prompt(one.group.draw_id)
        groups[prompt, attempt] = one
    plan = plan_restore(
        [_candidate(key, one, config) for key, one in groups.items()],
        lost,
        state.buffer,
        groups_per_step=config.algorithm.groups_per_step,
        max_off_policy_steps=config.max_off_policy_steps,
    )
    return FoundGroups(
        groups=tuple(groups[one.prompt, one.attempt] for one in plan.restored),
        batches=plan.batches,
        left_out=Counter(plan.left_out) + torn,
    )


def remove_others(folder: Path, groups: Sequence[SpilledGroup]) -> None:
    """Remove all files of groups but those of ``groups``."""
    wanted = {file_name(one.group.draw_id) for one in groups}
    for file in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{UNFINISHED_SUFFIX}")):
        if file.name not in wanted:
            file.unlink()


def _changed_settings(before: Mapping[str, object], config: RunConfig) -> list[str]:
    now = config.model_dump(mode="json")
    found = differences({name: before.get(name) for name in DECIDES}, {name: now[name] for name in DECIDES})
    return [path for path, _, _ in found if path not in _IRRELEVANT]


def _candidate(key: tuple[int, int], one: SpilledGroup, config: RunConfig) -> Candidate:
    prompt, attempt = key
    rollouts = one.group.rollouts
    return Candidate(
        prompt=prompt,
        attempt=attempt,
        reference=reference_version(rollouts, config.buffer.age_of),
        last_version=max(rollout.last_version for rollout in rollouts),
    )
