"""Reads past the layout of LaTeX and Markdown, and tells words from mathematics."""

import re
import unicodedata

from rewards.mathematics.algebra import IN_LATEX

WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname) *\{([^{}]*)\}"
)
_DECORATION = re.compile(
    r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[,!()\[\]]|\*\*(?=\S)|(?<=\S)\*\*|`"
)
_SPACE = re.compile(r"(?:\s|~|(?<!\\)\\[ ;:]|\\quad(?![a-z]))+")
_SPACE_BETWEEN_THOUSANDS = re.compile(r"(?<=\d)(?:~|\\[ ;:]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SIGNS_IN_LATEX = (
    (r"\%", "%"),
    (r"\$", "$"),
    ("{,}", ","),
    (r"^\circ", "°"),
    (r"^{\circ}", "°"),
)
_NEEDLESS_SPACES = (("( ", "("), (" )", ")"), (" ^", "^"), ("° ", "°"))
NAMES = (
    "sin|cos|tan|cot|sec|csc|log|exp|sqrt|inf|infty|infinity|min|max|gcd|lcm|mod|det|"
    "pi|theta|alpha|beta"
)
_WORD = re.compile(rf"(?!(?:{NAMES}|and|or)(?![A-Za-z]))[A-Za-z]{{3,}}", re.IGNORECASE)
COMMAND = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+")
OPERATION = re.compile(  # with two operands
    r"\\[A-Za-z{]|[\w)}\]!] *[-−+*/^_=<>≤≥:,;|] *[-−\w({\[\\]|[\[({|√∞π∅]|"
    r"(?<![A-Za-z\d])\d+[A-Za-z]|\d!|\b[a-z]!|\b\w (?:or|and) \w\b"
)


def without_layout(text: str) -> str:
    r"""Returns a text in one line, without layout of LaTeX and Markdown.

    without_layout(r"$5\,\text{cm}$") == "5 cm"
    """
    text = text.strip().removesuffix(".").translate(IN_LATEX)
    if len(text) > 2 and text.startswith("$") and text.endswith("$"):
        text = text.strip("$")
    for written, meant in _SIGNS_IN_LATEX:
        text = text.replace(written, meant)
    text = _SPACE_BETWEEN_THOUSANDS.sub("", text)
    text = _DECORATION.sub("", text)
    text = WRAPPER.sub(r" \1 ", text)
    text = _SPACE.sub(" ", text).strip()
    for spaced, joined in _NEEDLESS_SPACES:
        text = text.replace(spaced, joined)
    return text


def folded(text: str) -> str:
    """Returns a text without case, marks and article.

    folded("The Nile.") == "nile"
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    text = text.strip(" .,;:!?\"'“”‘’()[]*_")
    text = re.sub(r"[\s\-‐–]+", " ", text)
    return re.sub(r"^(?:the|an?) ", "", text)


def has_words(text: str) -> bool:
    """Returns whether a text has words, that is, more than names of functions and variables."""
    without_commands = COMMAND.sub(" ", text)
    return _WORD.search(without_commands) is not None


def is_expression(text: str) -> bool:
    """Returns whether a text is only mathematics, with more than one operand.

    "1, 2" and "x > 3" are expressions, 72 and "It is 72" are not.
    """
    without_commands = COMMAND.sub(" ", text)
    letters = re.sub(rf"\b(?:{NAMES})\b", "", without_commands)
    if re.search("[A-Za-z]{2}", letters):
        return False
    return OPERATION.search(text.strip("()[]{}$ ")) is not None
