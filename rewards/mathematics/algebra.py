"""Reads and compares mathematics by math-verify.

Completions are treated as hostile. Callers limit the time (time_limits.py) in the main thread,
where reward functions run. Beyond that, rewards.timeout_s is the limit.
"""

import functools
import importlib
import logging
import re
from fractions import Fraction
from typing import Any

from common.processes.time_limits import unlimited

IN_LATEX = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "√": r"\sqrt ",
        "θ": r"\theta ",
        "∅": r"\emptyset ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
    }
)
_NAME_WITHOUT_BACKSLASH = re.compile(
    r"(?<![\\A-Za-z])(pi|theta|alpha|beta|sin|cos|tan|log|ln)(?![A-Za-z])"
)
_REPEATING_DECIMAL = re.compile(r"(\d*)\.(\d*)\\overline ?\{(\d+)\}")
_ROOT = re.compile(r"(?<!\\)sqrt ?\(([^()]*)\)")


@functools.cache
def load(name: str) -> Any:
    """Imports and returns a module that not every run needs.

    Importing sympy takes half a second. No time limit runs out meanwhile.
    """
    with unlimited():
        module = importlib.import_module(name)
        if name == "math_verify":
            # It warns that it has no timer of its own, and its first call builds tables.
            logging.getLogger(name).setLevel(logging.ERROR)
            module.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)
        return module


@functools.lru_cache(1024)
def expression(text: str) -> Any:
    r"""Returns sympy's object for a text, such as "pi/2"; None if math-verify cannot read it."""
    text = text.translate(IN_LATEX)
    text = _NAME_WITHOUT_BACKSLASH.sub(r"\\\1", text)
    text = text.replace("**", "^").replace("varnothing", "emptyset")
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _REPEATING_DECIMAL.sub(_as_fraction, text)
    return _parse(rf"\boxed{{{text}}}", [_latex_config()])


def _as_fraction(repeating: re.Match[str]) -> str:
    r"""Returns a repeating decimal as a fraction: 0.1\overline{6} is (16 − 1) / 90."""
    whole, once, repeated = repeating.groups()
    numerator = int(whole + once + repeated) - int(whole + once or 0)
    denominator = 10 ** len(once) * (10 ** len(repeated) - 1)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


@functools.cache
def _latex_config() -> Any:
    """Returns math-verify's settings for LaTeX. They keep units (units.py), so 2c is not 2."""
    normalization = load("latex2sympy2_extended").NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="all",
        equations=False,
    )
    return load("math_verify").LatexExtractionConfig(normalization_config=normalization)


@functools.cache
def _words_config() -> Any:
    """Returns math-verify's settings for numbers among words."""
    return load("math_verify").ExprExtractionConfig()


def _parse(text: str, configs: list[Any]) -> Any:
    """Returns the object that math-verify reads first in a text, or None."""
    for parsed in load("math_verify").parse(text, configs, parsing_timeout=None):
        if not isinstance(parsed, str):
            return parsed
    return None


def rational(text: str) -> Fraction | None:
    r"""Returns the exact value of an expression, or None if that is not a rational number.

    rational(r"1.2\times 10^{-5}") == Fraction(3, 250000)
    """
    return _rational(expression(text))


def _rational(parsed: Any) -> Fraction | None:
    if parsed is None:
        return None
    sympy = load("sympy")
    if isinstance(parsed, sympy.Eq) and isinstance(parsed.lhs, sympy.Symbol):  # x = 5
        parsed = parsed.rhs
    if not isinstance(parsed, sympy.Expr) or parsed.free_symbols:
        return None
    exact = parsed.replace(_is_float, _exact).doit()
    if not exact.is_Rational:
        exact = sympy.simplify(exact)
    if not exact.is_Rational:
        return None
    return Fraction(int(exact.p), int(exact.q))


def _is_float(number: Any) -> bool:
    return bool(number.is_Float)


def _exact(number: Any) -> Any:
    return load("sympy").Rational(str(number))


def mentions(text: str, gold: str) -> bool:
    """Returns whether the answer that math-verify finds in a text is the gold one.

    If the gold answer is no number, only LaTeX in the text is read.
    """
    text = text.translate(IN_LATEX)
    value = None
    if "=" not in gold:
        value = rational(gold)
    if value is None:
        return equal(expression(gold), _parse(text, [_latex_config()]))
    return _rational(_parse(text, [_latex_config(), _words_config()])) == value


def equal(gold: Any, given: Any) -> bool:
    """Returns whether two objects of sympy mean the same; never for None."""
    if gold is None or given is None:
        return False
    verify = load("math_verify").verify
    if verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True):
        return True
    boolean = load("sympy").logic.boolalg.Boolean
    if not isinstance(gold, boolean) or not isinstance(given, boolean):
        return False
    # Both are relations: 2 > x ≥ 1 is 1 ≤ x < 2.
    try:
        return bool(gold.free_symbols == given.free_symbols and gold.as_set() == given.as_set())
    except Exception:  # the relation has no set
        return False
