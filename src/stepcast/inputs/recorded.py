"""Files of ``stepcast record`` next to its traces: step boundaries, and logs of collective libraries.

NCCL's flight recorder in PyTorch writes a pickle for each rank, ``torch._C._distributed_c10d._dump_nccl_trace``, or
JSON, ``_dump_nccl_trace_json`` (torch/csrc/distributed/c10d/FlightRecorder.hpp). A reader of our own takes plain values
alone out of the pickle. The Inspector writes a JSON object for each collective (NVIDIA/nccl, ext-profiler/inspector).
"""

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from stepcast.inputs.kineto.reader import dtype_named
from stepcast.inputs.plain_pickle import load_plain_pickle
from stepcast.inputs.source import FormatError, Source, expect, prefix_errors
from stepcast.ir.limits import GPUS, GROUP_RANKS, RESULT
from stepcast.ir.measured import CollectiveLog, LoggedCollective
from stepcast.ir.types import DType, FactDict, pick
from stepcast.units import GB, MS, NS, US

# Folders next to the traces.
STEPS, FLIGHT, INSPECTOR = "steps", "flight-recorder", "inspector"


class _RecordedMessage(msgspec.Struct):
    start_s: float
    end_s: float
    name: str
    bytes: int
    ranks: list[int] = []


class _RecordedFile(msgspec.Struct):
    rank: int
    step_ends_s: list[float]
    window: tuple[int, int]
    ahead_s: float = 0.0
    peak_bytes: int = 0
    host: str = ""
    collectives: list[_RecordedMessage] = []


def read_steps(folder: str) -> list[FactDict]:
    """Return the facts of the ranks in *folder*, in order; none where there is no such folder."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json")) if os.path.isdir(folder) else []
    return sorted((_read_rank(os.path.join(folder, name)) for name in names), key=lambda recorded: recorded["rank"])


def read_logs(folder: str) -> list[CollectiveLog]:
    """Return the logs of the flight recorder and of NCCL's Inspector, where the recorded *folder* holds them."""
    logs = []
    for name, read in ((FLIGHT, read_run_flight_recorder), (INSPECTOR, read_run_inspector)):
        logs_folder = os.path.join(folder, name)
        if files := sorted(os.listdir(logs_folder)) if os.path.isdir(logs_folder) else []:
            logs.append(read([Source(os.path.join(logs_folder, file)) for file in files]))
    return logs


def _read_rank(path: str) -> FactDict:
    with prefix_errors("no steps of a recorded job", path, (msgspec.DecodeError, UnicodeDecodeError)):
        file = msgspec.json.decode(Source(path).data(RESULT), type=_RecordedFile)
    skip, steps = file.window
    # Times by the wall clock, from the second step on. Step number skip + 1 warms the profiler up.
    steps_s = [after - before for before, after in pairwise(file.step_ends_s)]
    profiled_s = [step_s for index, step_s in enumerate(steps_s) if index in range(skip, skip + steps)]
    profiled = range(skip - 2, skip + steps + 1)  # with those that start and warm up the profiler
    outside = [step_s for index, step_s in enumerate(steps_s) if index not in profiled]
    window_s = statistics.mean(profiled_s) if profiled_s else None
    outside_s = statistics.median(outside or steps_s or [0.0])
    return {
        **pick(file, "rank host ahead_s peak_bytes"),
        "steps": len(steps_s) + 1,
        "step_s": outside_s,
        "window_step_s": window_s,
        "overhead": window_s / outside_s - 1 if window_s and outside_s else None,
        "collectives": len(file.collectives),
    }


MOST_BYTES = 2**63  # of a tensor


def looks_like_flight_recorder(head: bytes) -> bool:
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return b"entries" in head or b"pg_config" in head
    start = head.lstrip()[:1]
    return start == b"{" and b'"entries"' in head and (b'"pg_config"' in head or b'"profiling_name"' in head)


def read_run_flight_recorder(sources: Sequence[Source]) -> CollectiveLog:
    calls: list[LoggedCollective] = []
    members: dict[str, tuple[int, ...]] = {}
    ranks, warnings = [], []
    for place, source in enumerate(sources):
        data = source.raw(RESULT)
        try:
            dump = load_plain_pickle(data) if data[:1] == b"\x80" else msgspec.json.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FormatError(f"no dump of the flight recorder: {' '.join(str(error).split())}", source.path) from None
        if not isinstance(dump, dict):
            raise FormatError("no dump of the flight recorder: expected an object", source.path)
        rank = dump.get("rank")
        if not isinstance(rank, int):
            match = re.search(r"(\d+)(?:\.(?:json|pkl|pickle))?$", source.path)  # as TORCH_FR_DUMP_TEMP_FILE ends
            rank = int(match[1]) if match else place
        expect(rank not in ranks, f"is of rank {rank}, as another file is", source.path)
        ranks.append(int(rank))
        members |= _group_members(dump.get("pg_config"))
        entries = dump.get("entries")
        if not isinstance(entries, list):
            raise FormatError("has no list of entries", source.path)
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise FormatError(f"entry {number} is no object", source.path)
            calls.append(_read_call(entry, int(rank), number))
        if not entries:
            warnings.append(f"{source.path}: the recorder was empty; was TORCH_FR_BUFFER_SIZE set?")
    return CollectiveLog(
        tuple(calls), tuple(sorted(ranks)), members, sources[0].path, "NCCL flight recorder", tuple(warnings)
    )


def _group_members(config: object) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    total = 0
    for name, entry in config.items() if isinstance(config, dict) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if isinstance(ranks, str):
            GROUP_RANKS.check(total + ranks.count(",") + 1)
            ranks = [int(number) for number in re.findall(r"\b\d{1,18}\b", ranks)]
        if isinstance(ranks, list):
            total += len(ranks)
            GROUP_RANKS.check(total)
            members[str(name)] = tuple(number for number in ranks if isinstance(number, int) and number >= 0)
    return members


def _read_call(entry: Mapping[str, object], rank: int, number: int) -> LoggedCollective:
    group = entry.get("process_group")
    label = _text_of(entry.get("profiling_name"))
    turn = entry.get("collective_seq_id", entry.get("record_id", number))
    milliseconds = entry.get("duration_ms")
    if not isinstance(milliseconds, int | float):
        began, ended = entry.get("time_discovered_started_ns"), entry.get("time_discovered_completed_ns")
        # Both are zero where nobody watched when it ran, as with gloo.
        is_timed = isinstance(began, int) and isinstance(ended, int) and ended
        milliseconds = (ended - began) * 1e-6 if is_timed else None  # type: ignore[operator]
    issued = entry.get("time_created_ns")
    return LoggedCollective(
        rank=rank,
        group=_text_of(group[0] if isinstance(group, list | tuple) and group else entry.get("pg_name")),
        turn=int(turn) if isinstance(turn, int) else number,
        kind=label.partition(":")[2] or label,
        size_bytes=max(_total_bytes(entry, "input"), _total_bytes(entry, "output")),
        state="completed" if entry.get("retired") is True else _text_of(entry.get("state")),
        issued_s=issued * NS if isinstance(issued, int | float) else None,
        seconds=milliseconds * MS if milliseconds is not None and milliseconds >= 0 else None,
    )


def _text_of(value: object) -> str:
    """Return a name or a number as text; nothing for other values, whose text may be very long."""
    return str(value) if isinstance(value, str | int | float) else ""


def _total_bytes(entry: Mapping[str, object], side: str) -> int:
    sizes, types = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
    total = 0
    for index, shape in enumerate(sizes if isinstance(sizes, list | tuple) else ()):
        kind = types[index] if isinstance(types, list | tuple) and index < len(types) else "Float"
        size = int((dtype_named(_text_of(kind)) or DType.FP32).bytes)
        for length in shape if isinstance(shape, list | tuple) else ():
            size *= length if isinstance(length, int) else 1
            if not 0 <= size <= MOST_BYTES:
                raise FormatError(f"{side}_sizes: a tensor of more than {MOST_BYTES:,} bytes, or fewer than none")
        total += size
    return total


def read_run_inspector(sources: Sequence[Source]) -> CollectiveLog:
    calls: list[LoggedCollective] = []
    sizes: dict[str, int] = {}
    warnings = []
    for source in sources:
        damaged = 0
        for line in source.each_line(errors="replace"):
            text = line.strip().rstrip(",")
            if not text or text in "[]":
                continue
            try:
                event = msgspec.json.decode(text, type=dict[str, object])
            except msgspec.DecodeError:
                damaged += 1
                continue
            header, call = event.get("header"), event.get("coll_perf")
            if not isinstance(header, dict) or not isinstance(call, dict):
                continue
            group, rank = str(header.get("id", "")), header.get("rank", 0)
            if not isinstance(rank, int):
                raise FormatError("a header has no rank", source.path)
            size = 0 if header.get("n_ranks") is None else header["n_ranks"]
            if not isinstance(size, int) or size < 0:
                raise FormatError(f"n_ranks {size!r} is no number of ranks", source.path)
            GPUS.check(size)
            sizes[group] = size
            calls.append(_inspected_call(call, group, rank, len(calls)))
        if damaged:
            warnings.append(f"{source.path}: {damaged} lines are no JSON and were left out")
    expect(calls, "holds no collective of the NCCL Inspector", sources[0].path)
    members = {group: tuple(range(size)) for group, size in sizes.items() if size}
    ranks = tuple(sorted({call.rank for call in calls}))
    return CollectiveLog(tuple(calls), ranks, members, sources[0].path, "NCCL Inspector", tuple(warnings))


def _inspected_call(call: Mapping[str, object], group: str, rank: int, number: int) -> LoggedCollective:
    size, microseconds, rate = (
        value if isinstance(value := call.get(name), int | float) and value >= 0 else None
        for name in ("coll_msg_size_bytes", "coll_exec_time_us", "coll_busbw_gbs")
    )
    turn, kind = call.get("coll_sn"), str(call.get("coll", ""))
    return LoggedCollective(
        rank=rank,
        group=group,
        turn=turn if isinstance(turn, int) else number,
        kind=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower().replace("allto_all", "all_to_all"),
        size_bytes=int(size or 0),
        seconds=None if microseconds is None else microseconds * US,
        bus_bytes_per_s=None if rate is None else rate * GB,
    )
