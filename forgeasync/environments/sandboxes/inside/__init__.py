"""The program around a box's commands: a launcher, a supervisor for each box, a watcher for each call.

All of them are forks of one small Python (``launcher.py``), which has the standard library alone, and the
light half of that: what it loads, every box has in memory. The modules travel to it as compiled text, so they
import one another relatively.
"""
