"""All that a trainer's next step depends on besides its batch, as tensors by name."""

from pathlib import Path

import torch

from forgeasync.trainer import run_checkpoint
from forgeasync.trainer.bad_steps import SpikeRule
from forgeasync.trainer.run_checkpoint import NORMS, RNG, State
from forgeasync.trainer.step_sums import Probe
from forgeasync.trainer.weight_average import WeightAverage


class TrainerState:
    """The state of one rank; ``policy_version``, which is the schedule's position too, is a part of it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.AdamW,
        average: WeightAverage,
        *,
        probe: Probe,
        spikes: SpikeRule | None,
    ) -> None:
        self.policy_version = 0
        self._model = model
        self._optimizer = optimizer
        self._probe = probe
        self._spikes = spikes
        self._average = average

    def tensors(self) -> State:
        """The state as it is; what is trained, with its moments, shares the trainer's memory."""
        state = {
            **run_checkpoint.training_state(self._model, self._optimizer),
            **self._average.tensors(),
            **run_checkpoint.random_state(),
            "policy_version": torch.tensor(self.policy_version),
            "probe_owed": torch.tensor(self._probe.owed, dtype=torch.float64),
        }
        if self._spikes is not None:
            # Every norm is more than 0: the places behind the last one are empty.
            norms = torch.zeros(self._spikes.window, dtype=torch.float64)
            norms[: len(self._spikes.norms)] = torch.tensor(self._spikes.norms, dtype=torch.float64)
            state[f"{NORMS}{self._spikes.window}"] = norms
        return state

    def take_over(self, state: State) -> None:
        """Take over what of a state does not share the trainer's memory."""
        self.policy_version = int(state["policy_version"])
        self._probe.owed = float(state["probe_owed"])
        run_checkpoint.set_random_state(
            {name: tensor for name, tensor in state.items() if name.startswith(RNG)}
        )
        if self._spikes is not None:
            norms = state.get(f"{NORMS}{self._spikes.window}", torch.empty(0)).tolist()
            self._spikes.take_over([norm for norm in norms if norm > 0.0])

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, which may be of another parallel layout; collective.

        Raises:
            ValueError: it is a checkpoint of another model or of other adapters.
        """
        state = self.tensors()
        run_checkpoint.load(state, folder)
        self.take_over(state)
