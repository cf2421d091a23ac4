"""The program around a box's commands: a launcher, a supervisor for each box, a watcher for each call.

All of them are forks of one small Python (``supervisor.py``), which loads only light modules of the standard
library: every box has in memory what it loads. The modules travel to it as compiled text, so they import one
another relatively.
"""
