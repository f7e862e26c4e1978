"""The search for the answer in a completion: after its thoughts, in tags, in a box, or at its end."""

import re

_THOUGHTS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning", "seed:think")),
    ("[THINK]", "[/THINK]"),  # Mistral's
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere's
    ("<|channel>thought", "<channel|>"),  # Gemma 4's
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss'
)
_READ = 2000  # characters at the end of a completion that are searched for an answer without tags or box
_PHRASE = re.compile(r"\banswer(?: is|:| =)[: ]*(.+?) *((?:[.!](?=\s)[^\n]*)?)[.!]*$", re.IGNORECASE | re.MULTILINE)
_LEAD = re.compile(
    r"\b(?:is|are|was|were|be|equals?|gives?|get|so|thus|hence|therefore)\b[,:]? +|(?<![\d ])[:→] +|#+ +", re.IGNORECASE
)


def behind_thoughts(text: str) -> str:
    """Returns the text after the thoughts, because a guess in a thought is no answer; "" if the last thought is open.

    behind_thoughts("<think>7?</think> It is 8.") == " It is 8."   behind_thoughts("It is 7. <think>Or") == ""
    """
    for begin, end in _THOUGHTS:
        opened, closed = text.rfind(begin), text.rfind(end)
        if opened > closed:
            return ""
        if closed >= 0:
            text = text[closed + len(end) :]
    return text.rpartition("<|message|>")[2]


def answer_part(text: str) -> str:
    """Returns the content of the last complete pair of answer tags; all of the text when there is none."""
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, close) if close >= 0 else -1
    return text[start + len("<answer>") : close] if start >= 0 else text


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{…}, by balanced braces; None without one, or when it is cut off.

    last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth, escaped = 1, False
    for end in range(start, len(text)):
        character = text[end]
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:end]
        escaped = character == "\\" and not escaped
    return None


def endings(text: str, splits: bool = True) -> list[str]:
    """Returns the answers with which a text without tags may end. splits: also the part after the last "=".

    endings("The answer is B. Not A.") == ["B", "B. Not A"]
    """
    phrases = list(_PHRASE.finditer(text[-_READ:].replace("**", "")))
    if not phrases:
        return endings_of_line(text, splits)
    sentence, line = phrases[-1][1], phrases[-1][1] + phrases[-1][2].rstrip(" .!")
    return [*dict.fromkeys((sentence, line, *([sentence.rpartition("=")[2].strip()] if splits else ())))]


def endings_of_line(text: str, splits: bool = True) -> list[str]:
    """Returns the last line's endings: ["So the line is y = 2x", "y = 2x", "2x"] for "So the line is y = 2x."."""
    line = text[-_READ:].replace("**", "").strip().rpartition("\n")[2].rstrip(" .,;!")
    led = _LEAD.split(line)[-1]
    return [*dict.fromkeys((line, led, *([led.rpartition("=")[2].strip()] if splits else ())))]
