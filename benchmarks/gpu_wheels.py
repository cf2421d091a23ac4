"""What the packages of requirements/gpu.lock say on a machine without a GPU and without NVIDIA's driver.

    make setup-gpu                       # in another checkout
    python benchmarks/gpu_wheels.py --python OTHER/.venv/bin/python [--json FILE]

It runs no kernel and takes minutes on two cores. It compares schemas with those of
the CPU builds, which this interpreter has. It needs gcc, nm and ldd.

Every module is imported twice. The second time libcuda.so.1 is a stub whose functions all fail, and torch
says that there is an H100.
"""

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import REPOSITORY

MODULES = """torch triton torchvision torchaudio torchcodec torchtitan torchstore monarch.rdma flashinfer vllm
vllm.v1.worker.gpu.model_runner vllm.v1.attention.backends.flashinfer vllm.platforms.cuda""".split()

ON_AN_H100 = """import collections, importlib.metadata, json, pathlib, pkgutil, sys, torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)
import vllm.platforms.cuda
vllm.platforms._current_platform = vllm.platforms.cuda.CudaPlatform()
"""

OURS = """for module in pkgutil.walk_packages([sys.argv[1] + "/forgeasync"], "forgeasync."):
    try: ".inside." in module.name or importlib.import_module(module.name)
    except Exception as error: print(json.dumps([module.name, repr(error)]), flush=True)
    else: print(json.dumps([module.name, "ok"]), flush=True)"""

LOADED = 'for one in pathlib.Path(vllm.__file__).parent.rglob("*.so"): torch.ops.load_library(one)\n'

SCHEMAS = """import json, torch.nn.attention.varlen
print(json.dumps({str(one).partition("(")[0]: str(one) for one in torch._C._jit_get_all_schemas()}))"""

FACTS = """owners = collections.defaultdict(dict)
for one in importlib.metadata.distributions():
    for file in one.files or (): owners[str(file)][one.name] = file.hash and file.hash.value
twice = [" and ".join(sorted(names)) for names in owners.values() if len(set(names.values())) > 1]
print(json.dumps({"torch": torch.__version__, "vllm": vllm.__version__, "files of two packages": twice,
    "CUDA": torch.version.cuda, "NCCL": torch.cuda.nccl.version(), "for": torch._C._cuda_getArchFlags()}))"""


def run(*command: object, **variables: str) -> tuple[str, str]:
    """What a command prints, and the last line of its complaint or "ok"."""
    own = os.environ | {"PYTHONPATH": str(REPOSITORY), "VLLM_LOGGING_LEVEL": "ERROR"} | variables
    done = subprocess.run([str(one) for one in command], env=own, capture_output=True, text=True)
    return done.stdout, "ok" if done.returncode == 0 else (done.stderr.strip() or "killed").splitlines()[-1]


def write_stubs(folder: Path, libraries: list[Path]) -> None:
    """The driver's libraries, with all functions that other libraries ask for."""
    wanted = set(re.findall(r" U (cu[A-Z]\w*|nvml\w+)$", run("nm", "-D", *libraries)[0], re.MULTILINE))
    (folder / "stub.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in wanted))
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, folder / "stub.c")


def missing_libraries(site: Path, libraries: list[Path]) -> dict[str, str]:
    """What the loader does not find, by package, and where it is: that package has to be imported before."""
    found, places = {}, {file.name: f"in {file.relative_to(site).parts[0]}" for file in libraries}
    for part in re.split(r"^(?=/)", run("ldd", *libraries)[0], flags=re.MULTILINE)[1:]:
        for name in re.findall(r"\t((?!libcuda\.|libnvidia-ml\.)\S+) => not found", part):
            package = Path(part.partition(":")[0]).relative_to(site).parts[0]
            found[f"{package}: {name}"] = places.get(name, "nowhere")
    return found


def machine_code(file: Path) -> dict[str, int]:
    """Images in a library's fat binaries: sm_90 is machine code, compute_90 is PTX."""
    images, data = Counter[str](), file.read_bytes()
    # Each begins with a mark, version 1, its header's 16 bytes, and the number of those after it.
    for start in re.finditer(rb"\x50\xed\x55\xba\x01\x00\x10\x00", data):
        image, end = start.end() + 8, start.end() + 8 + struct.unpack_from("<Q", data, start.end())[0]
        while image < end:
            kind, header_bytes, num_bytes, number = struct.unpack_from("<HxxIQ12xI", data, image)
            images[f"{'compute' if kind == 1 else 'sm'}_{number}"] += 1
            image += header_bytes + num_bytes
    return dict(sorted(images.items()))


def look(python: Path, folder: Path) -> dict[str, dict[str, object]]:
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")[0].strip())
    libraries = [file for file in site.rglob("*.so*") if file.read_bytes()[:4] == b"\x7fELF"]
    write_stubs(folder, libraries)

    def stubbed(code: str) -> tuple[str, str]:
        return run(python, "-c", ON_AN_H100 + code, REPOSITORY, LD_LIBRARY_PATH=str(folder))

    ours = dict(json.loads(line) for line in stubbed(OURS)[0].splitlines() if line.startswith("["))
    here, (printed, end) = run(sys.executable, "-c", SCHEMAS)[0], stubbed(LOADED + SCHEMAS)
    own, schemas = json.loads(here), json.loads(printed or "{}")
    sources = "".join(file.read_text() for file in REPOSITORY.glob("[ft]*s*/**/*.py"))
    called = {"::".join(pair) for pair in re.findall(r"torch\.ops\.(\w+)\.(\w+)", sources)}
    return {
        "facts": json.loads(stubbed(FACTS)[0]),
        "pip check": dict(enumerate(run(python, "-m", "pip", "check")[0].splitlines())),
        "imports": {m: [run(python, "-c", f"import {m}")[1], stubbed(f"import {m}")[1]] for m in MODULES},
        f"of {len(ours)} modules of forgeasync": {k: v for k, v in ours.items() if v != "ok"},
        "libraries not found": missing_libraries(site, libraries),
        f"schemas unlike those here ({end})": {k: v for k, v in schemas.items() if own.get(k, v) != v},
        "operators called by name": {name: schemas.get(name, "none") for name in sorted(called)},
        "machine code": {str(f.relative_to(site)): code for f in libraries if (code := machine_code(f))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, type=Path, help="of an environment by make setup-gpu")
    parser.add_argument("--json", type=Path, default=os.devnull)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = look(options.python.absolute(), Path(folder))
    options.json.write_text(json.dumps(found, indent=1))
    for part, rows in found.items():
        print(f"{part}: {len(rows)}", *rows.items(), sep="\n  ")


if __name__ == "__main__":
    main()
