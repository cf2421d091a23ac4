"""Plug-ins: what you can remove without changing a run.

Each folder is a plug-in with a front of its own. It imports the fronts of rooms, and no other plug-in. Its
app in ``apps/``, or an entry point, finds it; the core never imports it.
"""
