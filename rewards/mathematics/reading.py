"""Finds the answer in a completion: after its thoughts, in its tags, in its box, or at its end."""

import re

_TAGS_OF_THOUGHTS = ("think", "thinking", "thought", "reasoning", "seed:think")
_THOUGHTS = (  # what begins and what ends a thought
    *((f"<{name}>", f"</{name}>") for name in _TAGS_OF_THOUGHTS),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
)
_NUM_CHARS_READ = 2000  # characters at the end of a completion that are searched for an answer
_PHRASE = re.compile(
    r"\banswer(?: is|:| =)[: ]*(.+?) *((?:[.!](?=\s)[^\n]*)?)[.!]*$", re.IGNORECASE | re.MULTILINE
)
_LEAD = re.compile(
    r"\b(?:is|are|was|were|be|equals?|gives?|get|so|thus|hence|therefore)\b[,:]? +|"
    r"(?<![\d ])[:→] +|#+ +",
    re.IGNORECASE,
)


def behind_thoughts(text: str) -> str:
    """Returns the text after the thoughts, because a guess in a thought is no answer.

    The result is "" if the last thought does not end.

    behind_thoughts("<think>7?</think> It is 8.") == " It is 8."
    behind_thoughts("It is 7. <think>Or") == ""
    """
    for begin, end in _THOUGHTS:
        begin_index = text.rfind(begin)
        end_index = text.rfind(end)
        if begin_index > end_index:
            return ""
        if end_index >= 0:
            text = text[end_index + len(end) :]
    return text.rpartition("<|message|>")[2]


def answer_part(text: str) -> str:
    """Returns what the last complete pair of answer tags holds, or the whole text without one."""
    end = text.rfind("</answer>")
    if end < 0:
        return text
    begin = text.rfind("<answer>", 0, end)
    if begin < 0:
        return text
    return text[begin + len("<answer>") : end]


def last_boxed(text: str) -> str | None:
    r"""Returns what the last \boxed{…} holds; None if there is no box, or if the box does not end.

    last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    box = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if box < 0:
        return None
    start = text.index("{", box) + 1
    depth = 1
    is_escaped = False  # whether a backslash stands before the character
    for end in range(start, len(text)):
        character = text[end]
        if is_escaped:
            is_escaped = False
            continue
        is_escaped = character == "\\"
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return text[start:end]
    return None


def endings(text: str, splits: bool = True) -> list[str]:
    """Returns the answers with which a text without tags may end.

    splits: whether the part after the last "=" is an answer, too.

    endings("The answer is B. Not A.") == ["B", "B. Not A"]
    """
    phrases = list(_PHRASE.finditer(_end_of(text)))
    if not phrases:
        return endings_of_line(text, splits)
    sentence, rest_of_line = phrases[-1].groups()
    line = sentence + rest_of_line.rstrip(" .!")
    return _with_right_side([sentence, line], sentence, splits)


def endings_of_line(text: str, splits: bool = True) -> list[str]:
    """Returns the answers with which the last line of a text may end. splits: as in `endings`.

    endings_of_line("So the line is y = 2x.") == ["So the line is y = 2x", "y = 2x", "2x"]
    """
    line = _end_of(text).strip().rpartition("\n")[2].rstrip(" .,;!")
    clause = _LEAD.split(line)[-1]
    return _with_right_side([line, clause], clause, splits)


def _end_of(text: str) -> str:
    return text[-_NUM_CHARS_READ:].replace("**", "")


def _with_right_side(answers: list[str], equation: str, splits: bool) -> list[str]:
    """Returns the answers and, if `splits`, what follows the last "=", each of them once."""
    if splits:
        right_side = equation.rpartition("=")[2].strip()
        answers.append(right_side)
    return list(dict.fromkeys(answers))
