"""Runs a function of a test: ``python -m tests.support.warm_python.call KIND FOLDER INDEX``.

``FOLDER/call`` has the test's search path and then the function with its arguments, pickled. The result goes
to ``FOLDER/INDEX``, what the function raises to ``FOLDER/INDEX.error``. A coroutine is run to its end.
"""

import asyncio
import faulthandler
import pickle
import sys
import traceback
from pathlib import Path


def main() -> None:
    _, _, folder, index = sys.argv
    # A process that dies of a signal shows where it was.
    faulthandler.enable()
    try:
        with Path(folder, "call").open("rb") as file:
            sys.path[:] = pickle.load(file)
            function, arguments = pickle.load(file)
        result = function(*arguments)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        content = pickle.dumps(result)
    except BaseException:
        Path(folder, f"{index}.error").write_text(traceback.format_exc())
        raise
    Path(folder, index).write_bytes(content)


if __name__ == "__main__":
    main()
