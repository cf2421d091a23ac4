"""The same program as an app, which is a fork: ``python -m tests.support.forked_app``."""

import sys

from forgeasync.launch import fork_app

if __name__ == "__main__":
    fork_app(sys.orig_argv)

from tests.support.forked_program import main

if __name__ == "__main__":
    main()
