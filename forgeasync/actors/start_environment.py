"""Starts the workers of the environment."""

from collections.abc import Callable
from pathlib import Path

from monarch.actor import this_host

from forgeasync.actors.environment import EnvironmentActor, EnvironmentSetup, WorkerReady, agent_roles
from forgeasync.actors.environment_pool import EnvironmentPool, SpawnedWorker
from forgeasync.actors.process_manager import ENVIRONMENT_WORKER, ProcessManager
from forgeasync.config import RunConfig, is_served
from forgeasync.environments import EndpointModel, ServingAddress
from forgeasync.launch import spawn_role, stop
from forgeasync.waiting import deadline


async def start_environment(
    procs: ProcessManager,
    config: RunConfig,
    model_path: Path,
    tell: Callable[[str], None],
    *,
    artifacts: Path | None = None,
    serving_file: Path | None = None,
    endpoint: EndpointModel | None = None,
) -> EnvironmentPool | None:
    """Start the workers of the environment; None if the run has none.

    ``tell`` is called with a line for people whenever a worker was lost. ``artifacts`` is the folder for
    files that episodes keep; None: they keep none. ``serving_file`` gets the address at which people are
    served, if they are. With ``endpoint`` its model takes all turns, instead
    of our generators; ``model_path`` is not read then.
    """
    if config.environment is None:
        return None
    setup = EnvironmentSetup(
        environment=config.environment,
        sandbox=config.sandbox,
        agents=config.agents,
        model_path=model_path,
        data=config.data,
        sampling=config.sampling,
        max_context_length=config.model.max_context_length,
        episodes=config.episodes,
        timeouts=config.timeouts,
        artifacts=artifacts,
        endpoint=endpoint,
    )

    address: ServingAddress | None = None
    if is_served(config):
        assert serving_file is not None, "only runs serve people"
        address = ServingAddress(config.serving, serving_file, tell)

    async def spawn(number: int) -> SpawnedWorker:
        mesh = spawn_role(this_host(), "environment", num_procs=1)
        actor = mesh.spawn(f"{ENVIRONMENT_WORKER}-{number}", EnvironmentActor, procs.log_dir, number)
        call = f"setting up environment worker {number}"
        try:
            async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
                serving = None if address is None else address.setup()
                ready: WorkerReady = await actor.setup.call_one(setup, serving)
        except BaseException:
            await stop(mesh)
            raise
        if number == 0:
            tell(ready.renderer)
        if address is not None:
            address.opened(ready.url, ready.port)
        return SpawnedWorker(actor=actor, pid=ready.pid, mark=ready.mark, stop=lambda: stop(mesh))

    procs.environment = EnvironmentPool(
        spawn,
        config.episodes,
        num_agents=len(agent_roles(config.agents)),
        serves=address is not None,
        tell=tell,
        faults=procs.faults,
        listing=procs.listing,
    )
    await procs.environment.start()
    return procs.environment
