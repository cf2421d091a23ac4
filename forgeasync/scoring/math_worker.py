"""The process that runs math-verify: reads one JSON request a line on stdin, answers one a line on stdout.

Started by ``forgeasync.scoring.math`` as ``python -m forgeasync.scoring.math_worker``. It lives apart
because responses are untrusted: a single expression can ask sympy for unbounded time and memory, and
only killing a process stops that for certain.
"""

import argparse
import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

MAX_UNBOXED_CHARS = 2000
"""Only this much of the end of a response without a box is searched for an answer."""

_BOX_TOKENS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The content of the complete ``\boxed{...}`` that starts last in ``text``; None without one."""
    # One pass with a stack: matching braces anew from every box would be quadratic in hostile text.
    open_braces: list[int | None] = []
    best_start, best = -1, None
    for token in _BOX_TOKENS.finditer(text):
        symbol = token.group()
        if symbol.startswith("\\boxed"):
            open_braces.append(token.end())
        elif symbol == "{":
            open_braces.append(None)
        elif symbol == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and start > best_start:
                best_start, best = start, text[start : token.start()]
    return best


def _parse_boxed(content: str) -> list[Any]:
    # The box is math-verify's marker for "all of this is the answer"; limits are enforced outside.
    return parse(f"\\boxed{{{content}}}", parsing_timeout=None)


@lru_cache(maxsize=256)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    boxed = last_boxed(answer)
    content = (answer if boxed is None else boxed).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        wrapped = content.startswith(opening) and content.endswith(closing)
        if wrapped and len(content) > len(opening) + len(closing):
            content = content[len(opening) : -len(closing)].strip()
            break
    return tuple(_parse_boxed(content))


def is_correct(response: str, answer: str) -> bool:
    """Whether the final answer of ``response`` equals ``answer``; runs without any limit."""
    boxed = last_boxed(response)
    if boxed is None:
        # The tail holds the final answer, and math-verify's patterns backtrack badly on long text.
        found = parse(response[-MAX_UNBOXED_CHARS:], parsing_timeout=None)
    else:
        found = _parse_boxed(boxed)
    return bool(verify(list(_parse_answer(answer)), found, timeout_seconds=None))


def _address_space() -> int:
    """Bytes of address space in use, which is what RLIMIT_AS counts."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _handle(line: bytes) -> dict[str, bool | str]:
    try:
        request = json.loads(line)
        return {"correct": is_correct(request["response"], request["answer"])}
    except Exception as error:  # whatever untrusted text provokes is reported, and counted there
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def serve(*, memory_limit_bytes: int, time_limit_s: float) -> None:
    """Answer requests until stdin ends; dies by SIGALRM when one takes longer than the limit."""
    # Replies get a private descriptor, so that nothing a library prints can end up among them.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Ctrl-C goes to the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # It would warn about the absent time limits that this process is there to replace.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    # Builds math-verify's patterns and parser tables, so that no expression pays for them.
    is_correct("so \\boxed{\\frac{1}{2}}", "0.5")
    is_correct("the answer is 4", "4")
    baseline = _address_space()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (baseline + memory_limit_bytes, hard_limit))

    replies.write(b'{"ready": true}\n')
    replies.flush()
    for line in sys.stdin.buffer:
        # A parent that is gone cannot kill a worker stuck in one long C call, in which no Python
        # handler or thread would run either; the alarm's default action needs neither.
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        reply = _handle(line)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # Memory that stays allocated would starve later, harmless expressions: ask to be replaced.
        reply["retire"] = _address_space() - baseline > memory_limit_bytes // 2
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-limit-bytes", type=int, required=True)
    parser.add_argument("--time-limit-s", type=float, required=True)
    arguments = parser.parse_args()
    serve(memory_limit_bytes=arguments.memory_limit_bytes, time_limit_s=arguments.time_limit_s)
