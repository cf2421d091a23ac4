"""Starts the replay buffer."""

from pathlib import Path

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.buffer_watch import BufferWatch
from forgeasync.actors.process_manager import ProcessManager
from forgeasync.config import RunConfig
from forgeasync.launch import LOCAL_HOST_ID
from forgeasync.ledger import ResumedBuffer
from forgeasync.waiting import deadline


async def start_buffer(
    procs: ProcessManager, config: RunConfig, ledger: Path, resumed: ResumedBuffer | None = None
) -> BufferActor:
    """Start the replay buffer, empty or restored; its endpoints are called with ``call_one``.

    ``ledger`` is the file that says what becomes of prompts.
    """
    actor = procs.spawn_here("buffer").spawn("buffer", BufferActor, procs.log_dir)
    async with deadline(config.timeouts.setup_s, call="setting up the replay buffer", key="timeouts.setup_s"):
        pid = await actor.setup.call_one(config, ledger, resumed)
    procs.listing.put("buffer", 0, pid=pid, host=LOCAL_HOST_ID)
    procs.buffer = BufferWatch(
        actor.beat.call_one, pid=pid, heartbeat_s=config.buffer.heartbeat_s, faults=procs.faults
    )
    return actor
