"""A model's changes of a checkout, in the sandbox where they are graded.

changes.py difference <changes> <result> <max bytes>
changes.py place <changes>
"""

import base64
import difflib
import json
import os
import sys


def write_difference(changes_path, result_path, max_bytes):
    """Write changes as a unified diff, before they are made."""
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


def place(changes_path):
    """Make a model's changes, then put the hidden tests in place.

    Prints the changed files that cannot be written, as a JSON list. No code of the model runs before this
    ends.
    """
    with open(changes_path) as file:
        changes = json.load(file)
    os.unlink(changes_path)
    without_place = []
    for path in changes["deleted"]:
        if is_plain(path) and os.path.lexists(path) and not os.path.isdir(path):
            os.unlink(path)
    for path, (content, is_executable) in sorted(changes["files"].items()):
        if not is_plain(path) or os.path.islink(path) or not make_room(path):
            without_place.append(path)
            continue
        write(path, content)
        os.chmod(path, 0o755 if is_executable else 0o644)
    for path in changes["tests_deleted"]:
        if os.path.lexists(path):
            os.unlink(path)
    for path, content in changes["tests"].items():
        clear(path)
        write(path, content)
    print(json.dumps(without_place))


def above(path):
    """Return the folders above a path, from the outermost."""
    parts = path.split("/")
    return ["/".join(parts[:index]) for index in range(1, len(parts))]


def is_plain(path):
    return not any(os.path.islink(folder) for folder in above(path))


def make_room(path):
    """Return whether a file can be written at a path; removes empty folders there."""
    for folder in above(path):
        if os.path.lexists(folder) and not os.path.isdir(folder):
            return False
    if os.path.isdir(path):
        for folder, _, _ in os.walk(path, topdown=False):
            if os.listdir(folder):
                return False
            os.rmdir(folder)
    return True


def clear(path):
    """Remove files and links that are in the way of a hidden test."""
    for one in [*above(path), path]:
        if os.path.islink(one) or (os.path.lexists(one) and not os.path.isdir(one)):
            os.unlink(one)


def write(path, content):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(content))


if sys.argv[1] == "difference":
    write_difference(sys.argv[2], sys.argv[3], int(sys.argv[4]))
else:
    place(sys.argv[2])
