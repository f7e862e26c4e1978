"""Hostile text: nothing of it acts in a terminal or on a page, and nothing of it disappears."""

import unicodedata

import pytest

from report.escape import one_line, visible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text\n\twith tabs", "plain text\n\twith tabs"),
        ("答案 √2 é 🙂", "答案 √2 é 🙂"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("over\rwrite\x08\x7f\x00", "over␍write␈␡␀"),
        ("\u202egnp.exe", "⟨U+202E⟩gnp.exe"),
        ("a\u2066b\u200fc\u200bd\ufeff", "a⟨U+2066⟩b⟨U+200F⟩c⟨U+200B⟩d⟨U+FEFF⟩"),
        ("\ud800 alone \udc80", "⟨U+D800⟩ alone ⟨U+DC80⟩"),
        ("\u2028line\u2029", "⟨U+2028⟩line⟨U+2029⟩"),
        (None, "None"),
    ],
)
def test_what_cannot_be_seen_gets_a_visible_mark(text, expected):
    assert visible(text) == expected
    assert one_line(text) == expected.replace("\n", "␊").replace("\t", "␉")


def test_no_character_of_unicode_stays_invisible():
    kept = set(visible("".join(map(chr, range(0x110000)))))
    of = {char: unicodedata.category(char) for char in kept}
    assert set(of.values()) & {"Cf", "Cs", "Co", "Cn", "Zl", "Zp"} == set()
    assert {char for char, category in of.items() if category == "Cc"} == {"\t", "\n"}
