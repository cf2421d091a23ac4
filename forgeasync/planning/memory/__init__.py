"""Computes the memory of a run, by rank, from its config and its model's config.json alone.

``python -m forgeasync.planning.memory --config FILE [--config FILE ...] [key=value ...]`` prints it; needs no
GPU and no weights. Every number is a formula over config and facts; tests/planning/test_memory_plan.py
compares them with what runs allocate. The unit is bytes everywhere.
"""
