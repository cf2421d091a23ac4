"""Command line of all apps: arguments, exit codes, signals, dry runs and rehearsals.

Exit codes: 0 done; 1 the run failed; 2 the config was refused, before any process started; 130 Ctrl-C;
143 SIGTERM. 130 and 143 are returned after cleanup, even if the cleanup failed.

The first Ctrl-C or SIGTERM cancels the app's coroutine, which ends its processes and cleans up. A second
signal ends the process immediately. Schedulers stop a job with SIGTERM and kill it some time later. To
distinguish the two signals, call ``received_signal()``.
"""

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from monarch.actor import shutdown_context
from rich.console import Console

from forgeasync.config import (
    HuggingFaceSource,
    RunConfig,
    all_sources,
    is_served,
    load_config,
    named_sets,
    resolve,
)
from forgeasync.controller.preparation import check, check_plan, gpu_memory_bytes
from forgeasync.controller.resume import end_own_run
from forgeasync.controller.supervisor import become_supervisor, start_beating
from forgeasync.environments import build_source
from forgeasync.files import remove_files_of
from forgeasync.models import character_tokenizer, model_config_file
from forgeasync.observability import (
    EXIT_PIPE,
    RUNS_FOLDER,
    RunDir,
    claimed_marks,
    failure_line,
    is_closed_pipe,
    release_claims,
    root_cause,
    say_on_stderr,
)
from forgeasync.planning import (
    GPU_GIB,
    Capacity,
    Draft,
    Stage,
    Verdict,
    changes_table,
    findings,
    findings_table,
    rehearse_data,
    rehearsed,
    write_model,
)
from forgeasync.processes import available_host_bytes
from forgeasync.rollouts import PromptEncoder, remove_own_folders
from forgeasync.runtime import STOP_SIGNALS
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL, ConfigError, Problem

T = TypeVar("T")

SAME_S = 1.0
"""Seconds within which a second signal is ignored: schedulers send the same signal in several ways."""

SHOW_CURSOR = b"\x1b[?25h"

_closing_words: list[str] = []
"""Messages that the last line adds to the reason."""

OVERRIDES = (
    "replaces values of the files: max_steps=20, algorithm.advantage=rloo, lora=null, or, as a whole list, "
    "'algorithm.filters=[{kind: dynamic_sampling}]'; `make docs` writes a page of all keys"
)

REPORT_COLUMNS = 120
"""Width of printed tables in characters, also when the output is a pipe."""


def run_training_app(
    description: str,
    start: Callable[[RunConfig, str | None], None],
    *,
    check: Callable[[RunConfig], None] = lambda config: None,
    can_rehearse: bool = False,
) -> int:
    """Run the command line of a training app; return the exit code.

    ``start`` is called with the config and the value of --resume. ``check`` raises ConfigError if the app
    does not support the config.
    """
    arguments = parse_arguments(description, starts_run=True, can_rehearse=can_rehearse)
    if can_rehearse and arguments.supervise:
        become_supervisor(arguments.config, arguments.overrides, arguments.resume)

    def run() -> None:
        config = load_config(arguments.config, arguments.overrides)
        check(config)
        if arguments.dry_run:
            show_plan(config, gpu_gib=arguments.gpu_gib)
        elif can_rehearse and arguments.rehearse:
            rehearse(config, lambda small: start(small, None), on_hosts=arguments.hosts)
        else:
            start(config, arguments.resume)

    return exit_code(run)


def run_app(main: Callable[[RunConfig], None], *, description: str) -> int:
    """Load the config that the arguments name and call ``main`` with it; return the exit code."""
    arguments = parse_arguments(description)
    return exit_code(lambda: main(load_config(arguments.config, arguments.overrides)))


def config_parser(description: str, *, needs_config: bool = True) -> argparse.ArgumentParser:
    """Return a parser of ``--config FILE [--config FILE ...] [key.path=value ...]``; add options to it."""
    parser = argparse.ArgumentParser(prog=f"python -m apps.{Path(sys.argv[0]).stem}", description=description)
    files = "YAML file of the run; you can give several, each overrides the ones before it"
    parser.add_argument("--config", action="append", required=needs_config, metavar="FILE", help=files)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDES)
    return parser


def parse_command_line(
    parser: argparse.ArgumentParser, given: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse ``given``, by default this process's arguments; errors have what to type instead."""
    given = sys.argv[1:] if given is None else given
    arguments, unknown = parser.parse_known_intermixed_args(given)
    if unknown:
        name, _, value = unknown[0].partition("=")
        options = re.findall(r"--[a-z-]+", parser.format_usage())
        similar = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
        following = [*given[given.index(unknown[0]) + 1 :], ""][0]
        value = value or (following if re.fullmatch(r"[^-=][^=]*", following) else "")
        meant = f"did you mean {similar[0]}?" if similar else "see --help"
        if value and not similar:
            meant = f"for a key of the config, write {name.lstrip('-').replace('-', '_')}={value}"
        parser.error(f"{unknown[0]}: no such option; {meant}")
    return arguments


def parse_arguments(
    description: str, *, starts_run: bool = False, can_rehearse: bool = False
) -> argparse.Namespace:
    """Parse ``--config FILE [--config FILE ...] [key.path=value ...]`` and further options.

    ``starts_run`` adds --dry-run, --gpu-gib and --resume. ``can_rehearse`` also adds --rehearse, --hosts and
    --supervise.
    """
    parser = config_parser(description)
    if not starts_run:
        return parse_command_line(parser)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="check the config, print the plan, and exit")
    gpu = f"GPU memory in GiB for --dry-run; default: this machine's, or {GPU_GIB:g}"
    parser.add_argument("--gpu-gib", type=_positive, metavar="N", help=gpu)
    resume = "continue the run in run_dir from its newest checkpoint, or from the checkpoint in FOLDER"
    modes.add_argument("--resume", metavar="latest|FOLDER", help=resume)
    if not can_rehearse:
        return parse_command_line(parser)
    rehearse = "run the processes of the config with a tiny model for three steps, on this machine"
    modes.add_argument("--rehearse", action="store_true", help=rehearse)
    hosts = "with --rehearse: use the hosts and GPUs of the config, and all of its processes"
    parser.add_argument("--hosts", action="store_true", help=hosts)
    supervise = "if the run dies, restart it from its newest checkpoint"
    parser.add_argument("--supervise", action="store_true", help=supervise)
    arguments = parse_command_line(parser)
    if arguments.supervise and (arguments.dry_run or arguments.rehearse):
        parser.error("--supervise: needs a run; omit --dry-run and --rehearse")
    if arguments.hosts and not arguments.rehearse:
        parser.error("--hosts: needs --rehearse; a run always uses the hosts that its config names")
    return arguments


def _positive(text: str) -> float:
    number = float(text)
    if not 0.0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GiB; must be greater than 0")
    return number


def exit_code(run: Callable[[], None]) -> int:
    """Run an app and return its exit code; a failure's reason is in the last lines on stderr."""
    install_handlers()
    start_beating()
    try:
        try:
            run()
        finally:
            was_refused = isinstance(sys.exc_info()[1], ConfigError)
            _leave_monarch()
            try:
                end_own_run()
            finally:
                release_claims(was_refused=was_refused)
    except ConfigError as error:
        say_on_stderr(f"refused:\n{error}")
        return EXIT_REFUSED
    except (KeyboardInterrupt, asyncio.CancelledError):
        received = received_signal() or signal.SIGINT
        say_on_stderr(_with_closing_message(f"interrupted by {received.name}"))
        return EXIT_SIGNAL + received
    except BaseException as error:
        if is_closed_pipe(root_cause(error)):
            return EXIT_PIPE
        say_on_stderr("".join(traceback.format_exception(root_cause(error))).rstrip())
        say_on_stderr(_with_closing_message(failure_line(error)))
        stop = received_signal()
        return EXIT_FAILED if stop is None else EXIT_SIGNAL + stop
    return 0


def add_closing_message(words: str) -> None:
    """Add ``words``, such as the location of results, to the last line if the app fails or is interrupted."""
    _closing_words.append(words)


def _with_closing_message(reason: str) -> str:
    return "; ".join([reason, *_closing_words])


def _leave_monarch() -> None:
    """Shut Monarch's client down now; at interpreter exit it would print after the app's last line."""
    # If a host is lost, the shutdown would never return.
    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)


def show_plan(config: RunConfig, *, gpu_gib: float | None = None) -> None:
    """Check the config and print what it would start; needs no GPU and starts nothing.

    ``gpu_gib`` is the memory of one GPU in GiB. None: the memory of this machine's GPUs, or ``GPU_GIB``.
    """
    # Imported here: these names build the model on the meta device, which only a dry run should wait for.
    from forgeasync.planning import dry_run_report, with_host_requests
    from forgeasync.runtime import render_launch

    facts, looked_at = check_plan(config)
    shape_from = model_config_file(config.model.path)
    gpu_bytes = gpu_memory_bytes() if gpu_gib is None else round(gpu_gib * 2**30)
    report = dry_run_report(config, facts, shape_from=shape_from, looked_at=looked_at, gpu_bytes=gpu_bytes)
    Console(width=REPORT_COLUMNS).print(report)
    if (spec := render_launch(with_host_requests(config, facts))) is not None:
        print(f"\nwith launcher {config.launcher.kind}:\n{spec}")


class RehearsalFailed(RuntimeError):
    """Raised if parts of a rehearsed run did not work; the message names them."""


def rehearse(config: RunConfig, run: Callable[[RunConfig], None], *, on_hosts: bool) -> None:
    """Run the topology of ``config`` with a tiny model for three steps, and print the findings.

    ``run`` starts a run of a config and waits for its end. The rehearsal uses this machine or, with
    ``on_hosts``, the hosts of the launcher.

    Raises:
        ConfigError: the config has problems, or this machine is too small for its parallel degrees.
        RehearsalFailed: the run completed, but a part of it did not work.
    """
    folder = rehearsal_folder(config, datetime.now())
    if is_served(config):
        remedy = "a rehearsal has no clients; rehearse with another data source and environment"
        raise ConfigError([Problem(field="data.source.kind", value="served", remedy=remedy)])
    # The run's own folders may be in use, so the rehearsal uses different ones.
    elsewhere = {"run_dir": str(folder), "checkpoint": config.checkpoint.model_copy(update={"folder": None})}
    facts = check(config.model_copy(update=elsewhere))
    config = resolve(config, facts)
    raw = json.loads(model_config_file(config.model.path).read_text(encoding="utf-8"))
    local_paths = _local_paths(config)
    num_gpus = torch.cuda.device_count()
    stage = Stage(
        folder=folder,
        capacity=None if on_hosts else Capacity(memory_bytes=available_host_bytes(), num_gpus=num_gpus),
        num_gpus=num_gpus,
        local_paths=local_paths,
        longest_prompt=_longest_prompt(config, local_paths),
    )
    rehearsal = rehearsed(config, facts, stage)
    console = Console(width=REPORT_COLUMNS, markup=False)
    console.print(changes_table(config.name, rehearsal.changes))
    write_model(
        Path(rehearsal.config.model.path),
        raw,
        rehearsal.facts,
        chat_template=config.data.chat_template,
        template_arguments=config.data.template_arguments or (),
        seed=config.seed,
    )
    run(rehearsal.config)
    found = findings(rehearsal.config, rehearsal.facts, RunDir(path=folder))
    console.print(findings_table(config.name, found, rehearsal.changes))
    if failed := [finding for finding in found if finding.verdict is Verdict.FAILED]:
        parts = "; ".join(f"{finding.part} ({finding.measured})" for finding in failed)
        raise RehearsalFailed(f"the rehearsal ended, but parts of it did not work: {parts}")


def rehearsal_folder(config: RunConfig, now: datetime) -> Path:
    """Return the folder of a rehearsal, next to the run's folder."""
    base = RUNS_FOLDER / config.name if config.run_dir is None else Path(config.run_dir)
    return base.with_name(f"{base.name}-rehearsal-{now:%Y%m%d-%H%M%S}")


def _local_paths(config: RunConfig) -> frozenset[str]:
    """Return the paths of the config's data sets that are on this machine."""
    # Imported here: the import takes a second, and only rehearsals need it.
    from forgeasync.environments import is_local

    sources = [one.source for one in all_sources(config) if isinstance(one.source, HuggingFaceSource)]
    return frozenset(source.path for source in sources if is_local(source))


def _longest_prompt(config: RunConfig, local_paths: frozenset[str]) -> int:
    """Return the number of tokens of the longest prompt among the rehearsal's problems."""
    draft = Draft(config)
    rehearse_data(draft, local_paths)
    data, sets = draft.config.data, named_sets(draft.config.evaluation)
    tokenizer = character_tokenizer(
        chat_template=data.chat_template, template_arguments=data.template_arguments or ()
    )
    prompts = PromptEncoder.from_section(tokenizer, data)
    problems = build_source(data, seed=config.seed, sets=sets)
    tasks = [*problems.train, *problems.held_out, *(task for one in problems.sets.values() for task in one)]
    return max(len(prompts.encode(task.prompt)) for task in tasks)


@dataclass(slots=True)
class _Stop:
    """The signal that this process received, and what is stopped by it."""

    received: signal.Signals | None = None
    received_s: float = 0.0
    main: asyncio.Task[Any] | None = None
    """Task to cancel; None if no coroutine runs."""
    listeners: list[Callable[[signal.Signals], None]] = field(default_factory=list)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.received is not None:
            if now_s - self.received_s >= SAME_S:
                _end_at_once(self.received)
            return
        self.received, self.received_s = signal.Signals(number), now_s
        if self.main is None:
            raise KeyboardInterrupt
        # The handler must not print: it may have interrupted a print to the same stream.
        self.main.get_loop().call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        assert self.received is not None
        try:
            for listener in self.listeners:
                listener(self.received)
        finally:
            if self.main is not None:
                self.main.cancel()


_stop = _Stop()


def received_signal() -> signal.Signals | None:
    """Return the signal that stopped this process, or None."""
    return _stop.received


def install_handlers() -> None:
    """Install this module's handlers of Ctrl-C and SIGTERM, replacing those of the parent process."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop.on_signal)


def run_main(main: Coroutine[Any, Any, T]) -> T:
    """Run an app's coroutine and return its result; Ctrl-C or SIGTERM cancels it.

    Raises:
        asyncio.CancelledError: the coroutine was cancelled.
    """

    async def body() -> T:
        _stop.main = asyncio.current_task()
        try:
            return await main
        finally:
            _stop.main = None

    return asyncio.run(body())


@contextmanager
def telling(listener: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``listener`` when a stop signal arrives inside the block, before the coroutine is cancelled."""
    _stop.listeners.append(listener)
    try:
        yield
    finally:
        _stop.listeners.remove(listener)


def _end_at_once(first: signal.Signals) -> None:
    """End this process immediately; the processes that it started end with it."""
    remove_own_folders()
    # All users of these files end with this process.
    for mark in claimed_marks():
        remove_files_of(mark)
    release_claims()
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            os.write(stream.fileno(), SHOW_CURSOR)
    os.write(sys.stderr.fileno(), b"ended at once by a second signal\n")
    os._exit(128 + first)
