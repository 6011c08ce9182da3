"""PyTorch profiler traces (Kineto's Chrome JSON, plain or gzip): one file per rank make one Timeline."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import msgspec

from stepcast.inputs.kineto.columns import Communicators, ProcessGroup, RankColumns
from stepcast.inputs.kineto.stream import EventStream
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.timeline import Timeline, TimelineBuilder
from stepcast.units import NS

BARE_EVENT = re.compile(r'\[\s*\{[^{}]{0,2000}"ph"\s*:\s*"[A-Za-z]"')
FILE_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
GROUPS = msgspec.json.Decoder(list[ProcessGroup])
MOST_RANKS = 10_000_000


def looks_like(head: str) -> bool:
    """Return whether it is an object with traceEvents, or Kineto's header where that fills the head, or bare events."""
    start = head.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return '"traceEvents"' in start or (
            '"schemaVersion"' in start and ('"distributedInfo"' in start or '"deviceProperties"' in start)
        )
    return BARE_EVENT.match(start) is not None


def read_run(sources: Sequence[Source]) -> Timeline:
    """Return the traces of a run's ranks, on one clock where they state what their times count from."""
    builder, warnings = TimelineBuilder(), list[str]()
    facts, devices, files = dict[str, object](), dict[str, None](), dict[int, str]()
    steps = world_size = 0
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
        own_base_ns = _count(metadata.get("baseTimeNanoseconds")) or 0
        base_ns = own_base_ns if base_ns is None else base_ns
        columns.add_to(builder, communicators, (own_base_ns - base_ns) * NS)
        where = f"{source.path}: " if len(sources) > 1 else ""
        odd = {"events without a usable start and duration were left out": stream.skipped + columns.skipped}
        odd["begin and end events were left out; only complete ones are read"] = columns.unpaired
        warnings += [where + warning for warning in stream.warnings]
        warnings += [f"{where}{count} {words}" for words, count in odd.items() if count]
        steps = max(steps, columns.steps)
        world_size = communicators.world_size or world_size
        devices |= dict.fromkeys(stream.device_names())
        facts |= _run_facts(metadata, communicators)
    if not len(builder):
        raise FormatError("has no events with a start and a duration; expected a profiler trace", sources[0].path)
    facts = {"steps": steps} | facts
    if devices:
        facts["devices"] = list(devices)
    if world_size > len(files):
        facts["missing_ranks"] = world_size - len(files)
    return builder.build(
        measured=True,
        source=sources[0].path if len(sources) == 1 else str(PurePath(sources[0].path).parent),
        facts=facts,
        warnings=warnings,
    )


def _communicators(metadata: Mapping[str, object], source: Source, order: int) -> Communicators:
    """Return rank and process groups: from distributedInfo, else the rank in the file's name, else its place."""
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = _count(info.get("rank"))
    if rank is None or rank >= MOST_RANKS:
        match = FILE_RANK.search(PurePath(source.path).name)
        rank = int(match[1]) if match else order
    try:
        groups = GROUPS.decode(msgspec.json.encode(info.get("pg_config") or []))
    except (msgspec.DecodeError, ValueError):
        groups = []
    world_size = min(_count(info.get("world_size")) or 0, MOST_RANKS)
    return Communicators(rank, world_size, {str(group.pg_name): group for group in groups})


def _run_facts(metadata: Mapping[str, object], communicators: Communicators) -> dict[str, object]:
    """Return the facts of the job in the trace's header, in the words of the glossary."""
    facts: dict[str, object] = {"world_size": communicators.world_size} if communicators.world_size else {}
    info = metadata.get("distributedInfo")
    for table, keys in (
        (info if isinstance(info, dict) else {}, ("backend", "nccl_version")),
        (metadata, ("pytorch_version", "cuda_runtime_version", "cuda_driver_version", "host_name")),
    ):
        facts |= {key: table[key] for key in keys if isinstance(table.get(key), str | int)}
    if groups := communicators.groups:
        facts["process_groups"] = {
            name: {"description": group.pg_desc, "ranks": len(group.ranks)} for name, group in groups.items()
        }
    return facts


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
