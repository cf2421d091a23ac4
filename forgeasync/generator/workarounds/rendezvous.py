"""Names the file by which the workers of one vLLM engine find each other after the run.

vLLM 0.32 calls it ``/tmp/vllm_dist_<random>``, never removes it, and gives the same name to the shared memory
of its collectives on CPUs (``/dev/shm/vllm_dist_...``), which stays when the workers are killed. With the
run's mark in the name the end of the run, or a later start, removes both.
"""

import tempfile
from uuid import uuid4

from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor import multiproc_executor, uniproc_executor

from forgeasync.faults.run_mark import own_prefix


def name_rendezvous() -> None:
    """Have engines that this process starts from now on name the file so, if there is a mark."""
    for module in (multiproc_executor, uniproc_executor):
        assert hasattr(module, "get_file_store_init_method"), "written against vLLM 0.32"
        module.get_file_store_init_method = _init_method


def _init_method() -> str:
    prefix = own_prefix()
    if prefix is None:
        return str(get_file_store_init_method())
    return f"file://{tempfile.gettempdir()}/{prefix}{uuid4().hex}"
