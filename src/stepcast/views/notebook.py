"""Answers in a notebook: a page in a frame of its own, apart from the style and programs around it."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.facts import ComparisonFacts
from stepcast.ir.strategy import Strategy
from stepcast.ir.timeline import Timeline
from stepcast.pages.blocks import about_line, answer, card, sortable_table, timed_answer
from stepcast.pages.charts import Frame
from stepcast.pages.document import About, Page, Section, render
from stepcast.pages.markup import tag
from stepcast.pages.plan import plan_page
from stepcast.report.search import nothing_words, row_words, strategy_words
from stepcast.units import GIB, format_seconds
from stepcast.version import __version__
from stepcast.views.compare import compare_view
from stepcast.views.html import render_notebook
from stepcast.views.measured import megatron_view, replay_view
from stepcast.views.step import step_view
from stepcast.views.traces import kineto_view, optimus_view

Facts = Mapping[str, Any]
HEIGHT = 720


def framed(page: Page) -> str:
    """*page* as part of another one; its title stands before it, for viewers that show no frames."""
    frame = tag(
        "iframe",
        srcdoc=None,
        sandbox="allow-scripts",
        width="100%",
        height=HEIGHT,
        frameborder=0,
        title=page.title,
    )
    document = render(page).decode().replace("&", "&amp;").replace('"', "&quot;")
    return f"<p>{tag('strong', page.title)}</p>" + frame.replace("<iframe", f'<iframe srcdoc="{document}"', 1)


def step_html(found: Facts, timeline: Timeline | None, roofline: Any = None) -> str:
    return render_notebook(step_view(found, timeline, roofline), "prediction")


def measured_html(facts: Facts) -> str:
    """Return the page of an analysed run."""
    views = {"megatron run": megatron_view, "kineto run": kineto_view, "optimus run": optimus_view}
    return render_notebook(views[facts["kind"]](facts), "analysis")


def replay_html(facts: Facts) -> str:
    """Return the page of a replayed run."""
    return render_notebook(replay_view(facts), "replay")


def compare_html(facts: ComparisonFacts) -> str:
    """Return the page of a comparison."""
    return render_notebook(compare_view(facts), "comparison")


def plan_html(found: Facts) -> str:
    """Of the facts of a Plan alone."""
    rest: dict[str, Any] = {
        "step_band_days": None,
        "choices": [],
        "assumptions": [],
        "warnings": [],
        "spares": None,
    }
    return framed(plan_page({**rest, **found}, About("plan", version=__version__)))


Found = tuple[Strategy, float, float]
"""A strategy, the seconds of its step, and the bytes of its fullest GPU."""


def found_html(counts: Facts, found: Sequence[Found], on_front: Sequence[Found]) -> str:
    """Strategies that a search found."""
    best, front = (
        [{**row_words(each), "step_s": step_s, "memory_bytes": size} for each, step_s, size in some]
        for some in (found, on_front)
    )
    cards = [
        card(name.replace("_", " ").capitalize(), f"{counts[name]:,}")
        for name in counts
        if name not in ("complete", "out_of_time")
    ]
    if not best:
        words = nothing_words(counts)
        first, _, rest = words.capitalize().partition(" ")
        head = answer(first, rest, tag("strong", "search"), cards=cards)
        return framed(Page(words, head, (), About("search", version=__version__)))
    heads = ("rank", "GPUs", "strategy", "step", "memory")
    rows = [{**row, "rank": at} for at, row in enumerate(best, 1)]
    columns = ("rank gpus,", ("strategy", strategy_words), "step_s memory_bytes")
    ranked = sortable_table(heads, rows, columns, "The best first", range(1, len(best) + 1))
    step_s = best[0]["step_s"]
    about = about_line(f"{best[0]['gpus']:,} GPUs", strategy_words(best[0]))
    sections = [
        Section("Strategies", ranked, wide=True),
        Section("Time against memory", _front(best, front), wide=True),
    ]
    head = timed_answer(step_s, "per step, the best found", about, cards=cards)
    return framed(
        Page(f"{format_seconds(step_s)} per step", head, sections, About("search", version=__version__))
    )


def _front(best: Sequence[Facts], front: Sequence[Facts]) -> str:
    points = [*best, *front]
    steps, sizes = [row["step_s"] for row in points], [row["memory_bytes"] / GIB for row in points]
    frame = Frame(
        min(steps) * 0.97,
        max(steps) * 1.03,
        0.0,
        max(sizes) * 1.05,
        format_seconds,
        lambda size: f"{size:g}",
        "time of a step",
        "GiB of a GPU",
    )
    line = frame.line(sorted((row["step_s"], row["memory_bytes"] / GIB) for row in front), "front")
    dots = [
        frame.dot(
            row["step_s"],
            row["memory_bytes"] / GIB,
            kind,
            f"{format_seconds(row['step_s'])}: {strategy_words(row)}",
            5,
        )
        for kind, rows in (("optimizer", front), ("compute", best))
        for row in rows
    ]
    return frame.draw(line, dots, label="Step time against memory")
