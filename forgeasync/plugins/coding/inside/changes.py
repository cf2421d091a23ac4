"""A model's changes of a checkout: reads them in the model's sandbox, makes them where they are graded.

changes.py take <list> <result> <max bytes> <max files>
changes.py difference <changes> <result> <max bytes>
changes.py place <changes>
"""

import base64
import difflib
import hashlib
import json
import os
import stat
import sys

SKIPPED = (".git", "__pycache__", ".pytest_cache")
"""Files that tools leave behind; ``manifest_of`` skips them too."""


def take(list_path, result_path, max_bytes, max_files):
    """Write the differences between the workspace and a list of the original files."""
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
            return write_json(result_path, {"is_too_large": True})
    deleted = sorted(set(original) - seen)
    if len(changed) + len(deleted) > max_files:
        return write_json(result_path, {"is_too_large": True})
    return write_json(result_path, {"is_too_large": False, "changed": changed, "deleted": deleted})


def write_json(path, result):
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


if sys.argv[1] == "take":
    take(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
elif sys.argv[1] == "difference":
    write_difference(sys.argv[2], sys.argv[3], int(sys.argv[4]))
else:
    place(sys.argv[2])
