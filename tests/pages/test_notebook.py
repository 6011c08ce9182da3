"""Answers in a notebook: short to print, whole to look at, and they travel."""

import html
import pickle
import re
from typing import Any

import pytest

import stepcast
from stepcast.analyze.kineto.analysis import analyze_kineto
from stepcast.analyze.megatron.analysis import analyze_megatron
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.replay import replay
from stepcast.forecast.prediction import roofline
from stepcast.goodput.plan import Saving
from stepcast.searching.search import search
from tests.pages.parsed import assert_safe
from tests.shared import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def prediction() -> stepcast.Prediction:
    strategy = stepcast.Strategy(stepcast.Layout(tp=2, dp=2, pp=2), micro_batch=1, global_batch=16, seq=4096)
    return stepcast.predict(stepcast.load_model("llama-3.1-8b"), stepcast.load_cluster("dgx-h100"), strategy)


def page_of(shown: str) -> bytes:
    """The page within the frame of a notebook."""
    found = re.search(r'<iframe srcdoc="([^"]*)"', shown)
    assert found
    assert 'sandbox="allow-scripts"' in shown
    return html.unescape(found[1]).encode()


def test_a_prediction_is_short_to_print_and_whole_to_look_at(prediction: stepcast.Prediction) -> None:
    assert len(repr(prediction)) < 150
    assert "8 GPUs" in repr(prediction)
    page = assert_safe(page_of(prediction._repr_html_()))
    assert "Time breakdown" in page.text
    assert page.block("timeline-data")["count"] == len(prediction.timeline)


def test_a_prediction_travels(prediction: stepcast.Prediction) -> None:
    there = pickle.loads(pickle.dumps(prediction))
    assert there.step_s == prediction.step_s
    assert there.report == prediction.report
    assert there.fits is prediction.fits
    assert (there.timeline.start_s == prediction.timeline.start_s).all()
    assert roofline(there) == roofline(prediction)
    assert repr(there) == repr(prediction)
    assert pickle.loads(pickle.dumps(there)).step_s == prediction.step_s


def test_a_prediction_of_very_many_micro_batches_travels_without_its_tasks() -> None:
    strategy = stepcast.Strategy(stepcast.Layout(dp=1, pp=8), micro_batch=1, global_batch=20_000, seq=128)
    long = stepcast.predict(stepcast.load_model("llama-3.2-1b"), stepcast.load_cluster("dgx-h100"), strategy)
    assert long.source.steady
    there = pickle.loads(pickle.dumps(long))
    assert there.report == long.report
    assert there.shown_timeline is None
    assert "Time breakdown" in there._repr_html_()
    with pytest.raises(ValueError, match="predict it again"):
        _ = there.timeline


def test_a_search_is_shown_and_travels() -> None:
    model, cluster = stepcast.load_model("llama-3.2-1b"), stepcast.load_cluster("dgx-h100")
    found = search(model, cluster, 8, 16, 2048, axes={"tp": (1, 2), "recompute": ("none",)}, top=4)
    assert len(repr(found)) < 150
    page = assert_safe(page_of(found._repr_html_()))
    assert len([1 for tag, attributes in page.elements if tag == "tr" and "data-row" in attributes]) == 4
    assert pickle.loads(pickle.dumps(found)).best == found.best
    none = search(model, cluster, 1, 16, 2048, most_bytes=1e6)
    assert "nothing fits" in repr(none)
    assert "fits" in assert_safe(page_of(none._repr_html_())).text


def test_a_plan_is_shown_and_travels() -> None:
    failures, restart = stepcast.load_failures("llama-3")
    operation = stepcast.Operation(failures, Saving(1e12), restart)
    made = stepcast.plan([stepcast.TrainingPhase(100_000, 4.0, 4e6, 1024)], operation, runs=50)
    assert len(repr(made)) < 150
    assert "days" in assert_safe(page_of(str(made._repr_html_()))).text
    assert pickle.loads(pickle.dumps(made)).facts() == made.facts()


def test_measured_runs_are_shown_and_travel() -> None:
    megatron = stepcast.read(EXAMPLES / "megatron-rank7.txt")
    shown: list[Any] = [
        analyze_megatron(megatron).result,
        analyze_kineto(stepcast.read(EXAMPLES / "kineto-llama-1b.json.gz")),
        replay(record_megatron(megatron)).result,
    ]
    facts = [each.facts() for each in shown]
    shown.append(stepcast.compare(facts[0], facts[2]))
    shown.append(stepcast.gate(EXAMPLES / "gate/night-2.log", baseline=EXAMPLES / "gate/night-1.log"))
    for each in shown:
        assert len(repr(each)) < 150
        assert_safe(page_of(each._repr_html_()))
        assert repr(pickle.loads(pickle.dumps(each))) == repr(each)


def test_nouns_are_short_to_print(prediction: stepcast.Prediction) -> None:
    for noun in (prediction.workload, prediction.timeline):
        assert len(repr(noun)) < 200


def test_the_public_names_are_listed() -> None:
    assert set(dir(stepcast)) == set(stepcast.__all__)
