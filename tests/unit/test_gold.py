"""What a gold answer is, and so how it is judged."""

import math

import pytest

from rewards.gold import gold_kind

KINDS = {
    "number": r"""72 ; #### 1,200 ; 0.00001 ; 1e-05 ; 10^{-5} ; 1.2\times 10^{3} ; -3/4 ; 1 1/2 ; \frac{1}{2} ; −7 ;
        -\dfrac{2}{3} ; 3\frac{1}{2} ; \frac12 ; $18.00 ; \$5 ; 50% ; 50\% ; 18 dollars ; 5\text{ cm} ; 5 cm^2 ;
        60 km/h ; 72 clips ; 30^\circ ; 1{,}000 ; $5$ ; 265252859812191058636308480000000""",
    "letter": r"B ; (B) ; \text{(B)} ; \textbf{(C)} ; d ; A. ; \boxed{B}",
    "time": "3:45 ; 03:45 PM ; 7 p.m. ; 2020-12-25 ; December 25, 2020 ; 5 March ; 12/25/2020",
    "text": r"Paris ; the number 7 ; no solution ; \text{Evelyn} ; New York ; unknown ; C++ ; Yes! ; 3 to 5 days",
    "mathematics": r"""x+1 ; 2\sqrt{3} ; x^2+1 ; (1,2) ; [0,1) ; \{1,2\} ; 1, 2 ; 1 or 2 ; x=5 ; 2x ; pi/2 ; 3:4:5 ;
        (-\infty, 3] ; \pi ; 1 \le x < 2 ; \begin{pmatrix}1&2\\3&4\end{pmatrix} ; sin(x) ; n! ; |x| ; f(x)=2x""",
}


@pytest.mark.parametrize(
    ("kind", "gold"), [(kind, gold) for kind, golds in KINDS.items() for gold in golds.split(" ;")]
)
def test_a_gold_answer_is_of_one_kind(kind, gold):
    assert gold_kind(gold).name == kind


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        *((empty, "it is empty") for empty in (None, "", "  ", math.nan, [], "#### ", r"\boxed{}")),
        ({"value": 7}, "it is a dict"),
        ("…", "it has neither letters nor digits"),
        ("so " * 200, "it has 599 characters, more than 400"),
        (r"\frac{1}{", "math-verify cannot read it"),
    ],
)
def test_what_cannot_be_judged_has_a_reason(gold, reason):
    assert gold_kind(gold) == (None, reason)


def test_of_several_right_answers_the_first_that_can_be_judged_decides():
    assert gold_kind([None, "Paris", "7"]).name == "text"


def test_a_column_of_numbers_or_truths_is_judged_as_such():
    assert [gold_kind(gold).name for gold in (5, -3, 0.5, 1e-05, True)] == ["number"] * 4 + ["text"]
