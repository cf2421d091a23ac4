"""Everything that touches vLLM."""

import os

import lazy_loader

from forgeasync.files import name_shared_memory

# vLLM reads these when it is imported, so they have to be set before that. No pinning of threads to cores:
# the trainer's processes use them too.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# The engine core runs in the generator's own process (inprocess_client): one worker then needs no other.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# A Monarch proc starts the workers of a tensor-parallel engine, on CPUs and on GPUs. It has threads, so a
# fork of it may hang. Workers are spawned whatever the environment asks for.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

# An engine's queues are shared memory of its workers too, which are spawned by vLLM and import this.
name_shared_memory()

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
