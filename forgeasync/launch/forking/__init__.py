"""Procs of this machine as forks of a server that has imported their libraries before.

Importing torch, TorchTitan or vLLM takes 3 to 9 s of a core, in every proc and after every loss of one. A
fork has them at once, and shares their memory with the others until it writes to it.

    client.py     in the process that spawns procs: starts the server, and says how a proc is started
    server.py     the server: imports, and forks; it does nothing else and has a single thread
    proxy.py      what Monarch starts: asks the server for a fork, and ends when and as that ends
    fork.py       what a fork does before it is a proc

On machines with GPUs, and on hosts of a job, procs are started as programs: see
``forgeasync.launch.placement``.
"""
