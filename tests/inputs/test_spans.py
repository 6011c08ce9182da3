"""Kernel traces of rocprofv3, OpenTelemetry spans, traces of JAX and XLA, and reports of straggler detections."""

import json
from pathlib import Path
from typing import Any

import pytest

import stepcast
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import read, recognise
from tests.analyze.test_watch import NEMO
from tests.shared import ROOT

SPANS = ROOT / "examples" / "spans"


def test_rocprof_names_the_slow_agent() -> None:
    facts = stepcast.analyze(SPANS / "rocprof-kernel-trace.csv").facts()
    assert facts["format"] == "rocprof"
    assert [(row["rank"], round(row["factor"], 3)) for row in facts["stragglers"]] == [(1, 1.3)]
    assert facts["devices"][0]["compute_s"] == pytest.approx(4 * 1160e-6)
    assert facts["devices"][0]["communication_s"] == pytest.approx(4 * 250e-6)


def test_rocprof_json_equals_csv(tmp_path: Path) -> None:
    columns = [
        line.replace('"', "").split(",")
        for line in (SPANS / "rocprof-kernel-trace.csv").read_text().split("\n")[1:]
        if line
    ]
    tool = {"kernel_symbols": [{"kernel_id": number, "formatted_kernel_name": row[7]} for number, row in enumerate(columns)],
            "buffer_records": {"kernel_dispatch": [{"start_timestamp": int(row[-2]), "end_timestamp": int(row[-1]), "thread_id": 3,
                "dispatch_info": {"agent_id": {"handle": int(row[1][6:])}, "queue_id": {"handle": int(row[2])}, "kernel_id": number}} for number, row in enumerate(columns)]}}  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [tool]}))
    facts, table = stepcast.analyze(path).facts(), stepcast.analyze(SPANS / "rocprof-kernel-trace.csv").facts()
    assert facts["format"] == "rocprof"
    assert {key: facts[key] for key in ("step_s", "devices", "stragglers")} == {
        key: table[key] for key in ("step_s", "devices", "stragglers")
    }
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [{"buffer_records": {"kernel_dispatch": [{}]}}]}))
    with pytest.raises(FormatError, match="no kernel trace of rocprofv3"):
        read(path)


def test_otlp_has_steps_and_spans() -> None:
    facts = stepcast.analyze(SPANS / "otlp-rl.json").facts()
    assert facts["step_s"] == pytest.approx(67.4)
    assert {row["name"]: row["total_s"] for row in facts["ranges"]}["rl.generation"] == pytest.approx(205)


def test_steps_of_two_ranks_are_those_of_each(tmp_path: Path) -> None:
    """Both ranks take 2 s a step, the second 3 ms later."""
    resources = []
    for rank in range(2):
        starts = [10**18 + 3_000_000 * rank + 2 * 10**9 * step for step in range(6)]
        spans = [
            {"name": "train_step", "startTimeUnixNano": str(at), "endTimeUnixNano": str(at + 10**9)} for at in starts
        ]
        attributes = [{"key": "rank", "value": {"intValue": str(rank)}}]
        resources.append({"resource": {"attributes": attributes}, "scopeSpans": [{"spans": spans}]})
    path = tmp_path / "spans.json"
    path.write_text(json.dumps({"resourceSpans": resources}))
    assert stepcast.analyze(path)["step_s"] == pytest.approx(2.0)


def encode(number: int, value: bytes | int) -> bytes:
    """Return a field of protobuf: bytes, or a fixed number of eight bytes."""
    if isinstance(value, int):
        return bytes([number << 3 | 1]) + value.to_bytes(8, "little")
    size, length = len(value), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


def pair(key: str, text: str) -> bytes:
    return encode(1, key.encode()) + encode(2, encode(1, text.encode()))


def encode_spans() -> bytes:
    """Return the spans of the example in protobuf."""
    table = json.loads((SPANS / "otlp-rl.json").read_text())
    spans = b"".join(
        encode(2, encode(1, b"x" * 16) + encode(5, span["name"].encode()) + encode(7, int(span["startTimeUnixNano"])) + encode(8, int(span["endTimeUnixNano"])) + encode(9, pair("dl.rank", "0")))
        for span in table["resourceSpans"][0]["scopeSpans"][0]["spans"]
    )  # fmt: skip
    resource = encode(1, encode(1, pair("service.name", "trainer")))
    return encode(1, resource + encode(2, spans))


def test_otlp_protobuf_equals_json(tmp_path: Path) -> None:
    table = json.loads((SPANS / "otlp-rl.json").read_text())
    path = tmp_path / "spans.pb"
    path.write_bytes(encode_spans())
    assert recognise(Source(path)).name == "otlp"
    assert stepcast.analyze(path)["ranges"] == stepcast.analyze(SPANS / "otlp-rl.json")["ranges"]
    lines = tmp_path / "spans.jsonl"
    lines.write_text(f"{json.dumps(table)}\n" * 2)
    assert len(read(lines)) == 2 * len(read(path))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("rocprof-kernel-trace.csv", "1551874061244694,", "late,", "columns of a kernel"),
        ("rocprof-kernel-trace.csv", ",1551874061644694", ",5", "must end after"),
        ("otlp-rl.json", '"endTimeUnixNano": "1767600067000000000"', '"endTimeUnixNano": "1"', "must end after"),
        ("otlp-rl.json", '"startTimeUnixNano"', '"start"', "no complete OTLP"),
    ],
)
def test_damaged_spans(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    text = (SPANS / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    with pytest.raises(FormatError, match=said):
        read(tmp_path / name)


def _name(process: int, thread: int | None, text: str) -> dict[str, Any]:
    kind = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": text}}


def _span(process: int, thread: int, text: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": thread, "name": text, "ts": start, "dur": duration}


XLA = {
    "displayTimeUnit": "ns",
    "metadata": {"highres-ticks": True},
    "traceEvents": [
        *(_name(1, None, "/device:TPU:0"), _name(1, 2, "XLA Ops"), _name(1, 3, "XLA Modules"), _name(9, None, "/host:CPU")),
        *(_span(1, 2, "dot.5", 0, 100), _span(1, 2, "loop_fusion.3", 100, 20), _span(1, 2, "all-reduce.1", 120, 30)),
        *(_span(1, 3, "jit_step", 0, 150), _span(9, 4, "PjitFunction(step)", 0, 10)),
    ],
}  # fmt: skip


def test_traces_of_xla(tmp_path: Path) -> None:
    path = tmp_path / "host.trace.json"
    path.write_text(json.dumps(XLA))
    facts = stepcast.analyze(path).facts()
    assert facts["operations_s"]["matmul"] == pytest.approx(100e-6)
    assert facts["operations_s"]["element-wise"] == pytest.approx(20e-6)
    assert facts["exposed_comm_s"] == pytest.approx(30e-6)
    assert facts["compute_s"] == pytest.approx(120e-6)
    # Devices of one process are ranks; on a GPU, operators repeat the work of streams.
    gpus = [*(_name(n, None, f"/device:GPU:{n}") for n in (1, 2)), *(_name(n, t, text) for n in (1, 2) for t, text in ((5, "Stream #13(Compute)"), (6, "XLA Ops"), (7, "Steps")))]  # fmt: skip
    work = [_span(n, t, "dot.5", 100.0 * step, 30.0 * n) for n in (1, 2) for t in (5, 6) for step in (0, 1)]
    steps = [_span(n, 7, str(step), 100.0 * step, 90) for n in (1, 2) for step in (0, 1)]
    path.write_text(json.dumps({**XLA, "traceEvents": [*gpus, *work, *steps]}))
    facts = stepcast.analyze(path).facts()
    assert [rank["steps"] for rank in facts["ranks"]] == [2, 2]
    assert [rank["breakdown_s"]["compute"] for rank in facts["ranks"]] == pytest.approx([60e-6, 120e-6])
    assert facts["operations_s"]["matmul"] == pytest.approx(45e-6)


SCORES = """GPU relative performance:
 Worst performing 2/512 ranks:
  Rank=76 Node=h100-001-253-012 Score=0.74
  Rank=13 Node=h100-001-010-003 Score=0.94
 Best performing 1/512 ranks:
  Rank=432 Node=h100-004-141-026 Score=0.99

GPU individual performance:
 Worst performing 1/512 ranks:
  Rank=5 Node=h100-001-253-012 Score=0.50
"""


def test_scores_of_a_straggler_detection(tmp_path: Path) -> None:
    path = tmp_path / "nemo.log"
    path.write_text(NEMO + SCORES + SCORES.replace("0.74", "0.97"))
    alerts = [event for event in stepcast.watch(path, idle_s=0) if isinstance(event, stepcast.WatchAlert)]
    assert [(alert.kind, alert.rank) for alert in alerts] == [("straggler", 76), ("recovered", 76)]
    path.write_text(NEMO + SCORES)
    assert [(row["rank"], row["node"]) for row in stepcast.analyze(path)["stragglers"]] == [(76, "h100-001-253-012")]
