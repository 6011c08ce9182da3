"""The interval of a step that waits for the CPU."""

from dataclasses import replace

import pytest

from stepcast.cost.calibration import Calibration
from stepcast.cost.host import HOST_PACES, MEASURED_PACES
from stepcast.forecast.prediction import Prediction
from stepcast.questions.choices import build_question
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import settle

SMALL = {"model": "qwen2.5-0.5b", "gpu": "h200", "framework": "pytorch", "seq": 256, "global_batch": 1}
SENTENCE = "the CPU's pace was not measured"


def predicted(**choices: object) -> Prediction:
    return settle(build_question(PredictQuestion, {**SMALL, **choices})).prediction


def notes_pace(prediction: Prediction) -> bool:
    return any(SENTENCE in text for text in prediction.report.assumptions)


def test_a_step_that_waits_for_the_cpu_is_as_unsure_as_its_pace() -> None:
    """Also where the host goes on to the next step: the step is then all of the host's."""
    prediction = predicted()
    assert [end / prediction.step_s for end in prediction.interval_s] == pytest.approx(HOST_PACES, abs=0.03)
    assert notes_pace(prediction)


def test_a_measured_pace_is_surer() -> None:
    prediction = predicted(calibration=Calibration("h200", {}, pace=1.2))
    low, high = (end / prediction.step_s for end in prediction.interval_s)
    assert HOST_PACES[0] < low <= MEASURED_PACES[0] + 0.03
    assert MEASURED_PACES[1] - 0.03 <= high < HOST_PACES[1]
    assert not notes_pace(prediction)


def test_a_step_that_the_gpu_limits_does_not_mention_it() -> None:
    assert not notes_pace(predicted(model="llama-3.1-8b", seq=8192))


def test_a_stage_that_waits_for_its_cpu_makes_the_whole_pipeline_unsure() -> None:
    """The first of two stages has eleven layers, the second has five and the head, and waits for the first."""
    sizes = {"micro_batch": 1, "global_batch": 64, "seq": 4096, "gpus": 32, "tp": 16, "pp": 2}
    model = "nanotron-1.34b:layers=16,hidden=2048,heads=32,kv_heads=32,ffn=8192,vocab=131072,seq=4096"
    choices = {"model": model, "cluster": "aws-p5", "framework": "nanotron", **sizes}
    prediction = settle(build_question(PredictQuestion, choices)).prediction
    first, last = prediction.report.stages
    assert min(first.host_s, last.bubble_s) > 0.9 * prediction.step_s
    assert prediction.interval_s[0] / prediction.step_s == pytest.approx(HOST_PACES[0], abs=0.05)
    assert prediction.band is not None
    on_time = replace(prediction, band=replace(prediction.band, late_s=0.0))  # no message between stages is late
    assert on_time.interval_s[1] / prediction.step_s == pytest.approx(HOST_PACES[1], abs=0.05)
    assert prediction.interval_s[1] > on_time.interval_s[1]
