"""A run from its ranks' profiler traces: rank, clock, process groups and facts of each."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from stepcast.inputs.kineto.columns import Communicators, ProcessGroup, RankColumns
from stepcast.inputs.kineto.stream import EventStream
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.timeline import Timeline, TimelineBuilder
from stepcast.units import NS

FILE_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
GROUPS = msgspec.json.Decoder(list[ProcessGroup])
MOST_RANKS = 10_000_000


def read_run(sources: Sequence[Source]) -> Timeline:
    """The traces of a run's ranks, on one clock where they say what their times count from."""
    builder = TimelineBuilder()
    warnings: list[str] = []
    facts: dict[str, Any] = {"steps": 0}
    devices: dict[str, None] = {}
    files: dict[int, str] = {}
    base_ns: int | None = None
    for order, source in enumerate(sources):
        stream, columns = EventStream(source), RankColumns()
        for events in stream:
            columns.add(events)
        metadata = stream.metadata
        communicators = _communicators(metadata, source, order)
        rank = communicators.rank
        if rank in files:
            raise FormatError(f"is of rank {rank}, as is {files[rank]}; expected one trace per rank", source.path)
        files[rank] = source.path
        own_base_ns = _whole(metadata.get("baseTimeNanoseconds")) or 0
        base_ns = own_base_ns if base_ns is None else base_ns
        columns.add_to(builder, communicators, (own_base_ns - base_ns) * NS)
        where = f"{source.path}: " if len(sources) > 1 else ""
        warnings += [where + warning for warning in stream.warnings + _odd_events(stream, columns)]
        facts["steps"] = max(facts["steps"], columns.steps)
        devices |= dict.fromkeys(_device_names(metadata))
        facts |= _run_facts(metadata, communicators)
    if not len(builder):
        raise FormatError("has no events with a start and a duration; expected a profiler trace", sources[0].path)
    if devices:
        facts["devices"] = list(devices)
    missing = facts.get("world_size", len(files)) - len(files)
    if missing > 0:
        facts["missing_ranks"] = missing
    return builder.build(
        measured=True,
        source=sources[0].path if len(sources) == 1 else str(PurePath(sources[0].path).parent),
        facts=facts,
        warnings=warnings,
    )


def _communicators(metadata: Mapping[str, Any], source: Source, order: int) -> Communicators:
    """Rank and process groups: from distributedInfo, else the rank in the file's name, else its place."""
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = _whole(info.get("rank"))
    if rank is None or rank >= MOST_RANKS:
        named = FILE_RANK.search(PurePath(source.path).name)
        rank = int(named[1]) if named else order
    try:
        groups = GROUPS.decode(msgspec.json.encode(info.get("pg_config") or []))
    except (msgspec.DecodeError, ValueError):
        groups = []
    world_size = min(_whole(info.get("world_size")) or 0, MOST_RANKS)
    return Communicators(rank, world_size, {str(group.pg_name): group for group in groups})


def _run_facts(metadata: Mapping[str, Any], communicators: Communicators) -> dict[str, Any]:
    """What the trace's header says of the job, in the words of the glossary."""
    facts: dict[str, Any] = {}
    if communicators.world_size:
        facts["world_size"] = communicators.world_size
    info = metadata.get("distributedInfo")
    for place, keys in (
        (info if isinstance(info, dict) else {}, ("backend", "nccl_version")),
        (metadata, ("pytorch_version", "cuda_runtime_version", "cuda_driver_version", "host_name")),
    ):
        facts |= {key: place[key] for key in keys if isinstance(place.get(key), str | int)}
    groups = {
        name: {"description": group.pg_desc, "ranks": len(group.ranks)} for name, group in communicators.groups.items()
    }
    if groups:
        facts["process_groups"] = groups
    return facts


def _device_names(metadata: Mapping[str, Any]) -> list[str]:
    devices = metadata.get("deviceProperties")
    if not isinstance(devices, list):
        return []
    names = [device.get("name") for device in devices if isinstance(device, dict)]
    return [name for name in names if isinstance(name, str)]


def _odd_events(stream: EventStream, columns: RankColumns) -> list[str]:
    warnings = []
    if skipped := stream.skipped + columns.skipped:
        warnings.append(f"{skipped} events without a usable start and duration were left out")
    if columns.unpaired:
        warnings.append(f"{columns.unpaired} begin and end events were left out; only complete ones are read")
    return warnings


def _whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
