"""Hosts of a run: started through Monarch's jobs, watched, and cleaned up."""
