"""What simulating a large run costs: 4,096 GPUs, 100,000 rollouts in flight, 100 steps, on one core.

    python benchmarks/simulation.py [--steps N]

Prints seconds by the wall and of the processor, and what was simulated; writes
benchmarks/results/simulation.json.
"""

import argparse
import time

from common import RESULTS, machine_facts, write_json

from forgeasync.config import AccountingSection, BufferSection, ScorerSection, WeightsSection
from forgeasync.plugins.simulator import (
    Cores,
    DecodePoint,
    Distribution,
    Estimate,
    Hardware,
    Lengths,
    Origin,
    Profile,
    Setup,
    SimulatedRun,
    TrainPoint,
    WeightTimes,
    simulate,
)

QUANTILES = (100.0, 2e3, 4e3, 6e3, 9e3, 12e3, 16e3, 20e3, 25e3, 30e3)

PROFILE = Profile(
    origin=Origin.STATED,
    sources=("made up for this benchmark",),
    hardware=Hardware(host="none", num_cores=64, cpu="none", packages={}),
    setup=Setup(
        model="none",
        num_trainer_procs=1024,
        num_data_ranks=128,
        trainer_dtype="bfloat16",
        num_replicas=384,
        tensor_parallel=8,
        generator_dtype="bfloat16",
        kv_block_tokens=16,
    ),
    cores=Cores(trainer=0.0, generator=0.0, scorer=0.0),
    decode=tuple(
        DecodePoint(
            num_running=num,
            num_context_tokens=context,
            step_s=Estimate.stated(0.02 + 5e-5 * num + 5e-10 * num * context),
        )
        for num in (1, 64, 512)
        for context in (0, 32_768)
    ),
    prefill_tokens_per_s=Estimate.stated(50_000.0),
    train=tuple(
        TrainPoint(num_rows=num, num_tokens=num * 32_768, step_s=Estimate.stated(1.0 + num))
        for num in (1, 16)
    ),
    between_steps_s=Distribution.point(1.0),
    call_s=Distribution.point(0.005),
    weights=WeightTimes(
        wait_s=Distribution.point(0.0),
        publish_s=Distribution.point(3.0),
        fetch_s=Distribution.point(5.0),
        swap_s=Distribution.point(0.5),
    ),
    score_s=Distribution.point(0.05),
    score_places=64,
    controller_s=Estimate.stated(0.0),
    loops_s=Estimate.stated(0.0),
    step_rest_s=Estimate.stated(0.0),
    response_s=Estimate.stated(0.0),
    lengths={
        "math": Lengths(
            prompt=Distribution.point(256.0),
            response=Distribution(mean=Estimate.stated(12_000.0), quantiles=QUANTILES),
            prompt_share=0.5,
        )
    },
    start_s=Estimate.stated(600.0),
)


def large_run(num_steps: int) -> SimulatedRun:
    """1,024 GPUs train, 3,072 generate, 8 for each engine; 17 times 368 groups of 16 are under way."""
    return SimulatedRun(
        num_steps=num_steps,
        groups_per_step=368,
        group_size=16,
        max_off_policy_steps=16,
        buffer=BufferSection(adapt_load=False),
        accounting=AccountingSection(),
        scorer=ScorerSection(num_replicas=8, max_in_flight=4096, num_workers=64, max_concurrent=1024),
        weights=WeightsSection(),
        num_replicas=384,
        num_generator_hosts=384,
        max_num_seqs=512,
        max_kv_tokens=10**7,
        num_data_ranks=128,
        tokens_per_row=32_768,
        steps_per_batch=1,
        payload_capacity_bytes=10**13,
        largest_group_bytes=10**9,
        longest_group_tokens=10**6,
        num_groups_held=368,
        max_response_tokens=30_720,
        source_weights={"math": 1.0},
        num_prompts=100_000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What simulating a large run costs.")
    parser.add_argument("--steps", type=int, default=100)
    num_steps = parser.parse_args().steps
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run = large_run(num_steps)
    prediction = simulate(run, PROFILE)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    in_flight = prediction.counts.sojourn_s / prediction.run_s * run.group_size
    result = {
        "num_steps": num_steps,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "mean_rollouts_in_flight": round(in_flight),
        "num_rollouts": prediction.counts.num_started * run.group_size,
        "step_s": round(prediction.step_s, 2),
        "mean_age": round(prediction.mean_age, 2),
    }
    print(result)
    write_json(RESULTS / "simulation.json", {"machine": machine_facts(), **result})


if __name__ == "__main__":
    main()
