"""Writes differences from a list of files: ``take.py <list> <result> <max bytes> <max files>``."""

import base64
import hashlib
import json
import os
import stat
import sys

SKIPPED = (".git", "__pycache__", ".pytest_cache")
"""Files that tools leave behind; ``manifest_of`` skips them too."""


def main(list_path, result_path, max_bytes, max_files):
    with open(list_path) as file:
        original = json.load(file)
    folder = os.path.dirname(list_path)
    changed, seen, num_bytes = {}, set(), 0
    for path, status in walk(folder):
        seen.add(path)
        kind, content = look(path, status, original.get(path), max_bytes - num_bytes)
        if kind == "same":
            continue
        num_bytes += len(content)
        changed[path] = [kind, base64.b64encode(content).decode(), bool(status.st_mode & stat.S_IXUSR)]
        if kind == "large" or len(changed) > max_files:
            return write(result_path, {"is_too_large": True})
    deleted = sorted(set(original) - seen)
    if len(changed) + len(deleted) > max_files:
        return write(result_path, {"is_too_large": True})
    return write(result_path, {"is_too_large": False, "changed": changed, "deleted": deleted})


def write(path, result):
    with open(path, "w") as file:
        json.dump(result, file)


def walk(own_folder):
    """Yield all paths except folders, each with its status; links are not followed."""
    folders = ["."]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except PermissionError:
            os.chmod(folder, 0o700)
            entries = list(os.scandir(folder))
        for entry in entries:
            path = os.path.normpath(entry.path)
            if entry.name in SKIPPED or entry.name.endswith((".pyc", ".pyo")) or path == own_folder:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                yield path, entry.stat(follow_symlinks=False)


def look(path, status, before, left_bytes):
    """Return the kind of a file's change, and its content if that is needed."""
    if stat.S_ISLNK(status.st_mode):
        digest = hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
        return ("same" if before == ["link", digest, False] else "link"), b""
    if not stat.S_ISREG(status.st_mode):
        return "other", b""
    if not status.st_mode & stat.S_IRUSR:
        os.chmod(path, status.st_mode | stat.S_IRUSR)
    hashed, content = hashlib.sha256(), []
    with open(path, "rb") as file:
        for part in iter(lambda: file.read(2**20), b""):
            hashed.update(part)
            if sum(map(len, content)) <= left_bytes:
                content.append(part)
    if before == ["file", hashed.hexdigest(), bool(status.st_mode & stat.S_IXUSR)]:
        return "same", b""
    whole = b"".join(content)
    return ("large", b"") if len(whole) > left_bytes else ("file", whole)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
