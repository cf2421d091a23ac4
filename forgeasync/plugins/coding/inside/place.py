"""Makes a model's changes, then puts the hidden tests in place: ``place.py <changes>``.

Prints the changed files that cannot be written, as a JSON list. No code of the model runs before this ends.
"""

import base64
import json
import os
import sys


def main(changes_path):
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


main(sys.argv[1])
