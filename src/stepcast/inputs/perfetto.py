"""Timelines that stepcast wrote as Chrome trace JSON (``outputs/perfetto.py``), with what they state of themselves."""

import re
from itertools import chain

import msgspec

from stepcast.inputs.kineto.stream import EventStream
from stepcast.inputs.source import Source, prefix_errors
from stepcast.ir.layout import Group, Layout
from stepcast.ir.timeline import NONE, SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import FactDict
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer, Work
from stepcast.units import US

PROCESS = re.compile(r"rank (\d{1,8})(?: \(stage (\d{1,8})\))?")
DAMAGED = (KeyError, TypeError, ValueError, AttributeError)


def read(source: Source) -> Timeline:
    """Return the timeline with its lanes, stages and works; arrows between spans are left out."""
    stream, builder = EventStream(source), TimelineBuilder()
    lanes, ranks, stages = dict[tuple[object, object], int](), dict[object, int](), dict[int, int]()
    with prefix_errors("is no complete timeline of stepcast", source.path, DAMAGED):
        for event in chain.from_iterable(stream):
            values: FactDict = msgspec.json.decode(event.args) if event.args else {}
            if event.name == "process_name" and (match := PROCESS.fullmatch(values["name"])):
                rank = ranks[event.pid] = int(match[1])
                stages |= {rank: int(match[2])} if match[2] else {}
            elif event.ph == "M" and event.name == "thread_name":
                name = values["name"].removesuffix(", overlapping")
                lanes[event.pid, event.tid] = builder.lane(ranks[event.pid], name)
            elif event.ph == "X":
                batch, work, lane = values.pop("micro_batch", NONE), _pop_work(values), lanes[event.pid, event.tid]
                start_s, duration_s = float(event.ts or 0.0) * US, float(event.dur or 0.0) * US
                about = {"kind": SpanKind[event.cat.upper()], "work": work, "micro_batch": batch}
                details = [(key, str(value)) for key, value in values.items()]
                builder.add(event.name, lane, start_s, duration_s, details=details, **about)
        origin = msgspec.convert(stream.metadata["otherData"], dict[str, FactDict])["stepcast"]
        layout = origin.pop("layout", None)
        return builder.build(
            measured=bool(origin.pop("measured")),
            source=source.path,
            layout=Layout(**layout) if layout else None,
            stage_of_rank=stages,
            facts=origin,
            warnings=stream.warnings,
            rebase=False,
        )


def _pop_work(values: FactDict) -> Work | None:
    """Take a message out of the arguments of a span; other work is named alone, so its size is not known."""
    if not {"group", "bytes"} <= set(values):
        return None
    group, size_bytes = Group(values.pop("group")), int(values.pop("bytes"))
    if "transfer" in values:
        return Transfer(Direction(values.pop("transfer")), size_bytes, group)
    return Collective(CollectiveKind(values.pop("collective")), size_bytes, group, values.pop("times", 1))
