"""What an analysis of a Megatron run says, against runs whose answer is known."""

import re
from pathlib import Path
from typing import Any

import pytest

from stepcast.analyze.megatron.analysis import analyze_megatron
from stepcast.analyze.megatron.record import RankEvent, align_clocks
from stepcast.inputs.source import Source
from stepcast.inputs.table import read, read_as_one
from stepcast.ir.layout import Layout, members
from tests.analyze.megatron_run import Pipeline, step_ms, write
from tests.inputs.test_megatron import SUMS_MS
from tests.shared import DATA, ROOT, needs_data

RUN = Pipeline()
RANK_7 = ROOT / "examples" / "megatron-rank7.txt"


def facts_of(run: Pipeline, folder: Path) -> dict[str, Any]:
    write(run, folder)
    return analyze_megatron(read(folder)).result.facts()


def test_the_parts_of_the_step(tmp_path: Path) -> None:
    found = facts_of(RUN, tmp_path)
    assert found["step_s"] * 1e3 == pytest.approx(step_ms(RUN), abs=0.01)
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"], rel=1e-6)
    # Four micro-batches through two layers of two halves, forward once and backward twice.
    pieces_ms = 4 * (2 * 2 * 5.0 * (1 + 2) + 2 * 0.2)
    assert found["stages"][0]["compute_s"] * 1e3 == pytest.approx(pieces_ms, abs=0.05)
    assert found["communication_s"]["tp"]["exposed"] * 1e3 == pytest.approx(4 * 2 * 4 * 1.0, abs=0.05)
    assert found["layers"][1]["forward_s"] * 1e3 == pytest.approx(10.1, abs=0.01)
    assert found["stragglers"] == []


def test_collectives_of_one_rank_are_no_communication(tmp_path: Path) -> None:
    """With one replica the gradients are scaled for 1 ms; with one tensor rank a collective stays within its rank."""
    run = RUN.changed(tp=1)
    for path in map(Path, write(run, tmp_path)):
        inner = (
            r"'trace_src_func=allreduce,duration=0.1,timestamp=\1,input__shape=[32, 64],input__dtype=torch.float32,"
            "func_name=linear_fwd,group=tp,comm_func=allreduce'"
        )
        empty, filled = r"(?<=timestamp=)([0-9.]+),sub_operations=\[\]", rf"\1,sub_operations=[{inner}]"
        lines = path.read_text().splitlines()
        lines = [re.sub(empty, filled, line) if ":forward_step" in line else line for line in lines]
        path.write_text("\n".join(lines) + "\n")
    found = analyze_megatron(read(tmp_path)).result.facts()
    assert set(found["communication_s"]) == {"pp", "embedding"}
    assert found["breakdown_s"]["optimizer"] * 1e3 == pytest.approx(12.0 + 1.0, abs=0.01)
    assert found["stages"][0]["compute_s"] * 1e3 == pytest.approx(4 * (2 * 2 * 5.0 * (1 + 2) + 2 * 0.2), abs=0.05)


def test_bubble_of_a_free_pipeline_is_that_of_1f1b(tmp_path: Path) -> None:
    run = RUN.changed(message_ms=0.0, reduce_ms=0.0, embedding_ms=0.0, optimizer_ms=0.0, gap_ms=0.0)
    found = facts_of(run.changed(layers=(8, 8, 8)), tmp_path)
    # (p - 1) / (m + p - 1): Narayanan et al. (2021), section 2.2.
    assert found["bubble_share"] == pytest.approx(2 / (4 + 2), abs=0.01)


@pytest.mark.parametrize("factor", [1.3, 2.3])
def test_a_straggler_is_named_with_its_factor(factor: float, tmp_path: Path) -> None:
    found = facts_of(RUN.changed(slow={5: factor}), tmp_path)
    assert [one["rank"] for one in found["stragglers"]] == [5]
    slow = found["stragglers"][0]
    assert slow["factor"] == pytest.approx(factor, rel=0.01)
    assert any(text.startswith("rank 4 waits") for text in slow["evidence"])
    # Its peer waits in every collective for what the slow rank needs longer.
    extra_ms = 4 * (4 * 5.0 * (1 + 2)) * (factor - 1)
    assert slow["waits_caused_s"]["4"] * 1e3 == pytest.approx(extra_ms, rel=0.1)


def test_imbalance_between_stages(tmp_path: Path) -> None:
    found = facts_of(RUN.changed(layers=(2, 2, 5)), tmp_path)
    assert found["imbalance"] == pytest.approx(5 / 3 - 1, rel=0.05)
    assert found["stragglers"] == []


def test_some_ranks_say_which_are_missing(tmp_path: Path) -> None:
    paths = write(RUN, tmp_path, keep=lambda rank: rank in (4, 5))
    found = analyze_megatron(read_as_one([Source(path) for path in paths])[1]).result.facts()
    (text,) = [text for text in found["warnings"] if "ranks are missing" in text]
    assert text.startswith("4 of 6 ranks are missing (0, 1, 2, 3)")
    assert found["critical_path"]


def test_the_seed_alone_gives_every_known_quantity() -> None:
    """The answers of the format's description, in milliseconds."""
    found = analyze_megatron(read(RANK_7)).result.facts()
    assert found["step_s"] * 1e3 == pytest.approx(3851.38, abs=0.005)
    assert found["gaps_s"] * 1e3 == pytest.approx(18.47, abs=0.005)
    assert sum(found["operations_s"].values()) * 1e3 == pytest.approx(3832.91, abs=0.005)
    assert {name: round(seconds * 1e3, 2) for name, seconds in found["operations_s"].items()} == SUMS_MS
    (reduces,) = [row for row in found["communication"] if row["name"] == "linear_fwd"]
    assert (reduces["count"], reduces["size_bytes"]) == (20, 83_886_080)
    assert reduces["shortest_s"] * 1e3 == pytest.approx(0.68, abs=1e-6)
    assert reduces["busbw_bytes_per_s"] == pytest.approx(123e9, rel=0.005)
    inside = found["rank_times"][0]["inside_operations_s"]
    assert inside["forward_step"]["tp"] * 1e3 == pytest.approx(20.75, abs=0.005)
    known = found["configuration"]
    assert (found["tp"], found["pp"], found["dp"], known["layers"], known["hidden"]) == (2, 4, 1, 40, 5120)


def test_the_seed_alone_warns_that_one_rank_is_not_enough() -> None:
    found = analyze_megatron(read(RANK_7)).result.facts()
    (text,) = found["warnings"]
    assert "cannot separate a slow GPU from slow work" in text
    assert "give the traces of all ranks" in text
    assert found["stragglers"] == []
    assert found["critical_path"] == []


@needs_data("megatron-traces")
def test_the_whole_run_of_the_seed() -> None:
    found = analyze_megatron(read(DATA / "megatron-traces" / "20240923205004")).result.facts()
    assert found["step_s"] * 1e3 == pytest.approx(3855.5, abs=0.1)
    assert [one["rank"] for one in found["stragglers"]] == [7]
    slow = found["stragglers"][0]
    assert slow["factor"] == pytest.approx(2.3, abs=0.1)
    # Layers only: what the last stage does beyond them has no counterpart on rank 5.
    assert slow["shared_operations"]["forward_step"]["own_s"] * 1e3 == pytest.approx(447, abs=0.5)
    assert slow["shared_operations"]["forward_step"]["reference_s"] * 1e3 == pytest.approx(193, abs=1)
    assert any(text.startswith("rank 6 waits") and "291 ms in 20" in text for text in slow["evidence"])
    assert found["critical_path_s"] == pytest.approx(3.80, abs=0.005)
    assert sum(one["duration_s"] for one in found["critical_path"]) == pytest.approx(found["step_s"])
    ends = [step for step in found["critical_path"] if step["operation"] == "backward_step"]
    assert list(ends[0]["ranks"]) == [7]


@needs_data("megatron-traces")
@pytest.mark.parametrize("run", sorted(path.name for path in (DATA / "megatron-traces").glob("*")))
def test_every_shared_run_is_explained(run: str) -> None:
    found = analyze_megatron(read(DATA / "megatron-traces" / run)).result.facts()
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"], rel=1e-4)
    for rank in found["rank_times"]:
        total_s = sum(rank["operations_s"].values()) + rank["gaps_s"]
        assert total_s == pytest.approx(rank["span_s"], rel=1e-6)
    rates = [row["busbw_bytes_per_s"] for row in found["communication"] if row["busbw_bytes_per_s"]]
    assert max(rates) < 500e9


def test_groups_follow_megatron() -> None:
    layout = Layout(tp=2, dp=2, pp=2, ep=2)
    assert members(5, "tp", layout) == (4, 5)
    assert members(5, "dp", layout) == (5, 7)
    assert members(5, "embedding", layout) == (1, 5)
    assert members(5, "model", layout) == (0, 1, 4, 5)
    assert members(5, "ep", layout) == (5, 7)
    assert members(5, "expert-dp", layout) == (5,)


def presence(rank: int, start_s: float, end_s: float) -> RankEvent:
    return RankEvent(rank, "allreduce", "dp", "all-reduce", None, start_s, end_s, ("key",))


def test_a_clock_without_meetings_stays_unplaced() -> None:
    meetings = [[presence(0, 1.0, 2.0), presence(1, 101.0, 102.0)]]
    found = align_clocks(meetings, [0, 1, 2])
    assert found.offset_s == {0: 0.0, 1: pytest.approx(-100.0)}
    assert found.unplaced == (2,)
    assert found.clocks == ((0,), (1,), (2,))


def test_clocks_chain_from_host_to_host() -> None:
    meetings = [[presence(0, 1.0, 2.0), presence(1, 51.5, 52.0)], [presence(1, 53.0, 54.0), presence(2, 0.5, 1.0)]]
    found = align_clocks(meetings, [0, 1, 2])
    assert found.offset_s[1] == pytest.approx(-50.0)
    assert found.offset_s[2] == pytest.approx(3.0)
