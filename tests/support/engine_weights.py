"""What an engine's parameters have to be, worked out from a Hugging Face folder by hand."""

import torch

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def assert_engine_holds(
    workers: list[dict[str, torch.Tensor]], exported: dict[str, torch.Tensor], *, atol: float = 0.0
) -> None:
    """Every parameter of every tensor-parallel worker is its part of ``exported``, by default bit for bit."""
    for rank, parameters in enumerate(workers):
        remaining = dict(parameters)
        for name, expected in _expected(dict(exported), rank, len(workers)).items():
            found = remaining.pop(name)
            if name in VOCABULARY:
                # The engine pads its vocabulary with zeros before it splits it.
                missing = len(workers) * found.shape[0] - expected.shape[0]
                whole = torch.nn.functional.pad(expected, (0, 0, 0, missing))
                expected = whole.chunk(len(workers))[rank]
            difference = float((found - expected).abs().max())
            assert difference <= atol, f"{name} of worker {rank} differs by {difference}"
        assert not remaining, f"parameters that nothing was compared with: {sorted(remaining)}"


def _expected(exported: dict[str, torch.Tensor], rank: int, num_workers: int) -> dict[str, torch.Tensor]:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(num_workers, dim=-2)[rank]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(num_workers, dim=-1)[rank]

    expected: dict[str, torch.Tensor] = {}
    num_layers = 1 + max(int(name.split(".")[2]) for name in exported if name.startswith("model.layers."))
    for layer in (f"model.layers.{i}" for i in range(num_layers)):
        attention = f"{layer}.self_attn"
        qkv = [rows(exported.pop(f"{attention}.{x}_proj.weight")) for x in "qkv"]
        expected[f"{attention}.qkv_proj.weight"] = torch.cat(qkv)
        expected[f"{attention}.o_proj.weight"] = columns(exported.pop(f"{attention}.o_proj.weight"))
        experts = {"gate": [], "up": [], "down": []}
        num_experts = exported[f"{layer}.mlp.gate.weight"].shape[0]
        for name, tensors in experts.items():
            prefix = f"{layer}.mlp.experts"
            tensors += [exported.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(num_experts)]
        gate, up, down = (torch.stack(experts[name]) for name in ("gate", "up", "down"))
        routed = f"{layer}.mlp.experts.routed_experts"
        expected[f"{routed}.w13_weight"] = torch.cat([rows(gate), rows(up)], dim=1)
        expected[f"{routed}.w2_weight"] = columns(down)
    return expected | exported
