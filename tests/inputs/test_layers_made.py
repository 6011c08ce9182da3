"""Layers made quickly are the layers that the constructor makes."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from stepcast.inputs.optable import build_layer, build_recorded
from stepcast.ir.work import Recorded
from stepcast.ir.workload import Layer, Op


def test_a_layer_made_quickly_is_a_layer() -> None:
    ops = (build_recorded(0.5),)
    made, plain = build_layer("a", ops, (), ops, 0.25), Layer("a", ops, (), ops, 0.25)
    assert type(made) is Layer
    assert made == plain
    assert hash(made) == hash(plain)
    assert repr(made) == repr(plain)
    assert replace(made, name="b") == replace(plain, name="b")
    assert pickle.loads(pickle.dumps(made)) == plain


def test_a_time_made_quickly_is_an_op() -> None:
    made, plain = build_recorded(0.5), Op("", Recorded(0.5))
    assert type(made) is Op
    assert type(made.work) is Recorded
    assert made == plain
    assert hash(made) == hash(plain)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (build_layer("a", (), (), (), 0.0), "name"),
        (build_recorded(0.5), "blocking"),
        (build_recorded(0.5).work, "duration_s"),
    ],
)
def test_what_was_made_quickly_does_not_change(made: object, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(made, field, 1)
