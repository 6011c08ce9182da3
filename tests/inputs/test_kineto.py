"""PyTorch profiler traces: spans, collectives, ranks and clocks; cut-off and odd files."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.inputs.kineto.reader import looks_like, read_run
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import recognise
from stepcast.ir.layout import Group
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer
from tests.inputs.fuzz import FUZZ, check_reader, mutations
from tests.shared import ROOT

EXAMPLE = ROOT / "examples" / "kineto-llama-1b.json.gz"
Json = dict[str, Any]


def event(name: str, category: str, start: float, duration: float, **more: Any) -> Json:
    place = {"pid": 0, "tid": 7} if category in ("kernel", "gpu_memcpy") else {"pid": 9, "tid": 9}
    return {"ph": "X", "cat": category, "name": name, **place, "ts": start, "dur": duration, **more}


NCCL = {
    "Collective name": "_allgather_base",
    "In msg nelems": 1024,
    "Out msg nelems": 8192,
    "dtype": "BFloat16",
    "Group size": 8,
    "Process Group Name": "3",
    "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
    "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    "In split size": "[]",
    "Out split size": "[]",
    "Seq": 5,
}
EVENTS = [
    event("ProfilerStep#3", "user_annotation", 100.0, 900.0),
    event("aten::linear", "cpu_op", 110.0, 50.0),
    event('aten::mm}, {"ph": [', "cpu_op", 120.0, 30.0, args={"Input Dims": [[4, 4], [{"ph": 1}]]}),
    event("cudaLaunchKernel", "cuda_runtime", 130.0, 5.0),
    event("gemm\\", "kernel", 200.0, 80.5, args={"stream": 7}),
    event("ncclDevKernel_AllGather_RING_LL(args)", "kernel", 250.0, 100.0, tid=20, args=NCCL),
    event("Memcpy HtoD", "gpu_memcpy", 300.0, 2.0),
    {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
    {"ph": "s", "id": 1, "pid": 9, "tid": 9, "ts": 130.0, "cat": "ac2g", "name": "ac2g"},
    event("PyTorch Profiler (0)", "Trace", 100.0, 1000.0, pid="Spans"),
]
HEADER: Json = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "distributedInfo": {"backend": "nccl", "rank": 2, "world_size": 8},
    "cuda_runtime_version": 13000,
    "baseTimeNanoseconds": 1_000_000_000,
}


def trace(events: list[Json] = EVENTS, indent: int | None = None, **header: Any) -> bytes:
    return json.dumps({**HEADER, **header, "traceEvents": events, "traceName": "t"}, indent=indent).encode()


def read(*files: bytes) -> Timeline:
    return read_run([Source(f"file{index}.json", data) for index, data in enumerate(files)])


def rows(timeline: Timeline) -> list[tuple[Any, ...]]:
    return [
        (span.name, span.kind, span.lane, span.start_s, span.duration_s, span.work, span.parent, dict(span.details))
        for span in timeline.spans()
    ]


class InPieces(Source):
    """A file that arrives a few bytes at a time."""

    def __init__(self, data: bytes, piece: int) -> None:
        super().__init__("pieces.json", data)
        self.piece = piece

    def salvage_chunks(self, damage: list[str], chunk_bytes: int = 0) -> Iterator[bytes]:
        return super().salvage_chunks(damage, self.piece)


def test_example_agrees_with_its_json() -> None:
    with gzip.open(EXAMPLE) as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event["ph"] == "X"]
    timeline = read_run([Source(EXAMPLE)])
    kinds = Counter(span.kind for span in timeline.spans())
    kernels = [event for event in events if event["cat"] == "kernel"]
    assert kinds[SpanKind.COMPUTE] == len(kernels)
    assert kinds[SpanKind.COPY] == sum(event["cat"] == "gpu_memset" for event in events)
    assert len(timeline) == sum(event["cat"] != "Trace" for event in events)
    on_gpu = timeline.kind_of == SpanKind.COMPUTE
    assert timeline.duration_s[on_gpu].sum() == pytest.approx(sum(event["dur"] for event in kernels) * 1e-6)
    assert timeline.facts["devices"] == ["NVIDIA H200"]
    assert not timeline.warnings
    assert {lane.name for lane in timeline.lanes} >= {"stream 7", "cpu thread 397", "cpu thread 438"}


def test_spans_lanes_kinds_and_times() -> None:
    timeline = read(trace())
    assert timeline.measured
    found = {span.name: span for span in timeline.spans()}
    assert {name: span.kind for name, span in found.items()} == {
        "ProfilerStep#3": SpanKind.STEP,
        "aten::linear": SpanKind.HOST,
        'aten::mm}, {"ph": [': SpanKind.HOST,
        "cudaLaunchKernel": SpanKind.HOST,
        "gemm\\": SpanKind.COMPUTE,
        "ncclDevKernel_AllGather_RING_LL(args)": SpanKind.COMMUNICATION,
        "Memcpy HtoD": SpanKind.COPY,
    }
    assert found["gemm\\"].lane.name == "stream 7"
    assert found["gemm\\"].start_s == pytest.approx(100e-6)
    assert found["gemm\\"].duration_s == pytest.approx(80.5e-6)
    assert {lane.rank for lane in timeline.lanes} == {2}
    facts = {key: timeline.facts[key] for key in ("steps", "backend", "world_size", "missing_ranks")}
    assert facts == {"steps": 1, "backend": "nccl", "world_size": 8, "missing_ranks": 7}


def test_host_calls_know_who_called_them() -> None:
    timeline = read(trace())
    names = [span.name for span in timeline.spans()]
    parents = {span.name: span.parent for span in timeline.spans()}
    assert parents["aten::linear"] is None
    assert parents['aten::mm}, {"ph": ['] == names.index("aten::linear")
    assert parents["cudaLaunchKernel"] == names.index('aten::mm}, {"ph": [')
    assert parents["gemm\\"] is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=25))
def test_parents_are_the_innermost_enclosing_calls(calls: list[tuple[int, int]]) -> None:
    events = [event(f"op{index}", "cpu_op", start, length) for index, (start, length) in enumerate(calls)]
    timeline = read(trace(events))
    for index, (start, length) in enumerate(calls):
        parent = int(timeline.parent_of[index])
        if parent != NONE:
            outer_start, outer_length = calls[parent]
            assert outer_start <= start
            assert outer_start + outer_length >= start + length


def test_collectives_of_nccl_kernels() -> None:
    (span,) = (span for span in read(trace()).spans() if span.kind is SpanKind.COMMUNICATION)
    # The whole buffer: what a rank holds after the gather.
    assert span.work == Collective(CollectiveKind.ALL_GATHER, 8192 * 2, Group.TP)
    assert span.lane.name == "stream 20"
    assert span.details["ranks"] == "0,1,2,3,4,5,6,7"
    assert span.details["group"] == "3"
    assert span.details["sequence"] == "5"


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("allreduce", {}, Collective(CollectiveKind.ALL_REDUCE, 16384, Group.TP)),
        ("reduce_scatter_tensor_coalesced", {}, Collective(CollectiveKind.REDUCE_SCATTER, 16384, Group.TP)),
        ("all_to_allv", {}, Collective(CollectiveKind.ALL_TO_ALL, 16384, Group.TP)),
        ("broadcast", {"dtype": "Float"}, Collective(CollectiveKind.BROADCAST, 32768, Group.TP)),
        ("send", {"Dst Rank": 4}, Transfer(Direction.SEND, 16384, Group.TP, 2)),
        ("recv", {"Src Rank": 1}, Transfer(Direction.RECEIVE, 16384, Group.TP, -1)),
        ("allreduce", {"dtype": "ComplexSomething"}, None),
        (
            "allreduce",
            {"Process Group Description": "default_pg"},
            Collective(CollectiveKind.ALL_REDUCE, 16384, Group.WORLD),
        ),
        (
            "allreduce",
            {"Process Group Description": "mesh_dp_shard"},
            Collective(CollectiveKind.ALL_REDUCE, 16384, Group.SHARD),
        ),
        (
            "allreduce",
            {"Process Group Description": "DATA_PARALLEL_GROUP_WITH_CP"},
            Collective(CollectiveKind.ALL_REDUCE, 16384, Group.DP),
        ),
        (
            "allreduce",
            {"Process Group Description": "EXPERT_DATA_PARALLEL_GROUP"},
            Collective(CollectiveKind.ALL_REDUCE, 16384, Group.EXPERT_DP),
        ),
    ],
)
def test_collective_attributes(name: str, more: Json, expected: Collective | Transfer | None) -> None:
    args = NCCL | {"Collective name": name} | more
    timeline = read(trace([event("ncclDevKernel_X", "kernel", 1.0, 1.0, args=args)]))
    assert timeline.span(0).work == expected
    assert timeline.span(0).kind is SpanKind.COMMUNICATION


HPU = {"HW event name": "DMA_1_CTX_0"}


@pytest.mark.parametrize(
    ("category", "name", "args", "kind"),
    [
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", {}, SpanKind.COPY),
        ("gpu_memset", "Memset (Device)", {}, SpanKind.COPY),
        ("Memcpy", "Memcpy DtoH (Device -> Pageable)", {}, SpanKind.COPY),
        ("mlu_memcpy", "Memcpy HtoD", {}, SpanKind.COPY),
        ("mlu_memset", "Memset (Device)", {}, SpanKind.COPY),
        ("GCU_MEMCPY", "Memcpy D2D", {}, SpanKind.COPY),
        ("mtia_ccp_events", "Memcpy HtoD", {}, SpanKind.COPY),
        ("kernel", "hipMemcpyAsync", {}, SpanKind.COPY),
        ("kernel", "CopyHostToDevice", {}, SpanKind.COPY),
        ("hpu_op", "memcpy", HPU, SpanKind.COPY),
        ("hpu_op", "gemm", {"HW event name": "MME_0_CTX"}, SpanKind.COMPUTE),
        ("hpu_op", "launchRecipe", {}, SpanKind.HOST),
        ("kernel", "void memset_kernel<float>", {}, SpanKind.COMPUTE),
        ("mtia_ccp_events", "fc_kernel", {}, SpanKind.COMPUTE),
        ("collective_comm", "all_reduce", {}, SpanKind.COMMUNICATION),
        ("mlu_runtime", "cnInvokeKernel", {}, SpanKind.HOST),
        ("xpu_driver", "zeCommandListAppendLaunchKernel", {}, SpanKind.HOST),
        ("privateuse1_runtime", "AscendCL@aclnnMatmul", {}, SpanKind.HOST),
        ("mlu_user_annotation", "forward", {}, SpanKind.OTHER),
        ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", {}, 1),
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)", {}, 1),
        ("kernel", "rccl_main_kernel", {}, 1),
        ("kernel", "mscclKernel_Sum_half_Simple_0", {}, 1),
        ("kernel", "void deep_ep::intranode::dispatch<8, 768, 8192>", {}, 1),
        ("kernel", "void deep_ep::internode_ll::combine<true, 7168, 9>", {}, 1),
        ("kernel", "void c10d::two_shot_all_reduce_kernel_inplace<float, 16, 8>", {}, 1),
        ("kernel", "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", {}, 1),
        ("kernel", "void deep_gemm::sm90_bf16_gemm_impl<deep_epilogue>", {}, SpanKind.COMPUTE),
    ],
)
def test_kinds_of_all_devices(category: str, name: str, args: Json, kind: int) -> None:
    """By category where it tells, else by name: categories of Kineto's ActivityType and of vendors' forks."""
    timeline = read(trace([event(name, category, 10.0, 5.0, tid=7, args=args)]))
    assert timeline.kind_of.tolist() == [kind]
    assert (timeline.lanes[0].name == "stream 7") == (kind <= SpanKind.COPY)


def test_launches_are_tied_to_what_they_launched() -> None:
    """By correlation; of two calls that share one, the outer; a graph's launch to all of its kernels."""
    events = [
        event("cudaLaunchKernel", "cuda_runtime", 0.0, 9.0, args={"correlation": 5}),
        event("cuLaunchKernelEx", "cuda_driver", 1.0, 2.0, args={"correlation": 5, "cbid": 3}),
        event("gemm", "kernel", 20.0, 4.0, args={"External id": 3, "correlation": 5}),
        event("gemm", "kernel", 26.0, 4.0, args={"correlation": 6}),
        event("cudaGraphLaunch", "cuda_runtime", 10.0, 2.0, args={"correlation": 7}),
        event("gemm", "kernel", 30.0, 4.0, args={"correlation": 7}),
        event("Memcpy DtoH", "gpu_memcpy", 40.0, 4.0, args={"correlation": 7}),
    ]
    assert read(trace(events)).flows.tolist() == [[0, 2], [4, 5], [4, 6]]
    second = trace(events, distributedInfo={"rank": 3, "world_size": 8})
    assert read(trace(events), second).flows.tolist()[3:] == [[7, 9], [11, 12], [11, 13]]


def test_groups_are_looked_up_in_the_header() -> None:
    info = {"rank": 0, "pg_config": [{"pg_name": "3", "pg_desc": "pp", "ranks": [0, 4]}]}
    args = {key: value for key, value in NCCL.items() if not key.startswith("Process Group")}
    args |= {"Process Group Name": "3", "Collective name": "send", "Dst Rank": 4}
    timeline = read(trace([event("nccl", "kernel", 1.0, 1.0, args=args)], distributedInfo=info))
    assert timeline.span(0).work == Transfer(Direction.SEND, 16384, Group.PP, 1)
    assert timeline.span(0).details["ranks"] == "0,4"


def test_gloo_collectives_on_the_host() -> None:
    args = {"Input Dims": [[64, 64]], "Input type": ["float"]}
    timeline = read(trace([event("gloo:all_gather", "user_annotation", 1.0, 1.0, args=args)]))
    assert timeline.span(0).work == Collective(CollectiveKind.ALL_GATHER, 8 * 64 * 64 * 4, Group.WORLD)
    assert timeline.span(0).kind is SpanKind.COMMUNICATION


def test_ranks_and_clocks_of_several_files() -> None:
    later = trace(distributedInfo={"rank": 5}, baseTimeNanoseconds=3_000_000_000)
    timeline = read(trace(), later)
    assert timeline.ranks == (2, 5)
    starts = [timeline.start_s[timeline.rank_of == rank].min() for rank in (2, 5)]
    assert starts[1] - starts[0] == pytest.approx(2.0)


def test_rank_from_the_name_or_the_order() -> None:
    data = trace(distributedInfo={})
    named = read_run([Source("run_rank-12.json", data), Source("run_rank-3.json", data)])
    assert named.ranks == (3, 12)
    assert read(data, data).ranks == (0, 1)
    with pytest.raises(FormatError, match="rank 2"):
        read(trace(), trace())


FORMS = {
    "one line": trace(),
    "pretty": trace(indent=2),
    "name first": trace([dict(sorted(each.items(), reverse=True)) for each in EVENTS]),
    "header last": json.dumps({"traceEvents": EVENTS, **HEADER}).encode(),
    "gzip": gzip.compress(trace()),
    "byte-order mark": b"\xef\xbb\xbf" + trace(),
    "utf-16": trace().decode().encode("utf-16"),
    "odd types": trace([{"ph": 1}, *EVENTS, {"ph": "M", "name": [1]}]),
    "traceEvents elsewhere": trace(traceName={"traceEvents": [1]}, note='"traceEvents": ['),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("piece", [7, 64, 333, 4096])
def test_every_form_in_pieces_of_any_size(form: str, piece: int) -> None:
    assert rows(read_run([InPieces(FORMS[form], piece)])) == rows(read(trace()))


def test_bare_arrays() -> None:
    bare = json.dumps(EVENTS).encode()
    assert looks_like(bare.decode())
    assert len(read(bare)) == len(read(trace()))
    unclosed = bare.rstrip(b"]") + b","
    assert not read(unclosed).warnings
    assert len(read(unclosed)) == len(read(trace()))


@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_off_trace_gives_its_whole_events(packed: bool) -> None:
    events = [event(f"op{index}", "cpu_op", float(index), 0.5) for index in range(400)]
    data = trace(events)
    whole = gzip.compress(data) if packed else data
    before = 0
    start = 60 if packed else data.index(b"[{") + 200
    for cut in range(start, len(whole) - 40, 97 if packed else 997):
        try:
            timeline = read(whole[:cut])
        except FormatError:
            assert packed or cut < 600
            continue
        assert [span.name for span in timeline.spans()] == [f"op{index}" for index in range(len(timeline))]
        assert len(timeline) >= before
        assert timeline.warnings
        before = len(timeline)
    assert before > 300


def test_odd_events_are_left_out_and_counted() -> None:
    odd = [
        event("negative", "kernel", 1.0, -1.0),
        event("text", "kernel", 1.0, 1.0, dur="soon"),
        {"ph": "X", "cat": "kernel", "name": "timeless", "pid": 0, "tid": 7},
        event("endless", "kernel", 1e308, 1e308),
        event("numbers as text", "kernel", 1.0, 1.0, ts="12.5"),
        event("list", "kernel", 1.0, 1.0, cat=["a"]),
    ]
    timeline = read(trace(EVENTS + odd))
    assert timeline.warnings == ("5 events without a usable start and duration were left out",)
    assert len(timeline) == len(read(trace())) + 1


def test_numbers_that_json_lacks() -> None:
    data = trace([event("a", "kernel", 1.0, 1.0, args={"x": 1}), event("b", "kernel", 2.0, 777.0)])
    timeline = read(data.replace(b'"x": 1', b'"x": inf').replace(b"777.0", b"nan"))
    assert [span.name for span in timeline.spans()] == ["a"]
    assert "1 events" in timeline.warnings[0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": 1}', "no array traceEvents"),
        (b"hello", "expected a JSON object"),
        (b'{"traceEvents": []}', "no events"),
        (trace([]), "no events"),
        (b'{"traceEvents": [{"ph": "X", "ts" 1}]}', "not JSON"),
        (b'{"traceEvents": [{"ph": "X"}}]', "bracket"),
    ],
)
def test_bad_files_are_named(data: bytes, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        read(data)


def test_recognised_by_content() -> None:
    assert recognise(Source("x", trace())).name == "kineto"
    assert recognise(Source(EXAMPLE)).name == "kineto"
    cut = gzip.compress(trace())[:-20]
    assert recognise(Source("x", cut)).name == "kineto"
    for text in ('{"hidden_size": 4}', "[1, 2]", '[{"name": "x"}]', "", "traceEvents"):
        assert not looks_like(text)


def test_columns_are_of_one_length() -> None:
    timeline = read(trace())
    assert len(timeline.name_of) == len(timeline.start_s) == len(timeline)
    assert np.all(timeline.duration_s >= 0)


@FUZZ
@given(mutations(trace(indent=1)) | mutations(gzip.compress(trace(), mtime=0)))
def test_damaged_files_give_a_timeline_or_a_format_error(data: bytes) -> None:
    looks_like(data.decode(errors="replace"))
    check_reader(lambda source: read_run([source]), data, Timeline)
