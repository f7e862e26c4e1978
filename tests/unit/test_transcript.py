"""The output of a program as lines of a log: of a bar only its end, and no colours."""

from common.processes.transcript import Transcript


def test_a_transcript_has_what_was_drawn_last_however_the_bytes_are_cut():
    data = "a\r\nbar 10%\rbar 99%\r\n\x1b[31mrot €\x1b[0m\r\nend".encode()
    for cut in range(len(data)):
        transcript = Transcript()
        lines = transcript.feed(data[:cut]) + transcript.feed(data[cut:]) + transcript.end()
        assert lines == ["a", "bar 99%", "rot €", "end"], cut
