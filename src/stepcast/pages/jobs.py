"""Pages of what jobs leave behind: logs of steps and collectives, databases of kernels, straggler traces."""

from collections.abc import Callable, Mapping
from typing import Any

from stepcast.ir.timeline import Timeline
from stepcast.pages.blocks import about_line, answer
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import tag
from stepcast.pages.timeline import timeline_section
from stepcast.report import jobs
from stepcast.units import format_seconds

Facts = Mapping[str, Any]
WIDTH = 100
TEXTS: dict[str, tuple[str, Callable[[Facts, int], str]]] = {
    "megatron-log": ("Megatron-LM log", jobs.step_log_text),
    "torchtitan-log": ("torchtitan log", jobs.step_log_text),
    "mlperf-log": ("MLPerf result log", jobs.step_log_text),
    "flight-recorder": ("NCCL flight recorder", jobs.collective_log_text),
    "nccl-inspector": ("NCCL Inspector", jobs.collective_log_text),
    "nsys": ("Nsight Systems export", jobs.streams_text),
    "stragglers": ("straggler trace", jobs.stragglers_text),
}


def job_page(found: Facts, about: About, timeline: Timeline | None = None) -> Page:
    """Of the facts of such a file, told as the command tells them."""
    title, told = TEXTS[found["format"]]
    step_s = found.get("step_s")
    number, unit = format_seconds(step_s).split(" ") if step_s else (f"{found.get('calls', 0):,}", "calls")
    what = about_line(title, str(found.get("source", "")))
    sections = [
        Section("What it tells", tag("pre", told(found, WIDTH)), wide=True),
        timeline_section(timeline, about.links),
    ]
    return Page(
        f"{title}: {number} {unit}",
        answer(number, f"{unit} per step, measured" if step_s else unit, what),
        sections,
        about,
        found,
        warnings=found["warnings"],
    )
