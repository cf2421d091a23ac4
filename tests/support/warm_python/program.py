"""A program that says what it is, as JSON, and then ends as it is told."""

import atexit
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np


class Collected:
    """Says when it is collected."""

    def __del__(self) -> None:
        print("collected")


def main() -> None:
    how, *rest = sys.argv[1:]
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "arguments": rest,
        "folder": os.getcwd(),
        "variable": os.environ.get("FORGEASYNC_TEST"),
        "has_torch": "torch" in sys.modules,
        "search_path": sys.path[0],
        "original": sys.orig_argv[1:],
        "drawn": int(np.random.randint(1 << 30)),
        "word": sys.stdin.readline().strip(),
    }
    print(json.dumps(facts), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    match how:
        case "at_exit":
            # What Python does at the end of a program, and what it would take apart then.
            atexit.register(print, "at exit")
            threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
            vars(json)["kept"] = Collected()
        case "exit":
            sys.exit(int(rest[0]))
        case "write":
            os.write(int(rest[0]), b"kept")
        case "starts":
            print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
            time.sleep(600)
        case "wait":
            print("waits", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main()
