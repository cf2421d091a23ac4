"""What the operators of a worker's model compute, for ``GeneratorEngine.first_different_operator``."""

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch


class OperatorWatch:
    """Keeps the last row of what modules return in the last forward pass, until ``end``."""

    def __init__(self, model: torch.nn.Module, names: Collection[str]) -> None:
        """Watch the modules of these names (``lm_head``: the logits)."""
        self._seen: dict[str, np.ndarray] = {}
        self._hooks = []
        names_of: dict[torch.nn.Module, list[str]] = {}
        # All layers share a rotary embedding.
        for name, module in model.named_modules(remove_duplicate=False):
            if (name := "lm_head" if name == "logits_processor" else name) in names:
                names_of.setdefault(module, []).append(name)
        for module, in_turn in names_of.items():
            turns = itertools.cycle(in_turn)

            def keep(_: torch.nn.Module, given: Any, found: Any, turns: Iterator[str] = turns) -> None:
                name = next(turns)
                parts = found if isinstance(found, tuple) else (found,)
                # Norms also return the residual, and linear layers their bias.
                used = parts if name.endswith("rotary_emb") else parts[:1]
                self._seen[name] = torch.cat([one[-1].flatten() for one in used]).float().cpu().numpy()

            self._hooks.append(module.register_forward_hook(keep))

    def end(self) -> dict[str, np.ndarray]:
        """Return what was kept, by name."""
        for hook in self._hooks:
            hook.remove()
        return self._seen
