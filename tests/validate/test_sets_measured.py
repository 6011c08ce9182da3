"""The measurement sets against the errors we claim: these fail when accuracy gets worse."""

import csv
import gzip
import shutil
from pathlib import Path

import pytest

from stepcast.cost.fits import merge_tables
from stepcast.validate import h200 as h200
from stepcast.validate.scoreboard import MEASUREMENT_SETS, Scoreboard, build_scoreboard, fit_digest, load_folds
from tests.shared import DATA, needs_data


def board(name: str, folder: Path) -> Scoreboard:
    return build_scoreboard(MEASUREMENT_SETS[name].measure(str(folder)))


def test_the_folds_belong_to_the_committed_fit() -> None:
    """After a new fit run tools/fit_folds.py again."""
    from stepcast.hardware.catalog import load_fit

    assert load_fit("folds")["fit"] == fit_digest()
    assert load_folds().note == ""


def test_merging_replaces_what_must_not_remember() -> None:
    base = {"power": {"a": 1, "b": 2}, "memory_efficiency": {"ampere": 1.0, "hopper": 1.0}}
    changed = merge_tables(base, {"power": {"b": 3}, "memory_efficiency": {"unseen": 0.9}})
    assert changed == {"power": {"a": 1, "b": 3}, "memory_efficiency": {"unseen": 0.9}}
    assert base["power"] == {"a": 1, "b": 2}


def test_h200_rows_by_constants_that_have_not_seen_them() -> None:
    found = board("h200", h200.shipped_folder())
    assert found.summary is not None
    assert found.summary.rows == 1792
    assert sum(found.skipped.values()) == 1
    bounds = {
        "linear bf16": 0.08,
        "linear bf16 over 50 us": 0.06,
        "bmm bf16": 0.12,
        "attention": 0.08,
        "memory-bound over 20 us": 0.08,
        "blocks forward": 0.08,
        "blocks backward": 0.07,
        "training steps": 0.045,
        "backward of training steps": 0.08,
        "optimizer of training steps": 0.08,
    }
    for name, bound in bounds.items():
        assert found.selections[name].mean_abs_error <= bound, name
    assert found.selections["linear bf16"].time_weighted_error <= 0.04
    assert found.selections["training steps"].worst_abs_error <= 0.15
    tags = MEASUREMENT_SETS["h200"].measure(str(h200.shipped_folder())).columns.tags["fit"]
    assert set(tags.tolist()) == {"left out", ""}


def test_every_fitted_operator_is_left_out_once() -> None:
    folds = load_folds()
    for name in h200.FITTED_FILES:
        with (h200.shipped_folder() / name).open(encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                kind, family = h200.family_of(row)
                assert (kind, family) in folds.families, row


def test_rows_of_another_folder_are_predicted_by_the_committed_constants(tmp_path: Path) -> None:
    lines = (h200.shipped_folder() / "ops.csv").read_text().splitlines()
    linear = next(line for line in lines if line.startswith("linear,bf16"))
    fields = linear.split(",")
    fields[lines[0].split(",").index("M")] = "777"
    (tmp_path / "ops.csv").write_text("\n".join([lines[0], linear, ",".join(fields), "fold,bf16" + "," * 13]) + "\n")
    found = MEASUREMENT_SETS["h200"].measure(str(tmp_path))
    assert found.columns.tags["fit"].tolist() == ["left out", "never"]
    assert sum(found.skipped.values()) == 1
    alone = MEASUREMENT_SETS["h200"].measure(str(tmp_path / "ops.csv"))
    assert len(alone.columns) == 2


def test_a_folder_without_rows_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected ops\.csv"):
        MEASUREMENT_SETS["h200"].measure(str(tmp_path))
    with pytest.raises(ValueError, match="NeuSight's set"):
        MEASUREMENT_SETS["neusight"].measure(str(tmp_path))


@needs_data("neusight")
def test_neusight_rows_with_their_gpu_left_out(tmp_path: Path) -> None:
    """One operator row in ten: enough for the means, and quick."""
    shutil.copy(DATA / "neusight" / "models_fp32.csv", tmp_path)
    with gzip.open(DATA / "neusight" / "ops_fp32.csv.gz", "rt", encoding="utf-8") as lines:
        kept = [line for number, line in enumerate(lines) if number == 0 or number % 10 == 1]
    (tmp_path / "ops_fp32.csv").write_text("".join(kept))
    found = board("neusight", tmp_path)
    assert found.summary is not None
    assert found.summary.rows == len(kept) - 1 + 40
    assert found.figures["operators_mean_over_cells"] <= 0.13
    assert found.figures["matmuls_mean_over_cells"] <= 0.20
    assert found.figures["operators_mean_over_cells_with_20_points"] <= 0.065
    assert found.figures["models_mean_abs_error_gpu_left_out"] <= 0.09
    ours = found.figures["models_mean_abs_error_where_neusight_has_one"]
    assert ours <= found.figures["models_mean_abs_error_of_neusight"]


@needs_data("neusight")
def test_neusight_says_what_it_skips(tmp_path: Path) -> None:
    names = (
        "device,model,mode,seq,batch,option,n_layer,measured_ms,measured_fwd_ms,measured_bwd_ms,neusight_ms,roofline_ms"
    )
    rows = [
        "Tesla_T4,bert_large,inf,512,2,,24,100,100,0,100,50",
        "Tesla_T4,bert_huge,inf,512,2,,24,100,100,0,100,50",
        "NVIDIA_Q1,bert_large,inf,512,2,,24,100,100,0,100,50",
        "Tesla_T4,bert_large,inf,512,2,fusion,24,100,100,0,100,50",
    ]
    (tmp_path / "models_fp32.csv").write_text("\n".join([names, *rows]) + "\n")
    found = board("neusight", tmp_path)
    assert found.summary is not None
    assert found.summary.rows == 1
    reasons = " ".join(found.skipped)
    for word in ("bert_huge", "NVIDIA_Q1", "fusion"):
        assert word in reasons


@needs_data("nccl-tests")
def test_nccl_rows() -> None:
    found = board("nccl-tests", DATA / "nccl-tests")
    assert found.summary is not None
    assert found.summary.rows == 104
    assert found.summary.mean_abs_error <= 0.08
    assert found.selections["1 MiB and more"].mean_abs_error <= 0.05
    one = board("nccl-tests", DATA / "nccl-tests" / "nccl_8.log")
    assert one.summary is not None
    assert one.summary.rows == 28


@needs_data("nccl-tests")
def test_small_all_reduces_and_group_sizes_that_nobody_measured() -> None:
    """Below 1 MiB on the logs the constants were fitted to, and beside it each number of ranks left out."""
    found = board("nccl-tests", DATA / "nccl-tests")
    assert found.selections["below 1 MiB"].mean_abs_error <= 0.08
    assert found.selections["1 MiB and more"].mean_abs_error <= 0.035
    left_out = found.figures["each number of ranks left out of the fit, below 1 MiB"]
    assert found.selections["below 1 MiB"].mean_abs_error < left_out <= 0.14
