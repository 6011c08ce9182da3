"""Megatron-LM rank traces: the grammar, known answers of the seed, and what is wrong with bad ones."""

import gzip
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from stepcast.inputs.megatron.reader import read_run
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import format_named, read, recognise
from stepcast.ir.layout import Group
from stepcast.ir.timeline import Span, SpanKind, Timeline
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer
from tests.inputs.fuzz import FUZZ, mutations
from tests.shared import ROOT

SEED_PATH = ROOT / "examples" / "megatron-rank7.txt"
SEED = SEED_PATH.read_text()
LINES = SEED.splitlines()

# Sums per operation of the seed in milliseconds, from the format's description.
SUMS_MS = {
    "ep_allreduce": 1274.09,
    "backward_step": 1183.71,
    "recv_forward": 629.77,
    "forward_step": 604.58,
    "optimizer_step": 105.32,
    "dp_allreduce": 24.64,
    "get_batch": 7.5,
    "send_backward": 2.9,
    "loss_func": 0.4,
}


def read_text(text: str, path: str = "trace.txt") -> Timeline:
    return read_run([Source(path, text.encode())])


def line(rank: int = 0, stage: int = 0, name: str = "forward_step", /, **fields: str) -> str:
    """One operation; fields given replace or add to the usual ones."""
    usual = {
        "batch_id": "0",
        "mg_state": "steady",
        "duration": "2.5",
        "description": "None",
        "group_kind": "None",
        "input__shape": "None",
        "input__dtype": "None",
        "timestamp": "1000.0",
        "sub_operations": "[]",
    }
    words = {"stage_id": str(stage), **usual, **fields}
    words["sub_operations"] = words.pop("sub_operations")
    return f"rank:{rank}:{name}({','.join(f'{word}={text}' for word, text in words.items())})"


@pytest.fixture(scope="module")
def seed() -> Timeline:
    return read_text(SEED)


def top_level(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans() if span.parent is None]


def test_seed_is_recognised() -> None:
    assert recognise(Source(SEED_PATH)).name == "megatron"
    other = Source("file", b"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8")
    assert not format_named("megatron").matches(other)


def test_seed_span_is_operations_and_gaps(seed: Timeline) -> None:
    assert seed.span_s * 1e3 == pytest.approx(3851.38, abs=0.005)
    operations_ms = sum(span.duration_s for span in top_level(seed)) * 1e3
    assert operations_ms == pytest.approx(3832.91, abs=0.005)
    assert seed.span_s * 1e3 - operations_ms == pytest.approx(18.47, abs=0.005)


def test_seed_sums_per_operation(seed: Timeline) -> None:
    sums_ms: dict[str, float] = defaultdict(float)
    for span in top_level(seed):
        sums_ms[span.name] += span.duration_s * 1e3
    assert dict(sums_ms) == pytest.approx(SUMS_MS, abs=0.005)


def test_seed_forward_all_reduces(seed: Timeline) -> None:
    forward = next(span for span in seed.spans() if span.name == "forward_step")
    parts = [span for span in seed.spans() if span.parent == forward.index and span.name == "linear_fwd"]
    assert len(parts) == 20
    assert {part.work for part in parts} == {Collective(CollectiveKind.ALL_REDUCE, 83_886_080, Group.TP)}
    assert {part.lane.name for part in parts} == {"tp"}
    assert min(part.duration_s for part in parts) == pytest.approx(0.68e-3)
    assert sum(part.duration_s for part in parts) == pytest.approx(20.69e-3, abs=1e-9)
    # With the three small ones of the cross-entropy.
    inside = [span.duration_s for span in seed.spans() if span.parent == forward.index]
    assert sum(inside) == pytest.approx(20.75e-3, abs=1e-9)
    assert all(forward.start_s < part.start_s and part.end_s < forward.end_s for part in parts)


def test_seed_configuration_is_inferred_from_one_rank(seed: Timeline) -> None:
    layout = seed.layout
    assert layout is not None
    assert (layout.tp, layout.pp, layout.dp, layout.gpus) == (2, 4, 1, 8)
    expected = {
        "hidden": 5120,
        "layers": 40,
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 1,
        "vocab": 50432,
        "dtype": "fp32",
        "ffn": 20480,
        "world": 8,
        "parameters": {3: 1_702_466_560},
    }
    assert {word: seed.facts[word] for word in expected} == expected
    assert seed.facts["basis"]["tp"].startswith("solved")
    assert seed.stage_of_rank == {7: 3}
    assert any("only rank 7 of 8" in warning for warning in seed.warnings)


def test_seed_work_kinds_and_details(seed: Timeline) -> None:
    by_name = {span.name: span for span in top_level(seed)}
    sent = 2048 * 2 * 5120 * 4
    assert by_name["recv_forward"].work == Transfer(Direction.RECEIVE, sent, Group.PP, -1)
    assert by_name["send_backward"].work == Transfer(Direction.SEND, sent, Group.PP, -1)
    embedding = Collective(CollectiveKind.ALL_REDUCE, 25216 * 5120 * 4, Group.EMBEDDING)
    assert by_name["ep_allreduce"].work == embedding
    assert by_name["dp_allreduce"].details["description"] == (
        "model_chunk.finish_grad_sync(), All-reduce / reduce-scatter across DP replicas"
    )
    assert by_name["recv_forward"].details == {
        "mg_state": "help",
        "group_kind": "pp",
        "shape": "[2048, 2, 5120]",
        "dtype": "float32",
    }
    kinds = {span.name: span.kind for span in top_level(seed)}
    assert kinds["forward_step"] is kinds["backward_step"] is kinds["optimizer_step"] is SpanKind.COMPUTE
    assert kinds["recv_forward"] is kinds["ep_allreduce"] is SpanKind.COMMUNICATION
    assert {span.lane.name for span in top_level(seed)} == {"ops"}
    assert {span.micro_batch for span in seed.spans()} == {0}
    broadcast = next(span for span in seed.spans() if span.name == "attention_mask")
    assert broadcast.work == Collective(CollectiveKind.BROADCAST, 2 * 2048 * 2048, Group.TP)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: gzip.compress(text.encode()),
        lambda text: text.rstrip("\n").encode(),
        lambda text: text.replace("\n", "  \n\n").encode(),
    ],
)
def test_other_wrappings_give_the_same(encode: object, seed: Timeline) -> None:
    other = read_run([Source("x", encode(SEED))])  # type: ignore[operator]
    assert np.array_equal(other.start_s, seed.start_s)
    assert other.facts == seed.facts


def test_slow_path_equals_fast_path(seed: Timeline) -> None:
    """A trailing blank and double quotes leave the usual spelling and must mean the same."""
    odd = "\n".join(f"{text} " for text in SEED.replace("['", '["').replace("'])", '"])').split("\n"))
    odd = odd.replace("', '", '", "')
    other = read_text(odd)
    assert len(other) == len(seed)
    for mine, its in zip(seed.spans(), other.spans(), strict=True):
        assert mine == its


def test_later_dialect_keeps_unknown_fields() -> None:
    text = line(
        0,
        0,
        "dp_allreduce",
        group_kind="dp",
        cmd_uid="cmd-392b",
        op_semantics="metadata_placeholder",
        finalize_base_duration_ms="131.33",
        input__shape="[100]",
        input__dtype="torch.float16",
    )
    span = read_text(text).span(0)
    assert span.details["cmd_uid"] == "cmd-392b"
    assert span.details["finalize_base_duration_ms"] == "131.33"
    assert span.work == Collective(CollectiveKind.ALL_REDUCE, 200, Group.DP)


def test_gradient_buckets_lie_on_their_group_and_count_the_parameters() -> None:
    bucket = (
        "rank:0:ddp_grad_comm(comm_uid=c{0},iter=3,stage_id=0,mg_state=steady,group_kind=dp,comm_func=allreduce,"
        "buffer_id={0},bucket_id=0,bucket_offset=0,bucket_numel={1},bucket_numel_unpadded={1},param_count=44,"
        "trigger_op=backward_step,trigger_batch_id=1,launch_timestamp_ms=990.5,metadata_only=True,"
        "completion_observed_timestamp_ms=None,grad_dtype=torch.float32,duration=0.0,timestamp=990.5,"
        "sub_operations=[])"
    )
    timeline = read_text("\n".join([bucket.format(0, 1000), bucket.format(1, 24), line()]))
    span = timeline.span(0)
    assert span.lane.name == "dp"
    assert span.parent is None
    assert span.micro_batch == 1
    assert span.work == Collective(CollectiveKind.ALL_REDUCE, 4000, Group.DP)
    assert span.details["launch_timestamp_ms"] == "990.5"
    assert timeline.facts["parameters"] == {0: 1024}


def test_fields_may_be_few_and_in_any_order() -> None:
    timeline = read_text("rank:3:forward_step(timestamp=7.0,cmd_uid=a,duration=4,stage_id=0)")
    span = timeline.span(0)
    assert (span.lane.rank, span.duration_s, span.micro_batch) == (3, 0.004, None)


def test_sub_operation_without_func_name_and_expert_words() -> None:
    part = (
        "'trace_src_func=_all_to_all,duration=0.5,timestamp=999.0,input__shape=[8, 4],"
        "input__dtype=torch.bfloat16,group=exp,comm_func=all_to_all'"
    )
    gather = part.replace("all_to_all", "allgather").replace("group=exp", "group=tp")
    timeline = read_run(
        [
            Source("a", line(0, 0, sub_operations=f"[{part}, {gather}]", loss="x").encode()),
            Source("b", line(1, 0, "loss_func").encode()),
        ]
    )
    first, second = (span for span in timeline.spans() if span.parent == 0)
    assert (first.name, first.lane.name) == ("_all_to_all", "ep")
    assert first.work == Collective(CollectiveKind.ALL_TO_ALL, 64, Group.EP)
    assert timeline.layout is not None
    # The whole buffer of an all-gather is what every rank hands in, together.
    assert second.work == Collective(CollectiveKind.ALL_GATHER, 64 * timeline.layout.tp, Group.TP)


def test_fused_send_and_receive_is_marked_once() -> None:
    shape = {"group_kind": "pp", "input__shape": "[4, 1, 8]", "input__dtype": "torch.float16"}
    text = "\n".join(
        [
            line(0, 0, "send_forward", duration="3.0", timestamp="50.0", **shape),
            line(0, 0, "recv_backward", duration="3.0", timestamp="50.0", **shape),
            line(0, 0, "send_backward", duration="1.0", timestamp="60.0", **shape),
            line(0, 0, "recv_forward", duration="2.0", timestamp="60.0", **shape),
        ]
    )
    marks = [span.details.get("fused_with") for span in read_text(text).spans()]
    assert marks == [None, "send_forward", None, None]


def test_line_without_timestamp_follows_the_one_before() -> None:
    text = "\n".join(
        [
            line(timestamp="6423013628.24"),
            line(0, 0, "ep_allreduce", duration="0", timestamp="0"),
            line(0, 0, "optimizer_step", duration="1", timestamp="6423013700.0"),
        ]
    )
    timeline = read_text(text)
    assert timeline.span(1).start_s == pytest.approx(timeline.span(0).end_s)
    assert timeline.span(1).details["untimed"] == "yes"
    assert timeline.span_s < 0.1
    assert any("no timestamp" in warning for warning in timeline.warnings)


def test_unrelated_clocks_are_told() -> None:
    near, far = line(0, timestamp="100.0"), line(1, timestamp="9999999.0")
    timeline = read_text(f"{near}\n{far}")
    assert any("clocks" in warning for warning in timeline.warnings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line(duration="NaN"), "duration"),
        (line(duration="nan"), "duration"),
        (line(duration="-1.0"), "zero or more"),
        (line(duration="1_000"), "duration"),
        (line(duration="9" * 30), "duration"),
        (line(timestamp="inf"), "timestamp"),
        (line(timestamp="1e400"), "timestamp"),
        (line(duration="fast"), "duration in milliseconds"),
        (line(batch_id="-1"), "batch_id"),
        (line(batch_id="99999999999"), "batch_id"),
        (line(input__shape="[2, x]"), "input__shape"),
        (line(input__shape="[-1]"), "input__shape"),
        (line(input__shape="[999999999999999, 99999999]", input__dtype="torch.float32"), "too large"),
        (line(comm_func="allreduse"), "unknown collective 'allreduse'"),
        (line(sub_operations="['duration=1,timestamp=2', 3]"), "quoted string"),
        (line(sub_operations="['duration=1,timestamp=2''x=1']"), "not separated"),
        (line(sub_operations="['duration=1']"), "no duration or timestamp"),
        (line(sub_operations="['']"), "expected fields"),
        (line()[:-1], "cut off"),
        (line()[:-2], "cut off"),
        (line()[:60], "cut off"),
        (line().replace("duration=2.5,", ""), "has no duration"),
        (line().replace("stage_id=0,", ""), "has no stage_id"),
        (line().replace("batch_id=0", "batch_id=0,batch_id=1"), "twice"),
        ("forward_step(stage_id=0)", "expected rank:INT:operation"),
        ("rank:x:forward_step(stage_id=0)", "expected rank:INT:operation"),
        (line(0, 1), "rank 0 is on stage 1, but on stage 0 before"),
    ],
)
def test_bad_line_is_named(text: str, expected: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_text(f"{line()}\n{text}\n")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("trace.txt:2: ")
    assert "\n" not in str(caught.value)


def test_truncated_seed_names_its_last_line() -> None:
    with pytest.raises(FormatError) as caught:
        read_text(SEED[:-100])
    assert str(caught.value).startswith("trace.txt:9: ")


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_no_operation_at_all(text: str) -> None:
    with pytest.raises(FormatError, match="no operation"):
        read_text(text)


def test_one_rank_in_two_files() -> None:
    with pytest.raises(FormatError, match=r"b:1: rank 7 is also in a"):
        read_run([Source("a", SEED.encode()), Source("b", SEED.encode())])


def test_same_file_twice(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="given twice"):
        read_run([Source(SEED_PATH), Source(SEED_PATH)])


def test_folder_is_one_run(tmp_path: Path) -> None:
    (tmp_path / "rank7.txt").write_text(SEED)
    # Rank 6, its tensor-parallel peer, ran the same operations.
    (tmp_path / "rank6.txt").write_text(SEED.replace("rank:7:", "rank:6:"))
    timeline = read(tmp_path)
    assert timeline.ranks == (6, 7)
    assert timeline.layout.gpus == 8


@given(mutations("\n".join([*LINES[:2], LINES[3], LINES[7]]).encode()))
@FUZZ
def test_damaged_traces_give_a_timeline_or_a_format_error(data: bytes) -> None:
    try:
        timeline = read_run([Source("fuzz", data)])
    except FormatError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert len(timeline) > 0
        assert timeline.layout is not None
