"""What a program drew on a terminal, as lines of a log."""

from __future__ import annotations

from common.transcript import Transcript


def test_a_line_drawn_again_is_logged_once_as_it_looked_last():
    transcript = Transcript()
    panel = "step {0}\r\nreward {0}"
    again = "\r\x1b[2K\x1b[1A\x1b[2K"
    lines = transcript.feed(b"start\r\n")
    for step in range(3):
        lines += transcript.feed(((again if step else "") + panel.format(step)).encode())
    lines += transcript.feed(b"\r\n") + transcript.end()
    # The very first line of the panel was final until the cursor first went up.
    assert lines == ["start", "step 0", "step 2", "reward 2"]


def test_a_transcript_does_not_depend_on_how_the_bytes_are_cut():
    data = "a\r\nbar 10%\rbar 99%\r\n\x1b[31mrot €\x1b[0m\r\nend".encode()
    for cut in range(len(data)):
        transcript = Transcript()
        lines = transcript.feed(data[:cut]) + transcript.feed(data[cut:]) + transcript.end()
        assert lines == ["a", "bar 99%", "rot €", "end"], cut
