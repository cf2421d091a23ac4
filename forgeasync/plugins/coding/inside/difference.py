"""Writes changes as a unified diff, before they are made.

``difference.py <changes> <result> <max bytes>``
"""

import base64
import difflib
import json
import os
import sys


def main(changes_path, result_path, max_bytes):
    with open(changes_path) as file:
        changes = json.load(file)
    texts = {path: base64.b64decode(one[0]) for path, one in changes["files"].items()}
    texts.update({path: None for path in changes["deleted"]})
    left = max_bytes
    with open(result_path, "wb") as result:
        for path in sorted(texts):
            part = difference(path, texts[path])[:left]
            result.write(part)
            left -= len(part)


def difference(path, after):
    before = None
    if os.path.isfile(path) and not os.path.islink(path):
        with open(path, "rb") as file:
            before = file.read()
    head = f"diff --git a/{path} b/{path}\n"
    if before is None:
        head += "new file mode 100644\n"
    if after is None:
        head += "deleted file mode 100644\n"
    lines = difflib.unified_diff(
        lines_of(before),
        lines_of(after),
        "/dev/null" if before is None else "a/" + path,
        "/dev/null" if after is None else "b/" + path,
    )
    whole = []
    for line in lines:
        whole.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return (head + "".join(whole)).encode("utf-8", "replace")


def lines_of(content):
    if content is None:
        return []
    # Only a newline ends a line of a diff.
    parts = content.decode("utf-8", "replace").split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
