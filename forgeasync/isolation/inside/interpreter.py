"""Interpreter of a Python session: runs code in one namespace and reports the last expression's value.

The source of this module runs as ``python -c``, so it imports only the standard library. The code of the
session can change everything in this process, including the report, so the host treats the report as
untrusted.
"""

import ast
import os
import struct
import sys

REPORT = struct.Struct("<BIIQ")
"""Same layout as ``PYTHON_REPORT`` of wire.py."""


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    results = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    while header := requests.readline():
        nonce, size, cap = header.split()
        code = requests.read(int(size)).decode("utf-8", "surrogatepass")
        has_value, value, traceback_text = run(code, names)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                continue  # The code has closed or replaced the stream.
        write(results[1], nonce)
        write(results[0], nonce + report(has_value, value, traceback_text, int(cap)))


def run(code: str, names: dict[str, object]) -> tuple[bool, str, str]:
    """Run code as an interactive interpreter does.

    Returns whether the last line has a value, the value's ``repr``, and the traceback of an exception.
    """
    try:
        tree = ast.parse(code, "<session>")
        last = None
        if tree.body and isinstance(end := tree.body[-1], ast.Expr):
            last = end.value
            tree.body.pop()
        remember(code)
        exec(compile(tree, "<session>", "exec"), names)
        if last is None:
            return False, "", ""
        value = eval(compile(ast.Expression(last), "<session>", "eval"), names)
        if value is None:
            return False, "", ""
        names["_"] = value
        return True, repr(value), ""
    except SystemExit:
        raise
    except BaseException as error:
        import traceback

        return False, "", "".join(traceback.format_exception(error))


def remember(code: str) -> None:
    """Store the lines of the code in linecache, so that tracebacks show them."""
    import linecache

    linecache.cache["<session>"] = (len(code), None, code.splitlines(keepends=True), "<session>")


def report(has_value: bool, value: str, traceback_text: str, cap: int) -> bytes:
    texts = [text.encode("utf-8", "replace") for text in (value, traceback_text)]
    kept = [text[:cap] for text in texts]
    cut = sum(map(len, texts)) - sum(map(len, kept))
    body = REPORT.pack(has_value, len(kept[0]), len(kept[1]), cut) + kept[0] + kept[1]
    return b"%08x" % len(body) + body


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    sys.path[0] = ""
    main()
