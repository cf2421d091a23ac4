"""Measures how long the parts of a run take on this machine, with the run's own procs."""
