"""Workloads survive being written as a Chakra trace and read again."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.inputs import simai
from stepcast.inputs.chakra import reader as chakra
from stepcast.inputs.chakra.nodes import NodeType, decode
from stepcast.inputs.chakra.record import encode_workload
from stepcast.inputs.source import Source
from stepcast.ir.layout import Group, Layout
from stepcast.ir.recurrent import RecurrentCells, Scan
from stepcast.ir.types import DType
from stepcast.ir.work import (
    Attention,
    Collective,
    CollectiveKind,
    Direction,
    Elementwise,
    ElementwiseKind,
    GroupedMatmul,
    Matmul,
    Recorded,
    Transfer,
)
from stepcast.ir.workload import FIRST, LAST, Block, Layer, Op, OpPart, Role, Stage, VariedBodies, Workload, vary_blocks
from stepcast.outputs.chakra import files, losses
from tests.shared import ROOT

counts = st.integers(1, 2**40)
sizes = st.integers(0, 2**50)
amounts = st.floats(0, 1e15)
times = st.floats(0, 1e6)


def _scan(groups: int, per_group: int, *sizes: int, backward: bool, dtype: DType) -> Scan:
    batch, seq, head_dim, state, chunk = sizes
    return Scan(batch, seq, groups * per_group, head_dim, state, groups, chunk, backward, dtype)


works = st.one_of(
    st.builds(Recorded, times),
    st.builds(Collective, st.sampled_from(CollectiveKind), sizes, st.sampled_from(Group), st.integers(1, 3)),
    st.builds(Transfer, st.sampled_from(Direction), sizes, st.sampled_from(Group), st.integers(-8, 8)),
    st.builds(Matmul, *[st.integers(1, 2**15)] * 4, st.sampled_from(DType)),
    st.builds(GroupedMatmul, *[st.integers(1, 2**15)] * 4, st.sampled_from(DType)),
    st.builds(Attention, *[st.integers(1, 2**10)] * 7, st.booleans(), st.booleans(), st.sampled_from(DType)),
    st.builds(_scan, *[st.integers(1, 2**5)] * 7, backward=st.booleans(), dtype=st.sampled_from(DType)),
    st.builds(
        Elementwise,
        st.sampled_from(ElementwiseKind),
        st.integers(1, 2**20),
        st.integers(1, 2**20),
        amounts,
        amounts,
        st.booleans(),
        st.sampled_from(DType),
    ),
)
names = st.text(max_size=12)
after = st.lists(names, max_size=2).map(tuple)
ops = st.lists(st.builds(Op, names, works, st.booleans(), after), max_size=3).map(tuple)
notes = st.lists(st.tuples(names, names), max_size=2).map(tuple)
layers = st.builds(Layer, names, ops, ops, ops, times, notes)
blocks = st.builds(Block, st.lists(layers, min_size=1, max_size=3).map(tuple), st.integers(1, 3))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    pp = draw(st.integers(1, 3))
    micro_batches = draw(st.integers(2, 4))

    def stage() -> Stage:
        body = tuple(draw(st.lists(blocks, max_size=3)))
        varied: VariedBodies = ()
        vary = draw(st.booleans())
        if body and vary:
            length = sum(len(block.layers) * block.repeat for block in body)
            chosen = draw(st.dictionaries(st.integers(0, length - 1), layers, max_size=2))
            varied = ((draw(st.sampled_from([FIRST, LAST, *range(micro_batches)])), vary_blocks(body, chosen)),)
        once = st.lists(layers, max_size=2)
        return Stage(body, tuple(draw(once)), tuple(draw(once)), varied)

    uniform = draw(st.booleans())
    return Workload(
        stages=tuple(stage() for _ in range(1 if uniform else pp)),
        layout=Layout(tp=draw(st.integers(1, 8)), dp=draw(st.integers(1, 4)), pp=pp),
        micro_batches=micro_batches,
        boundary_bytes=draw(st.none() | sizes),
        name=draw(names),
        source=draw(names),
        notes=draw(notes),
    )


def written(workload: Workload) -> dict[str, bytes]:
    return dict(files(workload, "w.et"))


def write(workload: Workload) -> bytes:
    """What rank 0 runs."""
    return written(workload)["w.0.et"]


def round_trip(workload: Workload) -> Workload:
    found = written(workload)
    assert all(chakra.looks_like(data[:65536]) for data in found.values())
    return chakra.read_run([Source(name, data) for name, data in found.items()])


@settings(max_examples=25, deadline=None)
@given(workloads())
def test_random_workloads_come_back_equal(workload: Workload) -> None:
    assert round_trip(workload) == workload


@pytest.mark.parametrize("name", ["simai-gpt-13b", "simai-llama-405b"])
def test_examples_come_back_equal(name: str) -> None:
    """On fewer ranks than there are: each has a file, and those of a stage differ in numbers alone."""
    workload = simai.read(Source(ROOT / "examples" / f"{name}.txt"))
    layout = replace(workload.layout, tp=2, dp=2)
    workload = replace(workload, layout=layout, micro_batches=min(2, workload.micro_batches))
    assert round_trip(workload) == replace(workload, warnings=())


def example() -> Workload:
    compute = Op("", Recorded(1.25e-6))
    gather = Op("gather", Collective(CollectiveKind.ALL_GATHER, 1000, Group.TP))
    reduce = Op("reduce", Collective(CollectiveKind.ALL_REDUCE, 64, Group.DP), blocking=False)
    again = Op("again", Collective(CollectiveKind.ALL_REDUCE, 64, Group.DP), blocking=False)
    layer = Layer("mlp", (compute, gather), (compute,), (compute, reduce, again))
    return Workload((Stage((Block((layer,), 2),)),), Layout(tp=8, dp=2), micro_batches=3)


def test_nodes_are_written_out_in_the_order_they_run() -> None:
    nodes = decode(write(example()), "w.et")
    assert len(nodes) == 3 * 2 * 6
    first = [nodes.content(index).name for index in range(12)]
    assert first == ["mlp", "mlp gather"] * 2 + ["mlp", "mlp", "mlp reduce", "mlp again"] * 2
    assert [nodes.content(index).type for index in range(4)] == [NodeType.COMP, NodeType.COMM_COLL] * 2


def test_blocking_ops_form_one_chain_and_others_only_that_of_their_lane() -> None:
    nodes = decode(write(example()), "w.et")
    starts = [0, *nodes.dependency_ends.tolist()]
    waits = [nodes.dependencies[start:end].tolist() for start, end in pairwise(starts)]
    # Node ids count from 1: two forward layers, then backward compute (5, 6), reduce (7), again (8).
    assert waits[:6] == [[], [1], [1, 2], [2, 3], [3, 4], [5]]
    assert waits[6:8] == [[6], [6, 7]]
    assert waits[8] == [6]


def test_an_op_waits_for_those_it_must_come_after() -> None:
    early = Op("fetch", Collective(CollectiveKind.ALL_GATHER, 8, Group.DP), blocking=False)
    used = Op("use", Recorded(1e-3), after=("fetch",))
    layer = Layer("l", (early, Op("", Recorded(1e-3)), used))
    nodes = decode(write(Workload((Stage((Block((layer,)),)),))), "w.et")
    assert nodes.dependencies.tolist() == [1, 2]
    assert nodes.dependency_ends.tolist() == [0, 0, 2]


def test_other_programs_see_microseconds_shards_and_communicators() -> None:
    nodes = decode(write(example()), "w.et")
    assert nodes.durations_us[:2].tolist() == [1, 0]
    assert nodes.content(1).attributes["comm_size"] == 125  # an eighth of the whole buffer
    assert nodes.content(1).attributes["comm_type"] == 2
    assert nodes.content(1).attributes["pg_name"] == "1"
    assert nodes.content(1).attributes["is_cpu_op"] is False


def test_losses_name_what_only_stepcast_reads() -> None:
    said = " ".join(losses(example()))
    assert "microsecond" in said
    assert "shapes" not in said
    assert "warnings" in " ".join(losses(replace(example(), warnings=("odd",))))


def test_layers_that_never_run_come_back() -> None:
    usual, other = Layer("usual", (Op("", Recorded(1.0)),)), Layer("other", (Op("", Recorded(2.0)),))
    stage = Stage((Block((usual,)),), varied=((0, (Block((other,)),)),))
    assert round_trip(Workload((stage,))) == Workload((stage,))


def test_every_field_of_an_op_comes_back() -> None:
    op = Op("a", Recorded(1.0), False, ("b",), 3, True, True, OpPart.PRODUCT)
    layer = Layer("l", (op,), (op,), (op,), 1.5, (("k", "v"),), True, Role.HEAD)
    (found,) = round_trip(Workload((Stage((Block((layer,)),)),))).stages[0].body_layers()
    for each in fields(layer):
        assert getattr(found, each.name) == getattr(layer, each.name)
    for each in fields(op):
        assert getattr(found.forward[0], each.name) == getattr(op, each.name)


def test_equal_layers_come_back_as_one_object() -> None:
    layers = [Layer("same", (Op("", Recorded(1.0)),)) for _ in range(3)]
    found = round_trip(Workload((Stage((Block(tuple(layers)),)),))).stages[0].body_layers()
    assert found[0] is found[1] is found[2]


def test_a_long_record_takes_little_of_each_file() -> None:
    """A thousand layers that differ in their times alone, as a profiled run has them."""
    layers = tuple(Layer(f"layer {i}", (Op("", Recorded(1e-3 + i * 1e-7)),)) for i in range(1000))
    workload = Workload((Stage((Block(layers),)),), micro_batches=8)
    assert len(encode_workload(workload)) < len(write(workload)) / 10


def test_the_cells_of_an_lstm_come_back() -> None:
    """Four gates of 8 from 8 wide states: 2 x 3 steps x 2 sequences x 32 x 8 FLOPs."""
    workload = Workload((Stage((Block((Layer("lstm", (Op("", RecurrentCells(3, 2, 8, 8, 4)),)),)),)),))
    assert round_trip(workload) == workload
    assert decode(write(workload), "w.et").content(0).attributes["num_ops"] == 3072


def test_other_programs_see_the_bytes_that_costs_count() -> None:
    """Backward of attention: queries of 512 KiB six times, as their gradients are summed by head, keys twice."""
    scan = Scan(1, 512, 8, 64, 16, 1, 128, backward=True)
    expected: dict[Attention | Scan, float] = {
        Attention(2, 128, 128, 8, 2, 64, 64, True, True): (6 * 512 + 2 * 128) * 1024,
        scan: scan.moved_bytes,
    }
    for work, size_bytes in expected.items():
        workload = Workload((Stage((Block((Layer("one", (Op("", work),)),)),)),))
        assert decode(write(workload), "w.et").content(0).attributes["tensor_size"] == round(size_bytes)
