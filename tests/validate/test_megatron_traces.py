"""The measurement set of Megatron runs."""

from pathlib import Path

from stepcast.validate.scoreboard import build_scoreboard
from stepcast.validate.traced_runs import REAL, TOY, measure_megatron_traces
from tests.analyze.megatron_run import Pipeline, write
from tests.shared import DATA, needs_data


def test_every_run_folder_is_a_row(tmp_path: Path) -> None:
    write(Pipeline(), tmp_path / "small")
    write(Pipeline(tp=1, layers=(6, 6, 6), micro_batches=5), tmp_path / "large")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "file.txt").write_text("nothing known\n")
    found = measure_megatron_traces(str(tmp_path))
    assert [found.columns.row(at).name for at in range(len(found.columns))] == ["large", "small"]
    assert found.selections[REAL].tolist() == [True, False]
    assert sum(found.skipped.values()) == 1


def test_a_folder_may_be_one_run(tmp_path: Path) -> None:
    write(Pipeline(), tmp_path)
    assert len(measure_megatron_traces(str(tmp_path)).columns) == 1


@needs_data("megatron-traces")
def test_replays_of_the_shared_runs() -> None:
    """The bar: mean 0.7 % and worst 2.5 % over real-size runs, toy ones apart."""
    board = build_scoreboard(measure_megatron_traces(str(DATA / "megatron-traces")))
    assert board.selections[REAL].rows == 8
    assert board.selections[TOY].rows == 4
    assert board.selections[REAL].mean_abs_error < 0.007
    assert board.selections[REAL].worst_abs_error < 0.025
    assert 1e-4 < board.figures[f"laid out anew, {REAL}: worst_abs_error"] < 0.025  # 0 would be the recording itself
    assert board.figures[f"as recorded, {REAL}: worst_abs_error"] < 1e-4
