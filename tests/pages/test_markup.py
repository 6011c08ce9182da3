"""Text stays text, whatever is in it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.views.document import ChartFrame, data_block, nice_ticks, shorten
from stepcast.views.markup import Markup, join, tag, text
from stepcast.views.view import Axis, Dot
from tests.pages.parsed import parsed


def test_text_is_escaped_and_markup_is_not_escaped_twice() -> None:
    inner = tag("b", "1 < 2 & 'x'")
    assert inner == "<b>1 &lt; 2 &amp; &#x27;x&#x27;</b>"
    assert tag("p", inner, [" and ", 3], None, False) == f"<p>{inner} and 3</p>"


def test_attributes_are_escaped_and_left_out() -> None:
    made = tag("a", "x", class_="one", aria_label='" onload="boo', data_row=3, hidden=True, title=None, lang=False)
    assert made == '<a class="one" aria-label="&quot; onload=&quot;boo" data-row="3" hidden>x</a>'


@given(st.text(max_size=80))
def test_any_text_comes_back_as_one_text(words: str) -> None:
    page = parsed(tag("p", words).encode("utf-8", "backslashreplace"))
    assert [name for name, _ in page.elements] == ["p"]
    assert parsed(tag("p", data_tip=words).encode("utf-8", "backslashreplace")).elements[0][0] == "p"


def test_what_turns_or_hides_text_is_spelt_out() -> None:
    assert text("a\u202eb\x1b[31m\n") == "a\\u202eb\\x1b[31m\\n"


def test_overlong_text_keeps_its_ends_and_says_so() -> None:
    shown = text("a" * 9_000 + "z" * 1_000)
    assert len(shown) < 700
    assert shown.startswith("aaa")
    assert shown.endswith("zzz")
    assert "9,400 more" in shown


def test_data_blocks_end_where_they_should() -> None:
    block = data_block(
        "facts", {"name": "</script><script>alert(1)</script>", "line": "\u2028", "n": [1.5, None, float("nan")]}
    )
    assert block.count("</script>") == 1
    page = parsed(block.encode())
    assert page.block("facts") == {
        "name": "</script><script>alert(1)</script>",
        "line": "\u2028",
        "n": [1.5, None, None],
    }


@pytest.mark.parametrize(("low", "high", "about"), [(0, 1, 4), (0, 4.66, 2), (0, 80, 3), (0.7, 0.71, 4), (3, 3, 4)])
def test_ticks_are_round_and_within(low: float, high: float, about: int) -> None:
    ticks = nice_ticks(low, high, about)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert len(ticks) <= about + 2
    assert len({round(b - a, 12) for a, b in pairwise(ticks)}) <= 1


def test_round_numbers_are_short() -> None:
    assert [shorten(each) for each in ("250.00 ms", "1.500 s", "100", "0.5", "20 days")] == [
        "250 ms",
        "1.5 s",
        "100",
        "0.5",
        "20 days",
    ]


def test_points_lie_where_their_values_are() -> None:
    frame = ChartFrame(Axis(1, 100, str, "x"), Axis(10, 1000, str, "y"), log=True)
    assert frame.x(10) == pytest.approx(50)
    assert frame.y(1000) == pytest.approx(0)
    dot = frame.dot(Dot(100, 10, "compute"))
    assert 'cx="100.000%"' in dot
    assert 'cy="100.000%"' in dot
    assert join([dot]) == dot == Markup(dot)
