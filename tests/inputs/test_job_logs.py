"""What jobs leave behind: logs of steps, of collectives, and databases of kernels."""

import gzip
import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from stepcast.analyze.logs import analyze_collective_log, analyze_step_log, analyze_streams
from stepcast.cli.main import main
from stepcast.inputs.recorded import looks_like_flight_recorder
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import read, read_as_one, recognise
from stepcast.ir.measured import CollectiveLog, LoggedCollective, LoggedStep, StepLog
from stepcast.views.measured import collective_log_view
from stepcast.views.terminal import render_text

MEGATRON = """ [2025-03-01 10:00:00] iteration        1/     100 | consumed samples:          128 | elapsed time per iteration (ms): 9000.0 | throughput per GPU (TFLOP/s/GPU): 80.0 | learning rate: 1.0E-05 | global batch size:   128 | lm loss: 1.1E+01 | loss scale: 1.0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1000.0 | max allocated: 4096.0 | reserved: 5000.0 | max reserved: 5000.0
 [2025-03-01 10:00:04] iteration        2/     100 | consumed samples:          256 | elapsed time per iteration (ms): 4000.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | global batch size:   128 | lm loss: 1.0E+01 |
 [2025-03-01 10:00:08] iteration        3/     100 | consumed samples:          384 | elapsed time per iteration (ms): 4000.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | global batch size:   128 | lm loss: nan |
 [2025-03-01 10:00:12] iteration        4/     100 | elapsed time per iteration (ms): 4100.0 | throughput per GPU (TFLOP/s/GPU): 390.0 | global batch size:   128 |
 [2025-03-01 10:00:20] iteration        5/     100 | elapsed time per iteration (ms): 8000.0 | throughput per GPU (TFLOP/s/GPU): 200.0 | global batch size:   128 |
"""
TITAN = """[titan] 2025-06-01 10:00:00,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.25  \x1b[33mmemory: 40.50GiB(42.00%)  \x1b[34mtps: 1,500  \x1b[36mtflops: 90.10  \x1b[35mmfu: 9.10%\x1b[39m
[titan] 2025-06-01 10:00:20,000 - root - INFO - step: 11  loss: 11.5  memory: 45.00GiB(47.00%)  tps: 8,000  tflops: 480.5  mfu: 48.60%
[titan] 2025-06-01 10:00:40,000 - root - INFO - step: 21  loss: 10.5  memory: 45.00GiB(47.00%)  tps: 8,000  tflops: 480.5  mfu: 48.60%
"""
MLPERF = """noise before
:::MLLOG {"namespace": "", "time_ms": 1000, "event_type": "INTERVAL_START", "key": "run_start", "value": null, "metadata": {}}
:::MLLOG {"namespace": "", "time_ms": 1000, "event_type": "POINT_IN_TIME", "key": "global_batch_size", "value": 256, "metadata": {}}
:::MLLOG {"namespace": "", "time_ms": 5000, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {"throughput": 128.0}, "metadata": {"step": 10}}
:::MLLOG {"namespace": "", "time_ms": 9000, "event_type": "POINT_IN_TIME", "key": "eval_accuracy", "value": 2.5, "metadata": {"samples_count": 512}}
:::MLLOG {"namespace": "", "time_ms": 61000, "event_type": "INTERVAL_END", "key": "run_stop", "value": null, "metadata": {"status": "success"}}
:::MLLOG {"cut
"""


def entry(turn: int, state: str = "completed", kind: str = "nccl:all_reduce", **more: object) -> dict[str, object]:
    return {
        "collective_seq_id": turn, "profiling_name": kind, "process_group": ["0", "default_pg"],
        "input_sizes": [[4, 8]], "input_dtypes": ["BFloat16"], "output_sizes": [[4, 8]],
        "output_dtypes": ["BFloat16"], "state": state, "time_created_ns": 10**9 * turn, **more,
    }  # fmt: skip


def dump(entries: list[dict[str, object]]) -> dict[str, object]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.5", "pg_config": config, "entries": entries}


def inspector(rank: int, turn: int, us: float) -> str:
    return json.dumps(
        {
            "header": {"id": "0xab", "rank": rank, "n_ranks": 2, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0", "hostname": "h"},
            "coll_perf": {"coll": "AllReduce", "coll_sn": turn, "coll_msg_size_bytes": 1024,
                          "coll_exec_time_us": us, "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 2.0},
        }
    )  # fmt: skip


def test_megatron_log(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(MEGATRON)
    assert recognise(Source(path)).name == "megatron-log"
    found = analyze_step_log(read(path)).facts()
    assert found["step_s"] == pytest.approx(4.1)
    assert found["global_batch"] == 128
    assert found["peak_memory_bytes"] == 4096 * 2**20
    assert found["slow_steps"] == [{"step": 5, "seconds": 8.0, "factor": pytest.approx(8.0 / 4.1)}]
    assert found["last_loss"] == 10.0


def test_a_clock_that_is_ahead_is_no_late_rank() -> None:
    """Rank 1 comes 20 ms late to every second call; the clock of rank 2 is 5 ms ahead."""
    calls = [
        LoggedCollective(
            rank, "0", turn, "all_reduce", 64, "completed", turn + 0.005 * (rank == 2) + late_s, 0.03 - late_s
        )
        for turn in range(40)
        for rank in range(4)
        for late_s in [0.02 * (rank == 1 and turn % 2)]
    ]
    log = CollectiveLog(tuple(calls), (0, 1, 2, 3), {"0": (0, 1, 2, 3)})
    (late,) = analyze_collective_log(log).stragglers
    assert (late.rank, late.last) == (1, 20)
    assert late.waited_s == pytest.approx(0.4)


def log_of(times_ms: list[tuple[int, float]]) -> StepLog:
    return StepLog(tuple(LoggedStep(step, time / 1e3) for step, time in times_ms), "train.log", "Megatron-LM", None, {})


def test_a_line_stands_for_the_steps_since_the_one_before() -> None:
    """A checkpoint of 10 s every hundred steps, in a log that has the mean of ten steps."""
    found = analyze_step_log(log_of([(step, 3000.0 if step % 100 == 0 else 2000.0) for step in range(10, 1001, 10)]))
    assert found.lost_s == pytest.approx(100.0)
    assert found.warnings == []


def test_a_log_leaves_out_its_first_steps_if_more_than_as_many_remain() -> None:
    steps = [(1, 9000.0), (2, 5000.0), (3, 2000.0), (4, 3000.0)]
    few, enough = analyze_step_log(log_of(steps)), analyze_step_log(log_of([*steps, (5, 2000.0)]))
    assert (few.step_s, enough.step_s) == (4.0, 2.0)
    assert [few.warnings, enough.warnings] == [["4 steps are too few to leave out the first ones"], []]


def test_restarts_and_steps_that_grow_are_stated() -> None:
    restarted = analyze_step_log(log_of([(step, 2000.0) for step in (*range(1, 61), *range(41, 101))]))
    assert [text[:31] for text in restarted.warnings] == ["step 60 is followed by step 41:"]
    grown = analyze_step_log(log_of([(step, 2000.0 + 4 * step) for step in range(1, 101)]))
    assert [text[:24] for text in grown.warnings] == ["the median step changes "]
    ranks = analyze_step_log(
        log_of([(step, 2000.0) for line in range(10, 210, 10) for step in (line, line, line + 10)])
    )
    assert ranks.warnings == []


def test_torchtitan_log(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(TITAN)
    assert recognise(Source(path)).name == "torchtitan-log"
    found = analyze_step_log(read(path)).facts()
    assert found["step_s"] == pytest.approx(2.0)
    assert found["tokens_per_s_per_gpu"] == 8000
    assert found["tflops_per_gpu"] == 480.5
    assert found["mfu"] == pytest.approx(0.486)


def test_mlperf_log(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(MLPERF)
    assert recognise(Source(path)).name == "mlperf-log"
    found = analyze_step_log(read(path)).facts()
    assert found["step_s"] == pytest.approx(2.0)
    assert found["run_s"] == pytest.approx(60.0)
    assert found["status"] == "success"


@pytest.mark.parametrize("pickled", [False, True])
def test_flight_recorder_tells_who_never_came(tmp_path: Path, pickled: bool) -> None:
    dumps = [dump([entry(1), entry(2, "started")]), dump([entry(1)])]
    paths = []
    for rank, each in enumerate(dumps):
        path = tmp_path / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(each, protocol=2) if pickled else json.dumps(each).encode())
        paths.append(path)
    kind, log = read_as_one([Source(path) for path in paths])
    assert kind.name == "flight-recorder"
    found = analyze_collective_log(log).facts()
    text = render_text(collective_log_view(found), 100)
    assert text.splitlines()[0].split(maxsplit=1)[1] == "1 unfinished and 0 mismatched calls"
    stuck = "all_reduce 2 of group 0: ranks [0] wait for ranks [1], which never called it"
    assert text.index(stuck) < text.index("bus bandwidth")
    assert found["unfinished"] == [
        {"group": "0", "turn": 2, "kind": "all_reduce", "size_bytes": 64, "waiting": [0], "absent": [1]}
    ]


def test_an_empty_recorder_is_told(tmp_path: Path) -> None:
    paths = [tmp_path / "dump0.json", tmp_path / "dump1.json"]
    for path, entries in zip(paths, ([], [entry(1)]), strict=True):
        path.write_text(json.dumps(dump(entries)))
    _, log = read_as_one([Source(path) for path in paths])
    assert log.warnings == (f"{paths[0]}: the recorder was empty; was TORCH_FR_BUFFER_SIZE set?",)


def test_groups_of_a_recorder_by_name_or_by_members(tmp_path: Path) -> None:
    named = {key: value for key, value in entry(1).items() if key != "process_group"} | {"pg_name": "tp"}
    nameless = entry(2) | {"process_group": [], "pg_name": "dp"}
    given = {
        "entries": [named, nameless],
        "rank": 0,
        "pg_config": {"tp": {"ranks": "[0, 1]"}, "dp": {"ranks": [0, -1, 2]}},
    }
    path = tmp_path / "dump0.json"
    path.write_text(json.dumps(given))
    log = read_as_one([Source(path)])[1]
    assert [call.group for call in log.calls] == ["tp", "dp"]
    assert log.members == {"tp": (0, 1), "dp": (0, 2)}


def test_times_and_sizes_of_a_recorder(tmp_path: Path) -> None:
    timed = entry(1, time_discovered_started_ns=10**9, time_discovered_completed_ns=10**9 + 2_500_000)
    sized = entry(2, input_sizes=[[4, "?"], [3]], input_dtypes=["Float"], output_sizes=[])
    path = tmp_path / "dump0.json"
    path.write_text(json.dumps(dump([timed, sized])))
    calls = read_as_one([Source(path)])[1].calls
    assert [call.seconds for call in calls] == [pytest.approx(2.5e-3), None]
    assert [call.size_bytes for call in calls] == [64, 4 * 4 + 3 * 4]


def test_an_inspector_without_a_number_of_ranks(tmp_path: Path) -> None:
    rows = [json.loads(inspector(rank, 1, 10.0)) for rank in (0, 1)]
    for row in rows:
        del row["header"]["n_ranks"]
    path = tmp_path / "inspector.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    log = read_as_one([Source(path)])[1]
    assert (log.ranks, dict(log.members)) == ((0, 1), {})


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("ran",)

    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"entries": [Evil()]}, protocol=2))
    with pytest.raises(FormatError, match="only plain values are read"):
        read(path)


def test_collectives_that_do_not_match(tmp_path: Path) -> None:
    paths = []
    for rank, kind in enumerate(("nccl:all_reduce", "nccl:all_gather")):
        path = tmp_path / f"dump{rank}.json"
        path.write_text(json.dumps(dump([entry(1, kind=kind)])))
        paths.append(Source(path))
    found = analyze_collective_log(read_as_one(paths)[1]).facts()
    assert [row["turn"] for row in found["mismatched"]] == [1]


@pytest.mark.parametrize(("began", "ended", "seconds"), [(0, 0, 0.0), (5, 2005, 2e-6), (5, None, 0.0), (None, 5, 0.0)])
def test_calls_that_nobody_watched_have_no_duration(
    tmp_path: Path, began: int | None, ended: int | None, seconds: float
) -> None:
    path = tmp_path / "trace_0"
    call = {**entry(1), "time_discovered_started_ns": began, "time_discovered_completed_ns": ended}
    path.write_text(json.dumps(dump([call])))
    row = analyze_collective_log(read(path)).facts()["collectives"][0]
    assert (row.get("median_s") or 0.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("head", "known"),
    [
        (b"\x80\x02}entries", True), (b"\x80\x05}pg_config", True), (b"\x80\x06}entries", False),
        (b"\x80\x02}other", False), (b'{"entries": [], "pg_config": {}}', True), (b'{"entries": []}', False),
        (b' {"entries": [{"profiling_name": 1', True), (b'{"pg_config": {}}', False), (b'["entries", "pg_config"]', False),
    ],
)  # fmt: skip
def test_dumps_of_the_flight_recorder_are_recognised(head: bytes, known: bool) -> None:
    assert looks_like_flight_recorder(head) is known


def test_nccl_inspector(tmp_path: Path) -> None:
    path = tmp_path / "host-pid1.log"
    path.write_text("\n".join(inspector(rank, turn, 10.0 * (1 + rank)) for rank in (0, 1) for turn in (1, 2)))
    assert recognise(Source(path)).name == "nccl-inspector"
    row = analyze_collective_log(read(path)).facts()["collectives"][0]
    assert (row["kind"], row["calls"], row["size_bytes"]) == ("all_reduce", 4, 1024)
    assert row["median_s"] == pytest.approx(15e-6)
    assert row["busbw_bytes_per_s"] == pytest.approx(2e9)
    path.write_text("\n".join(inspector(rank, turn, 0.5) for rank in (0, 1) for turn in (1, 2)))
    assert analyze_collective_log(read(path)).facts()["collectives"][0]["median_s"] == pytest.approx(0.5e-6)


@pytest.mark.parametrize(
    "row", [("soon", 10, 0, 7, 1), (0, "later", 0, 7, 1), (0, 10, "gpu", 7, 1), (0.5, 10, 0, 7, 1)]
)
def test_times_and_devices_of_an_nsys_export_are_whole_numbers(tmp_path: Path, row: tuple[Any, ...]) -> None:
    nsys(tmp_path / "run.sqlite", (row,))
    with pytest.raises(FormatError, match="whole numbers"):
        read(tmp_path / "run.sqlite")


def nsys(path: Path, more: tuple[tuple[Any, ...], ...] = ()) -> None:
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "ncclDevKernel_AllReduce")])
        base.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, "
            "streamId INTEGER, demangledName INTEGER)"
        )
        rows = [(0, 10, 0, 7, 1), (5, 25, 0, 8, 2), (40, 50, 0, 7, 1), *more]
        base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", rows)
        base.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER)")
        steps = [(at * 20, at * 20 + 15, f"step {at}", None) for at in range(3)]
        base.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", steps)
    base.close()


def test_nsight_systems(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    nsys(path)
    assert recognise(Source(path)).name == "nsys"
    assert read(path).measured
    found = analyze_streams(read(path)).facts()
    parts = {name: value * 1e9 for name, value in found["operations_s"].items()}
    # 20, 15 and 15 of the 50 ns that the GPU is seen, in a step of 20 ns: runs of other lengths compare.
    assert parts == pytest.approx({"compute": 8, "exposed": 6, "copy": 0, "idle": 6})
    assert found["step_s"] == pytest.approx(20e-9)
    assert found["kernels"][0]["name"] in ("gemm", "ncclDevKernel_AllReduce")


def test_nsight_systems_says_first_which_gpu_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPU 0 computes for 20 ns, GPU 1 for 50 of 50: two and a half times as long."""
    path = tmp_path / "report.sqlite"
    nsys(path, ((0, 50, 1, 7, 1),))
    assert main(["analyze", str(path)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["step", "20.00", "ns,"]
    assert lines[1].split(maxsplit=1)[1] == "computation: 14.00 ns (70.0 % of the step)"
    assert "GPU 1 computes 2.50x as long as the median of the others (30.00 ns more)" in lines[3]
    assert "gemm" not in text
    assert main(["analyze", str(path), "--verbose"]) == 0
    assert "gemm" in capsys.readouterr().out


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE notes (text TEXT)")
    base.close()
    with pytest.raises(FormatError, match="no table CUPTI"):
        read(path)


def test_a_database_that_computes_its_rows_is_refused(tmp_path: Path) -> None:
    """Columns that are made when they are read could be as large as they like, of a file of some kilobytes."""
    path = tmp_path / "bomb.sqlite"
    with sqlite3.connect(path) as base:
        base.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start AS (length(hex(zeroblob(9000000)))), "
            "end INTEGER, deviceId INTEGER, streamId INTEGER, demangledName INTEGER)"
        )
        base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 0, 7, 1)")
    base.close()
    with pytest.raises(FormatError, match="has computed columns"):
        read(path)


def test_a_database_given_as_bytes_is_not_looked_for_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload has a name to show; a file of that name may exist."""
    monkeypatch.chdir(tmp_path)
    nsys(Path("given.sqlite"))
    data = Path("given.sqlite").read_bytes()
    Path("given.sqlite").write_bytes(b"something else that is private")
    assert len(read_as_one([Source("given.sqlite", data)])[1]) == 6
    Path("packed.sqlite.gz").write_bytes(gzip.compress(data))
    assert len(read(Path("packed.sqlite.gz"))) == 6


@pytest.mark.parametrize(
    ("kind", "size"),
    [("BFloat16", 2), ("Half", 2), ("Float", 4), ("Double", 8), ("Byte", 1), ("Long", 8), ("Other", 4),
     ("Int", 4), ("Short", 2), ("Char", 1), ("Bool", 1), ("Float8_e4m3fn", 1), ("Float8_e5m2", 1)],
)  # fmt: skip
def test_bytes_of_a_recorded_tensor(tmp_path: Path, kind: str, size: int) -> None:
    """Elements times the bytes of one; the larger side of input and output is that of the collective."""
    sides = {
        "input_dtypes": [kind, kind],
        "output_dtypes": [kind],
        "input_sizes": [[4, 8], [3]],
        "output_sizes": [[2, 2]],
    }
    path = tmp_path / "0.json"
    path.write_text(json.dumps(dump([entry(1) | sides])))
    assert read(path).calls[0].size_bytes == (32 + 3) * size
    path.write_text(json.dumps(dump([entry(1) | sides | {"input_dtypes": [kind]}])))  # the other is taken as Float
    assert read(path).calls[0].size_bytes == 32 * size + 3 * 4
