"""``weights.archive``: every published version can be read again with its bits, or the error says why not."""

import asyncio
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from apps.control import control
from forgeasync.config import Delta, LoraSection, WeightsSection, dump_config
from forgeasync.controller import Refused, export_version
from forgeasync.schema import ConfigError
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.weights import (
    ArchivePlan,
    ArchiveUnreadable,
    NamedWeight,
    Publication,
    SharedMemoryTransport,
    StagedShard,
    WeightPublisher,
    read_version,
    whole_tensors,
)
from tests.support.disks import small_disk

pytestmark = pytest.mark.usefixtures("one_rank")

NUM_ELEMENTS = 700_001
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class Site:
    """A trainer of one rank, which publishes a matrix and a norm, and archives them in ``folder``."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.bfloat16,
        *,
        every_steps: int | None = None,
        num_kept: int | None = None,
        start: str = "a",
        num_ranks: int = 1,
        buffers: Path | None = None,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.weight = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0))
        self.versions: dict[int, torch.Tensor] = {}
        self.publisher = WeightPublisher(self._named(), dtype, host_id="h", has_patches=True)
        buffers = (buffers or folder.parent) / f"buffers-{start}"
        buffers.mkdir()
        plan = ArchivePlan(
            folder=folder, every_steps=every_steps, num_kept=num_kept, num_ranks=num_ranks, start=start
        )
        opening = self.publisher.open(
            buffers, SharedMemoryTransport(), generator_hosts=frozenset(), archive=plan
        )
        asyncio.run(opening)

    def _named(self) -> list[NamedWeight]:
        return [
            NamedWeight(names=("w",), tensor=self.weight),
            NamedWeight(names=("norm",), tensor=self.weight[:7]),
        ]

    def begin(self, version: int, share: float = 0.01, *, slot: int | None = None) -> Publication:
        chosen = torch.rand(NUM_ELEMENTS, generator=torch.Generator().manual_seed(version)) < share
        self.weight[chosen] = 2 * self.weight[chosen] + 1
        self.versions[version] = self.weight.to(self.dtype, copy=True)
        return self.publisher.begin(version % 2 if slot is None else slot, version, self._named())

    def publish(
        self, version: int, share: float = 0.01, *, slot: int | None = None, waits: bool = True
    ) -> StagedShard:
        staged = asyncio.run(self.begin(version, share, slot=slot).finished())
        if waits:
            self.publisher.flush_archive()
        return staged

    def assert_readable(self, *versions: int) -> None:
        for version in versions:
            layout, images = read_version(self.folder, version)
            found = dict(whole_tensors(layout, images))
            bits = BITS[self.dtype]
            assert torch.equal(found["w"].view(bits), self.versions[version].view(bits)), version
            assert torch.equal(found["norm"].view(bits), self.versions[version][:7].view(bits))

    def file(self, first: int, rank: int = 0) -> Path:
        return self.folder / f"{first:08d}-rank-{rank}.weights"


def refusal(folder: Path, version: int) -> str:
    with pytest.raises(ArchiveUnreadable) as problem:
        read_version(folder, version)
    return str(problem.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_version_is_read_with_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever the share of changed elements, and whichever version a patch leads from."""
    site = Site(tmp_path / "versions", dtype)
    shares = [0.0, 0.01, 0.0, 0.3, 0.01, 0.0001, 1.0, 0.02, 0.02, 0.02]
    for version, share in enumerate(shares, start=1):
        # A generator that reads slot 0 from version 4 on.
        site.publish(version, share, slot=1 if version > 4 else None)
        site.publish(version, 0.0, slot=1)
    site.assert_readable(*range(1, len(shares) + 1))
    assert [file.name for file in site.folder.iterdir()] == ["00000001-rank-0.weights"]


def test_files_begin_at_checkpoints_and_go_with_them(tmp_path: Path) -> None:
    site = Site(tmp_path / "versions", every_steps=4, num_kept=8)
    for version in range(1, 15):
        site.publish(version)
    # Checkpoints of steps 8 and 12 stay, and that of step 4 goes once that of step 12 is whole.
    assert sorted(site.folder.iterdir()) == [site.file(first) for first in (4, 8, 12)]
    site.assert_readable(*range(4, 15))
    assert refusal(site.folder, 3).endswith("from this version or before; nearest versions: 4")
    sizes = [site.file(first).stat().st_size for first in (4, 8)]
    assert max(sizes) < 1.3 * 2 * NUM_ELEMENTS, "three versions that follow are patches"


def test_the_end_of_a_run_waits_for_a_version_that_is_being_published(tmp_path: Path) -> None:
    site = Site(tmp_path / "versions")
    site.publish(1)
    site.begin(2)
    site.publisher.flush_archive()
    site.assert_readable(1, 2)


@pytest.mark.parametrize("num_left", [0.0, 0.3, 0.95, 0.99])
def test_what_a_crash_has_cut_off_is_found(tmp_path: Path, num_left: float) -> None:
    site = Site(tmp_path / "versions")
    for version in range(1, 7):
        site.publish(version)
    ends = site.file(1).stat().st_size
    os.truncate(site.file(1), int(num_left * ends))
    readable = []
    for version in range(1, 7):
        try:
            site.assert_readable(version)
            readable.append(version)
        except ArchiveUnreadable as problem:
            nearest = readable[-1] if readable else "none"
            assert str(problem).startswith(f"{site.file(1)} is damaged or cut off at byte ")
            assert str(problem).endswith(f"; nearest versions: {nearest}")
    assert readable == list(range(1, len(readable) + 1)) and len(readable) < 6
    assert bool(readable) is (num_left >= 0.9)


def test_a_damaged_version_is_named_with_its_neighbors(tmp_path: Path) -> None:
    site = Site(tmp_path / "versions", every_steps=4)
    sizes = []
    for version in range(1, 9):
        site.publish(version)
        sizes.append(site.file(version // 4 * 4 or 1).stat().st_size)
    with site.file(4).open("r+b") as file:
        file.seek(sizes[4] - 100)
        file.write(b"\0\1\2\3")
    assert refusal(site.folder, 6) == (
        f"{site.file(4)} is damaged or cut off at byte {sizes[3]:,}; nearest versions: 4 and 8"
    )
    site.assert_readable(1, 2, 3, 4, 8)
    site.file(1).unlink()
    assert "has no file of rank 0 from this version or before; nearest versions: 4" in refusal(site.folder, 2)
    site.publish(10)
    assert refusal(site.folder, 9) == f"{site.file(8)} lacks it; nearest versions: 8 and 10"


def test_a_rank_without_its_file_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path / "versions", num_ranks=2)
    site.publish(1)
    assert "has no file of rank 1 from this version or before; nearest versions: none" in refusal(
        site.folder, 1
    )
    site.file(1).rename(site.file(1, rank=1))
    Site(tmp_path / "versions", num_ranks=2, start="b").publish(1)
    words = f"{site.file(1, rank=1)} is of another start of the trainer than {site.file(1).name}"
    assert words in refusal(site.folder, 1)


def test_a_resumed_run_supersedes_what_it_makes_again(tmp_path: Path) -> None:
    before = Site(tmp_path / "versions")
    for version in range(1, 10):
        before.publish(version)
    again = Site(tmp_path / "versions", start="b")
    again.weight.neg_()
    for version in range(4, 7):
        again.publish(version)
    before.assert_readable(1, 2, 3)
    again.assert_readable(4, 5, 6)
    assert refusal(again.folder, 8) == f"{again.file(4)} lacks it; nearest versions: 6"


def test_a_full_disk_is_reported_and_later_versions_are_archived_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_mib=4) as disk:
        site = Site(disk / "versions", buffers=tmp_path)
        assert site.publish(1).archive_refusal is None
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        assert site.publish(2).archive_refusal is None, "publishing waits for no write"
        for version in range(3, 6):
            words = site.publish(version).archive_refusal
            assert words == "No space left on device; version 2 and later ones are left out"
        site.assert_readable(1)
        filler.unlink()
        site.publish(6)
        assert site.publish(7).archive_refusal is None
        site.assert_readable(1, 6, 7)
        assert refusal(site.folder, 4).endswith("; nearest versions: 1 and 6")


def test_a_file_that_can_grow_no_further_is_followed_by_another(tmp_path: Path) -> None:
    site = Site(tmp_path / "versions")
    site.publish(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (site.file(1).stat().st_size + 100, limits[1]))
    try:
        site.publish(2, waits=False)
        # Nothing is published after the last version, so the end of the run asks for it.
        assert site.publisher.flush_archive() == "File too large; version 2 and later ones are left out"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert site.publish(3).archive_refusal == "File too large; version 2 and later ones are left out"
    assert site.publish(4).archive_refusal is None
    site.assert_readable(1, 3, 4)
    assert refusal(site.folder, 2).endswith("; nearest versions: 1 and 3")


def test_publishing_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_fast = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda descriptor: is_fast.wait())
    site = Site(tmp_path / "versions")
    try:
        words = [site.publish(version, 0.03, waits=False).archive_refusal for version in range(1, 20)]
    finally:
        is_fast.set()
    assert words[0] is None and words[-1] is not None
    num_archived = words.index(words[-1])
    assert words[-1] == f"slower than versions are published; version {num_archived + 1} is left out"
    site.publisher.flush_archive()
    site.publish(20)
    assert site.publish(21).archive_refusal is None
    site.assert_readable(*range(1, num_archived + 1), 20, 21)


def run_of(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, lora: LoraSection | None
) -> Path:
    """The folder of a run that has published version 1: these tensors."""
    config = tiny_config(folder / "hf").model_copy(
        update={"weights": WeightsSection(delta=Delta.EXACT, archive=True), "lora": lora}
    )
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(config))
    named = [NamedWeight(names=(name,), tensor=tensor) for name, tensor in tensors.items()]
    publisher = WeightPublisher(named, dtype, host_id="h", has_patches=True)
    plan = ArchivePlan(folder=run / "versions", every_steps=None, num_kept=None, num_ranks=1, start="a")

    async def publish() -> None:
        opening = publisher.open(run, SharedMemoryTransport(), generator_hosts=frozenset(), archive=plan)
        await opening
        await publisher.begin(0, 1, named).finished()

    asyncio.run(publish())
    publisher.flush_archive()
    return run


def test_a_version_is_exported_with_the_models_files(tmp_path: Path) -> None:
    tensors = load_file(write_tiny_model(tmp_path / "hf") / "model.safetensors")
    run = run_of(tmp_path, tensors, torch.bfloat16, None)
    folder = run / "checkpoints" / "version-1"
    for change, version in (("export", None), ("generators=2", 1)):
        with pytest.raises(Refused, match="--version: must be given with export, and only then"):
            control(run, change, version)
    assert control(run, "export", 1) == f"version 1 is in {folder}"
    assert (folder / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
    found = load_file(folder / "model-00001-of-00001.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    with pytest.raises(ConfigError, match=r"is in .*version-1 already"):
        export_version(run, 1)
    with pytest.raises(ConfigError) as problem:
        export_version(run, 5)
    archive = run / "versions" / "00000001-rank-0.weights"
    assert f"--version = 5: {archive} lacks it; nearest versions: 1" in str(problem.value)


def test_a_version_of_adapters_is_exported_as_a_peft_folder(tmp_path: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{prefix}.lora_{side}.weight": torch.randn(2, 8) for side in "AB"}
    write_tiny_model(tmp_path / "hf")
    run = run_of(tmp_path, tensors, torch.float32, LoraSection(rank=2, alpha=4.0, targets=("q_proj",)))
    found = load_file(export_version(run, 1) / "adapter_model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
