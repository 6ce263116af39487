"""Words and units beside a number, and notations that are easily misread: what is paid, and what is not."""

from __future__ import annotations

import pytest

from trimtab.grading import grade

SCALING = (
    "eighths|lakh|billionths|kilo|M|k|K|MM|ppm|negative|doubled|inverse|squared|tens|dozen|pairs|fold|th|am|mod|factorial|"
    "quarters|halves|grand|bn|milli|cents per dollar|per hundred|parts per million|or so|below zero|percentage points|"
    "dozen eggs|degrees below zero|square root|ways..|foo|times ten|and a half|BC|over|minus"
)
HARMLESS = (
    "cm|meters|km/h|m/s^2|miles per hour|square units|sq. units|cubic feet|kWh|N|degrees Celsius|apples|dollars|"
    "years old|distinct integers|right triangles|ordered pairs|cups of flour|ways.|USD|minutes"
)


def kind(answer: str, truth: str) -> str:
    return grade(rf"\boxed{{{answer}}}", truth).kind


@pytest.mark.parametrize("word", SCALING.split("|"))
def test_a_word_that_is_not_known_to_be_harmless_is_refused(word: str) -> None:
    for form in (rf"7\text{{ {word}}}", f"7 {word}", rf"\mathbf{{7}}\ \mathrm{{{word}}}"):
        assert kind(form, "7") != "correct", form
    assert kind(rf"x = 7\text{{ {word}}}", "7") != "correct"
    assert kind(rf"(7\text{{ {word}}}, 8)", "(7, 8)") != "correct"
    assert kind(rf"2x\text{{ {word}}}", "2x") != "correct"


@pytest.mark.parametrize("word", SCALING.split("|"))
def test_such_a_word_of_the_truth_must_be_there(word: str) -> None:
    truth = rf"7\text{{ {word}}}"
    assert kind(truth, truth) == "correct"
    if word not in ("foo", "cents per dollar", "ways.."):  # a truth's own unit, known or not, may be left out
        assert kind("7", truth) != "correct"


@pytest.mark.parametrize("unit", HARMLESS.split("|"))
def test_a_unit_may_be_added_or_left_out(unit: str) -> None:
    answer = rf"7\text{{ {unit}}}"
    assert [kind(answer, "7"), kind("7", answer), kind(answer, answer)] == ["correct"] * 3
    assert kind(answer, r"7\text{ light years}") == "wrong"


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"7\text{ am}", r"7\text{ pm}"),
        ("7 a.m.", "7 p.m."),
        (r"7\text{ girls}", r"7\text{ boys}"),
        (r"7\text{ km}", r"7\text{ m}"),
        ("2, 1", "x=1, y=2"),
        (r"\{2, 1\}", "x=1, y=2"),
        ("x=2, y=1", "x=1, y=2"),
        ("3!!", "720"),
        ("3!!!", "720"),
        ("1, 234", "1,234"),
        ("1,234", "1, 234"),
        ("0,125", "125"),
        ("7..", "7"),
        ("7.,", "7"),
        ("]1,2[", "[1,2]"),
        ("-x<3", "x>3"),
        ("-x<-3", "x<3"),
        ("2x=6", "x=3"),
        (r"x<1 \text{ and } x>3", r"x<1 \text{ or } x>3"),
        (r"2\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}^T"),
        (r"\textcolor{red}{6}7", "7"),
        (r"8, 7", r"7\text{ apples}, 8\text{ pears}"),
        (r"30\text{ hours }2\text{ minutes}", r"2\text{ hours }30\text{ minutes}"),
        (r"45^\circ", r"30^\circ 15'"),
        (r"p \lor q", r"p \land q"),
        (r"x=1 \text{ and } y=2", r"x=1 \text{ or } y=2"),
        ("1:3:2", "1:2:3"),
        ("2f(x)", "f(2x)"),
        (r"\phantom 7", "7"),
        ("x>3..", "x>3"),
        ("]1,2[", "1, 2"),
        (r"7\text{ per}\text{cent}", "7"),
        (r"\binom{3}{4}", "7"),
        ("E[X]^2", "E[X^2]"),
        ("\u202e21\u202c", "21"),
        (r"\cancel{7}", "7"),
        ("4\u200b2", "42"),
        ("4²", "42"),
    ],
)
def test_what_is_not_the_same_is_not_paid(answer: str, truth: str) -> None:
    assert kind(answer, truth) in ("wrong", "ambiguous")


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("]1,200[", "(1,200)"),
        (r"]-\infty,3] \cup [5,6[", r"(-\infty,3] \cup [5,6)"),
        (r"x \in ]1,2[", "(1,2)"),
        ("-x<-3", "x>3"),
        (r"-3 \le -x < 1", r"(-1,3]"),
        (r"x>1 \text{ and } x<3", "(1,3)"),
        (r"x>3 \text{ or } x<1", r"(-\infty,1)\cup(3,\infty)"),
        (r"\mathbb{R}", r"(-\infty,\infty)"),
        (r"2\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\4\end{pmatrix}"),
        (r"-\frac{1}{2}\begin{bmatrix}x\\2\end{bmatrix}", r"\begin{pmatrix}-x/2\\-1\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}^T", r"\left[\begin{array}{c}1\\2\end{array}\right]"),
        ("5!!", "15"),
        ("(3!)!", "720"),
        ("y=2, x=1", "x=1, y=2"),
        ("1, 2", "x=1, y=2"),
        ("(x,y)=(1,2)", "x=1, y=2"),
        ("x=1, y=2", "(1,2)"),
        ("3=x", "x=3"),
        ("100, 10, 1", "1,10,100"),
        (r"\textcolor{red}{7.0}", "7"),
        (r"{\color{blue}\boldsymbol{7}}", "7.0"),
        (r"\textbf{7 cm}", "7"),
        (r"\operatorname{arcsin}(x)", r"\arcsin x"),
        ("７", "7"),
        ("10⁻¹²", "10^{-12}"),
        ("2⅛", "2.125"),
        ("101₂", "101_2"),
        (r"101\text{ base }2", "101_{two}"),
        ("1\u202f234", "1234"),
        (r"0.1\dot{6}", r"\frac16"),
        (r"0.\dot{1}4285\dot{7}", r"\frac17"),
        ("0.(3)", r"\frac13"),
        (r"25°C", "25"),
        (r"£7", r"7\text{ pounds}"),
        ("7 m/s", "7"),
        ("7:00 p.m.", "7 pm"),
        ("f(2x)", "f(x+x)"),
        (r"\{x \mid 1<x<2\}", "(1,2)"),
        (r"\begin{cases}x=1\\y=2\end{cases}", "y=2, x=1"),
        (r"7\text{ million dollars}", "7000000"),
        (r"\text{The answer is }7.", "7"),
        (r"\text{Area} = 7\text{ cm}^2", "7"),
        ("√12", r"2\sqrt{3}"),
        (r"h(a+b)/2", r"\frac{1}{2}(a+b)h"),
        (r"8.24", r"\approx 8.24 \text{ mph}"),
    ],
)
def test_the_same_in_another_notation_is_paid(answer: str, truth: str) -> None:
    assert kind(answer, truth) == "correct"


def test_boxed_tells_a_list_from_thousands_too() -> None:
    assert grade(r"\boxed{1, 234}", "1,234", "boxed").kind == "wrong"
    assert grade(r"\boxed{(1, 234)}", "(1,234)", "boxed").kind == "correct"
