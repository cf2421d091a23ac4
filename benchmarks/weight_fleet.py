"""One size of ``weight_sync.py``: a fleet that syncs, over and over; writes what it saw as JSON."""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import write_json
from weight_models import MAX_CONTEXT, SIZES, ModelSize, sync_config, write_model
from weight_probe import Change, ProbedGenerator, ProbedTrainer, Update

from forgeasync.actors import ProcessManager, TrainerMesh, start_generators, start_trainer
from forgeasync.algorithms import Loss
from forgeasync.config import Dtype, Interruption, RunConfig
from forgeasync.launch import HostRole
from forgeasync.models import read_model_facts
from forgeasync.trainer import PackedRow, TrainerSetup, TrainingSequence, pack_row
from forgeasync.weights import NUM_SLOTS, TORCH_DTYPES, Manifest, build_transport

TRANSPORTS = ("shared_memory", "rdma", "torchstore")

MODES = (Interruption.IN_FLIGHT, Interruption.BLOCKING, Interruption.DRAIN)

NUM_WARM, NUM_ENDS = 5, 10
"""Of the updates that look for growth: warm-up, for memory; first and last ones whose times are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One version by one transport; seconds."""

    waited_s: float
    staging_s: float
    call_s: float
    cast_s: float
    same_s: float
    update: Update


class Bench:
    """The procs of one size."""

    def __init__(self, config: RunConfig, size: ModelSize, logs: Path) -> None:
        self._config = config
        self._size = size
        self._manager = ProcessManager(logs)
        self._slot = 0

    async def start(self, folder: Path) -> None:
        """Spawn everything, connect every transport, begin to decode."""
        # The fleet is to spawn actors that time themselves.
        import_module("forgeasync.actors.trainer_mesh").TrainerActor = ProbedTrainer
        import_module("forgeasync.actors.router").GeneratorActor = ProbedGenerator
        config, facts, manager = self._config, read_model_facts(str(folder)), self._manager
        generators = await start_generators(manager, config, facts, folder)
        self._generator = generators.pool.replicas[0].actor
        setup = TrainerSetup(
            section=config.trainer,
            facts=facts,
            temperature=config.sampling.temperature,
            loss=Loss(),
            seed=0,
            checkpoint=folder,
        )
        self._trainer: TrainerMesh = await start_trainer(manager, setup, config.timeouts)
        for choice in TRANSPORTS:
            await build_transport(choice).start(manager.spawn_here)
        layout = await self._trainer.lay_out_weights(config.generator.dtype)
        self.num_bytes = layout.num_bytes
        (host,) = manager.hosts.of_procs(HostRole.GENERATORS, 1)
        folder = await host.make_folder((NUM_SLOTS + 1) * layout.num_bytes)
        sources = [one for _, one in await self._trainer._actors.open_all.call(folder, TRANSPORTS)]
        await self._generator.connect_transports.call_one(layout, sources, folder, TRANSPORTS)
        for transport in TRANSPORTS:
            await self._generator.forget.call_one(transport, False)
        await self._trainer._actors.prepare_reference.call(TORCH_DTYPES[config.generator.dtype])
        await self._generator.start_decoding.call_one(self._size.num_sequences)

    async def _change(self, transport: str, change: Change) -> None:
        """New weights in the trainer, to be staged in the other slot."""
        await self._trainer._actors.next_version.call(change)
        await self._trainer._actors.publish_by.call(transport)
        self._slot = 1 - self._slot

    async def publish(self, transport: str, change: Change = Change.EVERYTHING) -> Manifest:
        """One version, staged."""
        await self._change(transport, change)
        return await self._trainer.stage_weights(self._slot)

    async def round(self, transport: str) -> Round:
        """One version, everything measured."""
        references = [one for _, one in await self._trainer._actors.publish_reference.call()]
        await self._change(transport, Change.EVERYTHING)
        start_s = time.perf_counter()
        manifest = await self._trainer.stage_weights(self._slot)
        call_s = time.perf_counter() - start_s
        return Round(
            waited_s=manifest.waited_s,
            staging_s=manifest.staging_s,
            call_s=call_s,
            cast_s=max(reference.cast_s for reference in references),
            same_s=max(reference.same_s for reference in references),
            update=await self._generator.update.call_one(transport, manifest),
        )

    async def rounds(self, count: int) -> dict[str, list[Round]]:
        """Time ``count`` rounds for each transport, after one warm-up round."""
        found: dict[str, list[Round]] = {transport: [] for transport in TRANSPORTS}
        for number in range(-1, count):
            first = number % len(TRANSPORTS)
            for transport in TRANSPORTS[first:] + TRANSPORTS[:first]:
                measured = await self.round(transport)
                if number >= 0:
                    found[transport].append(measured)
        return found

    async def growth(self, transport: str, count: int) -> dict[str, float]:
        """Run the same update ``count`` times and measure what grows."""
        seconds: list[float] = []
        resident: list[float] = []
        for _ in range(count):
            start_s = time.perf_counter()
            manifest = await self.publish(transport)
            await self._generator.update.call_one(transport, manifest)
            seconds.append(time.perf_counter() - start_s)
            resident.append(resident_mib())
        return {
            "num_updates": count,
            "after_5_mib": resident[NUM_WARM - 1],
            "after_all_mib": resident[-1],
            "first_10_s": statistics.median(seconds[:NUM_ENDS]),
            "last_10_s": statistics.median(seconds[-NUM_ENDS:]),
        }

    async def delta(self, transport: str) -> dict[str, dict[str, float]]:
        """Measure a generator's fetch when it holds the version before, by what has changed."""
        await self._generator.forget.call_one(transport, True)
        await self._generator.update.call_one(transport, await self.publish(transport))
        found = {}
        for change in Change:
            manifest = await self.publish(transport, change)
            fetch = (await self._generator.update.call_one(transport, manifest)).fetch
            found[change.value] = {
                "num_bytes_moved": fetch.num_bytes_moved,
                "num_bytes_needed": fetch.num_bytes_needed,
                "fetch_s": fetch.fetch_s,
            }
        await self._generator.forget.call_one(transport, False)
        return found

    async def while_owner_computes(self) -> dict[str, float]:
        """A fetch over RDMA with the owners idle, then with both inside a train step."""
        rdma = "rdma"
        idle = await self._generator.update.call_one(rdma, await self.publish(rdma))
        rows = [_training_row()]
        await self._trainer.train_rows([rows, rows], step=1)
        start_s = time.perf_counter()
        await self._trainer.train_rows([rows, rows], step=1)
        step_s = time.perf_counter() - start_s
        manifest = await self.publish(rdma)
        rows *= max(2, int(4 * idle.fetch.fetch_s / step_s))
        start_s = time.perf_counter()
        training = asyncio.create_task(self._trainer.train_rows([rows, rows], step=1))
        await asyncio.sleep(0.3 * step_s)
        busy = await self._generator.update.call_one(rdma, manifest)
        is_still_training = not training.done()
        await training
        return {
            "fetch_idle_s": idle.fetch.fetch_s,
            "fetch_busy_s": busy.fetch.fetch_s,
            "step_s": time.perf_counter() - start_s,
            "was_over_before_the_step": is_still_training,
        }

    async def modes(self, count: int) -> dict[str, list[dict[str, float]]]:
        """Measure what every mode of interruption generates around an update; the modes take turns."""
        await self._generator.stop_decoding.call_one()
        found: dict[str, list[dict[str, float]]] = {mode.value: [] for mode in MODES}
        for _ in range(count):
            for mode in MODES:
                manifest = await self.publish("shared_memory")
                run = await self._generator.run_mode.call_one(mode, manifest, self._size.num_sequences)
                found[mode.value].append(asdict(run))
        return found

    async def median_gap_s(self) -> float:
        return await self._generator.median_gap_s.call_one()

    async def close(self) -> None:
        await self._manager.close()


def _training_row() -> PackedRow:
    rng = np.random.default_rng(0)
    num_tokens = MAX_CONTEXT - 16
    return pack_row(
        [
            TrainingSequence(
                prompt_ids_P=rng.integers(3, 10, 16).astype(np.int32),
                response_ids_T=rng.integers(3, 10, num_tokens).astype(np.int32),
                behavior_logprobs_T=np.full(num_tokens, -2.5, np.float32),
                ages_T=np.zeros(num_tokens, np.int32),
                advantage=1.0,
            )
        ]
    )


def resident_mib() -> float:
    """Return the resident memory of this process and all it started, in MiB; shared pages count once each."""
    own = psutil.Process()
    return sum(process.memory_info().rss for process in [own, *own.children(recursive=True)]) / 2**20


async def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements of one model size."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        num_parameters = write_model(folder, size)
        bench = Bench(sync_config(folder, size), size, Path(temporary) / "logs")
        try:
            await bench.start(folder)
            rounds = await bench.rounds(arguments.rounds)
            median_gap_s = await bench.median_gap_s()
            growth: dict[str, dict[str, float]] = {}
            for transport in TRANSPORTS:
                one = rounds[transport]
                round_s = statistics.median(r.call_s + r.update.total_s for r in one)
                if arguments.growth * round_s > arguments.growth_s:
                    print(f"{name}, {transport}: no growth measured, {round_s:.1f} s an update", flush=True)
                elif arguments.growth:
                    growth[transport] = await bench.growth(transport, arguments.growth)
            delta = {transport: await bench.delta(transport) for transport in TRANSPORTS}
            is_small = size.dtype is Dtype.FLOAT32
            busy = await bench.while_owner_computes() if is_small else None
            modes = await bench.modes(arguments.mode_rounds)
        finally:
            await bench.close()
    return {
        "num_parameters": num_parameters,
        "num_bytes": bench.num_bytes,
        "dtype": size.dtype.value,
        "num_sequences": size.num_sequences,
        "median_gap_s": median_gap_s,
        "rounds": {choice: [asdict(one) for one in of_one] for choice, of_one in rounds.items()},
        "growth": growth,
        "delta": delta,
        "while_owner_computes": busy,
        "modes": modes,
    }


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--growth", type=int, required=True)
    parser.add_argument("--growth-s", type=float, required=True)
    parser.add_argument("--mode-rounds", type=int, required=True)
    arguments = parser.parse_args()
    # The procs are to find the modules beside this one.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    write_json(arguments.out, asyncio.run(measure(arguments.size, arguments)))


if __name__ == "__main__":
    main()
