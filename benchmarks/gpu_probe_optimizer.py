"""Part of gpu_probe.py on AdamW across a checkpoint and a resume."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_probe_common import GB, Device, Report, group_of_one, open_trainer_package


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamwSizes:
    """Sizes of a chain of square layers in float32."""

    width: int
    num_layers: int
    batch: int


ADAMW = {
    "cuda": AdamwSizes(width=4096, num_layers=6, batch=512),
    "cpu": AdamwSizes(width=32, num_layers=2, batch=8),
}
NUM_STEPS, NUM_BEFORE = 6, 3


def fused_adamw(device: Device, report: Report) -> None:
    """Check that steps around a checkpoint and a resume equal uninterrupted steps."""
    open_trainer_package(device, report)
    from forgeasync.checkpoints import checkpoint_name
    from forgeasync.config import OptimizerSection
    from forgeasync.trainer import CheckpointWriter, build_optimizer, training_state
    from forgeasync.trainer.run_checkpoint import load

    sizes = ADAMW[device.kind]
    # Small for layers this wide: a loss that is not finite would equal none.
    section = OptimizerSection(learning_rate=1e-5, weight_decay=0.01)

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(sizes.width, sizes.width) for _ in range(sizes.num_layers)]
        model = torch.nn.Sequential(*layers).to(device.kind)
        return model, build_optimizer(list(model.named_parameters()), section)

    def step(model: torch.nn.Module, optimizer: torch.optim.AdamW, number: int) -> float:
        torch.manual_seed(1000 + number)
        x = torch.randn(sizes.batch, sizes.width, device=device.kind)
        loss = (model(x) - x.roll(1, dims=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model, optimizer = build(0)
    with group_of_one("gloo"), tempfile.TemporaryDirectory(prefix="gpu_probe-") as scratch:
        folder = Path(scratch) / checkpoint_name(NUM_BEFORE)
        losses = [step(model, optimizer, number) for number in range(NUM_BEFORE)]
        state = training_state(model, optimizer)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        writer = CheckpointWriter()
        start_s = time.perf_counter()
        writer.begin(state, folder, run_state=b"{}", keep=1)
        writer.until_staged()
        report.put(checkpoint_gb=num_bytes / GB, staged_s=time.perf_counter() - start_s)
        writer.finish()
        report.put(written_s=time.perf_counter() - start_s)
        losses += [step(model, optimizer, number) for number in range(NUM_BEFORE, NUM_STEPS)]
        other_model, other_optimizer = build(1)
        other_state = training_state(other_model, other_optimizer)
        start_s = time.perf_counter()
        load(other_state, folder)
        report.put(loaded_s=time.perf_counter() - start_s)
    resumed = [step(other_model, other_optimizer, number) for number in range(NUM_BEFORE, NUM_STEPS)]
    report.put(losses=losses, losses_after_resume=resumed)
    report.check("losses_after_resume_are_equal", resumed == losses[NUM_BEFORE:])
    pairs = list(zip(model.parameters(), other_model.parameters(), strict=True))
    differences = [float((one.detach() - other.detach()).abs().max()) for one, other in pairs]
    report.put(largest_weight_difference=max(differences))
    report.check("weights_after_resume_are_equal", max(differences) == 0.0)
    counters = [moments["step"] for moments in other_optimizer.state.values()]
    report.check("steps_are_on_the_device", all(one.device.type == device.kind for one in counters))
    report.check("steps_are_counted_on", all(float(one) == NUM_STEPS for one in counters))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    step_s = device.time_s(optimizer.step)
    # Reads weight, gradient and two moments, writes weight and moments.
    report.put(fused_step_ms=1e3 * step_s, fused_step_gb_per_s=7 * 4 * num_elements / GB / step_s)
