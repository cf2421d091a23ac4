"""benchmarks/gpu_probe.py: its parts on the CPU and on a pretended GPU; parts that go wrong."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_probe
import gpu_probe_kernels
import gpu_probe_machine
import gpu_probe_trainer
import pytest
import torch
from gpu_probe_common import Device, Report, Skipped
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.pretended_cuda import pretended_cuda
from tests.support.processes import run_apart

REPOSITORY = Path(__file__).parents[2]
SIZES = (
    gpu_probe_kernels.ATTENTION,
    gpu_probe_machine.STAGING,
    gpu_probe_machine.MACHINE,
    gpu_probe_trainer.ADAMW,
    gpu_probe_kernels.GROUPED,
    gpu_probe_kernels.LOGPROBS,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A pretended GPU, on which parts have the sizes for a CPU; what happens on its streams."""
    for sizes in SIZES:
        monkeypatch.setitem(sizes, "cuda", sizes["cpu"])
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", gpu_probe_kernels.stand_in)
    monkeypatch.setenv("PATH", "/no/driver")
    with pretended_cuda(monkeypatch) as log:
        yield log


def wrong_checks(line: gpu_probe.Line) -> set[str]:
    return {name for name, is_right in line["checks"].items() if not is_right}


def run_well(name: str, device: str) -> gpu_probe.Line:
    line = gpu_probe.run_part(name, device, None)
    assert well(line), line
    return line


def well(line: dict[str, object]) -> bool:
    json.dumps(line, allow_nan=False)
    return bool(line["ok"] and not line["errors"] and not gpu_probe.has_failed(line))


@pytest.mark.parametrize("name", ["machine", "staging", "fused_adamw"])
def test_a_part_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    line = gpu_probe.run_part(name, "cpu", tmp_path / "line.json")
    assert well(line), line
    on_disk = json.loads((tmp_path / "line.json").read_text())
    assert on_disk["figures"] == line["figures"] and on_disk["checks"] == line["checks"]


def test_graphs_need_a_gpu() -> None:
    line = gpu_probe.run_part("swap", "cpu", None)
    assert line["skipped"] == {"part": "needs CUDA: there are no graphs without it"}
    assert not line["ok"] and not gpu_probe.has_failed(line)


@pytest.mark.parametrize("name", ["staging", "varlen_attention", "grouped_products", "checkpoint_copies"])
def test_a_part_runs_on_a_pretended_gpu(gpu: list[str], name: str) -> None:
    run_well(name, "cuda")


def test_machine_without_its_driver_program(gpu: list[str]) -> None:
    line = gpu_probe.run_part("machine", "cuda", None)
    assert line["figures"]["gpu"] == "Pretended" and line["figures"]["page_locked_to_host_gb_per_s"] > 0
    assert set(line["errors"]) == {f"nvidia-smi {query}" for query in gpu_probe_machine.DRIVER_QUERIES}


def test_peak_memory_is_what_a_call_adds(gpu: list[str]) -> None:
    assert run_well("kept_logprobs", "cuda")["figures"]["kept_0_peak_gib"] == 2.0


def test_weights_are_swapped_under_a_graph_by_every_route(gpu: list[str]) -> None:
    line = run_well("swap", "cuda")
    for route in ("graph", "host", "device", "device_foreach"):
        assert line["checks"][f"{route}_replay_gives_the_new_result"]
    beside = ["side stream waits for main stream", "work goes to side stream"]
    capture = [*beside, "main stream waits for side stream"]
    # Uploads begin after what was queued before them; the last one with replays beside it.
    assert gpu == [*capture, *beside * 5, "host waits for main stream"]


def test_a_graph_that_keeps_the_old_weights_is_found(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def capture_copies(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return lambda: None, run().clone()

    monkeypatch.setattr(gpu_probe_machine, "capture", capture_copies)
    line = gpu_probe.run_part("swap", "cuda", None)
    assert line["checks"]["graph_replay_gives_the_new_result"]
    assert not line["checks"]["host_replay_gives_the_new_result"] and gpu_probe.has_failed(line)


def top_left(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *offsets: object, **_: object):
    """Attention whose causal mask is aligned at the first query and key of each sequence."""
    cu_seq_q, cu_seq_k = (one.tolist() for one in offsets[:2])  # type: ignore[attr-defined]
    outputs = []
    for index in range(len(cu_seq_q) - 1):
        num_queries = cu_seq_q[index + 1] - cu_seq_q[index]
        queries = slice(cu_seq_q[index], cu_seq_q[index + 1])
        keys = slice(cu_seq_k[index], cu_seq_k[index] + num_queries)
        outputs.append(gpu_probe_kernels.reference([num_queries], query[queries], key[keys], value[keys]))
    return torch.cat(outputs).to(query.dtype)


def test_a_kernel_aligned_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows are right under either alignment; parts are not."""
    monkeypatch.setattr(gpu_probe_kernels, "stand_in", top_left)
    line = gpu_probe.run_part("varlen_attention", "cpu", None)
    assert line["figures"]["causal_mask_is_aligned"] == "top-left"
    wrong = wrong_checks(line)
    assert "causal_mask_is_aligned_bottom_right" in wrong
    assert {"parts_0_scale_1", "parts_2_scale_6"} <= wrong
    assert not any(name.startswith("packed") for name in wrong)


@torch.no_grad()
def test_kernels_take_the_real_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own rules for CUDA tensors, without data: arguments, dtypes, strides. Forward only: autograd
    asks for a real device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sizes = gpu_probe_kernels.ATTENTION["cuda"]
    kernel = gpu_probe_kernels.find_kernel(Device("cuda"), Report())
    bfloat16 = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        part = gpu_probe_kernels.part_of(sizes.rows[0], start=512, stop=1024)
        heads = (sizes.num_kv_heads, sizes.head_size)
        k, v = (torch.empty(sum(sizes.rows[0]), *heads, **bfloat16) for _ in range(2))
        q = torch.empty(512, sizes.num_heads, sizes.head_size, **bfloat16)
        found = gpu_probe_kernels.attend(kernel, part, q, k, v)
        assert found.device.type == "cuda" and found.shape == q.shape
        for groups in gpu_probe_kernels.GROUPED["cuda"].cases:
            x = torch.empty(sum(groups), 2048, **bfloat16)
            weight = torch.empty(len(groups), 768, 2048, **bfloat16)
            product = gpu_probe_kernels._grouped(x, weight, groups)
            assert product.shape == (sum(groups), 768) and product.device.type == "cuda"


def test_gradients_of_empty_groups_that_are_not_zeroed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: torch.Tensor) -> torch.Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return torch.where(gradient.flatten(1).any(1)[:, None, None], gradient, 1e-3)

    def product(x: torch.Tensor, weight: torch.Tensor, groups: list[int]) -> torch.Tensor:
        return gpu_probe_kernels._loop(x, Unwritten.apply(weight), groups)

    monkeypatch.setattr(gpu_probe_kernels, "_grouped", product)
    line = gpu_probe.run_part("grouped_products", "cpu", None)
    wrong = wrong_checks(line)
    without = {name for name in line["checks"] if name.endswith("without_tokens") and "0" in name.split("_")}
    assert wrong == without | {"groups_0_0_0_0_backward"}


def test_a_resume_that_loses_the_moments_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forgeasync.trainer.run_checkpoint.load", lambda state, folder: None)
    line = gpu_probe.run_part("fused_adamw", "cpu", None)
    assert not line["checks"]["losses_after_resume_are_equal"]
    assert not line["checks"]["steps_are_counted_on"]


def _train_on_a_pretended_gpu() -> gpu_probe.Line:
    for sizes in (gpu_probe_trainer.SMALL, gpu_probe_trainer.LARGE):
        sizes["cuda"] = sizes["cpu"]
    with pretended_cuda(pytest.MonkeyPatch()):
        return gpu_probe.run_part("moe_trainer", "cuda", None)


def test_the_trainers_part_runs() -> None:
    """In bfloat16 as on a GPU; the trainer itself computes on the CPU."""
    line = run_apart(_train_on_a_pretended_gpu)
    assert well(line), line


@pytest.mark.exhaustive
@pytest.mark.processes
def test_whole_runs_train_what_their_engine_samples() -> None:
    checks = run_well("engine", "cpu")["checks"]
    assert {"moe_logprobs", "moe_routing", "dense_logprobs", "dense_learns"} <= set(checks)


@pytest.mark.processes
def test_without_torchtitan_the_others_still_run() -> None:
    """Parts whose modules need torch alone, in a process where TorchTitan cannot be imported."""
    script = (
        "import sys; sys.modules['torchtitan'] = None; sys.path[:0] = ['benchmarks', '.']\n"
        "import gpu_probe, json\n"
        "names = ('checkpoint_copies', 'kept_logprobs', 'moe_trainer')\n"
        "print(json.dumps([gpu_probe.run_part(name, 'cpu', None) for name in names]))\n"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    *others, trainer = json.loads(found.stdout)
    for line in others:
        assert well(line), line
    assert "forgeasync.trainer" in others[0]["figures"]["packages_without_their_init"]
    assert "torchtitan" in trainer["errors"]["part"]


def apart(tmp_path: Path, script: str, *, limit_s: float = 250.0) -> gpu_probe.Line:
    """Run a script in a part's place; the last argument is the file for the line."""
    file = tmp_path / "script.py"
    begin = "import json, os, pathlib, signal, sys, time\nfile = pathlib.Path(sys.argv[-1])\n"
    file.write_text(begin + script)
    environment = gpu_probe.child_environment("cpu")
    return gpu_probe.run_apart([sys.executable, str(file)], "x", limit_s=limit_s, environment=environment)


@pytest.mark.processes
def test_a_part_that_hangs_is_stopped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(subprocess.Popen):  # type: ignore[type-arg]
        """Its time begins once it has written what it found."""

        def wait(self, timeout: float | None = None) -> int:
            while not (tmp_path / "has begun").exists():
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(gpu_probe.subprocess, "Popen", Begun)
    report = {"ok": True, "figures": {"a_ms": 1.0}, "checks": {}, "errors": {}, "skipped": {}}
    writes = f"file.write_text(json.dumps({report!r}))"
    tells = f"pathlib.Path({str(tmp_path / 'has begun')!r}).touch()"
    line = apart(tmp_path, f"{writes}\n{tells}\ntime.sleep(600)", limit_s=1.0)
    assert line["errors"] == {"process": "stopped after its limit of 1 s"}
    assert line["figures"] == {"a_ms": 1.0} and not line["ok"]
    assert "stopped after its limit" in gpu_probe.table([line])


@pytest.mark.processes
def test_a_part_that_crashes_says_how(tmp_path: Path) -> None:
    line = apart(tmp_path, "print('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert line["errors"] == {"process": "ended by SIGSEGV"} and line["log_tail"] == ["last words"]


def test_errors_of_cases_leave_the_others_and_numbers_are_json() -> None:
    report = Report()
    with report.case("a"):
        raise ValueError("too large")
    with report.case("b"):
        raise Skipped("no such kernel")
    with report.case("c"):
        report.put(c_ms=math.nan, dtype=torch.bfloat16, c_gib=1 / 3)
    content = report.content()
    assert content["errors"]["a"].endswith("ValueError: too large")
    assert content["skipped"] == {"b": "no such kernel"}
    assert content["figures"] == {"c_ms": "nan", "dtype": "torch.bfloat16", "c_gib": 0.33333}
    assert not content["ok"]


@pytest.mark.processes
def test_the_script_writes_a_line_for_every_part(tmp_path: Path) -> None:
    """With no time for any of them: imports of torch would take longer than all else here."""
    file = tmp_path / "out" / "probe.json"
    command = [sys.executable, "benchmarks/gpu_probe.py", "--device", "cpu", "--seconds", "1", "--json", file]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["name"] for line in lines] == list(gpu_probe.PARTS)
    assert all("--seconds were over" in line["errors"]["part"] for line in lines)
    assert found.stdout.splitlines()[0] == json.dumps(lines[0]) and "FAILED" in found.stdout


def test_it_names_the_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = gpu_probe.run_part("machine", "cuda", None)
    assert f"torch {torch.__version__} sees no CUDA GPU: " in line["errors"]["part"]
    if torch.version.cuda is None:
        assert line["errors"]["part"].endswith("not compiled with CUDA enabled")
