"""Gives every gloo process group of this process one thread. Importing the module is enough.

A gloo group of torch 2.13 runs its collectives in two threads. After a collective, its thread moves the name
of the collective into a string of the group without a lock (``lastCompletedWorkName``, in
``ProcessGroupGloo::runLoop``). A name of more than 15 characters is on the heap. Two threads that move such
names at once can both free the previous name, and the process dies of signal 6 or 11 at a later ``malloc``.
Functional all-gathers, which DTensor uses, are called ``ALLGATHER_COALESCED``.

Waiting for each collective before the next is not enough: a collective is done before its name is moved. With
one thread, the collectives of a group run one after the other, in the order in which every rank requests
them. Different groups still run at the same time.

Can go when torch writes that string under a lock.
"""

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store
from torch.distributed.constants import default_pg_timeout

_init = ProcessGroupGloo.__init__


def _init_with_one_thread(
    group: ProcessGroupGloo, store: Store, rank: int, size: int, *given: Any, **named: Any
) -> None:
    """Replace ``ProcessGroupGloo.__init__``, whose last argument is a timeout, or options, or missing."""
    (last,) = (*given, *named.values()) or (default_pg_timeout,)
    options = _default_options(last) if isinstance(last, timedelta) else last
    options._threads = 1
    _init(group, store, rank, size, options)


def _default_options(timeout: timedelta) -> Any:
    """Return the options that torch makes from a timeout; it has no public function for this."""
    # torch's stub has it under another name.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = (
        [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
        if interfaces
        else [ProcessGroupGloo.create_default_device()]
    )
    return options


# Replaces torch's own method.
ProcessGroupGloo.__init__ = _init_with_one_thread  # type: ignore[method-assign, assignment]
