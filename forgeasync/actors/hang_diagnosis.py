"""What is seen of a process that does not answer, before it is killed: its stacks, and who waits for it."""

import asyncio

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forgeasync.faults import LIMIT_S, Role, awaited_calls
from forgeasync.launch import LOCAL_HOST_ID, Host, LocalHost

ANSWER_S = LIMIT_S + 2.0
"""Time for a host to say what a process of its does."""

WORDS = {
    Role.TRAINER: ("trainer",),
    Role.GENERATOR: ("router", "replica", "generator"),
    Role.TEACHER: ("teach",),
    Role.SCORER: ("scor",),
    Role.ENVIRONMENT: ("environment", "episode"),
    Role.BUFFER: ("buffer",),
}
"""What the code has in its names that waits for a role."""


async def stacks_of(host: Host, pid: int) -> str:
    """Return the Python stacks of a process of a host, in one line; or why they are not known."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await host.read_stacks(pid)
    except (ActorError, SupervisionError, TimeoutError) as error:
        return f"its stack is not known: host {host.id} does not answer ({type(error).__name__})"


async def evidence_here(role: Role, pid: int) -> str:
    """Return what is seen of a process of the controller's own host; see ``diagnose_hang``."""
    return await diagnose_hang(role, (LocalHost(LOCAL_HOST_ID, []), pid))


async def diagnose_hang(role: Role, *processes: tuple[Host, int]) -> str:
    """Return what is seen of processes of a role, in one line: their stacks, and who waits for the role.

    A process is named by its host and its id there.
    """
    # First: the calls may end while the stacks are read.
    calls = awaited_calls(asyncio.all_tasks() - {asyncio.current_task()}, WORDS[role])
    stacks = await asyncio.gather(*(stacks_of(host, pid) for host, pid in processes))
    if len(stacks) > 1:
        stacks = [f"process {pid}: {one}" for (_, pid), one in zip(processes, stacks, strict=True)]
    return f"{'; '.join(stacks)}; the controller waits in {calls or 'no call to it'}"
