"""Parts of gpu_probe.py about the machine and copies in it: names, versions, limits, bandwidths; staging,
weights that change under a CUDA graph, checkpoints.

``machine`` needs torch alone.
"""

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_probe_common import GB, SHARED_MEMORY, Device, Report, Skipped, free_host_bytes, open_trainer_package

DRIVER_QUERIES = (
    "name,driver_version,memory.total",
    "pcie.link.gen.max,pcie.link.width.max,mig.mode.current,ecc.mode.current,compute_mode,power.limit",
    "clocks.max.sm,clocks.max.memory",
)
"""Fields of nvidia-smi. A driver that does not know one of them gives none of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSizes:
    """Bytes of copies, and the width of square products. Defaults are for a GPU, as in all parts."""

    max_bytes: int = 4 * 2**30
    width: int = 8192


MACHINE = {"cuda": MachineSizes(), "cpu": MachineSizes(max_bytes=2**22, width=128)}


def machine(device: Device, report: Report) -> None:
    """Facts, then the best speed of copies and products."""
    report.put(
        python=sys.version.split()[0],
        system=platform.platform(),
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        free_host_gib=free_host_bytes() / 2**30,
        free_shared_memory_gib=shutil.disk_usage(SHARED_MEMORY).free / 2**30,
        packages={one.name: one.version for one in importlib.metadata.distributions()},
    )
    if device.is_gpu:
        with report.case("gpu"):
            _describe_gpu(report)
        for query in DRIVER_QUERIES:
            with report.case(f"nvidia-smi {query}"):
                _ask_driver(report, query)
    sizes = MACHINE[device.kind]
    num_bytes = min(sizes.max_bytes, device.free_bytes() // 4, free_host_bytes() // 8)
    with report.case("host_copy"):
        source = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        seconds = device.time_s(lambda: target.copy_(source))
        report.put(host_copy_gb_per_s=num_bytes / GB / seconds, host_copy_threads=torch.get_num_threads())
    if device.is_gpu:
        with report.case("links"):
            _measure_links(device, report, num_bytes)
    with report.case("products"):
        a = device.randn(sizes.width, sizes.width)
        product = torch.empty_like(a)
        seconds = device.time_s(lambda: torch.matmul(a, a, out=product), repeats=20)
        report.put(bfloat16_tflops=2e-12 * sizes.width**3 / seconds)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _describe_gpu(report: Report) -> None:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    report.put(
        gpu=properties.name,
        num_gpus=torch.cuda.device_count(),
        capability=list(torch.cuda.get_device_capability()),
        num_multiprocessors=properties.multi_processor_count,
        gpu_memory_gib=total / 2**30,
        free_gpu_memory_gib=free / 2**30,
        cuda=torch.version.cuda,
    )
    with report.case("libraries"):
        report.put(cudnn=torch.backends.cudnn.version(), nccl=str(torch.cuda.nccl.version()))


def _ask_driver(report: Report, query: str) -> None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if found.returncode != 0:
        raise RuntimeError(f"nvidia-smi ended with {found.returncode}: {found.stdout}{found.stderr}")
    report.put(**dict(zip(query.split(","), found.stdout.splitlines()[0].split(", "), strict=True)))


def _measure_links(device: Device, report: Report, num_bytes: int) -> None:
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device.kind)
    other = torch.ones_like(on_device)
    # Read once and written once.
    seconds = device.time_s(lambda: other.copy_(on_device))
    report.put(device_memory_gb_per_s=2 * num_bytes / GB / seconds)
    for kind in ("pageable", "page_locked"):
        with report.case(kind):
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "page_locked")
            to_host_s = device.time_s(lambda host=host: host.copy_(on_device, non_blocking=True))
            to_device_s = device.time_s(lambda host=host: on_device.copy_(host, non_blocking=True))
            report.put(
                kind,
                to_host_gb_per_s=num_bytes / GB / to_host_s,
                to_device_gb_per_s=num_bytes / GB / to_device_s,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSizes:
    """Float32 shards: stacks of experts, and some vectors with each. ``max_bytes`` is of the bfloat16
    version."""

    stack: tuple[int, int, int] = (32, 2048, 768)
    vector: int = 2048
    vectors_per_stack: int = 8
    max_bytes: int = 4 * 2**30


STAGING = {
    "cuda": StagingSizes(),
    "cpu": StagingSizes(stack=(4, 128, 384), vector=256, vectors_per_stack=3, max_bytes=2**20),
}
DTYPE = torch.bfloat16


def staging(device: Device, report: Report) -> None:
    """Copy shards from the device to pageable and to page-locked memory, with the product's own code."""
    open_trainer_package(device, report)
    from forgeasync.weights import DeviceCopies, page_lock

    sizes = STAGING[device.kind]
    shards = _make_shards(device, sizes)
    num_bytes = DTYPE.itemsize * sum(shard.numel() for shard in shards)
    report.put(staged_gb=num_bytes / GB, num_tensors=len(shards))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    targets = buffer.view(DTYPE).split([shard.numel() for shard in shards])

    copies = DeviceCopies()

    def copy() -> None:
        if shards[0].device.type != "cpu":
            copies.start(targets, shards).wait()
            return
        # Shards on the host have no stream to be copied on.
        for target, shard in zip(targets, shards, strict=True):
            target.view(shard.shape).copy_(shard)

    for kind in ("pageable", "page_locked"):
        with report.case(kind):
            if kind == "page_locked":
                start_s = time.perf_counter()
                page_lock(buffer)
                report.put(page_lock_s=time.perf_counter() - start_s)
            buffer.zero_()
            report.put(kind, gb_per_s=num_bytes / GB / device.time_s(copy))
            report.check(f"{kind}_bytes_are_right", _are_staged(targets, shards))
    with report.case("staging_buffers"):
        _stage(device, report, shards, num_bytes)


def _make_shards(device: Device, sizes: StagingSizes) -> list[torch.Tensor]:
    """Make as many shards as fit: in float32 on the device, three times in bfloat16 on the host."""
    stack_elements = sizes.stack[0] * sizes.stack[1] * sizes.stack[2]
    in_shared_memory = shutil.disk_usage(SHARED_MEMORY).free
    room = min(sizes.max_bytes, device.free_bytes() // 8, free_host_bytes() // 8, in_shared_memory // 3)
    num_stacks = max(1, room // (DTYPE.itemsize * stack_elements))
    shards = []
    for _ in range(num_stacks):
        shapes = [sizes.stack, *[(sizes.vector,)] * sizes.vectors_per_stack]
        shards += [device.randn(*shape, dtype=torch.float32) for shape in shapes]
    return shards


def _are_staged(targets: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(target, shard.to(DTYPE).cpu().flatten())
        for target, shard in zip(targets, shards, strict=True)
    )


def _stage(device: Device, report: Report, shards: Sequence[torch.Tensor], num_bytes: int) -> None:
    """Copy into both slots of the trainer's staging buffers, with checksums."""
    from forgeasync.weights import NamedWeight, StagingBuffers, lay_out

    weights = [
        NamedWeight(
            names=tuple(f"{i}.{j}" for j in range(shard.shape[0])) if shard.dim() == 3 else (str(i),),
            tensor=shard,
        )
        for i, shard in enumerate(shards)
    ]
    layout = lay_out(weights, range(len(weights)), rank=0, host_id="probe", itemsize=DTYPE.itemsize)
    folder = Path(tempfile.mkdtemp(prefix="gpu_probe-", dir=SHARED_MEMORY))
    try:
        start_s = time.perf_counter()
        buffers = StagingBuffers(folder, layout, DTYPE)
        report.put(staging_buffers_start_s=time.perf_counter() - start_s)
        copy_s = []
        for version in range(6):
            start_s = time.perf_counter()
            buffers.begin(version % 2, shards).finish()
            copy_s.append(time.perf_counter() - start_s)
        report.put(staging_buffers_gb_per_s=num_bytes / GB / statistics.median(copy_s[2:]))
        for slot in range(2):
            staged = buffers.bytes(slot)
            targets = [
                staged[piece.offset :][: piece.num_elements * DTYPE.itemsize].view(DTYPE)
                for piece in layout.pieces
            ]
            report.check(f"staging_buffers_bytes_of_slot_{slot}_are_right", _are_staged(targets, shards))
    finally:
        shutil.rmtree(folder)


BATCH = 16
"""Rows that square matrices multiply in turn, to see which version of them was used."""


def capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """Capture what ``run`` computes, after some calls on another stream, as torch requires.

    Returns what replays the CUDA graph, and the tensor to which it writes.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


def swap(device: Device, report: Report) -> None:
    """Copy new weights between two replays of one graph, from the host and from the device."""
    if not device.is_gpu:
        raise Skipped("needs CUDA: there are no graphs without it")
    sizes = MACHINE[device.kind]
    # Matrices are on the device twice, once more while they are made, and on the host once.
    room = min(sizes.max_bytes, device.free_bytes() // 4, free_host_bytes() // 4)
    num_bytes = DTYPE.itemsize * sizes.width**2
    num_matrices = max(2, room // num_bytes)
    report.put(swapped_gb=num_matrices * num_bytes / GB, num_copies=num_matrices)

    def make() -> list[torch.Tensor]:
        scale = sizes.width**-0.5
        return [device.randn(sizes.width, sizes.width).mul_(scale) for _ in range(num_matrices)]

    def apply(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        y = x
        for matrix in matrices:
            y = y @ matrix
        return y

    x = device.randn(BATCH, sizes.width)
    weights, shadow = make(), make()
    host_shadow = [torch.empty(sizes.width, sizes.width, dtype=DTYPE, pin_memory=True) for _ in shadow]
    for on_host, matrix in zip(host_shadow, shadow, strict=True):
        on_host.copy_(matrix)
    first, second = apply(weights).clone(), apply(shadow).clone()
    report.check("two_versions_differ", not torch.equal(first, second))
    replay, output = capture(lambda: apply(weights))
    replay()
    device.synchronize()
    _check_output(report, "graph", output, first)
    report.put(replay_ms=1e3 * device.time_s(replay))
    first_weights = [matrix.clone() for matrix in weights]

    def copy_from(sources: Sequence[torch.Tensor]) -> None:
        for matrix, source in zip(weights, sources, strict=True):
            matrix.copy_(source, non_blocking=True)

    routes: dict[str, Callable[[], object]] = {
        "host": lambda: copy_from(host_shadow),
        "device": lambda: copy_from(shadow),
        "device_foreach": lambda: torch._foreach_copy_(weights, shadow),
    }
    for name, swap_in in routes.items():
        with report.case(name):
            copy_from(first_weights)
            # Nothing waits between the replays, as in an engine.
            replay()
            swap_in()
            replay()
            device.synchronize()
            _check_output(report, name, output, second)
            pause_s = device.time_s(swap_in)
            report.put(name, pause_ms=1e3 * pause_s, gb_per_s=num_matrices * num_bytes / GB / pause_s)
    del first_weights
    with report.case("upload_beside_replays"):
        _upload_beside_replays(device, report, replay, shadow, host_shadow)


def _check_output(report: Report, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare outputs. Captured products may use another algorithm than eager ones, so bits may differ."""
    difference = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    report.put(name, relative_error=difference, is_bit_equal_to_eager=torch.equal(found, expected))
    report.check(f"{name}_replay_gives_the_new_result", difference < 0.1)


def _upload_beside_replays(
    device: Device,
    report: Report,
    replay: Callable[[], object],
    shadow: Sequence[torch.Tensor],
    host_shadow: Sequence[torch.Tensor],
) -> None:
    """Copy weights from the host into the shadow on another stream while the graph is replayed."""
    stream = torch.cuda.Stream()

    def upload() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for matrix, source in zip(shadow, host_shadow, strict=True):
                matrix.copy_(source, non_blocking=True)

    def begin() -> Callable[[], None]:
        upload()
        return device.synchronize

    upload_s = device.time_s(upload, repeats=3)
    report.put(upload_gb_per_s=sum(matrix.nbytes for matrix in shadow) / GB / upload_s)
    device.time_beside(report, "replays", begin, upload_s, replay)


NUM_TENSORS = 16
"""Number of equal tensors in the state of a checkpoint."""


def checkpoint_copies(device: Device, report: Report) -> None:
    """Copy a state for a checkpoint as the trainer does, alone and beside matrix products."""
    open_trainer_package(device, report)
    from forgeasync.trainer import HostCopies

    sizes = MACHINE[device.kind]
    # Page-locked memory comes in powers of two.
    room = min(sizes.max_bytes, device.free_bytes() // 4, free_host_bytes() // 4)
    shape = (room // (4 * NUM_TENSORS),)
    state = {f"w{i}": device.randn(*shape, dtype=torch.float32) for i in range(NUM_TENSORS)}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    report.put(state_gb=num_bytes / GB)
    copies = HostCopies()
    device.synchronize()
    start_s = time.perf_counter()
    copies.copy(state, copies.now())
    report.put(first_copy_s=time.perf_counter() - start_s)
    copy_s = device.time_s(lambda: copies.copy(state, copies.now()), repeats=3)
    report.put(copy_alone_s=copy_s, copy_gb_per_s=num_bytes / GB / copy_s)
    a = device.randn(sizes.width, sizes.width)
    product = torch.empty_like(a)
    for tensor in state.values():
        tensor.add_(1.0)
    copied: list[Future[dict[str, torch.Tensor]]] = []
    with ThreadPoolExecutor(1) as thread:

        def begin() -> Callable[[], object]:
            copied.append(thread.submit(copies.copy, state, copies.now()))
            return copied[0].result

        device.time_beside(report, "products", begin, copy_s, lambda: torch.matmul(a, a, out=product))
    found = copied[0].result()
    is_equal = all(torch.equal(found[name], tensor.cpu()) for name, tensor in state.items())
    report.check("copies_are_right", is_equal)
