"""Resumes a run that has ended or died.

    claim_run              claims the run's folder, and ends the run's leftover processes on this machine
    resume_or_begin_anew   decides whether there is a checkpoint to resume from
    find_checkpoint        returns the checkpoint that --resume names, checked against the config
    find_groups            returns finished groups that need not be sampled again
    open_files             reopens the run's files, rewound to the checkpoint

When a controller is killed, almost all of its processes end by themselves. The rest are found by the run's
mark or in its list (``procs.json``). A different process that got a listed id is left alone.

This module must not import torch, because the supervisor imports it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgeasync.buffer import (
    Candidate,
    LostSteps,
    ResumedBuffer,
    SkipReason,
    attempt_and_prompt,
    check_ledger,
    cut_torn_line,
    plan_restore,
    reference_version,
)
from forgeasync.checkpoints import (
    FINAL,
    LAST,
    LAST_PUBLISHED,
    RUN_FILE,
    RunState,
    check_resumable,
    differences,
    list_checkpoints,
    read_run_state,
    step_of,
    sweep_partial,
)
from forgeasync.config import ModelFacts, RunConfig, dump_config
from forgeasync.files import (
    RUN_MARK,
    SHARED_MEMORY,
    UNFINISHED_SUFFIX,
    last_line,
    remove_files_of,
    whole_lines,
)
from forgeasync.observability import (
    RUNS_FOLDER,
    FaultLog,
    Holder,
    Role,
    RunDir,
    check_folder,
    claimed_marks,
    cut_after,
    leftover_processes,
    put_aside,
    recorded_draws,
)
from forgeasync.processes import end_all, marked_processes
from forgeasync.rollouts import (
    SUFFIX,
    SpilledGroup,
    SpilledGroupTorn,
    file_name,
    read_spilled,
    sweep_stale_folders,
)
from forgeasync.schema import ConfigError, Problem, raise_if_any

LINGER_S = 5.0
"""Seconds that processes of a run that ends have to end by themselves before they are killed."""


def claim_run(config: RunConfig) -> list[str]:
    """Claim ``run_dir`` if it has an earlier run, and clean up that run's processes and shared memory.

    Returns a message about each change.

    Raises:
        ConfigError: a run is in progress in the folder.
        NotEnded: a process of the earlier run does not end.
    """
    if config.run_dir is None:
        return []
    run_dir = RunDir(path=Path(config.run_dir))
    if not run_dir.lock.exists():
        return []
    run_dir.claim()
    if (before := run_dir.before) is None:
        return []
    words = []
    if not before.has_ended:
        words.append(f"the controller of this run has died: {before}")
        FaultLog(run_dir.faults).detected(Role.CONTROLLER, f"controller ({before})", "has died")
    return [*words, *end_leftovers(run_dir, before)]


def end_leftovers(run_dir: RunDir, before: Holder) -> list[str]:
    """Kill the processes of a dead controller's run, and remove the run's files in shared memory.

    Returns a message about each change.

    Raises:
        NotEnded: a process does not end.
    """

    def find() -> Iterable[psutil.Process]:
        yield from marked_processes(before.mark, RUN_MARK)
        yield from leftover_processes(run_dir.procs)

    words = []
    if num_killed := end_all(find):
        words.append(f"{num_killed} processes that it had left were killed")
    removed = [*sweep_stale_folders(), *remove_files_of(before.mark)]
    if removed:
        words.append(f"{len(removed)} files and folders of dead runs in {SHARED_MEMORY} were removed")
    return words


def end_own_run() -> None:
    """End the remaining processes of this process's own runs, and remove their files in shared memory.

    Call it just before this process ends.

    Raises:
        NotEnded: a process does not end.
    """
    for mark in claimed_marks():
        end_all(partial(_started, mark), linger_s=LINGER_S)
        remove_files_of(mark)


def _started(mark: str) -> list[psutil.Process]:
    """Return the run's processes except this one and Python's resource tracker, which outlives this one."""
    # The tracker's process id has no public API.
    tracker: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return [one for one in marked_processes(mark, RUN_MARK) if one.pid not in (os.getpid(), tracker)]


LATEST = "latest"

MAX_CHANGES_SHOWN = 12
"""Maximum number of changed config keys in a message about a resumed run."""
MAX_VALUE_CHARACTERS = 60
"""Maximum length of each value in that message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroups:
    """Finished groups on the disk that a resumed run trains on without sampling them again."""

    groups: tuple[SpilledGroup, ...] = ()
    """Groups to restore, in the data's order."""
    batches: tuple[tuple[int, ...], ...] = ()
    """Prompts of each of the next steps that are repeated with these groups."""
    left_out: Mapping[SkipReason, int] = field(default_factory=dict)
    why: str = ""
    """Details of a reason that applies to all groups left out."""

    @property
    def num_left_out(self) -> int:
        """Number of finished groups that are sampled again."""
        return sum(num for reason, num in self.left_out.items() if reason is not SkipReason.ENDED)

    @property
    def num_prompts(self) -> int:
        """Number of prompts in the data's order up to the last one with a group here."""
        return max((attempt_and_prompt(one.group.draw_id)[1] + 1 for one in self.groups), default=0)

    def messages(self, step: int) -> Iterator[str]:
        """Yield messages about the groups found by a run that resumes after ``step``."""
        if self.groups:
            again = f"; steps {step + 1} to {step + len(self.batches)} are repeated" if self.batches else ""
            yield f"{len(self.groups)} finished groups are restored from disk{again}"
        if self.num_left_out:
            reasons = ", ".join(
                f"{reason} {num}"
                for reason, num in sorted(self.left_out.items())
                if reason is not SkipReason.ENDED
            )
            yield f"{self.num_left_out} finished groups are sampled again ({reasons}){self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint that a run resumes from, and the finished groups found with it."""

    folder: Path
    state: RunState
    found: FoundGroups = field(default_factory=FoundGroups)

    @property
    def buffer(self) -> ResumedBuffer:
        """State with which the replay buffer of the resumed run starts."""
        return ResumedBuffer(
            checkpointed=self.state.checkpointed_buffer,
            batches=self.found.batches,
            num_groups=len(self.found.groups),
        )

    @property
    def num_next_prompts(self) -> int:
        """Number of prompts to submit before all groups found can be restored."""
        return max(0, self.found.num_prompts - self.state.buffer.num_submitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Folders of a run, with ``messages`` about the files of an earlier run."""

    run_dir: RunDir
    checkpoints: Path
    messages: tuple[str, ...]


def planned_folder(config: RunConfig) -> Path:
    """Return the folder for checkpoints, or a folder above it if ``run_dir`` is not set yet."""
    if config.checkpoint.folder is not None:
        return Path(config.checkpoint.folder)
    return planned_export(config)


def planned_export(config: RunConfig) -> Path:
    """Return the folder for the trained model, or a folder above it if ``run_dir`` is not set yet."""
    return RUNS_FOLDER if config.run_dir is None else RunDir(path=Path(config.run_dir)).checkpoints


def check_checkpoint_folder(config: RunConfig, *, is_resumed: bool) -> Iterator[Problem]:
    """Yield a problem if checkpoints cannot be written, or if a new run would remove those of another run."""
    folder = config.checkpoint.folder
    problems = [] if folder is None else list(check_folder("checkpoint.folder", Path(folder)))
    yield from problems
    if not problems and not is_resumed and list_checkpoints(planned_folder(config)):
        yield Problem(
            field="checkpoint.folder",
            value=str(planned_folder(config)),
            remedy="holds checkpoints of another run; name another folder, or continue it (--resume latest)",
        )


def begin_anew(run_dir: RunDir) -> list[str]:
    """Move aside the files of a run without a checkpoint; the caller must hold the folder's lock.

    Returns a message about each change.
    """
    left = run_dir.put_all_aside()
    return [f"without a checkpoint the run starts over; moved to {', '.join(left)}"] if left else []


def resume_or_begin_anew(config: RunConfig, choice: str | None) -> tuple[str | None, list[str]]:
    """Return what to resume from (None: start from the beginning), and a message about each change.

    With ``latest``, a run that died before its first checkpoint starts from the beginning, unless it exported
    its model or wrote its checkpoints to a folder other than the config's. Call ``claim_run`` first, which
    claims the run's folder.
    """
    if choice != LATEST or config.run_dir is None or list_checkpoints(planned_folder(config)):
        return choice, []
    run_dir = RunDir(path=Path(config.run_dir))
    if run_dir.before is None or (run_dir.checkpoints / FINAL).exists():
        return choice, []
    if run_dir.config.exists() and _checkpoint_folder_before(run_dir) != config.checkpoint.folder:
        return choice, []
    return None, begin_anew(run_dir)


def message_if_done(config: RunConfig, choice: str | None) -> str | None:
    """Return a message if ``--resume`` names a run that is done; None if there is something left to do.

    A run that was killed between its last step and its end is not done. Naming a checkpoint before the last
    step goes back to that step.
    """
    if choice is None or config.run_dir is None:
        return None
    run_dir = RunDir(path=Path(config.run_dir))
    num_steps = newest_step(run_dir.metrics)
    goes_back = choice != LATEST and (step_of(Path(choice)) or 0) < config.max_steps
    if goes_back or num_steps < config.max_steps or not has_ended(run_dir):
        return None
    return (
        f"the run is done: it has made {num_steps} steps, and max_steps is {config.max_steps}; its model is "
        f"{run_dir.checkpoints / FINAL}. To continue it, give a larger max_steps"
    )


def newest_step(metrics: Path) -> int:
    """Return the step in the last complete line of metrics.jsonl; 0 if there is none."""
    if not metrics.exists():
        return 0
    lines = whole_lines(metrics)
    return int(json.loads(lines[-1])["step"]) if lines else 0


def has_ended(run_dir: RunDir) -> bool:
    """Return whether a run has exported its model and its ledger ends with the event ``ended``."""
    if not (run_dir.checkpoints / FINAL).is_dir() or not run_dir.ledger.exists():
        return False
    with run_dir.ledger.open("rb") as file:
        last = last_line(file.fileno())
    return last.endswith(b"\n") and json.loads(last)["event"] == "ended"


def _checkpoint_folder_before(run_dir: RunDir) -> str | None:
    """Return ``checkpoint.folder`` of the earlier run's config; None means a folder inside ``run_dir``."""
    folder: str | None = yaml.safe_load(run_dir.config.read_text(encoding="utf-8"))["checkpoint"]["folder"]
    return folder


def find_checkpoint(config: RunConfig, facts: ModelFacts, choice: str) -> Resumed:
    """Return the checkpoint that ``choice``, the value of ``--resume``, names, checked against the config.

    Raises:
        ConfigError: there is no such checkpoint, or the run cannot resume from it.
    """
    if config.run_dir is None:
        remedy = "must name the run to continue, because --resume is given"
        raise ConfigError([Problem(field="run_dir", remedy=remedy)])
    folder = Path(choice)
    if choice == LATEST:
        parent = planned_folder(config)
        checkpoints = list_checkpoints(parent)
        if not checkpoints:
            remedy = f"{parent} has no checkpoint (step-...); omit --resume, or name another run_dir"
            raise ConfigError([Problem(field="--resume", value=choice, remedy=remedy)])
        folder = checkpoints[-1]
    elif step_of(folder) is None or not (folder / RUN_FILE).is_file():
        remedy = f"must be {LATEST!r} or the folder of a checkpoint, such as runs/x/checkpoints/step-00000040"
        raise ConfigError([Problem(field="--resume", value=choice, remedy=remedy)])
    try:
        state = read_run_state(folder)
    except ValueError as error:
        raise ConfigError([Problem(field="--resume", value=choice, remedy=str(error))]) from None
    raise_if_any(check_resumable(state, folder, config, facts))
    run_dir = RunDir(path=Path(config.run_dir))
    lost = check_ledger(run_dir.ledger, state.checkpointed_buffer, checkpoint=folder)
    found = find_groups(run_dir.payloads, state, config, lost)
    return Resumed(folder=folder.resolve(), state=state, found=found)


def open_files(config: RunConfig, resumed: Resumed | None) -> RunFiles:
    """Create or reopen the run's folder, and remove unfinished checkpoints.

    Raises:
        ConfigError: another run has started in the folder meanwhile.
    """
    messages: list[str] = []
    if resumed is None:
        left = [] if config.run_dir is None else RunDir(path=Path(config.run_dir)).put_start_aside()
        if left:
            messages.append(f"run_dir held a start that never trained; moved to {', '.join(left)}")
        run_dir = RunDir.create(config, dump_config(config), datetime.now())
    else:
        assert config.run_dir is not None
        run_dir = RunDir.reopen(Path(config.run_dir))
        messages += _rewind(config, run_dir, resumed)
    folder = config.checkpoint.folder
    checkpoints = run_dir.checkpoints if folder is None else Path(folder)
    checkpoints.mkdir(parents=True, exist_ok=True)
    swept = sweep_partial(checkpoints)
    if swept:
        messages.append(f"removed {len(swept)} unfinished checkpoints: {', '.join(swept)}")
    return RunFiles(run_dir=run_dir, checkpoints=checkpoints.resolve(), messages=tuple(messages))


def _rewind(config: RunConfig, run_dir: RunDir, resumed: Resumed) -> Iterator[str]:
    """Rewind the run's files to their state after the checkpoint's step; yield messages about each change."""
    step = resumed.state.step
    yield f"resuming after step {step} from {resumed.folder}"
    if not run_dir.ledger.exists():
        yield f"{run_dir.ledger.name} is missing: a new one begins after step {step}"
    elif num_torn_bytes := cut_torn_line(run_dir.ledger):
        yield f"{num_torn_bytes} bytes of an unfinished last line of {run_dir.ledger.name} removed"
    yield from resumed.found.messages(step)
    # Runs that write no rollouts have no file of token values either.
    others = (file for file in (run_dir.tokens, run_dir.execution) if file.exists())
    for file in (run_dir.metrics, run_dir.rollouts, *others):
        cut = cut_after(file, step)
        if cut is not None:
            yield f"{cut.num_lines} lines of {file.name} after step {step} moved to {cut.file.name}"
    restored = (one.group.draw_id for one in resumed.found.groups)
    remove_others(run_dir.payloads, [*restored, *recorded_draws(run_dir.execution)])
    checkpoints = list_checkpoints(planned_folder(config))
    later = [folder for folder in checkpoints if (step_of(folder) or 0) > step]
    versions = run_dir.checkpoints.glob("version-*[0-9]")
    later += [folder for folder in versions if int(folder.name.rpartition("-")[2]) > step]
    exports = [name + suffix for name in (FINAL, LAST, LAST_PUBLISHED) for suffix in ("", ".partial")]
    # The run publishes the checkpoint's version again, whole.
    archived = sorted(run_dir.versions.glob("*[0-9].weights"))
    later += [file for file in archived if int(file.name.partition("-")[0]) >= step]
    for path in (*later, *(run_dir.checkpoints / name for name in exports)):
        if path.exists():
            yield f"{path.name} moved to {put_aside(path).name}"
    config_yaml = dump_config(config)
    if run_dir.config.exists():
        before = run_dir.config.read_text(encoding="utf-8")
        if before != config_yaml:
            moved = put_aside(run_dir.config).name
            yield f"the config differs; the earlier one moved to {moved}; {_changes(before, config)}"
    run_dir.config.write_text(config_yaml, encoding="utf-8")


def _changes(before: str, config: RunConfig) -> str:
    """Return the keys that differ from the run's earlier config.yaml, with both values, as text."""
    try:
        saved = OmegaConf.to_container(OmegaConf.create(before), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return f"it cannot be read ({type(error).__name__})"
    if not isinstance(saved, dict):
        return "it holds no keys"
    found = [
        f"{key}: {_shown(old)} -> {_shown(new)}"
        for key, old, new in differences(
            {str(key): value for key, value in saved.items()}, config.model_dump(mode="json")
        )
    ]
    more = f" and {len(found) - MAX_CHANGES_SHOWN} more" if len(found) > MAX_CHANGES_SHOWN else ""
    return ", ".join(found[:MAX_CHANGES_SHOWN]) + more if found else "only in how it is written"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "..."


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
"""Sections that determine a group, its score, its age or the weights of the lost steps."""

_IRRELEVANT = frozenset(
    {"buffer.keep_groups", "buffer.heartbeat_s", "episodes.heartbeat_s", "trainer.recovery.heartbeat_s"}
)


def find_groups(folder: Path, state: RunState, config: RunConfig, lost: LostSteps | None) -> FoundGroups:
    """Read the groups in ``folder`` and choose those that the run resumes with; remove nothing.

    ``lost`` are the ledger's events after the checkpoint; None if there is no ledger.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        return FoundGroups()
    if lost is None:
        return FoundGroups(left_out={SkipReason.NO_LEDGER: len(files)})
    if changed := _changed_settings(state.config, config):
        return FoundGroups(
            left_out={SkipReason.OTHER_CONFIG: len(files)}, why=f": {', '.join(changed)} changed"
        )
    torn: Counter[SkipReason] = Counter()
    groups: dict[tuple[int, int], SpilledGroup] = {}
    for file in files:
        try:
            one = read_spilled(file)
        except SpilledGroupTorn:
            torn[SkipReason.TORN] += 1
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


def remove_others(folder: Path, draws: Iterable[int]) -> None:
    """Remove all files of groups except those of ``draws``."""
    wanted = {file_name(draw) for draw in draws}
    for file in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f".*{UNFINISHED_SUFFIX}")):
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
