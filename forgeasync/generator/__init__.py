"""Everything that touches vLLM."""

import os

import lazy_loader

from forgeasync.files import name_shared_memory

# vLLM reads these when it is imported, so they are set before that. Threads are not pinned to cores, because
# the trainer's processes use the cores too.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# The engine core runs in the generator's own process (inprocess_client): with one worker, no other is needed.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# A Monarch process starts the workers of a tensor-parallel engine, on CPUs and on GPUs. It has threads, so a
# fork of it may hang. Workers are therefore spawned, whatever the environment variable says.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

# An engine's queues are also shared memory of its workers, which vLLM spawns and which import this module.
name_shared_memory()

# __init__.pyi lists the names; each one is imported from its module on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
