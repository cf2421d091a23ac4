"""Ledgers for tests, and a second program that reads them."""

import json
import re
import zlib
from collections.abc import Sequence

import msgspec

from forgeasync.buffer import FORMAT, START, AnyEvent, Opened, encode_lines


def opened(groups_per_step: int) -> Opened:
    """The first line of a new run."""
    return Opened(format=FORMAT, run="run", seed=0, groups_per_step=groups_per_step)


def ledger_text(events: Sequence[AnyEvent]) -> bytes:
    """The file with these events."""
    return encode_lines(events, START)[0]


def plain(events: Sequence[AnyEvent]) -> list[dict]:
    """Events as another program sees them."""
    return [json.loads(msgspec.json.encode(event)) for event in events]


def is_intact(text: bytes) -> bool:
    """Whether all lines are JSON and have their numbers and checksums, as docs/ledger.md says.

    Checksums run on from line to line, so two lines of which the first has lost just its own have that of the
    second; they are no JSON.
    """
    checksum = 0
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        said, _, rest = line.rpartition(b',"crc":')
        checksum = zlib.crc32(said, checksum)
        if rest != b'"%08x"}' % checksum or not said.startswith(b'{"n":%d,"event":' % number):
            return False
        try:
            json.loads(line)
        except ValueError:
            return False
    return True


# A prompt's story in letters: submitted w, started s, sampled m, scored c, restored k, dropped for another
# attempt d, dropped for good x, trained t, restarted by a resumption r, unfinished u.
_STORY = re.compile(r"w((s(m(c)?)?|k)[dr])*((s(m(c)?)?|k)x|(smc|k)t|(s(m(c)?)?|k)?u?)")


def is_consistent(events: Sequence[dict]) -> bool:
    """Whether a ledger's events can be true; asks every prompt's whole story again at every resumption.

    Written against docs/ledger.md, without anything from the package.
    """
    standing: list[dict] = []
    tasks: dict[int, tuple[str, str]] = {}
    for number, event in enumerate(events, start=1):
        if (event["event"] == "opened") != (number == 1):
            return False
        if standing and standing[-1]["event"] == "ended" and event["event"] != "resumed":
            return False
        if event["event"] == "submitted":
            task = (event["source"], event["task_id"])
            if tasks.setdefault(event["prompt"], task) != task:
                return False
        if event["event"] == "resumed":
            if not _holds(standing):
                return False
            kept = [one for one in standing if one["n"] <= event["line"]]
            if not kept or kept[-1]["n"] != event["line"] or kept[-1]["event"] != "checkpointed":
                return False
            if kept[-1]["step"] != event["step"]:
                return False
            standing = kept
        standing.append(event | {"n": number})
    return _holds(standing)


def _holds(events: Sequence[dict]) -> bool:
    """Whether events that were not undone can be true."""
    stories: dict[int, str] = {}
    attempts: dict[int, int] = {}
    groups: dict[int, int] = {}
    planned: list[list[int]] = []
    is_resumed = False
    num_prompts = num_groups = step = groups_per_step = 0
    for event in events:
        kind = event["event"]
        members = [(event["prompt"], event.get("group"))] if "prompt" in event else []
        match kind:
            case "opened":
                groups_per_step, step = event["groups_per_step"], event["step"]
                num_prompts, num_groups = event["num_submitted"], event["next_group"]
                for prompt, attempt in event["waiting"]:
                    if prompt >= num_prompts or prompt in stories:
                        return False
                    stories[prompt], attempts[prompt] = "w", attempt
            case "submitted":
                if event["prompt"] != num_prompts:
                    return False
                num_prompts += 1
                stories[event["prompt"]], attempts[event["prompt"]] = "w", 0
            case "started":
                if event["group"] != num_groups or attempts.get(event["prompt"]) != event["attempt"]:
                    return False
                num_groups += 1
                groups[event["prompt"]] = event["group"]
                stories[event["prompt"]] += "s"
            case "restored":
                if event["group"] != num_groups or not is_resumed or event["prompt"] not in attempts:
                    return False
                if event["attempt"] < attempts[event["prompt"]]:
                    return False
                num_groups += 1
                groups[event["prompt"]], attempts[event["prompt"]] = event["group"], event["attempt"]
                stories[event["prompt"]] += "k"
            case "trained":
                step += 1
                if planned and set(planned.pop(0)) != set(event["prompts"]):
                    return False
                members = list(zip(event["prompts"], event["groups"], strict=False))
                if event["step"] != step or not (
                    len(event["prompts"]) == len(event["groups"]) == groups_per_step
                ):
                    return False
            case "checkpointed":
                if event["step"] != step:
                    return False
            case "resumed":
                groups_per_step = event["groups_per_step"]
                planned, is_resumed = list(event["batches"]), True
                for prompt, story in stories.items():
                    if story[-1] in "smck":
                        stories[prompt] = story + "r"
            case "ended":
                left = sorted(prompt for prompt, story in stories.items() if story[-1] in "wsmckdr")
                if sorted(event["unfinished"]) != left:
                    return False
                for prompt in left:
                    stories[prompt] += "u"
        if kind in ("submitted", "started", "restored"):
            continue
        for prompt, group in members:
            if prompt not in stories or groups.get(prompt) != group:
                return False
            again = event.get("again", False)
            if again and event["reason"] == "filtered":
                return False
            letter = {"sampled": "m", "scored": "c", "trained": "t"}.get(kind, "d" if again else "x")
            stories[prompt] += letter
            attempts[prompt] += letter == "d"
    return all(_STORY.fullmatch(story) for story in stories.values())
