"""Finds a gold answer in a text without box and tags: at its end, or by math-verify anywhere."""

import re

from rewards.mathematics.algebra import mentions
from rewards.mathematics.gold import MAX_CHARS, is_ordered, kind_of, same
from rewards.mathematics.layout import WRAPPER, is_expression, without_layout
from rewards.mathematics.numbers import find_last_number
from rewards.mathematics.quantities import UNIT_WORD, split_unit
from rewards.mathematics.reading import endings, endings_of_line
from rewards.mathematics.times import DAY_AND_MONTH, TIME

_NUM_CHARS_READ = 2000  # characters at the end of a completion that math-verify reads
_NUM_CHARS_BEFORE = 40  # characters before the last number that are looked at
_NUM_CHARS_BEHIND = 80  # characters behind the last number that may belong to it
_MAX_NUMBERS = 20  # the most numbers of a text that are looked at with their words
# A number, here "#", that is only a part of an expression: x + 5, \sqrt{3}, \frac 7 2, 3x, (1,2)
_PART = re.compile(
    r"(?:[{_^]|\\[A-Za-z]+(?: ?\d)?|(?:[\d)}]|\b[A-Za-z]) ?[+*×·^]|(?:[)}]|\b[A-Za-z]) ?[-−]|"
    r"\d ?:) ?#|"
    r"#(?:[}^_]| ?\\[A-Za-z]|[A-Za-z](?![A-Za-z]))|[\w})], ?#\\?[)\]}]"
)
_CHOICE = re.compile(
    r"\(([A-Za-z])\)|(?:[Oo]ption|[Cc]hoice|[Aa]nswer) ([A-Z])\b|"
    r"\b([A-H]) is (?:correct|right|the )"
)
_SCALE = re.compile(r" ?%| (?:dozen|hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\d.,])[-−]?\d[\d,]*(?:\.\d+)?")
_INLINE = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_SIGN_BEFORE = re.compile(
    r"(?:\\?\$|(?<!\\)\$\$|(?<!\S)\$ |[€£¥₹]\}? ?|\b(?:USD|EUR|GBP|CAD|AUD|JPY|INR) ?)$"
)
_CLOSING = re.compile(r"[^$\n]*?(\$+)(?!\d)")  # the end of mathematics in a line
_POWER = re.compile(r"\d (?:hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_CONJUNCTION = re.compile(r" ?(?:and|or|to|plus|minus)\b", re.IGNORECASE)
_LAYOUT = re.compile(r"^(?:\\\)|[*$_`])+")  # the end of what is in bold or mathematics
_HYPHENATED = re.compile(r"-[A-Za-z]{2,}")  # a 12-mile run
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z][A-Za-z}])\^\{?([23])(?:\}|(?!\d))")  # cm^2, not x^2
_UNICODE_POWERS = {"2": "²", "3": "³"}
_SPACES = re.compile(r"(?:\\[,;:! ]|~|\s)+")
_WORDS_BEHIND = re.compile(rf" ?{UNIT_WORD}(?: {UNIT_WORD})*")


def math_verify_finds(text: str, gold: str) -> bool:
    """Returns whether math-verify's answer in a text is the gold one, in its unit and its order."""
    # math-verify reads 3,5 as a set, and 2x3 as a product.
    if is_ordered(gold) or not mentions(text, gold):
        return False
    if kind_of(gold).name != "number":
        return True
    # math-verify reads no units and no millions.
    _, unit = split_unit(without_layout(gold))
    if not unit and not _POWER.search(text):
        return True
    end_of_text = text[-_NUM_CHARS_READ:]
    numbers = list(_NUMBER.finditer(end_of_text))
    for number in numbers[-_MAX_NUMBERS:]:
        quantity = _with_words(end_of_text, number.start(), number.end())
        if same(quantity, gold):
            return True
    return False


def ends_with(text: str, gold: str) -> bool:
    """Returns whether the answer with which a text ends is the gold one."""
    kind = kind_of(gold).name
    if kind == "number":
        return _ends_with_number(text, gold)
    for ending in endings(text, splits="=" not in gold):
        if same(ending, gold):
            return True
    last_line = endings_of_line(text)[0]
    if is_ordered(gold):
        inline = list(_INLINE.finditer(last_line))
        return bool(inline) and same(inline[-1][1] or inline[-1][2], gold)
    if kind == "mathematics":
        return ":" not in gold and math_verify_finds(text[-_NUM_CHARS_READ:], gold)
    if kind == "time":
        times = TIME.findall(last_line) or DAY_AND_MONTH.findall(last_line)
        return bool(times) and same(times[-1], gold)
    if kind == "letter":
        letters = _chosen(last_line)
        return len(letters) == 1 and same(letters.pop(), gold)
    return False


def _chosen(line: str) -> set[str]:
    """Returns the letters that a line names as choices."""
    letters = set[str]()
    for choice in _CHOICE.finditer(line):
        letters.update(letter for letter in choice.groups() if letter)
    return letters


def _ends_with_number(text: str, gold: str) -> bool:
    last_endings = endings_of_line(text)
    for ending in last_endings:
        if same(ending, gold):
            return True
    for ending in last_endings[:2]:  # the line and its last clause
        if len(ending) < MAX_CHARS and is_expression(ending):
            return False  # its last number is only a part of the answer
    return _last_number_is(text, gold)


def _last_number_is(text: str, gold: str) -> bool:
    """Returns whether the last number of a text, with the words behind it, is the gold one."""
    text = _POWER_OF_UNIT.sub(_in_unicode, text)
    _, start, end = find_last_number(text)
    if start == end:
        return False
    before = text[max(0, start - _NUM_CHARS_BEFORE) : start]
    behind = _behind(text, end)
    if _PART.search(f"{before}#{behind}"):
        return False
    _, gold_unit = split_unit(without_layout(gold))
    if gold_unit or _SCALE.match(behind):
        return same(_with_words(text, start, end), gold)
    return same(text[start:end], gold)


def _in_unicode(power: re.Match[str]) -> str:
    return _UNICODE_POWERS[power[1]]


def _behind(text: str, end: int) -> str:
    r"""Returns what follows a number in its line, without \text, and with plain spaces."""
    behind = text[end : end + _NUM_CHARS_BEHIND]
    if len(behind) == _NUM_CHARS_BEHIND:
        behind = behind.rpartition(" ")[0]  # the last word may be cut
    line = behind.partition("\n")[0]
    line = WRAPPER.sub(r" \1 ", line)
    line = _SPACES.sub(" ", line)
    return line.replace(" ²", "²").replace(" ³", "³")


def _with_words(text: str, start: int, end: int) -> str:
    """Returns a number in a text with its sign of money and the words behind it, up to a mark.

    "€7", or "7 red balls that he bought"
    """
    number = text[start:end]
    behind = _behind(text, end)
    sign = _SIGN_BEFORE.search(text[max(0, start - 8) : start])
    if sign is not None:
        closing = _CLOSING.match(behind)
        if closing is not None and sign[0].strip() == closing[1]:
            # The sign begins mathematics: $7$ blue balls, $7 km$.
            behind = behind[: closing.start(1)] + behind[closing.end() :]
        else:
            number = _currency(sign[0]) + number
    hyphenated = _HYPHENATED.match(behind)
    if hyphenated is not None:
        return f"{number} {hyphenated[0][1:]}"
    words = _WORDS_BEHIND.match(_LAYOUT.sub("", behind))
    if words is None or _CONJUNCTION.match(words[0]):
        return number
    return number + words[0]


def _currency(sign: str) -> str:
    r"""Returns a sign of money without what stands around it: "$" for "\$", "EUR" for "EUR "."""
    if "$" in sign:
        return "$"
    return sign.strip(" }")[-3:]
