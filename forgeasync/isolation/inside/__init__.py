"""Program that runs commands in sandboxes: one launcher, a supervisor per sandbox, and a watcher per call.

All of these processes are forks of one small Python (``supervisor.py``). It loads only light modules of the
standard library, because every sandbox holds them in memory. The modules of this package are sent to it as
compiled code, so they import one another relatively.
"""
