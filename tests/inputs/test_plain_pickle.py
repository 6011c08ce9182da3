"""Pickles of plain values are read as Python reads them, and nothing else is."""

import contextlib
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.inputs import plain_pickle
from stepcast.inputs.plain_pickle import load_plain_pickle
from stepcast.inputs.source import FormatError
from stepcast.ir.limits import SHARED_VALUES

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=30,
)


@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert load_plain_pickle(pickle.dumps(value, protocol)) == value


def test_shared_values_are_read() -> None:
    frame = {"name": "step", "filename": "train.py", "line": 3}
    value = {"entries": [{"frames": [frame, frame], "pg": ("0", "default")} for _ in range(100)]}
    assert load_plain_pickle(pickle.dumps(value, 2)) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        load_plain_pickle(b"\x80\x02" + data)


@pytest.mark.parametrize("value", [{1}, b"bytes", 1 + 2j, range(3), {(1, 2): 3}, 2**64, Any])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(FormatError):
        load_plain_pickle(pickle.dumps(value, 4))


@pytest.mark.parametrize(
    ("opcodes", "message"),
    [
        (b"]K\x01K\x02s.", "no list or dictionary"),
        (b"}K\x01a.", "no list or dictionary"),
        (b"K\x05K\x01a.", "no list or dictionary"),
        (b"}(K\x01u.", "keys are not text"),
        (b"}(NK\x01u.", "keys are not text"),
        (b"h\x05.", "refers to value 5"),
        (b"cos\nsystem\n.", "only plain values are read, no code"),
    ],
)
def test_opcodes_that_make_no_plain_value_are_refused(opcodes: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_plain_pickle(b"\x80\x02" + opcodes)


def test_integers_have_64_bits() -> None:
    for value in (2**63 - 1, -(2**63)):
        assert load_plain_pickle(pickle.dumps(value, 2)) == value
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="more than 64 bits"):
            load_plain_pickle(pickle.dumps(value, 2))


def test_a_frame_is_at_most_as_long_as_the_file() -> None:
    whole = pickle.dumps(["x" * 50], 4)
    assert load_plain_pickle(whole) == ["x" * 50]
    with pytest.raises(ValueError, match="cut off"):
        load_plain_pickle(whole[:3] + (len(whole) + 1).to_bytes(8, "little") + whole[11:])


def test_long_texts_that_are_shared_count_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "SHARED_VALUES", replace(SHARED_VALUES, most=1000))
    text = "x" * 10_000
    assert load_plain_pickle(pickle.dumps([text] * 5, 2)) == [text] * 5
    with pytest.raises(ValueError, match=SHARED_VALUES.what):
        load_plain_pickle(pickle.dumps([text] * 5000, 2))
