"""Programs that run in sandboxes, each as a text for ``python3 -I -c``, with the standard library alone.

They know Python 3.6 and later, because images of old repositories have old interpreters.
"""
