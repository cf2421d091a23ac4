"""GPUs that rewards have for themselves, which no other role of a run may get."""

from collections.abc import Iterable

from forgeasync.config.data import named_sources
from forgeasync.config.evaluation import named_sets
from forgeasync.config.process_reward_model import ProcessRewardModel
from forgeasync.config.run import RunConfig


def reward_gpus(config: RunConfig) -> frozenset[int]:
    """The GPUs, by the machine's own numbers, of the process reward models of training and evaluation."""
    sources = (*named_sources(config.data), *named_sets(config.evaluation))
    return frozenset(
        reward.gpu
        for source in sources
        for reward in source.rewards
        if isinstance(reward, ProcessRewardModel) and reward.gpu is not None
    )


def places_of(gpus: Iterable[int], visible: str | None) -> frozenset[int]:
    """Places of GPUs among those that a run may use; ``visible`` is its CUDA_VISIBLE_DEVICES.

    Those that the run may not use otherwise have none.

    Raises:
        ValueError: ``visible`` names GPUs in another way than by number.
    """
    wanted = frozenset(gpus)
    if visible is None or not wanted:
        return wanted
    names = [name.strip() for name in visible.split(",")]
    if not all(name.removeprefix("-").isdecimal() for name in names if name):
        raise ValueError(
            f"cannot be told from the others that the run may use: CUDA_VISIBLE_DEVICES={visible}; must name "
            "GPUs by number (with CUDA_DEVICE_ORDER=PCI_BUS_ID those of nvidia-smi)"
        )
    return frozenset(place for place, name in enumerate(names) if name and int(name) in wanted)
