"""Specs: which points they are, and what is wrong with those that are none."""

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.inputs.expression import Expression
from stepcast.inputs.source import FormatError
from stepcast.sweep.spec import read_spec


def points(text: str) -> list[dict[str, object]]:
    return [words for _, words in read_spec(text).points()]


def test_axes_multiply_and_lists_of_one_axis_vary_together() -> None:
    text = '[[axis]]\ntp = [1, 2]\n[[axis]]\ncluster = ["x", "y"]\nprice = [2, 3.5]\n[fixed]\nglobal-batch = 64'
    assert points(text) == [
        {"global_batch": 64, "cluster": cluster, "price": price, "tp": tp}
        for cluster, price in (("x", 2), ("y", 3.5))
        for tp in (1, 2)
    ]


def test_rows_need_not_have_the_same_words() -> None:
    assert points("[[axis]]\nrows = [{tp = 8, pp = 2}, {micro-batch = 4}]") == [{"tp": 8, "pp": 2}, {"micro_batch": 4}]


def test_a_range_doubles() -> None:
    assert [each["gpus"] for each in points('[[axis]]\ngpus = "8..100"')] == [8, 16, 32, 64]


def test_a_filter_leaves_points_out_and_keeps_their_places() -> None:
    text = 'where = "tp * pp <= 4 and not tp == 3"\n[[axis]]\ntp = [1, 2, 3]\n[[axis]]\npp = [1, 2, 4]'
    spec = read_spec(text)
    kept = dict(spec.points())
    assert [(each["tp"], each["pp"]) for each in kept.values()] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
    assert all(spec.point(position) == words for position, words in kept.items())


def test_no_axis_is_one_point() -> None:
    assert points('[fixed]\nmodel = "a"') == [{"model": "a"}]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_combination_has_a_position_of_its_own(lengths: Sequence[int]) -> None:
    text = "".join(f"[[axis]]\nx{at} = {list(range(length))}\n" for at, length in enumerate(lengths))
    found = [tuple(sorted(each.items())) for each in points(text)]
    size = 1
    for length in lengths:
        size *= length
    assert len(found) == len(set(found)) == size == read_spec(text).size


BAD = {
    "nothing = 1": "'nothing' is not part",
    'ask = "guess"': "expected one of predict, search, plan",
    "fixed = 3": "fixed is not a table",
    "axis = 3": "axis is not a list of tables",
    "[[axis]]": "axis 1: has no values",
    "[[axis]]\ntp = []": "axis 1: has no values",
    '[[axis]]\ngpus = "64..8"': "axis 1: has no values",
    '[[axis]]\ngpus = "0..8"': "axis 1: has no values",
    "[[axis]]\ntp = [1, 2]\npp = [1]": "differ in length: 2 of tp, 1 of pp",
    "[[axis]]\nrows = []": "axis 1: has no values",
    "[[axis]]\nrows = [1]": "rows is a list of tables",
    "[[axis]]\nrows = [{tp = 1}]\npp = [1]": "rows is a list of tables",
    "[[axis]]\ntp = [[1]]": "is not text, a number, true or false",
    "[fixed]\ntp = {a = 1}": "is not text, a number, true or false",
    "[[axis]]\ntp = [1]\n[[axis]]\ntp = [2]": "two axes set 'tp'",
    "where = 3": "where is not text",
    'where = "tp"': "no point has 'tp'",
    'where = "1 +"': "is not an expression",
    "where = \"__import__('os')\"": "call is not allowed",
    'where = "9 ** 9"': "binop is not allowed",
    "[[axis]]\n"
    + "x = ["
    + "1, " * 4000
    + "1]\n[[axis]]\ny = ["
    + "1, " * 4000
    + "1]": "points of a sweep: more than 10,000,000",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_said(text: str) -> None:
    with pytest.raises(FormatError, match=BAD[text].replace("[", r"\[").replace("(", r"\(")):
        read_spec(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('tp * "a" == 1', "text can only be compared"),
        ("tp / 0 > 1", "division by zero"),
        ("tp < model", "not supported"),
    ],
)
def test_what_a_filter_cannot_work_out_is_said(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        Expression(text, ("tp", "model"))({"tp": 1, "model": "a"})


def test_and_and_or_return_operands_as_python_does() -> None:
    """Names that a point lacks are None, so that "cp or 1" is its default."""
    text = 'where = "(cp or 1) > 1"\n[[axis]]\nrows = [{tp = 1}, {cp = 2}, {cp = 1}, {cp = 4}]'
    assert points(text) == [{"cp": 2}, {"cp": 4}]
    text = 'where = "gpus // (tp and pp or 2) == 4"\n[[axis]]\nrows = [{gpus = 8}, {gpus = 8, tp = 4, pp = 4}]'
    assert points(text) == [{"gpus": 8}]
    for text in ("0 or '' or 3", "2 and 3", "0 and 3", "'' or 0", "1 and 0 or 5"):
        assert Expression(text).value({}) == eval(text), text


def test_what_and_and_or_do_not_need_is_not_worked_out() -> None:
    assert Expression("tp == 1 or 8 % (tp - 1) == 0")({"tp": 1})
    assert not Expression("tp != 1 and 8 % (tp - 1) == 0")({"tp": 1})


@given(st.text("tp0123456789+-*/%()<>=! andorit\"',[]", max_size=30))
def test_any_text_is_a_filter_or_told_why_not(text: str) -> None:
    with contextlib.suppress(FormatError):
        assert Expression(text, ("tp",))({"tp": 3}) in (True, False)


def test_points_of_a_very_large_sweep_are_counted_from_some() -> None:
    """Ten million would take a minute to look at."""
    axes = "".join(f"[[axis]]\n{name} = {list(range(200))}\n" for name in ("tp", "pp", "cp"))
    spec = read_spec(f'where = "tp < 100 and pp < 50"\n{axes}')
    found, exact = spec.count_points()
    assert not exact
    assert found == pytest.approx(spec.size / 8, rel=0.02)
    assert read_spec(axes).count_points() == (spec.size, True)
    few = read_spec('where = "tp < 3"\n[[axis]]\ntp = [1, 2, 3]\n')
    assert few.count_points() == (2, True)


def test_a_limit_sees_every_value_of_every_axis() -> None:
    """Steps of a whole part of the points would meet the same values again and again."""
    spec = read_spec(
        "[[axis]]\nmodel = ['a', 'b', 'c']\n[[axis]]\ntp = [1, 2, 4, 8]\n[[axis]]\npp = [1, 2, 4, 8]\n"
        "[[axis]]\nmicro-batch = [1, 2, 4]\n[[axis]]\nseq = [1, 2, 4, 8]"
    )
    assert spec.size == 576
    some = dict(spec.points(12))
    assert len(some) == 12
    for name in spec.names:
        assert len({words[name] for words in some.values()}) >= 3, name
    assert set(some) < set(dict(spec.points(40))), "a larger limit keeps them"
    assert [at for at, _ in spec.points(576)] == list(range(576))
