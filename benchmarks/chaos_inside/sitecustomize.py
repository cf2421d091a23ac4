"""Faults from inside: a thread in each process of a run that ``benchmarks/chaos.py`` has started.

Python imports this module when it starts, because the tool puts this folder first in PYTHONPATH. The variable
``FORGEASYNC_CHAOS`` names a folder; without it nothing happens. A file ``<process id>-<number>.json`` there
is an order for that process. ``.taken`` beside it says when it was carried out, with details. ``.end`` ends
an order that lasts.
"""

import asyncio
import builtins
import errno
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

VARIABLE = "FORGEASYNC_CHAOS"
PROGRAMS = ("apps.grpo", "forgeasync.runtime.bootstrap_main")
"""Modules as which processes of roles start. Other processes of a run may fork, and must have no thread."""
LOOK_S = 0.03
EXIT_CODE = 13
COLLECTIVES = """all_reduce all_gather_into_tensor reduce_scatter_tensor all_gather all_gather_object
    broadcast barrier""".split()
TRAINER_THREAD = "trainer"
"""Name of the thread that makes steps. Collectives of a checkpoint are in another one."""


def serve(folder):
    """Carry out the orders for this process until it ends."""
    seen = set()
    while True:
        time.sleep(LOOK_S)
        try:
            names = os.listdir(folder)
        except OSError:
            return  # the tool is gone
        for name in sorted(names):
            if name.startswith(f"{os.getpid()}-") and name.endswith(".json") and name not in seen:
                seen.add(name)
                file = Path(folder, name)
                Order(file, json.loads(file.read_text())).carry_out()


class Order:
    """One order: ``kind`` and its details."""

    def __init__(self, file, words):
        self._file = file
        self._words = words
        self._lock = threading.Lock()
        self._is_taken = False

    def carry_out(self):
        match self._words["kind"]:
            case "exit":
                self.taken()
                os._exit(EXIT_CODE)
            case "aborted_collective" | "hung_collective":
                self._break_collective(self._words["kind"] == "hung_collective", self._words["num_before"])
            case "full_disk" | "failing_disk" as kind:
                self._refuse_writes(errno.ENOSPC if kind == "full_disk" else errno.EIO)
            case "delayed_messages":
                self._hold_messages(self._words["seconds"])
            case "dropped_messages":
                self._drop_messages()
            case "hold_call":
                self._hold_call(self._words["method"], self._words["seconds"], self._words["is_after"])

    def taken(self, **more):
        """Answer that the order was carried out. Returns False if that was done before."""
        with self._lock:
            if self._is_taken:
                return False
            self._is_taken = True
        said = self._file.with_suffix(".partial")
        said.write_text(json.dumps({"time_s": time.time(), **more}))
        said.rename(self._file.with_suffix(".taken"))
        return True

    @property
    def is_ended(self):
        """Whether the tool has ended an order that lasts, or is gone."""
        return self._file.with_suffix(".end").exists() or not self._file.parent.exists()

    def _break_collective(self, hangs, num_before):
        """Break one collective, after ``num_before`` others."""
        import torch.distributed as dist

        left = [num_before]

        originals = {name: getattr(dist, name) for name in COLLECTIVES}

        def broken(name):
            def call(*args, **kwargs):
                is_it = threading.current_thread().name == TRAINER_THREAD
                if is_it and left[0] > 0:
                    left[0] -= 1
                    is_it = False
                if not is_it or not self.taken(collective=name):
                    return originals[name](*args, **kwargs)
                if hangs:
                    threading.Event().wait()
                # The text of gloo when a peer is gone.
                raise RuntimeError(f"[gloo] {name}: connection aborted (injected by benchmarks/chaos.py)")

            return call

        for name in COLLECTIVES:
            setattr(dist, name, broken(name))

    def _refuse_writes(self, number):
        """Refuse what Python code writes below a folder through descriptors and newly opened files."""
        below = os.path.realpath(self._words["folder"]) + os.sep
        pwrite, fsync, open_file = os.pwrite, os.fsync, io.open

        def refuse(path):
            # The tool may have ended the order since the last look.
            if os.path.realpath(path).startswith(below) and not self.is_ended:
                raise OSError(number, os.strerror(number), path)

        def refusing(write):
            def call(file, *args):
                refuse(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
                return write(file, *args)

            return call

        def refusing_open(file, mode="r", *args, **kwargs):
            if isinstance(file, str | os.PathLike) and any(sign in mode for sign in "wax+"):
                refuse(os.fspath(file))
            return open_file(file, mode, *args, **kwargs)

        os.pwrite, os.fsync = refusing(pwrite), refusing(fsync)
        io.open = builtins.open = refusing_open
        self.taken()

        def end():
            while not self.is_ended:
                time.sleep(LOOK_S)
            os.pwrite, os.fsync, io.open, builtins.open = pwrite, fsync, open_file, open_file

        threading.Thread(target=end, daemon=True).start()

    def _hold_messages(self, seconds):
        """Keep all messages that arrive within ``seconds`` until these are over, in order."""
        end_s = time.monotonic() + seconds
        locks = {}
        num_held = [0]

        async def hold(actor, method):
            lock = locks.setdefault(id(actor), asyncio.Lock())
            # Messages do not overtake one that still waits.
            if time.monotonic() < end_s or lock.locked():
                num_held[0] += 1
                async with lock:
                    await asyncio.sleep(max(0.0, end_s - time.monotonic()))
            return True

        restore = _on_message(hold)

        def end():
            time.sleep(seconds + 1.0)
            restore()
            self.taken(num_messages=num_held[0])

        threading.Thread(target=end, daemon=True).start()

    def _drop_messages(self):
        """Do not answer any further message."""

        async def drop(actor, method):
            return False

        _on_message(drop)
        self.taken()

    def _hold_call(self, method, seconds, is_after):
        """Answer when the next call of an endpoint arrives, and delay the call or its result."""

        async def hold(actor, name):
            if name == method and not self.is_ended and self.taken():
                if is_after:
                    return seconds
                await asyncio.sleep(seconds)
            return True

        _on_message(hold)


_PORT = 4
"""Place of the port for the result among the arguments after the method's name."""

_kept = []
"""Dropped messages, kept so that their callers wait without an error."""


def _on_message(ask):
    """Let ``ask`` decide on each message to an actor of this process. Returns a function that undoes this.

    True: handle the message. False: never. A number: handle it, and send the result that many seconds later.
    """
    from monarch._src.actor.actor_mesh import _Actor

    original = _Actor.handle

    async def handle(self, ctx, method, *args):
        answer = await ask(self, method.name)
        if answer is False:
            _kept.append(args)
            return
        if answer is not True:
            args = (*args[:_PORT], _LatePort(args[_PORT], answer), *args[_PORT + 1 :])
        await original(self, ctx, method, *args)

    def restore():
        if _Actor.handle is handle:
            _Actor.handle = original

    _Actor.handle = handle
    return restore


class _LatePort:
    """A port that sends its result some seconds late."""

    def __init__(self, port, seconds):
        self._port = port
        self._seconds = seconds

    def _resolve_and_send(self, result):
        async def later():
            await asyncio.sleep(self._seconds)
            sent = self._port._resolve_and_send(result)
            if sent is not None:
                await sent

        return later()

    def __getattr__(self, name):
        return getattr(self._port, name)


def _start():
    folder = os.environ.get(VARIABLE)
    words = sys.orig_argv
    if folder and any(name in words for name in PROGRAMS) and "--supervise" not in words:
        threading.Thread(target=serve, args=(folder,), name="chaos", daemon=True).start()


_start()
