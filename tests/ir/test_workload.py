"""Workloads check themselves, and fold what repeats without changing what runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.inputs.simai import fold_layers, fold_micro_batches
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind, Matmul, Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload, vary_blocks


def layer(name: str, seconds: float = 1.0) -> Layer:
    return Layer(name, forward=(Op("", Recorded(seconds)),))


def forward_s(row: Layer) -> float:
    work = row.forward[0].work
    assert isinstance(work, Recorded)
    return work.duration_s


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=60)


@given(NAMES)
def test_folding_keeps_every_layer_in_order(names: list[str]) -> None:
    layers = [layer(name) for name in names]
    assert Stage(fold_layers(layers)).body_layers() == tuple(layers)


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8, unique=True), st.integers(2, 50))
def test_whole_repeats_are_stored_once(names: list[str], count: int) -> None:
    blocks = fold_layers([layer(name) for name in names] * count)
    assert [(len(block.layers), block.repeat) for block in blocks] == [(len(names), count)]


@given(NAMES, st.integers(1, 6), st.data())
def test_micro_batches_fold_with_their_variations(names: list[str], count: int, data: st.DataObject) -> None:
    body = [layer(name) for name in names] * count
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] = layer(body[place].name, 7.0)
    folded = fold_micro_batches(body, count)
    if folded is not None:
        usual = fold_layers(folded.base)
        stage = Stage(usual, varied=tuple((which, vary_blocks(usual, rows)) for which, rows in folded.varied.items()))
        written = [row for micro_batch in range(count) for row in stage.body_layers(micro_batch)]
        assert written == body
        counted = sum(forward_s(row) * times for row, times in stage.counted_layers(count))
        assert counted == pytest.approx(sum(map(forward_s, body)))


def test_layout_sizes() -> None:
    layout = Layout(tp=8, cp=2, ep=4, dp=8, pp=4, vpp=2)
    assert layout.gpus == 512
    assert layout.size(Group.DP) == 16
    assert layout.size(Group.EXPERT_DP) == 4
    assert layout.size(Group.EMBEDDING) == 2
    assert Layout().size(Group.EMBEDDING) == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: Layout(tp=0),
        lambda: Layout(dp=-2),
        lambda: Layout(tp=2.0),  # type: ignore[arg-type]
        lambda: Recorded(-1.0),
        lambda: Recorded(float("nan")),
        lambda: Recorded(float("inf")),
        lambda: Matmul(1, 0, 1),
        lambda: Collective(CollectiveKind.ALL_REDUCE, -1, Group.DP),
        lambda: Block((), 1),
        lambda: Block((layer("a"),), 0),
        lambda: Layer("a", process_s=float("nan")),
        lambda: Workload((Stage((Block((layer("a"),)),)),) * 3, Layout(pp=2)),
        lambda: Workload((Stage((Block((layer("a"),)),)),), micro_batches=0),
    ],
)
def test_impossible_values_are_refused(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"must|needs"):
        build()


@pytest.mark.parametrize(
    ("layer_name", "op_name", "told"),
    [
        ("experts up", "up weight gradient", "experts up weight gradient"),
        ("attention core", "core gradient", "attention core gradient"),
        ("mlp", "mlp norm", "mlp norm"),
        ("attention qkv", "qkv", "attention qkv"),
        ("experts", "up", "experts up"),
    ],
)
def test_names_say_no_word_twice(layer_name: str, op_name: str, told: str) -> None:
    assert layer(layer_name).op_name(Op(op_name, Recorded(1.0))) == told
