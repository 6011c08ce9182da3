"""Replays and what-ifs against runs that were worked out under the changed conditions."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.recording import (
    Recording,
    at_shortest,
    critical_steps,
    from_durations,
    play,
    play_measured,
    rank_parts,
    timeline_of,
)
from stepcast.analyze.replay import Surroundings, WhatIfError, apply_changes, replay
from stepcast.hardware import load_cluster
from stepcast.inputs.table import read
from tests.analyze.megatron_run import Pipeline, step_ms, write
from tests.shared import DATA, needs_data

RUN = Pipeline()


def record(run: Pipeline, folder: Path) -> Recording:
    write(run, folder)
    return record_megatron(read(folder))


def after_ms(recording: Recording, *changes: str, around: Surroundings | None = None) -> float:
    return replay(recording, changes, around).after.step_s * 1e3


@pytest.mark.parametrize(
    "run",
    [
        RUN,
        RUN.changed(tp=1, pp=2, layers=(3, 3), micro_batches=6),
        RUN.changed(pp=4, layers=(2, 2, 2, 2), micro_batches=1),
        RUN.changed(pp=1, layers=(4,), micro_batches=2),
        RUN.changed(dp=2, slow={3: 1.4}),
        RUN.changed(slow={5: 2.0}, micro_batches=7),
    ],
)
def test_a_replay_takes_as_long_as_the_run(run: Pipeline, tmp_path: Path) -> None:
    recording = record(run, tmp_path)
    expected = step_ms(run)
    assert recording.measured_step_s * 1e3 == pytest.approx(expected, abs=0.01)
    assert play(recording).step_s * 1e3 == pytest.approx(expected, rel=1e-5)
    assert play(from_durations(recording)).step_s * 1e3 == pytest.approx(expected, rel=1e-3)
    # Here the optimizer of a slow rank is not known: the one that waited least stands for it.
    assert play(at_shortest(recording)).step_s * 1e3 == pytest.approx(expected, rel=0.015)
    assert not any("clock" in text or "unmatched" in text for text in recording.warnings)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_sum_to_the_step(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    pp = data.draw(st.integers(1, 3))
    run = Pipeline(
        tp=data.draw(st.sampled_from([1, 2])),
        pp=pp,
        micro_batches=data.draw(st.integers(1, 4)),
        layers=tuple(data.draw(st.integers(1, 3)) for _ in range(pp)),
        half_layer_ms=data.draw(st.floats(0.5, 20)),
        message_ms=data.draw(st.floats(0.01, 5)),
        reduce_ms=data.draw(st.floats(0.01, 5)),
        slow={0: data.draw(st.floats(1, 3))},
    )
    recording = record(run, tmp_path_factory.mktemp("run"))
    for played in (play_measured(recording), play(recording)):
        for one in rank_parts(played):
            assert sum(one.parts_s.values()) == pytest.approx(played.step_s, rel=1e-3)
            assert min(one.parts_s.values()) >= 0


def test_clocks_of_two_hosts_are_aligned(tmp_path: Path) -> None:
    far = RUN.changed(clock_ms=dict.fromkeys((4, 5), 7_654_321.0))
    together, apart = record(RUN, tmp_path / "one"), record(far, tmp_path / "two")
    assert apart.measured_step_s == pytest.approx(together.measured_step_s, abs=1e-3)
    assert play(apart).step_s == pytest.approx(together.measured_step_s, abs=1e-3)
    assert any("2 clocks" in text and "-7654.32" in text for text in apart.warnings)


def test_a_healthy_rank_gives_the_step_of_the_healthy_run(tmp_path: Path) -> None:
    for factor in (1.3, 2.5):
        recording = record(RUN.changed(slow={5: factor}), tmp_path / str(factor))
        assert after_ms(recording, "rank.5=healthy") == pytest.approx(step_ms(RUN), rel=2e-3)


def test_a_rank_alone_on_its_stage_is_healed_by_other_stages(tmp_path: Path) -> None:
    run = RUN.changed(tp=1, pp=4, layers=(2, 2, 2, 2))
    recording = record(run.changed(slow={2: 1.7}), tmp_path)
    assert after_ms(recording, "rank.2=healthy") == pytest.approx(step_ms(run), rel=0.01)


def test_a_slower_rank(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    assert after_ms(recording, "rank.1=1.5x") == pytest.approx(step_ms(RUN.changed(slow={1: 1.5})), rel=5e-3)


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_other_micro_batches(micro_batches: int, tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    expected = step_ms(RUN.changed(micro_batches=micro_batches))
    assert after_ms(recording, f"micro-batches={micro_batches}") == pytest.approx(expected, rel=5e-3)


def test_messages_share_the_links_of_a_cluster_that_is_large_enough(tmp_path: Path) -> None:
    """One message at a time takes as long as it did, on a cluster of any size or on a node of 8 GPUs."""
    recording = record(RUN.changed(tp=1, pp=2, layers=(2, 2), micro_batches=1), tmp_path / "small")
    for cluster in ("dgx-h100", "l40s-node"):
        found = replay(recording, shares=load_cluster(cluster)).after.step_s
        assert found == pytest.approx(recording.measured_step_s, rel=1e-3)
    with pytest.raises(ValueError, match="the run has 12 GPUs and cluster l40s-node has 8"):
        replay(record(RUN.changed(dp=2), tmp_path / "large"), shares=load_cluster("l40s-node"))


def test_faster_links(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    for group, change in (
        ("tp", RUN.changed(reduce_ms=RUN.reduce_ms / 2)),
        ("pp", RUN.changed(message_ms=RUN.message_ms / 2)),
        ("embedding", RUN.changed(embedding_ms=RUN.embedding_ms / 2)),
    ):
        assert after_ms(recording, f"bandwidth.{group}=2x") == pytest.approx(step_ms(change), rel=1e-4)


def test_a_stated_bandwidth(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    # An activation is 32 x 64 x 4 bytes; over two ranks an all-reduce moves each byte once.
    rate = 32 * 64 * 4 / 0.5e-3
    expected = step_ms(RUN.changed(reduce_ms=0.5))
    assert after_ms(recording, f"bandwidth.tp={rate:.0f}B/s") == pytest.approx(expected, rel=1e-4)


def test_a_layer_less_on_a_stage(tmp_path: Path) -> None:
    run = RUN.changed(layers=(4, 4, 4), tp=1, slow={})
    recording = record(run, tmp_path)
    fewer = run.changed(layers=(4, 4, 3))
    # Gradients and optimizer follow the layers, which the worked-out run keeps as they were.
    spared_ms = (run.optimizer_ms + 1.0) / 4
    found = after_ms(recording, "stage.2.layers=-1")
    assert step_ms(fewer) - spared_ms - 0.5 <= found <= step_ms(fewer) + 0.5
    moved = replay(recording, ["stage.2.layers=-1", "stage.1.layers=+1"])
    assert moved.changed.facts["layers_on"] == {0: 4, 1: 5, 2: 3}


def test_other_replicas(tmp_path: Path) -> None:
    run = RUN.changed(dp=2)
    recording = record(run, tmp_path)
    assert after_ms(recording, "dp=4") == pytest.approx(step_ms(run.changed(dp=4)), rel=1e-4)
    assert len(replay(recording, ["dp=4"]).changed.ranks) == 24


def test_replicas_that_were_not_measured_need_a_price(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    with pytest.raises(ValueError, match="--cluster"):
        after_ms(recording, "dp=2")
    priced = Surroundings(all_reduce_s=lambda size_bytes, ranks: 4e-3)
    expected = step_ms(RUN.changed(dp=2)) + 1.0  # the local pass over the gradients stays
    assert after_ms(recording, "dp=2", around=priced) == pytest.approx(expected, rel=1e-3)


def test_other_schedules(tmp_path: Path) -> None:
    recording = record(RUN.changed(micro_batches=6), tmp_path)
    same = after_ms(recording, "schedule=1f1b")
    assert same == pytest.approx(recording.measured_step_s * 1e3, rel=5e-3)
    # 1F1B waits as long as GPipe does, it only holds fewer activations.
    assert after_ms(recording, "schedule=gpipe") == pytest.approx(same, rel=0.02)
    assert after_ms(recording, "schedule=interleaved") < same


@pytest.mark.parametrize(
    "change", ["schedule=1f1b", "micro-batches=6", "dp=1", "compute=1x", "bandwidth.tp=1x", "rank.0=1x"]
)
def test_a_change_that_states_the_measured_run_changes_nothing(tmp_path: Path, change: str) -> None:
    recording = record(RUN.changed(micro_batches=6), tmp_path)
    assert after_ms(recording, change) == pytest.approx(after_ms(recording), rel=1e-9)


def test_bits_and_bytes_of_a_bandwidth_are_told_apart(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    in_bytes, in_bits = (after_ms(recording, f"bandwidth.tp={text}") for text in ("50GB/s", "400Gb/s"))
    assert in_bits == in_bytes < after_ms(recording, "bandwidth.tp=50Gb/s")


def test_another_gpu_scales_work_and_not_transfers(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    around = Surroundings(gpu=lambda name: (name, 0.5, 1.0))
    halved = RUN.changed(half_layer_ms=RUN.half_layer_ms / 2)
    assert after_ms(recording, "gpu=other", around=around) == pytest.approx(step_ms(halved), rel=0.01)


def test_several_changes_at_once(tmp_path: Path) -> None:
    recording = record(RUN.changed(slow={5: 2.0}), tmp_path)
    expected = step_ms(RUN.changed(micro_batches=8, reduce_ms=0.25))
    found = after_ms(recording, "rank.5=healthy", "micro-batches=8", "bandwidth.tp=4x")
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    "change",
    [
        ("", "no change"),
        ("dp", "no change"),
        ("dp=0", "whole number from 1"),
        ("dp=x", "whole number"),
        ("rank.99=healthy", "not in this run"),
        ("rank.1=fast", "factor such as 2x"),
        ("bandwidth.xx=2x", "unknown group"),
        ("bandwidth.tp=0x", "factor such as 2x"),
        ("bandwidth.dp=2x", "no matched communication over dp in the traces; they have"),
        ("stage.9.layers=-1", "not in this run"),
        ("stage.1.layers=2", "-1 or"),
        ("stage.1.layers=-9", "leaves none"),
        ("schedule=other", "unknown schedule"),
        ("schedule=zb-h1", "times whole backwards, not their halves; choose gpipe, 1f1b, interleaved"),
        ("schedule=zb-v", "times whole backwards"),
        ("schedule=dualpipe", "times whole backwards"),
        ("micro-batches=0", "whole number from 1"),
        ("compute=2", "factor such as 2x"),
        ("unknown=1", "unknown change"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    with pytest.raises(ValueError, match=change[1]):
        apply_changes(recording, [change[0]])


def test_the_same_change_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhatIfError, match="twice"):
        apply_changes(record(RUN, tmp_path), ["compute=2x", "compute=3x"])


def test_the_critical_path_sums_to_the_step(tmp_path: Path) -> None:
    recording = record(RUN.changed(slow={5: 2.0}), tmp_path)
    path = critical_steps(recording)
    assert sum(step.duration_s for step in path) == pytest.approx(play(recording).step_s, rel=1e-9)
    busiest = max(path, key=lambda step: step.duration_s)
    assert 5 in busiest.ranks
    assert busiest.operation == "backward_step"


def test_a_played_step_is_a_timeline(tmp_path: Path) -> None:
    recording = record(RUN, tmp_path)
    timeline = timeline_of({"measured": play_measured(recording), "replayed": play(recording)})
    assert {lane.name for lane in timeline.lanes} == {"measured", "replayed"}
    assert timeline.span_s == pytest.approx(recording.measured_step_s, rel=1e-3)
    assert any(name.startswith("wait: ") for name in timeline.names)


@needs_data("megatron-traces")
def test_rank_7_healthy_in_the_shared_run() -> None:
    recording = record_megatron(read(DATA / "megatron-traces" / "20240923205004"))
    result = replay(recording, ["rank.7=healthy"])
    assert result.recording.measured_step_s == pytest.approx(3.8555, abs=1e-4)
    assert abs(result.result.error) < 1e-3
    assert result.after.step_s == pytest.approx(2.8, abs=0.06)
