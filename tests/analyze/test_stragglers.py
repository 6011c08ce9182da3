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


FORWARD, BACKWARD, SCATTER = "forward-compute", "backward-compute", "grads-reduce-scatter"


def played(*rows: tuple[int, int, str, float, float, int, int]) -> StragglerJob:
    """A job of one step; rows are replica, stage, kind, start, duration, chunk and place in the model."""
    turns: dict[tuple[int, int, str], int] = {}
    lines = [HEAD.strip()]
    for replica, stage, kind, start, seconds, chunk, place in rows:
        turn = turns[replica, stage, kind] = turns.get((replica, stage, kind), -1) + 1
        lines.append(f"{replica},{stage},{replica * 9 + stage},1,{kind},{start},{seconds},{turn},{chunk},-1,{place}")
    return StragglerJob(read(Source("job.csv", "\n".join(lines).encode())))


def test_a_chunk_waits_for_its_parameters_and_the_optimizer_for_all_reductions() -> None:
    """Gathers of 3 s follow one another, so the second chunk begins at 6 s and four computes of 1 s end at 9 s.

    The scatter of chunk 1 (5 s) runs from the end of its backward at 8 s, that of chunk 0 after it until 18 s; the
    reduction that is not overlapped ends at 11 s. The clip (1 s) waits for both, the optimizer (1 s) for the clip.
    The recorded times have gaps: the host took 10 s longer than that.
    """
    first = [(0, 0, "params-all-gather", 0.0, 3.0, 0, -1), (0, 0, "params-all-gather", 3.0, 3.0, 1, -1)]
    first += [(0, 0, FORWARD, 3.0, 1.0, 0, 0), (0, 0, FORWARD, 6.0, 1.0, 1, 1)]
    first += [(0, 0, BACKWARD, 7.0, 1.0, 1, 1), (0, 0, BACKWARD, 8.0, 1.0, 0, 0)]
    ends = [(0, 0, "optimizer-clip-main-grad", 18.0, 1.0, 0, -1), (0, 0, "optimizer", 29.0, 1.0, 0, -1)]
    scatters = [(0, 0, SCATTER, 8.0, 5.0, 1, -1), (0, 0, SCATTER, 13.0, 5.0, 0, -1)]
    apart = [(0, 0, "separate-grads-all-reduce", 9.0, 2.0, 0, -1)]
    result = analyze_stragglers(played(*first, *scatters, *apart, *ends).run)
    assert result.undelayed_s == pytest.approx(20.0)
    assert result.step_s == pytest.approx(30.0)
    assert result.launch_slowdown == pytest.approx(1.5)
    # Without one that is not overlapped, the scatters themselves begin after the last compute.
    assert played(*first, *scatters, *ends).undelayed_s == pytest.approx([9 + 10 + 2])


def test_clipping_waits_for_all_replicas() -> None:
    """A replica computes 3 s, the other 1 s and waits 2 s of its clip, which takes 1 s on both: usually 2 + 1 s."""
    clip = "optimizer-clip-main-grad"
    rows = [(0, 0, FORWARD, 0.0, 3.0, 0, 0), (0, 0, clip, 3.0, 1.0, 0, -1)]
    found = played(*rows, (1, 0, FORWARD, 0.0, 1.0, 0, 0), (1, 0, clip, 1.0, 3.0, 0, -1))
    assert found.undelayed_s == pytest.approx([4.0])
    assert found.slowdown == pytest.approx(4 / 3)


@pytest.mark.parametrize(("end", "recorded"), [(1.995, -0.005), (1.9, 0.0)])
def test_a_transfer_before_the_last_start_is_a_clock_that_is_off(end: float, recorded: float) -> None:
    """Up to 10 ms of clock error are kept, so that they average out; beyond that, nothing is known of the transfer."""
    rows = [(replica, 0, FORWARD, 0.0, 1.0, 0, 0) for replica in (0, 1)]
    found = played(*rows, (0, 0, SCATTER, 2.0, 1.0, 0, -1), (1, 0, SCATTER, 1.0, end - 1.0, 0, -1))
    assert found.recorded_s[0, :, 1] == pytest.approx([1.0, recorded])


@pytest.mark.parametrize(("late_s", "step_s"), [(40e-6, 6.0), (60e-6, 5.0)])
def test_a_receive_noted_shortly_after_its_compute_belongs_to_it(late_s: float, step_s: float) -> None:
    """Clocks of a rank differ by up to 50 us: the compute (1 s) waits for the other stage (5 s). Later, it does not."""
    rows = [(0, 0, FORWARD, 0.0, 5.0, 0, 0), (0, 0, "forward-send", 5.0, 0.0, 0, 0)]
    found = played(*rows, (0, 1, FORWARD, 5.0, 1.0, 0, 1), (0, 1, "forward-recv", 5.0 + late_s, 0.0, 0, 1))
    assert found.undelayed_s == pytest.approx([step_s])


def test_small_slowdowns_are_no_stragglers() -> None:
    """A replica 5 % slower than the other slows the job by (6.3 + 0.5) / (6.15 + 0.5): 2.3 %, below the 5 % reported."""
    result = analyze_stragglers(job(slow=1.05).run)
    assert result.slowdown == pytest.approx(6.8 / 6.65)
    assert not result.stragglers


def test_the_first_gradient_is_awaited_two_computes_before_its_backward() -> None:
    """Forwards of 5 s end at 15 s on the first stage; the last stage sends back its first gradient (1 s) at 7 s.

    It is received after the second forward, from 10 to 11 s, so that the backward need not wait for it at 15 s.
    """
    rows = [(0, 0, FORWARD, 5.0 * number, 5.0, 0, 0) for number in range(3)]
    rows += [(0, 0, "forward-send", 5.0 + 5 * number, 0.0, 0, 0) for number in range(3)]
    rows += [(0, 1, "forward-recv", 5.0 * number, 5.0, 0, 1) for number in range(3)]
    for number in range(3):
        rows += [(0, 1, FORWARD, 5.0 + 5 * number, 1.0, 0, 1), (0, 1, BACKWARD, 6.0 + 5 * number, 1.0, 0, 1)]
        rows += [(0, 1, "backward-send", 7.0 + 5 * number, 4.0 if not number else 1.0, 0, 1)]
        received_s = 10.0 if not number else 14.0 + 2 * number
        rows += [(0, 0, "backward-recv", received_s, 1.0, 0, 0), (0, 0, BACKWARD, 15.0 + 2 * number, 1.0, 0, 0)]
    rows.sort(key=lambda row: row[3])
    assert played(*rows).undelayed_s == pytest.approx([20.0])


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
