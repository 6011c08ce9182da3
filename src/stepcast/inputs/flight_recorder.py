"""Dumps of PyTorch's NCCL flight recorder: JSON, or a pickle that is read without running any of its code.

``torch._C._distributed_c10d._dump_nccl_trace`` writes a pickle for each rank, ``_dump_nccl_trace_json`` the
same as JSON (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

import io
import pickle
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import RESULT
from stepcast.ir.measured import CollectiveLog, LoggedCollective

NS = 1e-9
ITEM_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Byte": 1, "Char": 1,
    "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


class _Plain(pickle.Unpickler):
    """Numbers, text, lists and dictionaries; nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}, and plain values alone are read")


def looks_like(head: bytes) -> bool:
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return b"entries" in head or b"pg_config" in head
    start = head.lstrip()[:1]
    return start == b"{" and b'"entries"' in head and (b'"pg_config"' in head or b'"profiling_name"' in head)


def read_run(sources: Sequence[Source]) -> CollectiveLog:
    calls: list[LoggedCollective] = []
    members: dict[str, tuple[int, ...]] = {}
    ranks, warnings = [], []
    for place, source in enumerate(sources):
        dump = _decoded(source)
        rank = _rank_of(dump, source.path, place)
        if rank in ranks:
            raise FormatError(f"is of rank {rank}, as another file is", source.path)
        ranks.append(rank)
        members |= _members(dump)
        entries = dump.get("entries")
        if not isinstance(entries, list):
            raise FormatError("has no list of entries", source.path)
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise FormatError(f"entry {number} is no object", source.path)
            calls.append(_call(entry, rank, number))
        if not entries:
            warnings.append(f"{source.path}: the recorder was empty; was TORCH_FR_BUFFER_SIZE set?")
    return CollectiveLog(
        tuple(calls), tuple(sorted(ranks)), members, sources[0].path, "NCCL flight recorder", tuple(warnings)
    )


def _decoded(source: Source) -> dict[str, Any]:
    data = source.raw(RESULT)
    try:
        found = _Plain(io.BytesIO(data)).load() if data[:1] == b"\x80" else msgspec.json.decode(data)
    except (pickle.UnpicklingError, msgspec.DecodeError, EOFError, ValueError, TypeError, KeyError,
            IndexError, AttributeError, MemoryError, OverflowError, UnicodeDecodeError) as error:  # fmt: skip
        told = " ".join(str(error).split())
        raise FormatError(f"no dump of the flight recorder: {told}", source.path) from None
    if not isinstance(found, dict):
        raise FormatError("no dump of the flight recorder: expected an object", source.path)
    return found


def _rank_of(dump: dict[str, Any], path: str, place: int) -> int:
    if isinstance(dump.get("rank"), int):
        return int(dump["rank"])
    found = re.search(r"(\d+)(?:\.(?:json|pkl|pickle))?$", path)  # as TORCH_FR_DUMP_TEMP_FILE ends
    return int(found[1]) if found else place


def _members(dump: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    config = dump.get("pg_config")
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in config.items() if isinstance(config, dict) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        numbers = re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks
        if isinstance(numbers, list):
            found[str(name)] = tuple(int(each) for each in numbers if str(each).isdigit())
    return found


def _call(entry: dict[str, Any], rank: int, number: int) -> LoggedCollective:
    group = entry.get("process_group")
    name = str(group[0]) if isinstance(group, list | tuple) and group else str(entry.get("pg_name", ""))
    kind = str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", ""))
    turn = entry.get("collective_seq_id", entry.get("record_id", number))
    took = entry.get("duration_ms")
    if not isinstance(took, int | float):
        began, ended = entry.get("time_discovered_started_ns"), entry.get("time_discovered_completed_ns")
        # Both are zero where nobody watched when it ran, as of gloo.
        took = (ended - began) * 1e-6 if isinstance(began, int) and isinstance(ended, int) and ended else None
    issued = entry.get("time_created_ns")
    return LoggedCollective(
        rank=rank,
        group=name,
        turn=int(turn) if isinstance(turn, int) else number,
        kind=kind,
        size_bytes=max(_bytes(entry, "input"), _bytes(entry, "output")),
        state="completed" if entry.get("retired") is True else str(entry.get("state", "")),
        issued_s=issued * NS if isinstance(issued, int | float) else None,
        seconds=took * 1e-3 if took is not None and took >= 0 else None,
    )


def _bytes(entry: dict[str, Any], side: str) -> int:
    sizes, types = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
    total = 0
    for at, shape in enumerate(sizes if isinstance(sizes, list | tuple) else ()):
        elements = 1
        for each in shape if isinstance(shape, list | tuple) else ():
            elements *= each if isinstance(each, int) else 1
        kind = types[at] if isinstance(types, list | tuple) and at < len(types) else "Float"
        total += elements * ITEM_BYTES.get(str(kind), 4)
    return total
