"""TorchTitan's router, using the experts that the generator used (Keep Routing).

Only the choice is replaced: the scores are the trainer's own, gathered at the recorded experts, normalized
and scaled as usual, so that gradients reach the gate. Rollout routing replay: DeepSeek-AI, "DeepSeek-V3.2",
2025, section 3.1 (Keep Routing); Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", 2025.

Shape suffixes: B batch, L sequence, D model dim, E experts, K top-k, M MoE layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

from forgeasync.rollouts import NO_RECORD, Decision
from forgeasync.weights import local_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedPlaces:
    """Output of a router's decisions, uint8 (``Decision``), for one row of length L."""

    decisions_L: torch.Tensor
    positions_BL: torch.Tensor
    """Each token's position in the row, int64, in the layout of the ids."""


class ReplayRouter(TokenChoiceTopKRouter):
    """``TokenChoiceTopKRouter`` with a ``replay`` context, which routes tokens to recorded experts.

    Outside of the context it is exactly that router.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.replayed_BLK: torch.Tensor | None = None
        """Recorded experts of the current row, int64; None outside of ``replay``."""
        self._num_uses_BL: torch.Tensor | None = None
        self._noted: NotedPlaces | None = None
        # Counts of the last forward pass: replayed decisions, and those in which this router would have
        # chosen another set of experts. Overwritten, so that recomputation in the backward pass changes
        # nothing.
        self.register_buffer("replay_counts", torch.zeros(2, dtype=torch.int64), persistent=False)
        # Tokens of each expert in that pass, among the tokens of ``num_uses_BL``.
        counts_E = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("expert_counts_E", counts_E, persistent=False)

    @contextmanager
    def replay(
        self,
        expert_ids_BLK: torch.Tensor,
        num_uses_BL: torch.Tensor | None = None,
        noted: NotedPlaces | None = None,
    ) -> Iterator[None]:
        """Route by recorded ids in forward passes until the context ends.

        The router chooses the experts of tokens with any ``NO_RECORD`` among their ids. With activation
        checkpointing, which recomputes the forward pass, the backward pass must also run in the context.

        Args:
            expert_ids_BLK: Ids of the experts, of any integer type. With tensor parallelism every rank passes
                the ids of all tokens, with context parallelism those of its part.
            num_uses_BL: How often each token counts in ``expert_counts_E``, of any integer type; None: the
                tokens of each expert are not counted.
            noted: Where to write whether each token's experts are those that the router would have chosen.
        """
        assert self.replayed_BLK is None, "replay contexts of one router do not nest"
        self.replayed_BLK = expert_ids_BLK.long()
        self._num_uses_BL = num_uses_BL
        self._noted = noted
        try:
            yield
        finally:
            self.replayed_BLK = self._num_uses_BL = self._noted = None

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores [B, L, K] and ids [B, L, K] of the chosen experts, and all scores [B, L, E]."""
        own_scores_BLK, own_ids_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.replayed_BLK is None:
            return own_scores_BLK, own_ids_BLK, scores_BLE
        replayed_BLK = _laid_out_like(self.replayed_BLK, own_ids_BLK)
        local_own_BLK = local_shard(own_ids_BLK)
        has_record_BL1 = (replayed_BLK > NO_RECORD).all(-1, keepdim=True)
        ids_BLK = torch.where(has_record_BL1, replayed_BLK, local_own_BLK)
        is_match_BLKK = ids_BLK[..., :, None] == local_own_BLK[..., None, :]
        is_same_BL1 = is_match_BLKK.any(-1).all(-1, keepdim=True)
        with torch.no_grad():
            counts = torch.stack([has_record_BL1.sum(), (has_record_BL1 & ~is_same_BL1).sum()])
            self.replay_counts.copy_(counts)
            if self._num_uses_BL is not None:
                self._count(ids_BLK, _laid_out_like(self._num_uses_BL, own_ids_BLK))
            if self._noted is not None:
                positions_BL = _laid_out_like(self._noted.positions_BL, own_ids_BLK)
                decisions_BL1 = torch.where(is_same_BL1, Decision.SAME.value, Decision.OTHER.value)
                decisions_BL1 = (decisions_BL1 * has_record_BL1).to(torch.uint8)
                self._noted.decisions_L.index_copy_(0, positions_BL.flatten(), decisions_BL1.flatten())
        # A record may list experts in another order than the router. If the set is the same, use the router's
        # own scores in the record's order: replaying its own choices changes no bit, forward or backward.
        place_BLK = is_match_BLKK.to(torch.uint8).argmax(-1)
        scores_BLK = torch.where(
            _wrapped_like(is_same_BL1, own_ids_BLK),
            own_scores_BLK.gather(-1, _wrapped_like(place_BLK, own_ids_BLK)),
            self._scores_at(_wrapped_like(ids_BLK, own_ids_BLK), scores_BLE),
        )
        return scores_BLK, _wrapped_like(ids_BLK, own_ids_BLK), scores_BLE

    def _count(self, ids_BLK: torch.Tensor, num_uses_BL: torch.Tensor) -> None:
        takes_BLE = torch.zeros(*ids_BLK.shape[:2], self.num_experts, dtype=torch.bool, device=ids_BLK.device)
        takes_BLE.scatter_(-1, ids_BLK, True)
        self.expert_counts_E.copy_((takes_BLE * num_uses_BL[..., None]).sum((0, 1)))

    def _scores_at(self, ids_BLK: torch.Tensor, scores_BLE: torch.Tensor) -> torch.Tensor:
        """Process the scores of chosen experts as ``TokenChoiceTopKRouter`` does."""
        scores_BLK = scores_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            scores_BLK = scores_BLK / (scores_BLK.sum(-1, keepdim=True) + 1e-20)
        return scores_BLK * self.route_scale


def replay_routers(model: nn.Module) -> list[ReplayRouter]:
    """Return the model's routers, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, ReplayRouter)]


@contextmanager
def replay(
    routers: Sequence[ReplayRouter],
    expert_ids_BLMK: torch.Tensor,
    num_uses_BL: torch.Tensor | None = None,
    *,
    noted_ML: torch.Tensor | None = None,
    positions_BL: torch.Tensor | None = None,
) -> Iterator[None]:
    """Replay in all layers; the ids of layer m are ``expert_ids_BLMK[:, :, m]``.

    The outcomes of the decisions are written to ``noted_ML``, for tokens at ``positions_BL`` of the row.
    """
    assert expert_ids_BLMK.shape[2] == len(routers)
    with ExitStack() as contexts:
        for layer, router in enumerate(routers):
            noted = None
            if noted_ML is not None:
                assert positions_BL is not None
                noted = NotedPlaces(decisions_L=noted_ML[layer], positions_BL=positions_BL)
            contexts.enter_context(router.replay(expert_ids_BLMK[:, :, layer], num_uses_BL, noted))
        yield


def _laid_out_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has."""
    if not isinstance(like, DTensor):
        return whole
    replicated = DTensor.from_local(
        whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return replicated.redistribute(placements=like.placements).to_local()


def _wrapped_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a local part as a DTensor, if ``like`` is one."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)


_BUFFER = "expert_bias_E"


def router_biases(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the biases of all layers that have one, by TorchTitan's names, in the order of the layers."""
    return ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(f".{_BUFFER}"))


def checkpoint_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a checkpoint of the model: parameters, and biases of routers."""
    yield from model.named_parameters()
    yield from router_biases(model)


class RouterBiasUpdate:
    """Counts the tokens per expert in a step, and moves biases against the imbalance."""

    def __init__(self, model: nn.Module, speed: float) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, MoE)]
        self._speed = speed
        num_experts = self._layers[0].router.num_experts
        device = self._layers[0].tokens_per_expert_E.device
        self._counts_ME = torch.zeros((len(self._layers), num_experts), dtype=torch.float64, device=device)

    def add(self, routers: Sequence[ReplayRouter]) -> None:
        """Add the tokens of the last forward pass."""
        self._counts_ME += torch.stack([router.expert_counts_E for router in routers])

    @torch.no_grad()
    def step(self) -> None:
        """Move all biases by ``speed``: up for experts with fewer tokens than the average; collective."""
        # Only signs matter, so duplicates do no harm: ranks that compute the same tokens count each expert
        # alike.
        dist.all_reduce(self._counts_ME)
        missing_ME = self._counts_ME.mean(-1, keepdim=True) - self._counts_ME
        change_ME = self._speed * torch.sign(missing_ME)
        change_ME -= change_ME.mean(-1, keepdim=True)
        for moe, change_E in zip(self._layers, change_ME, strict=True):
            own_E = local_shard(moe.expert_bias_E)
            own_E += change_E.to(own_E.dtype)
        self.discard()

    def discard(self) -> None:
        """Discard the tokens counted so far."""
        self._counts_ME.zero_()
