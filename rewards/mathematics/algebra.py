"""Mathematics by math-verify: the meaning of a text, and whether two texts mean the same.

Completions are treated as hostile: callers limit the time (time_limits.py) in the main thread, where reward
functions run; rewards.timeout_s is the limit beyond that.
"""

import functools
import importlib
import logging
import re
from fractions import Fraction
from typing import Any

from common.processes.time_limits import unlimited

IN_LATEX = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le "}
    | {"≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "√": r"\sqrt ", "θ": r"\theta ", "∅": r"\emptyset "}
    | {"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
)
_TYPED = re.compile(r"(?<![\\A-Za-z])(pi|theta|alpha|beta|sin|cos|tan|log|ln)(?![A-Za-z])")  # without a backslash
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline ?\{(\d+)\}")
_ROOT = re.compile(r"(?<!\\)sqrt ?\(([^()]*)\)")


@functools.cache
def load(name: str) -> Any:
    """Imports a module that not every run needs; sympy takes half a second, in which no time limit runs out."""
    with unlimited():
        module = importlib.import_module(name)
        if name == "math_verify":
            logging.getLogger(name).setLevel(logging.ERROR)  # it warns that it has no timer of its own
            module.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)  # the first one builds tables
        return module


@functools.lru_cache(1024)
def expression(text: str) -> Any:
    r"""Returns sympy's object for a text; None if math-verify cannot read it.  expression("pi/2")"""
    text = _TYPED.sub(r"\\\1", text.translate(IN_LATEX)).replace("**", "^").replace("varnothing", "emptyset")
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _REPEATING.sub(_as_fraction, text)
    return _found(rf"\boxed{{{text}}}", _configs()[:1])


def _as_fraction(repeating: re.Match[str]) -> str:
    whole, once, again = repeating.groups()
    nines = 10 ** len(once) * (10 ** len(again) - 1)
    return rf"\frac{{{int(whole + once + again) - int(whole + once or 0)}}}{{{nines}}}"


@functools.cache
def _configs() -> list[Any]:
    """Returns configurations for LaTeX, and for numbers in words. They keep units (units.py): 2c is not 2."""
    library, normal = load("math_verify"), load("latex2sympy2_extended").NormalizationConfig
    keep = normal(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False)
    return [library.LatexExtractionConfig(normalization_config=keep), library.ExprExtractionConfig()]


def _found(text: str, configs: list[Any]) -> Any:
    found = load("math_verify").parse(text, configs, parsing_timeout=None)
    return next((part for part in found if not isinstance(part, str)), None)


def rational(text: str) -> Fraction | None:
    r"""Returns the exact value of a text that has one.  rational(r"1.2\times 10^{-5}") == Fraction(3, 250000)"""
    return _rational(expression(text))


def _rational(found: Any) -> Fraction | None:
    if found is None:
        return None
    sympy = load("sympy")
    if isinstance(found, sympy.Eq) and isinstance(found.lhs, sympy.Symbol):  # x = 5
        found = found.rhs
    if not isinstance(found, sympy.Expr) or found.free_symbols:
        return None
    exact = found.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e))).doit()
    exact = exact if exact.is_Rational else sympy.simplify(exact)
    return Fraction(int(exact.p), int(exact.q)) if exact.is_Rational else None


def mentions(text: str, gold: str) -> bool:
    """Returns whether math-verify's answer in a whole text is the gold one; without a value only LaTeX is read."""
    text, value = text.translate(IN_LATEX), None if "=" in gold else rational(gold)
    if value is None:
        return equal(expression(gold), _found(text, _configs()[:1]))
    return _rational(_found(text, _configs())) == value


def equal(gold: Any, found: Any) -> bool:
    if gold is None or found is None:
        return False
    if load("math_verify").verify(gold, found, timeout_seconds=None, allow_set_relation_comp=True):
        return True
    boolean = load("sympy").logic.boolalg.Boolean
    if not (isinstance(gold, boolean) and isinstance(found, boolean)):  # 2 > x ≥ 1 is 1 ≤ x < 2
        return False
    try:
        return bool(gold.free_symbols == found.free_symbols and gold.as_set() == found.as_set())
    except Exception:  # the relation has no set
        return False
