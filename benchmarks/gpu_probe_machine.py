"""Parts of gpu_probe.py about the machine and copies in it: names, versions, limits, bandwidths; staging,
weights that change under a CUDA graph, checkpoints.

``machine`` needs torch alone.
"""

import importlib.metadata
import math
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common import machine_facts
from gpu_probe_common import (
    GB,
    SHARED_MEMORY,
    Device,
    Report,
    Skipped,
    free_host_bytes,
    open_trainer_package,
    relative_error,
)

DRIVER_QUERIES = (
    "name,driver_version,memory.total",
    "pcie.link.gen.max,pcie.link.width.max,mig.mode.current,ecc.mode.current,compute_mode,power.limit",
    "clocks.max.sm,clocks.max.memory",
)
"""Fields of nvidia-smi. A driver that does not know one of them gives none of its line."""


MACHINE = {"cuda": (4 * 2**30, 8192), "cpu": (2**22, 128)}
"""Most bytes of copies, and the width of square products."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors, without waiting for the device."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.view_as(target), non_blocking=True)


def machine(device: Device, report: Report) -> None:
    """Facts, then the best speed of copies and products."""
    report.put(
        **machine_facts(),
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
    max_bytes, width = MACHINE[device.kind]
    num_bytes = min(max_bytes, device.free_bytes() // 4, free_host_bytes() // 8)
    with report.case("host_copy"):
        source = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        seconds = device.time_s(lambda: target.copy_(source))
        report.put(host_copy_gb_per_s=num_bytes / GB / seconds, host_copy_threads=torch.get_num_threads())
    if device.is_gpu:
        with report.case("links"):
            _measure_links(device, report, num_bytes)
    with report.case("products"):
        a = device.randn(width, width)
        product = torch.empty_like(a)
        seconds = device.time_s(lambda: torch.matmul(a, a, out=product), repeats=20)
        report.put(bfloat16_tflops=2e-12 * width**3 / seconds)


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
            for name, pair in (("to_host", (host, on_device)), ("to_device", (on_device, host))):
                seconds = device.time_s(partial(torch.Tensor.copy_, *pair, non_blocking=True))
                report.put(kind, **{f"{name}_gb_per_s": num_bytes / GB / seconds})


STAGING = {"cuda": ((32, 2048, 768), 2048, 8, 4 * 2**30), "cpu": ((4, 128, 384), 256, 3, 2**20)}
"""Float32 shards: shape of a stack of experts, size and number of vectors with each; most bytes of the
bfloat16 version."""
DTYPE = torch.bfloat16


def staging(device: Device, report: Report) -> None:
    """Copy shards from the device to pageable and to page-locked memory, with the product's own code."""
    open_trainer_package(device, report)
    from forgeasync.weights import DeviceCopies, page_lock

    shards = _make_shards(device)
    num_bytes = DTYPE.itemsize * sum(shard.numel() for shard in shards)
    report.put(staged_gb=num_bytes / GB, num_tensors=len(shards))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    targets = buffer.view(DTYPE).split([shard.numel() for shard in shards])

    copies = DeviceCopies()

    def copy() -> None:
        if shards[0].device.type == "cpu":
            # Without a stream to be copied on.
            copy_all(targets, [shard.flatten() for shard in shards])
        else:
            copies.start(targets, shards).wait()

    for kind in ("pageable", "page_locked"):
        with report.case(kind):
            if kind == "page_locked":
                report.put(page_lock_s=device.once_s(lambda: page_lock(buffer)))
            buffer.zero_()
            report.put(kind, gb_per_s=num_bytes / GB / device.time_s(copy))
            report.check(f"{kind}_bytes_are_right", _are_staged(targets, shards))
    with report.case("staging_buffers"):
        _stage(device, report, shards, num_bytes)


def _make_shards(device: Device) -> list[torch.Tensor]:
    """Make as many shards as fit: in float32 on the device, three times in bfloat16 on the host."""
    stack, vector, num_vectors, max_bytes = STAGING[device.kind]
    in_shared_memory = shutil.disk_usage(SHARED_MEMORY).free
    room = min(max_bytes, device.free_bytes() // 8, free_host_bytes() // 8, in_shared_memory // 3)
    num_stacks = max(1, room // (DTYPE.itemsize * math.prod(stack)))
    shapes = [stack, *[(vector,)] * num_vectors] * num_stacks
    return [device.randn(*shape, dtype=torch.float32) for shape in shapes]


def _are_staged(targets: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> bool:
    pairs = zip(targets, shards, strict=True)
    return all(torch.equal(target, shard.to(DTYPE).cpu().flatten()) for target, shard in pairs)


def _stage(device: Device, report: Report, shards: Sequence[torch.Tensor], num_bytes: int) -> None:
    """Copy into both slots of the trainer's staging buffers, with checksums."""
    from forgeasync.weights import NamedWeight, StagingBuffers, lay_out

    weights = [
        NamedWeight(
            names=tuple(f"{i}.{j}" for j in range(len(shard) if shard.dim() == 3 else 1)), tensor=shard
        )
        for i, shard in enumerate(shards)
    ]
    layout = lay_out(weights, range(len(weights)), rank=0, host_id="probe", itemsize=DTYPE.itemsize)
    with tempfile.TemporaryDirectory(prefix="gpu_probe-", dir=SHARED_MEMORY) as folder:
        start_s = time.perf_counter()
        buffers = StagingBuffers(Path(folder), layout, DTYPE)
        report.put(staging_buffers_start_s=time.perf_counter() - start_s)
        copy_s = [
            device.once_s(lambda slot=version % 2: buffers.begin(slot, shards).finish())
            for version in range(6)
        ]
        report.put(staging_buffers_gb_per_s=num_bytes / GB / statistics.median(copy_s[2:]))
        for slot in range(2):
            staged = buffers.bytes(slot)
            targets = [
                staged[piece.offset :][: piece.num_elements * DTYPE.itemsize].view(DTYPE)
                for piece in layout.pieces
            ]
            report.check(f"staging_buffers_bytes_of_slot_{slot}_are_right", _are_staged(targets, shards))


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
    max_bytes, width = MACHINE[device.kind]
    # Matrices are on the device twice, once more while they are made, and on the host once.
    room = min(max_bytes, device.free_bytes() // 4, free_host_bytes() // 4)
    num_bytes = DTYPE.itemsize * width**2
    num_matrices = max(2, room // num_bytes)
    report.put(swapped_gb=num_matrices * num_bytes / GB, num_copies=num_matrices)

    def make() -> list[torch.Tensor]:
        return [device.randn(width, width).mul_(width**-0.5) for _ in range(num_matrices)]

    def apply(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        y = x
        for matrix in matrices:
            y = y @ matrix
        return y

    x = device.randn(BATCH, width)
    weights, shadow = make(), make()
    host_shadow = [torch.empty(width, width, dtype=DTYPE, pin_memory=True) for _ in shadow]
    copy_all(host_shadow, shadow)
    first, second = apply(weights).clone(), apply(shadow).clone()
    report.check("two_versions_differ", not torch.equal(first, second))
    replay, output = capture(lambda: apply(weights))
    replay()
    device.synchronize()
    _check_output(report, "graph", output, first)
    report.put(replay_ms=1e3 * device.time_s(replay))
    first_weights = [matrix.clone() for matrix in weights]

    routes: dict[str, Callable[[], object]] = {
        "host": lambda: copy_all(weights, host_shadow),
        "device": lambda: copy_all(weights, shadow),
        "device_foreach": lambda: torch._foreach_copy_(weights, shadow),
    }
    for name, swap_in in routes.items():
        with report.case(name):
            copy_all(weights, first_weights)
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
    difference = relative_error(found, expected)
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
            copy_all(shadow, host_shadow)

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

    max_bytes, width = MACHINE[device.kind]
    # Page-locked memory comes in powers of two.
    room = min(max_bytes, device.free_bytes() // 4, free_host_bytes() // 4)
    shape = (room // (4 * NUM_TENSORS),)
    state = {f"w{i}": device.randn(*shape, dtype=torch.float32) for i in range(NUM_TENSORS)}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    report.put(state_gb=num_bytes / GB)
    copies = HostCopies()

    def copy() -> dict[str, torch.Tensor]:
        return copies.copy(state, copies.now())

    report.put(first_copy_s=device.once_s(copy))
    copy_s = device.time_s(copy, repeats=3)
    report.put(copy_alone_s=copy_s, copy_gb_per_s=num_bytes / GB / copy_s)
    a = device.randn(width, width)
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
