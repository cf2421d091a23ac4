"""Finds the final answer of a response and rewrites it for math-verify. Pure text processing.

Responses are untrusted and can be long, so every pattern here takes time linear in the text.
"""

import re
from fractions import Fraction

_END_OF_REASONING = re.compile(r"</think(?:ing)?>|\[/THINK\]")
_BOX_COMMAND = r"\\(?:boxed|fbox)(?![a-zA-Z])\s*"
_BOX_TOKENS = re.compile(rf"{_BOX_COMMAND}\{{?|\\.|[{{}}]", re.DOTALL)
_INNER_BOX = re.compile(rf"{_BOX_COMMAND}(?=\{{)")
# TeX boxes one token; models that omit the braces mean everything up to the next space.
_UNBRACED = re.compile(r"(?:\\[a-zA-Z]+|\{[^{}]{0,200}\}|[^\s\\{}$]){1,200}")


def after_reasoning(response: str) -> str:
    """Return the text after the last end of reasoning (``</think>``), which has the stated answer.

    Returns the whole response if no reasoning ends, even if one begins.
    """
    ends = [match.end() for match in _END_OF_REASONING.finditer(response)]
    return response[ends[-1] :] if ends else response


def last_boxed(text: str) -> str | None:
    r"""Return the content of the ``\boxed`` or ``\fbox`` that starts last in ``text``; None without one.

    Empty if that box is not finished: an earlier box is not an answer. A box inside a finished one belongs to
    the content of the outer box. A box without braces has the text up to a space.
    """
    # One pass with a stack: matching braces from every box would take quadratic time in hostile text.
    open_braces: list[tuple[int, int] | None] = []
    last_start = -1
    start = inside = stop = end = -1  # the last box that is finished, and its content
    for token in _BOX_TOKENS.finditer(text):
        symbol = token.group()
        if symbol.startswith(("\\boxed", "\\fbox")):
            last_start = token.start()
            if symbol.endswith("{"):
                open_braces.append(token.span())
            elif unbraced := _UNBRACED.match(text, token.end()):
                start, (inside, stop) = token.start(), unbraced.span()
                end = stop
        elif symbol == "{":
            open_braces.append(None)
        elif symbol == "}" and open_braces:
            box = open_braces.pop()
            if box is None:
                continue
            # A box that closes later either starts later or contains the previous one, perhaps with nothing
            # else.
            around = (text[box[1] : start], text[end : token.start()]) if box[1] <= start else ("more", "")
            if "".join(around).strip():
                inside, stop = box[1], token.start()
            start, end = box[0], token.end()
    if last_start < 0:
        return None
    if last_start >= end:
        return ""
    content = text[inside:stop] if stop < end else text[inside:stop].rstrip(".,;:")
    return _INNER_BOX.sub("", content)


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_END_OF_FORMULA = re.compile(r"\$|\\\)|\\\]|\n")


def ends_unfinished(text: str) -> bool:
    r"""Return whether the last formula of a text without a box is unfinished, as in ``$\frac{1}{$``."""
    opened: list[int] = []
    for brace in _BRACES.finditer(text):
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            opened.pop()
    if not opened:
        return False
    end = _END_OF_FORMULA.search(text, opened[-1])
    return end is None or not any(letter.isdecimal() for letter in text[end.end() :])


_EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])|(?:\\left\s*)?\\\{(?:\s|~|\\[,;:! ])*(?:\\right\s*)?\\\}")
_UPRIGHT_CONSTANT = re.compile(
    r"(?:\\(?:mathrm|mathit|mathnormal|operatorname\*?|text|textrm|textit|rm)\s*\{\s*(\\?[a-z]+)\s*\}"
    r"|\{\s*\\rm\s+([a-z])\s*\})"
)
_CONSTANTS = {"e": "e", "i": "i", r"\pi": r"\pi ", r"\e": "e"}
_EXPONENT = re.compile(r"(?<![\w.])(\d{1,400}(?:\.\d{1,400})?|\.\d{1,400})[eE]([-+]?\d{1,20})(?!\w|\.\d)")
_SPACE = r"(?:\\[,;: ]|~|[ \u00a0\u2009\u202f])"
_SPACED_THOUSANDS = re.compile(
    rf"(?<![\w./^])(?<!(?<!\\),)\d{{1,3}}(?:{_SPACE}\d{{3}}){{1,30}}(?![\d/]|{_SPACE}{{0,3}}[\d/])"
)
_OUTER_SPACE = re.compile(
    r"\A(?:\\[,;:! ]|\\q?quad(?![a-zA-Z])|\s)+|(?:(?<!\\)\\[,;:! ]|\\q?quad|\s){1,20}\Z"
)
_MIXED = re.compile(r"(?<![\w.,/^])(\d{1,100}) +(\d{1,100}) ?/ ?(\d{1,100})(?![\d.])")
_REPEATING = re.compile(r"(?<![\w.])(\d{1,100})\.(\d{0,100})\\(?:overline|bar|dot)\s*\{?(\d{1,100})\}?")
_DIGITS = r"[0-9][0-9A-Z]{0,200}(?:\.[0-9A-Z]{1,200})?"
_BASED = re.compile(
    rf"(?<![\w.^\\])(?:(?P<plain>{_DIGITS})|\(\s*(?P<round>{_DIGITS})\s*\)"
    r"|\\(?:text|mathrm)\s*\{\s*(?P<text>[0-9A-Z]{1,200})\s*\}|\{\s*(?P<braced>[0-9A-Z]{1,200})\s*\})"
    r"\s*_\s*(?:(?P<digit>\d)|\{\s*(?:\\text\s*\{\s*)?\(?\s*(?P<base>\d{1,2}|[a-z]{3,7})\s*\)?\s*\}{1,2}"
    r"|\\text\s*\{\s*(?P<word>\d{1,2}|[a-z]{3,7})\s*\})"
)
_FINAL_NUMBER = re.compile(
    r"(?<![\w.])(?:\(?[0-9][0-9A-Z.]{0,200}\)?_(?:\d|\{[^{}\n]{1,20}\})|-?\d{1,400}(?:\.\d{1,400})?[eE][-+]?\d{1,20})"
    r"(?=[\s.$*)\\\]]{0,20}\Z)"
)
_BASE_NAMES = {
    name: base
    for base, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)
} | {"sixteen": 16}


def plain_notation(content: str) -> str:
    r"""Rewrite the LaTeX of one answer in forms that math-verify reads, with the same meaning.

    Constants lose their font (``\mathrm{e}``), empty sets are ``\emptyset``, repeating decimals and ``1 1/2``
    are fractions, ``6e23`` is a product, spaces between thousands are removed, and a number in another base
    is its value with the base as subscript, which ``forgeasync.scoring.math_answers`` reads.
    """
    text = content.replace("\u2212", "-").replace("\u2013", "-").replace(r"\uppi", r"\pi ")
    text = text.replace(r"\bmod", r"\mod").replace(r"\left\lbrace", r"\{").replace(r"\right\rbrace", r"\}")
    text = _EMPTY_SET.sub(r"\\emptyset ", text)
    text = _UPRIGHT_CONSTANT.sub(_constant, text)
    text = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _REPEATING.sub(_repeating, text)
    text = _BASED.sub(_based, text)
    text = scientific_as_product(text).replace(r"\log_e", r"\log_{e}").replace("~", " ")
    text = _OUTER_SPACE.sub("", text)
    # The period of a sentence, but not that of "\right.".
    return text[:-1] if text.endswith(".") and not text.endswith("\\right.") else text


def scientific_as_product(text: str) -> str:
    """Return ``6e23`` as ``(6*10^(23))``, which math-verify reads in formulas and in prose."""
    return _EXPONENT.sub(r"(\1*10^(\2))", text)


def final_special_number(text: str) -> str | None:
    """Return the number with a base or in scientific notation that ends ``text``; None without one."""
    match = _FINAL_NUMBER.search(text)
    return match.group() if match else None


def _constant(match: re.Match[str]) -> str:
    return _CONSTANTS.get(match[1] or match[2], match.group())


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed))
    value /= (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _based(match: re.Match[str]) -> str:
    name = match["digit"] or match["base"] or match["word"]
    base = int(name) if name.isdigit() else _BASE_NAMES.get(name, 0)
    whole, _, places = (match["plain"] or match["round"] or match["text"] or match["braced"]).partition(".")
    places = places.rstrip("0")
    try:
        value = int(whole + places, base)
    except ValueError:  # no base, or digits that it does not have
        return match.group()
    # "+" and the number of places distinguish 0.1 and 0.01, which have the same digits.
    return f"{value}_{{{base}+{len(places)}}}" if 2 <= base <= 36 else match.group()


_LETTERS_AS_UNITS = re.compile(r"(?<![A-Za-z\\])([a-z]s?|abs?|bcs?)(?=[\s$]*\Z)")
_UNIT_AFTER_SPACE = re.compile(r"[\d}]\s+(?:[a-z]s?|abs?|bcs?)[\s$]*\Z")


def ends_in_variable(content: str) -> bool:
    """Return whether the letter at the end of a reference is a variable (``3t``), not a unit (``3 m``)."""
    return bool(_LETTERS_AS_UNITS.search(content)) and not _UNIT_AFTER_SPACE.search(content)


def keep_last_letter(content: str) -> str:
    """Prevent math-verify from removing the letter at the end as a unit."""
    return _LETTERS_AS_UNITS.sub(r"{\1}", content)
