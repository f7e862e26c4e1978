"""Conversion of a program's output to plain lines for a log file, and the last lines of such files."""

import codecs
import re
from pathlib import Path

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")  # colours, titles and other


class Transcript:
    """A converter from bytes to finished lines.  b"50%\\r100%\\ndone\\n" → ["100%", "done"]

    A progress bar draws its line again after a carriage return: the last one stays, without escape sequences.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._line = ""  # not finished yet

    def feed(self, data: bytes) -> list[str]:
        """Takes bytes, and returns the lines that can no longer change, without their line ends."""
        *finished, line = (self._line + self._decode(data)).split("\n")
        self._line = line[line.rfind("\r", 0, -1) + 1 :]
        return list(map(_last_drawn, finished))

    def end(self) -> list[str]:
        """Returns the last line if it has no line end when the stream is closed."""
        return [_last_drawn(self._line)] if self._line else []


def _last_drawn(line: str) -> str:
    return _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2])


def tail(log: Path, count: int) -> list[str]:
    """Returns the last lines of a log that are not empty; reads its end only, however long it is. Raises OSError."""
    with open(log, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def last_lines(log: Path) -> str:
    """Returns the end of the other process's log, for a message; "" if it has none, as in a run by hand."""
    try:
        lines = tail(log, 5)
    except OSError:
        return ""
    return " Last lines of " + "\n  ".join([f"{log}:", *(re.sub(r"[\x00-\x1f\x7f-\x9f]", "", line) for line in lines)])
