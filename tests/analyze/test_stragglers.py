"""Straggler traces: the published answers of two real jobs, and small ones whose answer is plain."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from stepcast.analyze.stragglers import StragglerJob, analyze_stragglers
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.stragglers import read
from stepcast.inputs.table import recognise
from stepcast.views.measured import stragglers_view
from stepcast.views.terminal import render_text
from tests.shared import DATA, needs_data

TRACES = DATA / "stragglers"
HEAD = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id,gmc\n"


def job(slow: float = 1.0, replicas: int = 2, micro_batches: int = 3) -> StragglerJob:
    """One stage of several replicas, whose gradients are summed; replica 0 computes *slow* times as long."""
    rows = []
    for step in (1, 2):
        for replica in range(replicas):
            at, unit = 0.0, slow if replica == 0 else 1.0
            for kind in ("forward-compute", "backward-compute"):
                for number in range(micro_batches):
                    rows.append((replica, 0, replica, step, kind, at, unit, number, 0, number, 0))
                    at += unit
            end = 2 * micro_batches * max(slow, 1.0) + 0.5
            rows.append((replica, 0, replica, step, "grads-reduce-scatter", at, end - at, 0, 0, -1, -1))
    text = HEAD + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    return StragglerJob(read(Source("job.csv", text.encode())))


def test_a_job_without_stragglers_is_not_slowed_down() -> None:
    found = job()
    assert found.slowdown == pytest.approx(1.0)
    assert found.undelayed_s == pytest.approx([6.5, 6.5])


def test_a_slow_replica_explains_what_is_lost() -> None:
    """Six computes of 3 s beside six of 1 s: the usual one takes 2 s."""
    found = job(slow=3.0)
    assert found.undelayed_s == pytest.approx([18.5, 18.5])
    assert found.ideal_s == pytest.approx([12.5, 12.5])
    assert found.slowdown == pytest.approx(18.5 / 12.5)
    assert found.by_replica[0] == pytest.approx(18.5 / 12.5)
    facts = analyze_stragglers(found.run).facts()
    assert facts["stragglers"][0]["rank"] == 0
    lines = render_text(stragglers_view(facts), 100, verbose=False).splitlines()
    assert lines[0].split() == ["step", "18.500", "s"]
    assert "6.000 s, 32.4 % of the step (1.480x)" in lines[1]
    assert lines[2].split()[:2] == ["bottleneck", "forward-compute:"]
    assert "straggler" in lines[3]
    assert "rank 0 (replica 0, stage 0)" in lines[3]
    assert "grads-reduce-scatter" in render_text(stragglers_view(facts), 100)


def test_a_transfer_is_what_follows_the_last_start() -> None:
    """The reduce-scatter of the fast replica waits 12 s; both take half a second of their own."""
    found = job(slow=3.0)
    scatter = [at for at, each in enumerate(found.run.operations) if each.kind == "grads-reduce-scatter"]
    assert np.allclose(found.recorded_s[:, :, scatter], 0.5)


@needs_data("stragglers")
@pytest.mark.parametrize("name", ["ST", "AR"])
def test_published_answers(name: str) -> None:
    found = StragglerJob(read(Source(TRACES / f"trace-{name}.csv.gz")))
    expected = json.loads((TRACES / f"expected-{name}.json").read_text())
    result = expected["result"]
    assert found.slowdown == pytest.approx(result["blocking_slowdown"], rel=1e-5)
    assert found.undelayed_s == pytest.approx(list(result["step_t_nodelay"].values()), abs=1e-4)
    assert found.last_stage_share == pytest.approx(expected["ms"]["Ms"], abs=1e-4)
    assert found.worst_workers_share == pytest.approx(expected["mw"]["Mw"], abs=1e-4)
    stages = result["blocking_decompose_by_stage"]
    assert found.by_stage == pytest.approx([stages[str(at)] for at in range(len(stages))], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "holds no operation"),
        (HEAD + "0,0,0,1,gc,x,0,0,-1,0,-1\n", "expected numbers"),
        (HEAD + "0,0,0,1,gc,0,-1,0,-1,0,-1\n", "finite"),
        (HEAD + "0,0,0,1,gc,0,1,0,-1,0,-1\n1,1,3,1,gc,0,1,0,-1,0,-1\n", "every stage"),
        (HEAD + "0,0,0,1,gc,0,1,0,-1,0,-1\n1,-1,0,1,gc,0,1,0,-1,0,-1\n", "every stage"),
        (HEAD.replace("seq_id,", ""), "header lacks seq_id"),
    ],
)
def test_what_is_wrong_is_told(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read(Source("job.csv", text.encode()))


def test_recognised_compressed_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(HEAD.encode()))
    assert recognise(Source(path)).name == "stragglers"


def interleaved(slow_stage: int | None = None, replicas: int = 1, ends: bool = True) -> str:
    """Two stages of two chunks each and four micro-batches, as Megatron interleaves them, every compute a
    second and every message 0.1 s; with messages of the first and last chunk that go nowhere, or without.
    """
    order = [("F", batch, chunk) for chunk in (0, 1) for batch in (0, 1)]
    order += [("F", batch, chunk) for chunk in (0, 1) for batch in (2, 3)]
    order += [("B", batch, chunk) for batches in ((0, 1), (2, 3)) for chunk in (1, 0) for batch in batches]
    took = {stage: 2.0 if stage == slow_stage else 1.0 for stage in (0, 1)}
    ready: dict[tuple[str, int, int], float] = {}
    rows: list[tuple[object, ...]] = []
    places = {0: 0, 1: 0}
    free = {0: 0.0, 1: 0.0}
    turns: dict[tuple[int, str], int] = {}

    def note(stage: int, kind: str, start: float, seconds: float, chunk: int, place: int) -> None:
        turn = turns[stage, kind] = turns.get((stage, kind), -1) + 1
        for replica in range(replicas):
            rank = replica * 2 + stage
            rows.append((replica, stage, rank, 1, kind, start, seconds, turn, chunk, -1, place))

    while any(places[stage] < len(order) for stage in (0, 1)):
        for stage in (0, 1):
            if places[stage] == len(order):
                continue
            way, batch, chunk = order[places[stage]]
            place = chunk * 2 + stage
            before = place - 1 if way == "F" else place + 1
            source = ("F", batch, place) if way == "B" and place == 3 else (way, batch, before)
            name = "forward" if way == "F" else "backward"
            start = free[stage]
            if 0 <= before <= 3 or source[1:] == (batch, place):
                if source not in ready:
                    continue
                start = max(start, ready[source] + (0.1 if source[2] != place else 0.0))
            if 0 <= before <= 3 or ends:
                arrives = start - 0.1 if 0 <= before <= 3 else start
                note(stage, f"{name}-recv", arrives, max(0.0, start - arrives), chunk, place)
            note(stage, f"{name}-compute", start, took[stage], chunk, place)
            free[stage] = ready[way, batch, place] = start + took[stage]
            after = place + 1 if way == "F" else place - 1
            if 0 <= after <= 3 or ends:
                note(stage, f"{name}-send", free[stage], 0.1 if 0 <= after <= 3 else 0.0, chunk, place)
            places[stage] += 1
    return HEAD + "\n".join(",".join(map(str, row)) for row in rows) + "\n"


def test_interleaved_chunks_of_one_replica() -> None:
    """Two chunks a stage, no data parallelism: played again it takes as long as it took."""
    found = StragglerJob(read(Source("job.csv", interleaved().encode())))
    assert found.run.replicas == 1
    assert found.undelayed_s == pytest.approx(found.measured_s, rel=0.05)
    assert found.slowdown == pytest.approx(1.0, abs=0.02)


def test_a_slow_stage_of_interleaved_chunks() -> None:
    found = StragglerJob(read(Source("job.csv", interleaved(slow_stage=1, replicas=2).encode())))
    assert found.slowdown > 1.1
    assert found.last_stage_share > 0.8
    assert found.by_stage[1] > found.by_stage[0]


def test_messages_beyond_the_model_may_be_missing() -> None:
    found = StragglerJob(read(Source("job.csv", interleaved(ends=False).encode())))
    assert found.slowdown == pytest.approx(1.0, abs=0.1)


def test_incomplete_replicas_and_steps_are_left_out() -> None:
    text = interleaved(slow_stage=1, replicas=3)
    whole = StragglerJob(read(Source("job.csv", text.encode())))
    lines = text.splitlines()
    lost = [line for line in lines if not line.startswith("2,1,")]  # a rank whose trace is missing
    found = read(Source("job.csv", "\n".join(lost).encode()))
    assert found.replicas == 2
    assert found.warnings == ("1 of 3 replicas lack stages and are left out",)
    assert StragglerJob(found).slowdown == pytest.approx(whole.slowdown)
    second = [line.replace(",1,forward", ",2,forward").replace(",1,backward", ",2,backward") for line in lines[1:]]
    third = [line.replace(",2,forward", ",3,forward").replace(",2,backward", ",3,backward") for line in second]
    # The first step lacks an operation; the others tell what the job does.
    odd = "\n".join([lines[0], *lines[2:], *second, *third])
    found = read(Source("job.csv", odd.encode()))
    assert found.steps == (2, 3)
    assert "1 of 3 steps" in found.warnings[0]
