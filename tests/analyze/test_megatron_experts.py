"""Megatron-LM runs with experts: who shares them, who got more tokens, and who is slow."""

from pathlib import Path
from typing import Any

import pytest

from stepcast.analyze.megatron.analysis import analyze_megatron
from stepcast.analyze.recording import play
from stepcast.analyze.replay import replay
from stepcast.inputs.table import read
from tests.analyze.megatron_run import Pipeline, step_ms, write
from tests.cli.test_main import run, run_json

NAMED = "wd{world}_tp{tp}_pp{pp}_exp{ep}_expNum8_l{layers}_bs{batch}_T_rank{rank}.txt"
UNNAMED = "trace-{rank}.txt"
EVEN = ((2, 2, 2, 2),)
UNEVEN = ((1, 4, 2, 1), (2, 4, 1, 1))
RUN = Pipeline(tp=1, dp=4, pp=2, layers=(2, 2), ep=4, routing=UNEVEN, file_name=NAMED)


def facts_of(pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    write(pipeline, folder)
    return analyze_megatron(read(folder)).result.facts()


def record_of(pipeline: Pipeline, folder: Path) -> Any:
    write(pipeline, folder)
    return analyze_megatron(read(folder)).recording


@pytest.mark.parametrize(
    "file_name",
    [
        NAMED,
        NAMED.replace("_l{", "_numl{"),
        NAMED.replace("_exp{", "_ep{"),
        "bs{batch}_l{layers}_ep{ep}_pp{pp}_tp{tp}_wd{world}_rank{rank}.txt",
    ],
)
def test_ep_and_layers_are_read_from_the_name(file_name: str, tmp_path: Path) -> None:
    run = RUN.changed(file_name=file_name)
    write(run, tmp_path)
    timeline = read(tmp_path)
    assert timeline.layout is not None
    assert timeline.layout.ep == 4
    assert timeline.facts["layers"] == 4
    assert timeline.facts["basis"]["ep"] == "file name"


@pytest.mark.parametrize(
    ("name", "ep", "expert_tp"),
    [
        ("exp3", 1, 1),  # divides no stage's ranks: the name is of another run
        ("exp8", 8, 1),  # more than the replicas: experts are spread over the tensor ranks too
    ],
)
def test_an_ep_that_its_replicas_cannot_form(name: str, ep: int, expert_tp: int, tmp_path: Path) -> None:
    run = RUN.changed(tp=2, routing=EVEN, file_name=NAMED.replace("exp{ep}", name))
    write(run, tmp_path)
    timeline = read(tmp_path)
    assert timeline.layout is not None
    assert (timeline.layout.ep, timeline.layout.expert_tp) == (ep, expert_tp if ep > 1 else 0)
    found = analyze_megatron(timeline).result.facts()
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"], rel=1e-4)


@pytest.mark.parametrize(("ep", "routing"), [(4, UNEVEN), (2, ((1, 3), (2, 2))), (1, ((1,),))])
def test_ep_is_told_from_the_tokens(ep: int, routing: Any, tmp_path: Path) -> None:
    run = RUN.changed(file_name=UNNAMED, ep=ep, routing=routing)
    write(run, tmp_path)
    timeline = read(tmp_path)
    assert timeline.layout is not None
    assert timeline.layout.ep == ep
    told = not any("share experts" in text for text in timeline.warnings)
    assert told == (ep > 1)


def test_a_name_that_the_tokens_contradict_is_told(tmp_path: Path) -> None:
    run = RUN.changed(file_name=NAMED.replace("_exp{ep}", "_exp2"))
    write(run, tmp_path)
    timeline = read(tmp_path)
    assert timeline.layout is not None
    assert timeline.layout.ep == 4
    assert "the file name says ep 2, the content 4" in timeline.warnings


def test_a_run_of_unknown_tp_claims_no_ep(tmp_path: Path) -> None:
    write(RUN.changed(tp=2, file_name=UNNAMED), tmp_path)
    warnings = read(tmp_path).warnings
    assert any("tensor parallelism cannot be inferred" in text for text in warnings)
    assert any("how many ranks share experts (ep)" in text for text in warnings)


def test_an_ep_that_cannot_be_told_is_warned_of(tmp_path: Path) -> None:
    write(RUN.changed(file_name=UNNAMED, routing=EVEN), tmp_path)
    assert any("how many ranks share experts (ep)" in text for text in read(tmp_path).warnings)


@pytest.mark.parametrize("file_name", [NAMED, UNNAMED])
@pytest.mark.parametrize(
    "run", [RUN, RUN.changed(dp=8), RUN.changed(ep=2, routing=((1, 3),)), RUN.changed(slow={2: 1.6}, pp=1, layers=(3,))]
)
def test_a_run_with_uneven_experts_is_replayed(run: Pipeline, file_name: str, tmp_path: Path) -> None:
    run = run.changed(file_name=file_name)
    recording = record_of(run, tmp_path)
    assert play(recording).step_s * 1e3 == pytest.approx(step_ms(run), rel=1e-5)
    exchanged = [meeting for meeting in recording.meetings if meeting.kind == "all-to-all"]
    assert {len(meeting.members) for meeting in exchanged} == {run.ep}
    # Waiting for the busiest expert is no part of the exchange.
    assert all(meeting.transfer_s * 1e3 == pytest.approx(0.6, abs=0.01) for meeting in exchanged)


def test_uneven_exchanges_that_take_longer_backward(tmp_path: Path) -> None:
    """Longer than the same size elsewhere, they are taken to hide work, each for ranks of other sizes."""
    pipeline = RUN.changed(backward_exchange_ms=2.4, dp=8)
    recording = record_of(pipeline, tmp_path)
    assert play(recording).step_s * 1e3 == pytest.approx(step_ms(pipeline), rel=0.01)
    sizes = {meeting.size_bytes for meeting in recording.meetings if meeting.uneven}
    # 256 tokens, half of them to the busiest rank, of 64 numbers of four bytes.
    assert sizes == {256 // 2 * 64 * 4}


def test_busy_experts_are_no_straggler(tmp_path: Path) -> None:
    found = facts_of(RUN, tmp_path)
    assert found["stragglers"] == []
    worst = found["expert_imbalance"][0]
    assert worst["busiest_rank"] in (1, 5)
    assert worst["factor"] == pytest.approx(2.0)
    # Four micro-batches, two layers, 256 tokens among four ranks.
    assert worst["mean_tokens"] == 4 * 2 * 64
    assert sum(worst["tokens"].values()) == 4 * 2 * 256
    assert min(worst["waits_caused_s"].values()) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_one_expert_that_gets_most_tokens_is_no_straggler(tp: int, tmp_path: Path) -> None:
    """The experts of one rank in eight get 4.5 times the mean, and compute for that much longer."""
    skewed = ((1, 1, 9, 1, 1, 1, 1, 1), (2, 1, 8, 1, 1, 1, 1, 1))
    found = facts_of(RUN.changed(tp=tp, dp=8, ep=8, routing=skewed, token_ms=0.2), tmp_path)
    assert found["stragglers"] == []
    assert [one["busiest_rank"] // tp % 8 for one in found["expert_imbalance"]] == [2] * 2 * tp
    assert found["expert_imbalance"][0]["factor"] == pytest.approx(4.25)


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slow_rank_is_named_beside_busy_experts(slow: int, tmp_path: Path) -> None:
    found = facts_of(RUN.changed(slow={slow: 1.7}), tmp_path)
    assert [one["rank"] for one in found["stragglers"]] == [slow]
    assert found["stragglers"][0]["factor"] == pytest.approx(1.7, rel=0.03)
    assert found["expert_imbalance"][0]["factor"] == pytest.approx(2.0)


def test_a_healthy_rank_keeps_its_tokens(tmp_path: Path) -> None:
    write(RUN.changed(slow={1: 1.7}), tmp_path)
    recording = analyze_megatron(read(tmp_path)).recording
    healed = replay(recording, ["rank.1=healthy"]).after.step_s * 1e3
    assert healed == pytest.approx(step_ms(RUN), rel=0.02)


def test_the_text_and_json_name_the_imbalance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN, tmp_path)
    status, text, _ = run(capsys, "analyze", str(tmp_path))
    assert status == 0
    assert "has busy experts: 2.00x the mean tokens" in text
    verdict = text.split("\n\n")[0]
    assert "gets 2.00x the mean number of tokens; others wait up to " in " ".join(verdict.split())
    assert "is slow" not in text
    found = run_json(capsys, "analyze", str(tmp_path))
    assert found["expert_imbalance"][0]["factor"] == pytest.approx(2.0)


def test_even_experts_are_not_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN.changed(routing=EVEN), tmp_path)
    assert "busy experts" not in run(capsys, "analyze", str(tmp_path))[1]
