"""Chakra traces of other programs, and clear errors for damaged ones."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.inputs.chakra import reader as chakra
from stepcast.inputs.chakra.nodes import KNOWN_ATTRIBUTES, decode
from stepcast.inputs.chakra.protobuf import (
    SIGNED,
    STRUCTS,
    AttributeKind,
    WireError,
    attribute,
    bytes_field,
    delimit,
    field,
    number_field,
    read_attribute,
    read_varint,
    varint,
)
from stepcast.inputs.chakra.record import encode_workload, write_head
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import recognise
from stepcast.ir.layout import Group, Layout
from stepcast.ir.limits import UNPACKED
from stepcast.ir.work import Collective, CollectiveKind, Direction, Recorded, Transfer
from stepcast.ir.workload import Layer, Op, Workload
from stepcast.outputs.chakra import files
from tests.inputs.fuzz import FUZZ, check_reader, mutations
from tests.outputs.test_chakra import example, write

METADATA = delimit(
    bytes_field(1, b"0.0.4") + bytes_field(2, attribute("schema", AttributeKind.STRING, "1.1.0-chakra.0.0.4"))
)
COMP, SEND, RECV, COLL, META = 4, 5, 6, 7, 1


def node(
    number: int, kind: int, name: str = "n", waits: tuple[int, ...] = (), us: int = 0, *attributes: bytes
) -> bytes:
    message = number_field(1, number) + bytes_field(2, name.encode()) + number_field(3, kind)
    if waits:
        message += bytes_field(5, b"".join(varint(wait) for wait in waits))
    if us:
        message += number_field(7, us)
    return delimit(message + b"".join(bytes_field(10, body) for body in attributes))


def coll(kind: int, size: int, group: str = "") -> tuple[bytes, ...]:
    found = [attribute("comm_type", AttributeKind.INT64, kind), attribute("comm_size", AttributeKind.INT64, size)]
    return (*found, attribute("pg_name", AttributeKind.STRING, group)) if group else tuple(found)


def read_trace(source: Source) -> Workload:
    return chakra.read_run([source])


def read(*messages: bytes) -> Workload:
    return read_trace(Source("trace.et", METADATA + b"".join(messages)))


def layers(workload: Workload) -> tuple[Layer, ...]:
    return workload.stages[0].body_layers()


def op(layer: Layer) -> Op:
    (only,) = layer.forward
    return only


scalars: dict[AttributeKind, st.SearchStrategy[Any]] = {
    AttributeKind.DOUBLE: st.floats(allow_nan=False),
    AttributeKind.FLOAT: st.floats(allow_nan=False, width=32),
    AttributeKind.INT32: st.integers(-(2**31), 2**31 - 1),
    AttributeKind.INT64: st.integers(-(2**63), 2**63 - 1),
    AttributeKind.UINT32: st.integers(0, 2**32 - 1),
    AttributeKind.UINT64: st.integers(0, 2**64 - 1),
    AttributeKind.SINT32: st.integers(-(2**31), 2**31 - 1),
    AttributeKind.SINT64: st.integers(-(2**63), 2**63 - 1),
    AttributeKind.FIXED32: st.integers(0, 2**32 - 1),
    AttributeKind.FIXED64: st.integers(0, 2**64 - 1),
    AttributeKind.SFIXED32: st.integers(-(2**31), 2**31 - 1),
    AttributeKind.SFIXED64: st.integers(-(2**63), 2**63 - 1),
    AttributeKind.BOOL: st.booleans(),
    AttributeKind.STRING: st.text(max_size=20),
    AttributeKind.BYTES: st.binary(max_size=20),
}


def encode(kind: AttributeKind, value: Any) -> bytes:
    """Return the bytes of a value of any kind, after its tag and length."""
    if isinstance(value, str | bytes):
        return value.encode() if isinstance(value, str) else value
    if kind in STRUCTS:
        return STRUCTS[kind].pack(value)
    if kind in SIGNED:
        value = 2 * value if value >= 0 else -2 * value - 1
    return varint(value & (2**64 - 1))


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("kind", AttributeKind)
@given(data=st.data())
def test_attributes_of_every_kind_come_back(kind: AttributeKind, data: st.DataObject) -> None:
    head, value = bytes_field(1, b"a"), data.draw(scalars[kind])
    body = encode(kind, value)
    if kind in STRUCTS:
        assert read_attribute(head + field(kind, 1 if len(body) == 8 else 5) + body) == ("a", value)
    elif kind in SIGNED:
        assert read_attribute(head + field(kind, 0) + body) == ("a", value)
    else:
        assert read_attribute(attribute("a", kind, value)) == ("a", value)
    # Strings of a list are fields of their own, numbers are packed.
    values = data.draw(st.lists(scalars[kind], min_size=1, max_size=4))
    items = [encode(kind, item) for item in values]
    packed = items if kind >= AttributeKind.STRING else [b"".join(items)]
    entries = b"".join(bytes_field(1, item) for item in packed)
    assert read_attribute(head + bytes_field(kind + 1, entries)) == ("a", tuple(values))


def test_attributes_are_encoded_as_protobuf_libraries_do() -> None:
    # From Google's encoder, for AttributeProto(name="comm_size", int64_val=1048576) and bool_val=False.
    assert attribute("comm_size", AttributeKind.INT64, 1048576).hex() == "0a09636f6d6d5f73697a6548808040"
    assert attribute("is_cpu_op", AttributeKind.BOOL, False).hex() == "0a0969735f6370755f6f70d80100"
    assert attribute("x", AttributeKind.INT64, -1).hex() == "0a017848ffffffffffffffffff01"


def test_unpacked_lists_are_read_too() -> None:
    body = bytes_field(1, b"involved_dim") + bytes_field(28, field(1, 0) + b"\1" + field(1, 0) + b"\0")
    assert read_attribute(body) == ("involved_dim", (True, False))


@given(st.integers(0, 2**64 - 1))
def test_varints_come_back(value: int) -> None:
    assert read_varint(varint(value), 0) == (value, len(varint(value)))


def test_endless_varint_is_an_error() -> None:
    with pytest.raises(WireError, match="ten bytes"):
        read_varint(b"\xff" * 11, 0)


def test_compute_collectives_and_messages() -> None:
    workload = read(
        node(1, COMP, "fwd", (), 250, attribute("num_ops", AttributeKind.INT64, 7)),
        node(2, COLL, "grads", (1,), 0, *coll(0, 4096, "tp")),
        node(3, SEND, "send", (2,), 0, attribute("comm_size", AttributeKind.INT64, 8), *peers(2, 4)),
        node(4, RECV, "recv", (), 0, attribute("comm_size", AttributeKind.INT64, 8), *peers(0, 2)),
        node(5, 2, "load", (4,), 3),
    )
    assert [op(layer).work for layer in layers(workload)] == [
        Recorded(250e-6),
        Collective(CollectiveKind.ALL_REDUCE, 4096, Group.TP),
        Transfer(Direction.SEND, 8, Group.WORLD, 2),
        Transfer(Direction.RECEIVE, 8, Group.WORLD, -2),
        Recorded(3e-6),
    ]
    assert layers(workload)[0].notes == (("num_ops", "7"),)
    assert [op(layer).blocking for layer in layers(workload)] == [True, False, False, True, True]
    assert op(layers(workload)[2]).after == ("node 2",)


def peers(source: int, destination: int) -> tuple[bytes, ...]:
    return attribute("comm_src", AttributeKind.INT32, source), attribute("comm_dst", AttributeKind.INT32, destination)


def test_a_collective_blocks_where_the_next_computation_waits_for_it() -> None:
    workload = read(
        node(1, COLL, "first", (), 0, *coll(0, 1)),
        node(2, COLL, "second", (1,), 0, *coll(7, 1)),
        node(3, COMP, "compute", (2,), 1),
        node(4, COLL, "last", (3,), 0, *coll(6, 1)),
    )
    found = [op(layer) for layer in layers(workload)]
    assert [each.blocking for each in found] == [False, True, True, False]
    assert [each.after for each in found] == [(), ("node 1",), (), ()]
    assert found[0].name == "node 1"


def test_overlapped_communication_is_waited_for_where_it_is_used() -> None:
    workload = read(
        node(1, COLL, "gather", (), 0, *coll(0, 1)),
        node(2, COMP, "beside", (), 1),
        node(3, META, "label", (1,)),
        node(4, COMP, "user", (2, 3), 1),
        node(5, COMP, "later user", (1, 4), 1),
    )
    found = [op(layer) for layer in layers(workload)]
    assert [each.blocking for each in found] == [False, True, True, True]
    assert [each.after for each in found] == [(), (), ("node 1",), ()]


def test_nodes_run_after_what_they_depend_on() -> None:
    workload = read(node(3, COMP, "c", (2,), 1), node(2, COMP, "b", (1,), 1), node(1, COMP, "a", (), 1))
    assert [layer.name for layer in layers(workload)] == ["a", "b", "c"]


def test_process_groups_of_pytorch_give_sizes_groups_and_layout() -> None:
    listed = (
        '["[{\\"pg_name\\": \\"0\\", \\"pg_desc\\": \\"default_pg\\", \\"pg_size\\": 8, \\"ranks\\": []}, '
        '{\\"pg_name\\": \\"1\\", \\"pg_desc\\": \\"mesh_tp\\", \\"pg_size\\": 4, \\"ranks\\": [0, 1, 2, 3]}]"]'
    )
    init = delimit(
        number_field(1, 9)
        + bytes_field(2, b"## process_group:init ##")
        + number_field(3, META)
        + bytes_field(8, bytes_field(1, listed.encode()))
    )
    workload = read(init, node(10, COLL, "gather", (), 0, *coll(2, 1000, "1")))
    assert op(layers(workload)[0]).work == Collective(CollectiveKind.ALL_GATHER, 4000, Group.TP)
    assert (workload.layout.tp, workload.layout.dp) == (4, 2)


def test_host_ops_are_left_out_beside_device_ops() -> None:
    host, device = attribute("is_cpu_op", AttributeKind.BOOL, True), attribute("is_cpu_op", AttributeKind.BOOL, False)
    workload = read(node(1, COMP, "aten::mm", (), 9, host), node(2, COMP, "gemm", (1,), 5, device))
    assert [layer.name for layer in layers(workload)] == ["gemm"]
    assert "1 host ops" in workload.warnings[0]
    assert len(layers(read(node(1, COMP, "a", (), 9, host), node(2, COMP, "b", (1,), 5, host)))) == 2


def test_fields_in_any_order_and_unknown_ones_are_read() -> None:
    message = (
        bytes_field(10, attribute("comm_size", AttributeKind.INT64, 64))
        + number_field(5, 1)
        + number_field(3, COLL)
        + bytes_field(99, b"later schema")
        + field(100, 1)
        + bytes(8)
        + number_field(1, 2**63)
        + bytes_field(2, b"odd")
    )
    workload = read(node(1, COMP, "a", (), 1), delimit(message))
    assert op(layers(workload)[1]).work == Collective(CollectiveKind.ALL_REDUCE, 64, Group.WORLD)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((node(1, COMP, waits=(2,), us=1), node(2, COMP, waits=(1,), us=1)), "depends on itself"),
        ((node(1, COMP, waits=(1,), us=1),), "depends on itself"),
        ((node(1, COMP, waits=(5,), us=1),), "node 1 depends on node 5, which is not there"),
        ((node(1, COMP, us=1), node(1, COMP, us=1)), "node 2 has the id 1 of node 1"),
        ((node(1, COMP, us=1), node(2, 8, us=1)), "message 3 at byte .*type 8"),
        ((node(1, COLL, "c", (), 0, *coll(99, 1)),), "collective type 99"),
        ((node(1, COLL, "c", (), 0, *coll(0, -1)),), "comm_size -1"),
        ((node(1, COMP, us=1)[:-1],), "message 2 at byte .* more"),
        ((b"\x80",), "message 2 at byte .*ends within a number"),
        ((delimit(b"\x08" + b"\xff" * 11),), "message 2 at byte .*ten bytes"),
        ((delimit(number_field(1, 1) + b"\x12\x7fab"),), "longer than its message"),
        ((delimit(bytes_field(2, b"\xff\xfe") + number_field(3, COMP)),), "not UTF-8"),
        ((), "no nodes that compute"),
    ],
)
def test_damage_is_named(messages: tuple[bytes, ...], expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        read(*messages)


def own(record: bytes) -> Source:
    return Source("w.et", write_head(record, 0, b""))


def test_changed_nodes_of_our_own_trace_are_an_error() -> None:
    data = write(example())
    with pytest.raises(FormatError, match=r"w\.et: its nodes were changed"):
        read_trace(Source("w.et", data[:-1] + bytes([data[-1] ^ 1])))
    with pytest.raises(FormatError, match=r"w\.et: its nodes were changed"):
        read_trace(Source("w.et", data + node(99, COMP, us=1)))


def test_a_trace_of_an_earlier_stepcast_is_to_be_written_again() -> None:
    head = delimit(bytes_field(2, attribute("stepcast.workload", AttributeKind.STRING, '{"version":1}')))
    with pytest.raises(FormatError, match=r"earlier version of stepcast.*write it again"):
        read_trace(Source("w.et", head + node(1, COMP, us=1)))


RECORDED = json.loads(zlib.decompress(encode_workload(example())))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 99}, "version 99; expected 3: write it again"),
        ({"stages": [7]}, "damaged: tuple index|damaged: list index"),
        ({"stages": [-1]}, "Expected `int` >= 0"),
        ({"micro_batches": 10**12}, "micro-batches of a step: more than"),
        ({"micro_batches": 0}, "micro_batches must be"),
        ({"layout": 3}, "Expected `object`"),
        ({"tables": RECORDED["tables"] | {"stages": [{"body": [[[0], 10**15]]}]}}, "nodes of the stages"),
        (
            {"tables": RECORDED["tables"] | {"stages": [{"body": [], "varied": [[0, [[[0], 5]]]]}]}},
            "differ in their number of layers",
        ),
        (
            {"tables": RECORDED["tables"] | {"stages": [{"body": [], "varied": [[-1, []]]}]}},
            "a micro-batch has a negative number",
        ),
        ({"tables": RECORDED["tables"] | {"works": [["Magic", {}]]}}, "damaged: 'Magic'"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(FormatError, match=rf"^w\.et: .*({expected})") as caught:
        read_trace(own(zlib.compress(json.dumps(RECORDED | changes).encode())))
    assert "\n" not in str(caught.value)


def test_a_record_that_is_cut_off_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = encode_workload(example())
    for damaged in (record[:-1], b"", b"\0" * 9):
        with pytest.raises(FormatError, match=r"^w\.et: stepcast\.workload is damaged"):
            read_trace(own(damaged))
    monkeypatch.setattr("stepcast.inputs.chakra.record.UNPACKED", replace(UNPACKED, most=100))
    with pytest.raises(FormatError, match="compressed file, unpacked"):
        read_trace(own(record))


def test_attributes_names_and_dependencies_become_columns() -> None:
    random = Random(1)
    given_nodes, messages = [], []
    for number in range(1, 300):
        values = {name: "v" * random.randrange(20) for name in random.sample(KNOWN_ATTRIBUTES, random.randrange(6))}
        waits = tuple(random.randrange(1, 300) for _ in range(random.choice([0, 0, 1, 2, 90])))
        given_nodes.append((number << random.randrange(50), "x" * random.randrange(9), waits, 1 << number % 64, values))
        given_id, name, _, duration_us, _ = given_nodes[-1]
        attributes = [attribute(name, AttributeKind.STRING, value) for name, value in values.items()]
        attributes.insert(0, attribute("rf_id", AttributeKind.UINT64, random.getrandbits(64)))
        messages.append(node(given_id, COMP, name, waits, duration_us, *attributes))
    nodes = decode(METADATA + b"".join(messages), "t")
    ends = [0, *nodes.dependency_ends.tolist()]
    for index, (number, name, waits, duration_us, values) in enumerate(given_nodes):
        assert (nodes.ids[index], nodes.durations_us[index]) == (number, duration_us)
        content = nodes.content(index)
        assert content.name == name
        assert tuple(nodes.dependencies[ends[index] : ends[index + 1]].tolist()) == waits
        assert {each: content.attributes.get(each) for each in KNOWN_ATTRIBUTES} == (
            dict.fromkeys(KNOWN_ATTRIBUTES) | values
        )


def test_lengths_that_look_like_byte_order_marks() -> None:
    filler = 127 + 126 * 128 + 16384  # encoded ff fe 01
    for size in range(filler - 60, filler):
        data = delimit(bytes_field(2, attribute("input_file", AttributeKind.STRING, "x" * size))) + node(1, COMP, us=1)
        if data.startswith(b"\xff\xfe"):
            assert len(layers(read_trace(Source("t.et", data)))) == 1
            return
    raise AssertionError("no length was hit")


def test_recognised_by_content() -> None:
    for data in (write(example()), METADATA + node(1, COMP, us=1), b"\0" + node(1, COMP, us=1), node(1, COLL)):
        assert chakra.looks_like(data)
    assert recognise(Source("trace", write(example()))).name == "chakra"


@given(st.binary(max_size=200))
def test_junk_is_not_recognised(junk: bytes) -> None:
    text = b"DATA\n3\n" + junk
    assert not chakra.looks_like(text)
    assert not chakra.looks_like(b"\0" * 10 + junk[:0])
    assert not chakra.looks_like(b'{"traceEvents": []}')


OWN = write(example())
FOREIGN = METADATA + b"".join(
    node(number, COLL if number % 3 == 0 else COMP, f"n{number}", (number - 1,) if number > 1 else (), 10, *values)
    for number in range(1, 12)
    for values in [coll(number % 10, 100 * number, "1") if number % 3 == 0 else ()]
)


SET = list(files(replace(example(), layout=Layout(tp=2, pp=2)), "w.et"))
RANK_FILES = [("t.0.et", FOREIGN), ("t.1.et", FOREIGN), ("groups.json", b'{"1": [0, 1]}')]


@settings(FUZZ, max_examples=80)
@given(st.data())
def test_a_damaged_file_of_a_set_gives_a_workload_or_a_format_error(data: st.DataObject) -> None:
    given_files = data.draw(st.sampled_from([SET, RANK_FILES]))
    which = data.draw(st.integers(0, len(given_files) - 1))
    damaged = data.draw(mutations(given_files[which][1]))
    sources = [Source(name, content) for name, content in given_files]
    sources[which] = Source(given_files[which][0], damaged)
    check_reader(lambda _: chakra.read_run(sources), damaged, Workload)


@FUZZ
@given(mutations(OWN) | mutations(FOREIGN))
def test_damaged_files_give_a_workload_or_a_format_error(data: bytes) -> None:
    chakra.looks_like(data)
    check_reader(read_trace, data, Workload)


def sources(given_files: Sequence[tuple[str, bytes]]) -> list[Source]:
    return [Source(name, data) for name, data in given_files]


def test_the_damaged_one_of_several_files_is_named() -> None:
    damaged = ("t.1.et", FOREIGN + node(99, 55))
    with pytest.raises(FormatError, match=r"t.1.et: message \d+ at byte \d+: .*type 55"):
        chakra.read_run(sources([RANK_FILES[0], damaged, *RANK_FILES[2:]]))
