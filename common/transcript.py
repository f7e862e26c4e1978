"""What a program drew on a terminal, as plain lines for a log file.

A live panel moves the cursor up and draws itself again several times a second. Here a line that is drawn again
replaces the old one, so that the log holds each line once, as it looked when it scrolled away. Left out: everything
but line feed, carriage return, cursor up and erase; colours and the rest are dropped.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path

_TOKEN = re.compile(
    r"\x1b\[(?P<number>[0-9;?]*)(?P<code>[@-~])"  # a control sequence
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[^\[\]]"  # a title and other escapes: dropped
    r"|(?P<newline>\r*\n)|(?P<home>\r)|(?P<text>[^\x1b\r\n]+)"
)
_UNFINISHED = re.compile(r"(?:\x1b(?:\[[0-9;?]*|\][^\x07\x1b]*)?|\r+)\Z")


class Transcript:
    """Feeds on bytes and returns finished lines.  b"50%\\r100%\\ndone\\n" → ["100%", "done"]"""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""  # an escape sequence, or a \r that may belong to \r\n, cut off by the end of a chunk
        self._lines = [""]  # the last one is being written
        self._held = 0  # lines above it that may still be drawn again: the most the cursor has ever gone up
        self._up = 0
        self._overwrite = False  # the cursor is back at the start of a line that has text

    def feed(self, data: bytes) -> list[str]:
        """Lines that can no longer change, without their line ends."""
        text = self._rest + self._decode(data)
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished.group() if unfinished else ""
        for token in _TOKEN.finditer(text[: len(text) - len(self._rest)]):
            self._apply(token)
        count = max(0, len(self._lines) - 1 - self._held)
        finished, self._lines = self._lines[:count], self._lines[count:]
        return finished

    def end(self) -> list[str]:
        """Everything that is still held back, when the stream is closed."""
        lines, self._lines = self._lines, [""]
        return lines[:-1] if not lines[-1] else lines

    def _apply(self, token: re.Match[str]) -> None:
        if token["newline"]:
            self._lines.append("")
            self._overwrite = False
        elif token["home"]:
            self._overwrite = True
        elif token["text"]:
            self._lines[-1] = token["text"] if self._overwrite else self._lines[-1] + token["text"]
            self._overwrite, self._up = False, 0
        elif token["code"] == "A":  # cursor up: the lines below it are about to be drawn again
            count = int(token["number"] or 1)
            self._up += count
            self._held = max(self._held, self._up)
            del self._lines[max(0, len(self._lines) - count) :]
            self._lines = self._lines or [""]
            self._overwrite = True
        elif token["code"] == "K" and token["number"] == "2":
            self._lines[-1] = ""


def tail(log: Path, count: int) -> list[str]:
    """The last lines of a log that are not empty; reads its end only, however long it is. Raises OSError."""
    with open(log, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def last_lines(log: Path, count: int = 5) -> str:
    """The end of the other process's log as the end of a message; "" if it has none, as in a run by hand."""
    try:
        lines = tail(log, count)
    except OSError:
        return ""
    return " Last lines of " + "\n  ".join([f"{log}:", *(re.sub(r"[\x00-\x1f\x7f-\x9f]", "", line) for line in lines)])
