"""Answers in a notebook: a page in a frame of its own, apart from the style and programs around it."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.facts import ComparisonFacts, RooflineFacts
from stepcast.ir.timeline import Timeline
from stepcast.views.compare import compare_view
from stepcast.views.html import render_notebook
from stepcast.views.measured import megatron_view, replay_view
from stepcast.views.plan import plan_view
from stepcast.views.search import Candidate, strategies_view
from stepcast.views.step import step_view
from stepcast.views.traces import kineto_view, optimus_view

Facts = Mapping[str, Any]


def step_html(found: Facts, timeline: Timeline | None, roofline: RooflineFacts | None = None) -> str:
    """Return the page of a simulated step."""
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
    """Return the page of a Plan."""
    rest: dict[str, Any] = {"step_band_days": None, "choices": [], "assumptions": [], "warnings": [], "spares": None}
    return render_notebook(plan_view({**rest, **found}), "plan")


def found_html(counts: Facts, found: Sequence[Candidate], on_front: Sequence[Candidate]) -> str:
    """Return the page of the strategies that a search found."""
    return render_notebook(strategies_view(counts, found, on_front), "search")
