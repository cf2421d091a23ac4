"""Lets torch 2.13 compile the layers of TorchTitan 0.3.0 under every layout.

All layers share their code, and each must be a single graph (``fullgraph``). Two things then end a run:

- torch compiles code at most 8 times, and more is an error. Dense and MoE layers, passes with and without
  gradients, notes on routing, and the first and further sizes of rows each need a graph.
- With tensor parallelism the embedding returns the result of a collective that may still be in flight
  (``AsyncCollectiveTensor`` in a DTensor). torch compiles the first layer for it, and later runs this graph
  for other layers, whose inputs are plain tensors.

The first part can go when the limit is not an error, the second when guards look into DTensors.
"""

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder

MAX_GRAPHS = 64
"""Maximum number of graphs of a layer's code."""


def prepare_compiled_layers(model: Decoder) -> None:
    """Prepare a model, after its layers were compiled and before its first forward pass."""
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    # A copy waits for the collective. Without tensor parallelism there is none.
    model.tok_embeddings.register_forward_hook(
        lambda module, inputs, output: output.clone() if isinstance(output, DTensor) else output
    )
