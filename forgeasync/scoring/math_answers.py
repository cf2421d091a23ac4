"""Finds final answers in responses, and compares them with math-verify 0.9 and corrections.

Only for processes of verifiers. Responses are untrusted and can be long, so every pattern that looks for an
answer takes time linear in the text.

math-verify compares numbers with an absolute tolerance: it rounds decimals to six places, and treats other
numbers as equal if their difference vanishes at 15 digits. So all small numbers are equal, and powers of any
size are computed. It drops the base of a number, reads 2(3) as the mixed number 2 + 3, and treats two
equations without real solutions as equal. ``repair`` replaces these comparisons. The parser, symbolic
equality and the pairing of elements of sets, intervals and matrices are math-verify's.

math-verify's own limits use signal.alarm, which cannot stop one long C call, such as an integer raised to an
integer power. Nothing here has a limit: ``forgeasync.scoring.worker`` kills the process if it takes too long.
"""

import itertools
import logging
import math
import re
from fractions import Fraction
from typing import Any, Literal

import sympy
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import grader, parse, verify
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from forgeasync.rollouts import Score, Task

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

    Empty if its braces are not closed, even if an earlier command is complete. A command inside the braces of
    a complete one is part of that one's content. Without braces, the content is the text up to a space.
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
    r"""Return whether the last formula of a text without ``\boxed`` is unfinished, as in ``$\frac{1}{$``."""
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

    Constants lose their font (``\mathrm{e}``). Empty sets become ``\emptyset``, repeating decimals and
    ``1 1/2`` become fractions, and ``6e23`` becomes a product. Spaces between thousands are removed. A number
    in another base becomes its value with the base as subscript, which math-verify reads after
    ``repair``.
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


MAX_BITS = 1 << 17
"""Maximum number of bits of a computed number; 10000! has 118,458. Larger ones are compared by notation."""

NUM_DIGITS = 50
"""Digits to which equal irrational numbers must agree; their difference must vanish at ``MAX_DIGITS``."""

MAX_DIGITS = 1000
"""Maximum number of digits computed to find a difference of two numbers."""

DECIMAL_TOLERANCE = sympy.Rational(1, 10**6)
"""Relative tolerance between a decimal and an irrational number. Rational numbers have none."""

_DEFERRED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)


class _Huge(sympy.Function):
    """A number too large to compute, with the name of its operation and its arguments."""


def equal(reference: Any, found: Any) -> bool:
    """Return whether two results of math-verify's ``parse`` are equal; ``repair`` must have been called."""
    if isinstance(reference, str) or isinstance(found, str):
        return bool(verify(reference, found, timeout_seconds=None))
    if isinstance(reference, sympy.Symbol) or isinstance(found, sympy.Symbol):
        # A word: its letters have an order, which computing their product would lose.
        if verify(reference, found, timeout_seconds=None):
            return True
    first, second = _of_any_numbers(computed(reference), computed(found))
    if first.has(_Huge) or second.has(_Huge):
        return bool(first == second)
    return bool(verify(first, second, timeout_seconds=None))


def computed(tree: Any) -> Any:
    """Return the expression with its numbers computed exactly, up to ``MAX_BITS``."""
    if isinstance(tree, sympy.MatrixBase):
        return tree.applyfunc(computed)
    if isinstance(tree, sympy.MatrixExpr):
        done = tree.doit()
        return computed(done) if isinstance(done, sympy.MatrixBase) else done
    if isinstance(tree, sympy.Float):
        return _decimal(tree)
    if isinstance(tree, sympy.Symbol):
        return sympy.I if tree.name == "i" else tree
    if not tree.args or _is_percentage(tree):
        return tree
    if isinstance(tree, _DEFERRED):
        done = tree.doit()
        return done if isinstance(done, _DEFERRED) else computed(done)
    if isinstance(tree, FiniteSet):
        return FiniteSet(*map(computed, tree._unsorted_args))
    if isinstance(tree, And):
        return And(*map(computed, tree._unsorted_args))
    args = [computed(one) for one in tree.args]
    if isinstance(tree, sympy.core.relational.Relational):
        return tree.func(*args, evaluate=False)
    if isinstance(tree, sympy.Interval):
        interval = tree.func(*args)
        return sympy.Tuple(*args[:2]) if interval is sympy.S.EmptySet else interval
    if isinstance(tree, sympy.Set):
        return tree.func(*args, evaluate=False)
    if isinstance(tree, sympy.UnevaluatedExpr):
        return args[0]
    if _num_bits_of_result(tree, args) > MAX_BITS:
        return _Huge(sympy.Symbol(tree.func.__name__), *args)
    return tree.func(*args)


def _of_any_numbers(*trees: Any) -> tuple[Any, ...]:
    """Drop the assumption that symbols are real from all trees if one of them has complex numbers.

    The parser makes this assumption for each expression separately, so equal symbols would differ.
    """
    if not any(tree.has(sympy.I) for tree in trees):
        return trees
    symbols = set[sympy.Symbol]().union(*(tree.free_symbols for tree in trees))
    plain = {symbol: sympy.Symbol(symbol.name) for symbol in symbols}
    return tuple(tree.xreplace(plain) for tree in trees)


def numbers_equal(first: Any, second: Any, *_: Any) -> bool:
    """Return whether two expressions or matrices without sets are equal; replaces math-verify's comparisons.

    Rational numbers must be equal exactly, irrational ones to at least ``NUM_DIGITS`` digits. A decimal with
    finitely many digits equals an irrational number within ``DECIMAL_TOLERANCE``. "9%" equals 9 and 0.09.
    """
    first, second = computed(first), computed(second)
    if isinstance(first, sympy.MatrixBase) and isinstance(second, sympy.MatrixBase):
        pairs = zip(first.flat(), second.flat(), strict=True) if first.shape == second.shape else ((0, 1),)
        return all(numbers_equal(sympy.sympify(one), sympy.sympify(other)) for one, other in pairs)
    if _is_percentage(first) or _is_percentage(second):
        bare = [one.args[0] if _is_percentage(one) else one for one in (first, second)]
        if all(one.is_Integer for one in bare):
            return bool(bare[0] == bare[1])
        first, second = computed(first.doit()), computed(second.doit())
    if first == second:
        return True
    if isinstance(first, sympy.Rational) and isinstance(second, sympy.Rational):
        return False
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr):
        close = _close(first, second)
        if close is not None:
            return close
    return bool(_SYMBOLIC_EQUALITY(first, second))


def _close(first: sympy.Expr, second: sympy.Expr) -> bool | None:
    """Compare two numbers by their digits; None if that cannot decide."""
    for one in (first, second):
        if not one.is_number or one.has(AppliedUndef, _Huge):
            return None
    digits = _digits(first), _digits(second)
    if digits[0] is None or digits[1] is None:
        return None
    values = digits[0], digits[1]
    if not all(one.is_finite for one in values):
        return False
    is_rounded = _is_decimal(first) != _is_decimal(second) and first.is_Rational != second.is_Rational
    tolerance = DECIMAL_TOLERANCE if is_rounded else sympy.Rational(1, 10 ** (NUM_DIGITS - 2))
    difference = sympy.Abs(values[0] - values[1]).evalf(NUM_DIGITS)
    scale = max(sympy.Abs(one).evalf(NUM_DIGITS) for one in values)
    if difference > tolerance * scale:
        return False
    return is_rounded or not _digits(first - second)


def _digits(number: sympy.Expr) -> sympy.Expr | None:
    """Return the number to ``NUM_DIGITS`` digits.

    None if computing ``MAX_DIGITS`` does not determine them, as for a hidden zero.
    """
    try:
        return number.evalf(NUM_DIGITS, maxn=MAX_DIGITS, strict=True)
    except (PrecisionExhausted, NotImplementedError):
        return None


def _decimal(number: sympy.Float) -> sympy.Expr:
    """Return the decimal as it was written: ``Float`` keeps more bits than its digits need."""
    if not number.is_finite:
        return number
    _, _, exponent, num_bits = number._mpf_
    if abs(exponent) + num_bits > MAX_BITS:
        return _Huge(number)
    return sympy.Rational(str(number))


def _is_decimal(number: sympy.Expr) -> bool:
    """Return whether a number is a decimal with finitely many digits, but not an integer."""
    if not isinstance(number, sympy.Rational) or number.q == 1:
        return False
    rest = number.q >> ((number.q & -number.q).bit_length() - 1)
    while rest % 5 == 0:
        rest //= 5
    return bool(rest == 1)


def _is_percentage(tree: Any) -> bool:
    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    return isinstance(tree, sympy.Mul) and len(tree.args) == 2 and tree.args[1] == hundredth


def _num_bits(number: sympy.Rational) -> int:
    return max(int(abs(number.p)).bit_length(), int(number.q).bit_length())


def _num_bits_of_result(tree: sympy.Basic, args: list[Any]) -> float:
    """Return an approximate upper bound of the result's bits; 0 if it is at most its arguments."""
    if not all(isinstance(one, sympy.Rational) for one in args):
        return 0
    if isinstance(tree, sympy.Add | sympy.Mul):
        return sum(map(_num_bits, args))
    size = abs(args[0])
    if isinstance(tree, sympy.Pow):
        # log2 of the base, rounded up.
        return int(abs(args[1]) * max(int(size.p - 1).bit_length(), int(size.q - 1).bit_length()))
    if isinstance(tree, sympy.factorial | sympy.gamma | sympy.factorial2 | sympy.subfactorial):
        return math.lgamma(size + 1) / math.log(2) if size < MAX_BITS else math.inf
    if isinstance(tree, sympy.binomial):
        return int(min(abs(args[1]), abs(args[0] - args[1])) * _num_bits(size))
    return 0


def _factors(parser: Any, factors: list[Any], index: int = 0) -> Any:
    """Return the product of factors without a sign; a mixed number is an integer before a fraction.

    Replaces the parser's method, which also adds the factors of 2(3) and of "2 3".
    """
    first = parser.convert_postfix(factors[index])
    texts = [one.getText() for one in factors[index : index + 2]]
    if len(texts) == 2 and texts[0].isdecimal():
        if texts[1].isdecimal():
            raise ValueError(f"no sign between {texts[0][:20]} and {texts[1][:20]}")
        if texts[1].startswith("\\frac"):
            index += 1
            fraction = parser.convert_postfix(factors[index])
            is_mixed = isinstance(fraction, sympy.Rational) and fraction > 0
            first = first + fraction if is_mixed else parser.mul_flat(first, fraction)
    if index == len(factors) - 1:
        if isinstance(first, list):
            raise ValueError("a derivative of nothing")
        return first
    rest = _factors(parser, factors, index + 1)
    if isinstance(first, list):  # d/dx, with x in it
        return sympy.Derivative(rest, first[0])
    if getattr(first, "is_Matrix", False) or getattr(rest, "is_Matrix", False):
        return parser.mat_mul_flat(first, rest)
    return parser.mul_flat(first, rest)


def _atom(parser: Any, atom: Any) -> Any:
    """Convert an atom; a number with a subscript is a number in another base, equal only to itself."""
    number = atom.number_subexpr()
    if number is None or number.subexpr() is None:
        return _PARSED_ATOM(parser, atom)
    return sympy.Symbol(number.getText().translate(_NO_BRACES), real=True)


def _binomial(parser: Any, binomial: Any) -> Any:
    """Return a binomial coefficient without computing it."""
    return sympy.binomial(
        parser.convert_expr(binomial.upper), parser.convert_expr(binomial.lower), evaluate=False
    )


def _equations_equal(first: Any, second: Any, *precision: int) -> bool:
    """Return whether two relations have the same solutions; each must have at least one."""
    if not all(sympy.solve(one, one.free_symbols) for one in (first, second)):
        return False
    return bool(_SOLVE_AND_COMPARE(first, second, *precision))


_NO_BRACES = str.maketrans("", "", "{} ")
_SYMBOLIC_EQUALITY = grader.sympy_symbolic_eq
_SOLVE_AND_COMPARE = grader.sympy_solve_and_compare
_PARSED_ATOM = latex2sympy2._Latex2Sympy.convert_atom


def repair() -> None:
    """Replace math-verify's functions with those above, in this process."""
    grader.sympy_numeric_eq = numbers_equal
    grader.sympy_symbolic_eq = lambda *_: False  # numbers_equal calls it where it is applicable
    grader.sympy_solve_and_compare = _equations_equal
    parser = latex2sympy2._Latex2Sympy
    parser.convert_postfix_list = _factors
    parser.convert_atom = _atom
    parser.convert_binom = _binomial


MAX_UNBOXED_CHARS = 2000
"""Number of characters at the end of a response without ``\\boxed`` that are searched for an answer."""

_GSM8K_MARK = "####"
# "#4" can mean 4, but math-verify finds no number in it. The hash after a letter or digit is part of
# something else. Repeats are bounded, because hostile text can be long.
_SIGN = r"(?<![\w#\\])\\?#{1,6}[ \t]{0,4}(?=[-+]?(?:\\?\$)?[-+.]?\d|\\[dt]?frac|\\sqrt)"
_NUMBER_SIGN = re.compile(_SIGN)
# In a sentence "#4" names something ("rule #4"), so there only the last word or the first of a line counts.
_FINAL_NUMBER_SIGN = re.compile(rf"^[ \t]{{0,8}}{_SIGN}|{_SIGN}(?=\S{{1,80}}\s{{0,20}}\Z)", re.MULTILINE)


def _parse_boxed(content: str, *, is_reference: bool = False) -> list[Any]:
    # A box is math-verify's marker for "all of this is the answer". If a box is unreadable, no other number
    # is searched for in it. A reference is not a guess, so any match in it counts.
    mode: Literal["any_match", "first_match"] = "any_match" if is_reference else "first_match"
    content = _NUMBER_SIGN.sub("", content)
    return parse(f"\\boxed{{{content}}}", parsing_timeout=None, extraction_mode=mode)


def _reference_content(answer: str) -> str:
    boxed = last_boxed(answer)
    # A GSM8K reference is a solution, "####" and the result.
    content = (answer.rpartition(_GSM8K_MARK)[2] if boxed is None else boxed).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        wrapped = content.startswith(opening) and content.endswith(closing)
        if wrapped and len(content) > len(opening) + len(closing):
            content = content[len(opening) : -len(closing)].strip()
            break
    return plain_notation(content)


def judge_answer(response: str, answer: str) -> Score:
    """Return 1.0, and correct, if the final answer of ``response`` equals ``answer``; else 0.0.

    Has no time limit.
    """
    reference = _reference_content(answer)
    stated = after_reasoning(response)
    boxed = last_boxed(stated)
    # The tail has the final answer, and math-verify's patterns backtrack badly on long text.
    tail = stated[-MAX_UNBOXED_CHARS:]
    if boxed is None and ends_unfinished(tail):
        boxed = ""
    content = final_special_number(tail) if boxed is None else boxed
    if content is None:
        tail = scientific_as_product(_FINAL_NUMBER_SIGN.sub("", tail))
        found = parse(tail, parsing_timeout=None)
    else:
        content = plain_notation(content)
        if ends_in_variable(reference):
            content = keep_last_letter(content)
        found = _parse_boxed(content)
    if ends_in_variable(reference):
        reference = keep_last_letter(reference)
    references = _parse_boxed(reference, is_reference=True)
    is_correct = any(equal(one, other) for one, other in itertools.product(references, found))
    return Score(float(is_correct), is_correct, has_answer=bool(found))


_WARM_UP = (
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    ("the answer is 4", "4"),
    (r"\boxed{5}", "4"),
    (r"\boxed{x^2 - \sqrt{2}}", r"(x+1)^2"),
    (r"\boxed{\{1, 2\}}", "[1, 2)"),
    (r"\boxed{1.5\sin 1}", r"\sqrt{2}"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\boxed{x = 1}", "x = 2"),
)


class MathVerifier:
    """Verifies final answers against the references of their tasks."""

    def __init__(self) -> None:
        # It would warn about the missing time limits, which the processes of verifiers have.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # Builds math-verify's patterns and parser tables, and triggers late imports of sympy, so that no
        # answer is slowed down by them.
        repair()
        for response, answer in _WARM_UP:
            judge_answer(response, answer)

    def load(self, task: Task) -> str:
        """Return the reference, which needs no preparation."""
        return task.answer

    def score(self, answer: str, response: str) -> Score:
        """Return 1.0, and correct, if the final answer of ``response`` equals ``answer``; else 0.0."""
        return judge_answer(response, answer)
