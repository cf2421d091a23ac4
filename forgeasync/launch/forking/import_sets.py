"""What the servers import ahead, by what a proc is going to do."""

from enum import StrEnum

# Sets what vLLM reads from the environment when it is imported.
import forgeasync.generator as _generator_variables  # noqa: F401


class ImportSet(StrEnum):
    """Modules that a proc's process has imported when it begins."""

    COMMON = "common"
    TRAINER = "trainer"
    GENERATOR = "generator"
    EPISODES = "episodes"
    CONTROLLER = "controller"


OF_FIRST_SERVER = frozenset({ImportSet.COMMON, ImportSet.CONTROLLER, ImportSet.TRAINER})
"""Sets that one server imports, one after the other, so that their processes share all of them. The other
sets have servers of their own, forked from that one: vLLM changes torch for whoever imports it."""


MODULES: dict[ImportSet, tuple[str, ...]] = {
    ImportSet.COMMON: (
        "torch",
        # TorchTitan and vLLM import it.
        "torch._inductor.compile_fx",
        # Monarch imports them.
        "opentelemetry.metrics",
        "pyre_extensions",
        "forgeasync.scoring.judge",
        "forgeasync.scoring.reward_pool",
        "forgeasync.scoring.scorer",
    ),
    ImportSet.TRAINER: (
        "forgeasync.trainer.policy_trainer",
        # What TorchTitan imports with its first model.
        "torchtitan.trainer",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ),
    ImportSet.GENERATOR: (
        "forgeasync.generator.engine",
        "forgeasync.generator.episodes",
        # What vLLM imports with its first engine.
        "vllm.model_executor.models.qwen3_moe",
        "vllm.v1.worker.cpu_worker",
    ),
    ImportSet.EPISODES: (
        "transformers",
        "forgeasync.environments.build",
        "forgeasync.environments.endpoint",
        "forgeasync.environments.episodes",
        "forgeasync.environments.rendering.build",
        "forgeasync.environments.served.environment",
        "forgeasync.environments.served.server",
        "forgeasync.environments.sessions.server",
    ),
    ImportSet.CONTROLLER: (
        "transformers.models.auto.tokenization_auto",
        "forgeasync.checkpoint.folders",
        "forgeasync.config.load",
        "forgeasync.observability.console",
        # Pydantic reads what its fields' docstrings say out of the files of all modules that are imported.
        "forgeasync.trainer.batch",
    ),
}
"""Nothing here may import Monarch: it starts threads when it is imported, and a process with threads cannot
be forked safely. A fork imports Monarch in 0.3 s."""
