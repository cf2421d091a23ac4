"""A row through the trainer's model and back at real sizes on "cuda", without data and without a GPU.

Tensors are fake (shapes, dtypes and strides only), collectives do nothing (torch's "fake" process group), and
this process is one rank of as many as the layout has. Where sequences begin and how many tokens each expert
gets is given. Reading any other value from the device raises.

``look_at`` runs this module in a process of its own, in which torch has a pretended device
(pretended_cuda.cpp).
"""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.tiers import Starts, starts

SOURCE = Path(__file__).with_name("pretended_cuda.cpp")

REPOSITORY = SOURCE.parents[2]

FLA = REPOSITORY / ".venv-fla" / "lib" / "python3.11" / "site-packages"
"""Where ``make .venv-fla`` puts flash-linear-attention."""

EAGER = "trainer.compile=false"
"""torch compiles nothing for tensors without data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A config with overrides; layers are alike, so that two stand for all."""

    config: str
    overrides: tuple[str, ...] = ()
    num_layers: int = 2
    facts: Mapping[str, int | float | bool | str] | None = None
    """The model's shape; None: the one of ``model.path``."""
    rank: int = 0
    num_tokens: int | None = None
    """Tokens of the row's only sequence; 0: a row of padding; None: a full row."""
    is_bitwise: bool = False
    """With the operators of vLLM's engines, which only return tensors of the right shapes."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the rank did."""

    attention: list[Any] = field(default_factory=list)
    """Dtypes, shapes of queries and keys, number of sequences, longest of queries and keys; of each call."""
    products: list[Any] = field(default_factory=list)
    """Dtypes and shapes of grouped products in the forward and the backward pass."""
    logits: list[Any] = field(default_factory=list)
    """Shapes of matrices as wide as this rank's vocabulary."""
    gradients: list[Any] = field(default_factory=list)
    """Dtypes of parameters' gradients; None where there is none."""
    devices: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    collectives: list[Any] = field(default_factory=list)
    """Operator, ranks of the group, and sizes of tensors; without sizes where ranks exchange unequal ones."""
    kept_bytes: int = 0
    """Between forward and backward pass, besides parameters."""
    peak_bytes: int = 0
    states: list[Any] = field(default_factory=list)
    """Dtypes and shapes of queries, keys, values, decays and starts of each call of linear attention."""
    engine_operators: list[str] = field(default_factory=list)
    """Operators of vLLM that were called."""


def build_device(folder: Path) -> Path:
    """Compile the pretended device."""
    library = folder / "pretended_cuda.so"
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
    command += ["-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


@starts(Starts.PROCESSES)
def look_at(cases: Mapping[str, Case], library: Path) -> dict[str, Seen]:
    """What the rank of each case did."""
    return {name: Seen(**found) for name, found in on_pretended_device(__name__, cases, library).items()}


def on_pretended_device(module: str, cases: Mapping[str, Case], library: Path) -> dict[str, Any]:
    """What a module, which calls ``answer``, answers to cases in a process of its own."""
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib"),
        "PYTHONPATH": f"{REPOSITORY}:{FLA}",
    }
    asked = json.dumps({name: asdict(case) for name, case in cases.items()})
    out = library.with_suffix(".json")
    done = subprocess.run(
        [sys.executable, "-m", module, str(out)],
        input=asked,
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-12000:]
    return json.loads(out.read_text())


class _Device:
    """What FSDP2 and meshes ask of ``torch.cuda``; its streams and events do nothing."""

    Stream = Event = current_stream = staticmethod(lambda *_, **__: mock.MagicMock())
    stream = staticmethod(contextlib.nullcontext)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 8)
    is_initialized = staticmethod(lambda: True)
    set_device = staticmethod(lambda _: None)


def answer(look: Callable[[Case], Any], out: Path) -> None:
    """Write down what ``look`` finds in the cases of standard input."""
    with mock.patch("torch.accelerator.is_available", lambda: True):
        # The trainer then takes this machine for one with a GPU.
        import forgeasync.trainer.policy_trainer as _  # noqa: F401
    cases = {name: Case(**case) for name, case in json.load(sys.stdin).items()}
    # In a fork each: torch keeps meshes and plans of DTensors by layout, also when their groups are gone.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(cases, pool.map(partial(_tried, look), cases.values(), chunksize=1), strict=True))
    out.write_text(json.dumps({name: asdict(seen) for name, seen in found.items()}))


def _tried(look: Callable[[Case], Any], case: Case) -> Any:
    try:
        return look(case)
    except Exception as error:
        # Errors of fake tensors cannot be sent to another process.
        raise AssertionError("".join(traceback.format_exception(error))) from None


@contextlib.contextmanager
def patched(fake: Any, num_routed: int) -> Iterator[None]:
    """Replaces what asks for values, for random numbers, or for the device itself."""
    import torch.distributed.device_mesh as device_mesh
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param_group,
        _fsdp_state,
    )
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from forgeasync.trainer import model

    def even_splits(
        _: object, mine_E: torch.Tensor, theirs: torch.Tensor, num_ranks: int
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        splits = [num_routed // num_ranks] * num_ranks
        return theirs.reshape(-1), splits, splits

    def to_empty(self: torch.nn.Module, *, device: str, recurse: bool = True) -> torch.nn.Module:
        with fake:
            return torch.nn.Module.to_empty(self, device=device, recurse=recurse)

    class FakeEmpty:
        """torch, but that nothing is allocated."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *arguments: object, **keywords: object) -> torch.Tensor:
            with fake:
                return torch.empty(*arguments, **keywords)

    with contextlib.ExitStack() as stack:
        for module in (device_mesh, _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", lambda *_: _Device))
        for owner, name, new in (
            (_fsdp_param_group, "torch", FakeEmpty()),
            (AllToAllTokenDispatcher, "_sync_token_count_exchange", even_splits),
            (Decoder, "init_states", lambda self, buffer_device=None: None),
            (Decoder, "to_empty", to_empty),
            (model, "move_buffers", lambda *_: None),
            (torch.Tensor, "pin_memory", lambda self: self),
        ):
            stack.enter_context(mock.patch.object(owner, name, new, create=True))
        yield


def row_of(case: Case, config: Any, facts: Any) -> Any:
    from forgeasync.trainer import pack_row
    from tests.support.measured_memory import full_row

    if case.num_tokens is None:
        return full_row(config, facts)
    if case.num_tokens == 0:
        return pack_row([])
    changes = {
        "model": {"max_context_length": case.num_tokens},
        "sampling": {"max_response_tokens": case.num_tokens // 2},
        "trainer": {"tokens_per_row": case.num_tokens},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return full_row(config.model_copy(update=sections), facts)


def group_of(arguments: Sequence[Any]) -> list[int]:
    """Ranks of the process group among the arguments of a collective; none: it is not a collective."""
    import torch.distributed as dist

    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    if arguments and isinstance(arguments[-1], str):
        group = dist.distributed_c10d._resolve_process_group(arguments[-1])
        return dist.get_process_group_ranks(group)
    return []


def config_and_facts(case: Case) -> tuple[Any, Any]:
    """The run of a case, and its model with as many layers as the case has."""
    from forgeasync.config import ModelFacts, load_config
    from forgeasync.models import read_model_facts

    config = load_config(REPOSITORY / "configs" / f"{case.config}.yaml", [*case.overrides, EAGER])
    facts = read_model_facts(config.model.path) if case.facts is None else ModelFacts(**case.facts)
    return config, with_layers(facts, case.num_layers)


def with_layers(facts: Any, num_layers: int) -> Any:
    """The model's first layers."""
    num_dense = num_layers if facts.num_experts == 0 else facts.num_dense_layers
    linear = facts.linear
    if linear is not None:
        linear = replace(linear, full_layers=tuple(one for one in linear.full_layers if one < num_layers))
    return replace(facts, num_layers=num_layers, num_dense_layers=num_dense, linear=linear)


class _Rule(torch.autograd.Function):
    """What fla 0.5.2's chunked gated delta rule returns, saves and computes again, without values."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        assert {one.device.type for one in (q, k, v, g, beta, starts)} == {"cuda"}
        corrections = k.new_empty((*k.shape[:3], 64))
        norms = [one.new_empty(one.shape[:3], dtype=torch.float32) for one in (q, k)]
        ctx.save_for_backward(
            q.clone(), k.clone(), v.contiguous(), g.clone(), beta.clone(), corrections, *norms
        )
        _chunks(k, v, num=1)
        return torch.empty_like(v, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, *_ = ctx.saved_tensors
        _chunks(k, v, num=2)
        return (*(torch.empty_like(one) for one in (q, k, v, g, beta)), None)


def _chunks(k: torch.Tensor, v: torch.Tensor, *, num: int) -> None:
    """States between chunks, and what corrects them."""
    length, heads = k.shape[1:3]
    states = [k.new_empty((length // 64 + 1, heads, k.shape[3], v.shape[3])) for _ in range(num)]
    states += [torch.empty_like(one) for one in (k, v, v) * num]


def fake_states(seen: "Seen") -> contextlib.ExitStack:
    """Replaces fla's kernels, which take no tensors without data."""
    # A real GPU's trainer imports it with the model.
    import torchtitan.models.qwen3_5.model as titan

    def rule(*inputs: torch.Tensor, cu_seqlens: torch.Tensor, **named: object) -> tuple[torch.Tensor, None]:
        assert named.keys() == {"use_qk_l2norm_in_kernel", "cu_seqlens_cpu"}
        seen.states.append([[str(x.dtype), list(x.shape)] for x in (*inputs[:4], cu_seqlens)])
        return _Rule.apply(*inputs, cu_seqlens), None

    def convolution(*, x: torch.Tensor, weight: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return x * weight.sum(), None

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(titan, "_fla_chunk_gated_delta_rule", rule))
    stack.enter_context(mock.patch("fla.modules.conv.causal_conv1d.causal_conv1d", convolution))
    return stack


def generator_forward(model: Any, facts: Any, called: list[str]) -> Any:
    """The generator's forward pass on GPUs; every operator checks that its tensors are there."""
    import torch.nn.functional as F

    from forgeasync.trainer import gpu_operators
    from forgeasync.trainer.generator_forward import GeneratorForward

    def route(x: torch.Tensor, logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple:
        shape = (len(x), top_k)
        ids = torch.zeros(shape, dtype=torch.int32, device=x.device)
        return torch.ones(shape, device=x.device), ids, ids

    stand_ins = {
        "linear_batch_invariant": F.linear,
        "rms_norm_batch_invariant": lambda x, weight, eps: x * weight,
        "fused_topk": route,
        "fused_experts": lambda x, w13, w2, scores, ids: x.clone(),
        "compute_token_logprobs": lambda logits, ids: logits.gather(-1, ids),
        **dict.fromkeys(("triton_reshape_and_cache_flash", "unified_attention", "apply_temperature")),
    }

    def checked(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            tensors = [one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor)]
            assert {one.device.type for one in tensors} == {"cuda"}, name
            called.append(name)
            return None if function is None else function(*arguments, **named)

        return call

    for name, function in stand_ins.items():
        setattr(gpu_operators, name, checked(name, function))
    for name in ("fused_add_rms_norm", "rotary_embedding"):
        setattr(gpu_operators.ops, name, checked(name, None))
    torch.ops._C.silu_and_mul = checked("silu_and_mul", None)
    return GeneratorForward(model, facts)


def _look(case: Case) -> Seen:
    import torch.distributed as dist
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from forgeasync.trainer import RowForward, build_parallel_dims, build_parallel_model
    from tests.support.live_tensors import LiveTensors
    from tests.support.trainers import local

    config, facts = config_and_facts(case)
    section, parallel = config.trainer, config.trainer.parallel
    row = row_of(case, config, facts)
    num_tokens = len(row.token_ids_L) // parallel.context
    if parallel.tensor > 1 and parallel.sequence:
        num_tokens //= parallel.tensor
    seen = Seen()
    width = facts.vocab_size // parallel.tensor

    class Watch(TorchDispatchMode):
        """Writes calls down. A call that reads a value from the device, and so waits for it, raises."""

        def __torch_dispatch__(
            self, function: Any, types: object, arguments: Sequence[Any] = (), keywords: Any = None
        ) -> Any:
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            is_number = function is torch.ops.aten._local_scalar_dense.default
            if is_number and isinstance(tensors[0], FakeTensor) and tensors[0].device.type == "cpu":
                # Where kept sets begin: no vocabulary is cut.
                return 0
            if function is torch.ops.torch_attn._varlen_attn.default:
                q, k, _, cu_seq_q, cu_seq_k = tensors
                offsets = [cu_seq_q.shape[0], cu_seq_k.shape[0], str(cu_seq_q.dtype)]
                seen.attention.append([str(q.dtype), list(q.shape), list(k.shape), offsets, arguments[5:7]])
            elif function is torch.ops.aten._grouped_mm.default:
                seen.products.append([[str(x.dtype), list(x.shape)] for x in tensors[:2]])
            elif function.namespace in ("c10d", "_c10d_functional") and (group := group_of(arguments)):
                name = function.__name__.partition(".")[0]
                sizes = [x.numel() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
                seen.collectives.append([name, group, [] if "alltoall" in name.replace("_", "") else sizes])
            result = function(*arguments, **(keywords or {}))
            if function is torch.ops.aten.mm.default and result.shape[1] == width:
                seen.logits.append(list(result.shape))
            return result

    torch.autograd.set_multithreading_enabled(False)
    dist.init_process_group("fake", rank=case.rank, world_size=parallel.num_procs, store=FakeStore())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    linear = contextlib.nullcontext() if facts.linear is None else fake_states(seen)
    with patched(fake, num_tokens * facts.top_k), linear:
        dims = build_parallel_dims(section, world_size=parallel.num_procs)
        model = build_parallel_model(facts, section, parallel_dims=dims)
        with fake:
            engine = generator_forward(model, facts, seen.engine_operators) if case.is_bitwise else None
            forward = RowForward(
                model, parallel_dims=dims, section=section, temperature=1.0, generator_forward=engine
            )
            known = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
            with LiveTensors(known) as live, Watch(), forward.replay(row):
                found = forward.predictions(row)
                seen.kept_bytes = live.num_bytes
                found.logprobs_T.sum().backward()
            seen.peak_bytes = live.peak_bytes
    seen.logprobs = [str(found.logprobs_T.dtype), list(found.logprobs_T.shape)]
    for parameter in model.parameters():
        grad = parameter.grad
        seen.gradients.append(None if grad is None else [str(grad.dtype), grad.shape == parameter.shape])
    seen.devices = sorted({str(local(parameter).device) for parameter in model.parameters()})
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    answer(_look, Path(sys.argv[1]))
