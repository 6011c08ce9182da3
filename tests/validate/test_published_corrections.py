"""Published rows that their sources contradict: corrected or left out in the open, each with a reason."""

import csv
import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.generate.flops import model_flops
from stepcast.ir.framework import Dispatcher, Execution, Kernels
from stepcast.ir.strategy import RecomputeKind, RecomputeModule
from stepcast.validate.published.comparison import measure_step_s
from stepcast.validate.published.setup import correct_records, load_corrections, parse_corrections, read_setup
from tests.shared import DATA, ROOT, needs_data
from tests.validate.csv_rows import write

M = RecomputeModule
ROW = {
    "id": "x1",
    "source": "a paper, Table 2",
    "model": "llama3-8b",
    "gpu": "H100-SXM-80GB",
    "num_gpus": "16.0",
    "framework": "NeMo",
    "precision": "bf16",
    "tp": "1.0",
    "pp": "1.0",
    "cp": "1.0",
    "dp": "16.0",
    "micro_batch": "1.0",
    "global_batch": "256.0",
    "seq": "8192.0",
    "iter_time_s": "12.3",
    "status": "measured",
}
WRONG_BATCH = """
[[correction]]
source = "a paper"
rows = ["x1"]
change = { global_batch = ["256", "128"] }
reason = "half as many tokens per second"
"""


def test_a_change_says_what_it_changed() -> None:
    (found,) = correct_records([ROW], parse_corrections(WRONG_BATCH))
    assert found["global_batch"] == "128"
    assert found["corrected"] == "global_batch 256 -> 128: half as many tokens per second"
    assert read_setup(found).strategy.global_batch == 128


@pytest.mark.parametrize(
    "other", [{"id": "x2"}, {"source": "another paper"}, {"global_batch": "512"}, {"global_batch": ""}]
)
def test_other_rows_and_other_values_stay(other: dict[str, str]) -> None:
    row = {**ROW, **other}
    assert list(correct_records([row], parse_corrections(WRONG_BATCH))) == [row]


def test_a_correction_may_name_columns_instead_of_rows() -> None:
    text = WRONG_BATCH.replace('rows = ["x1"]', 'when = { model = "llama3-8b", num_gpus = "16" }')
    assert [
        row["global_batch"] for row in correct_records([ROW, {**ROW, "num_gpus": "8"}], parse_corrections(text))
    ] == ["128", "256.0"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("reason", "why", "reason"),
        ('rows = ["x1"]', "", "rows or when"),
        ('["256", "128"]', '["256"]', "published and corrected"),
    ],
)
def test_a_list_of_corrections_that_says_too_little(old: str, new: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_corrections(WRONG_BATCH.replace(old, new))


def test_every_shipped_correction_has_a_reason_and_is_documented() -> None:
    page = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    assert load_corrections()
    for each in load_corrections():
        assert len(each.reason) > 30
        for row in each.rows:
            assert row in page, f"{row} is corrected but docs/published.md does not say so"


def board(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["validate", "--set", "published", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]["published"]
    assert isinstance(found, dict)
    return found


@needs_data("published-new")
def test_the_scoreboard_says_what_was_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (DATA / "published-new" / "training_runs.csv").open(newline="") as lines:
        known = {row["id"]: row for row in csv.DictReader(lines)}
    path = write(tmp_path / "some.csv", *(known[name] for name in ("gt0231", "gt0645", "gt0528")))
    found = board(capsys, "--data", str(path), "-o", str(tmp_path / "rows.csv"))
    assert found["rows"] == 2
    assert found["skipped"] == 1
    assert any("gt0645 left out" in reason for reason in found["skip_reasons"])  # type: ignore[attr-defined]
    assert any(note.startswith("1 row corrected, 1 left out") for note in found["notes"])  # type: ignore[attr-defined]
    assert list(found["groups"]["values"]) == ["as published", "corrected"]  # type: ignore[index]
    assert "correction" not in found["groups"]  # type: ignore[operator]
    with (tmp_path / "rows.csv").open(newline="") as lines:
        told = {row["name"].split()[0]: row["correction"] for row in csv.DictReader(lines)}
    assert told["gt0231"].startswith("compile blank -> 0")
    assert told["gt0528"] == ""


@needs_data("published", "published-new")
def test_both_folders_are_one_set() -> None:
    from stepcast.cli.validate import _default_places
    from stepcast.validate.scoreboard import MEASUREMENT_SETS

    places = _default_places(MEASUREMENT_SETS["published"])
    assert [place.name for place in places] == ["published", "published-new"]


def test_operations_are_counted_as_the_source_counts_them() -> None:
    """Time from TFLOP/s: the whole square of attention, unless the source counts the causal half."""
    rate = {**ROW, "iter_time_s": "", "tflops_per_gpu": "400"}
    whole = measure_step_s(read_setup({**rate, "tflops_kind": "model(incl. full, non-causal attention FLOPs)"}))
    assert whole == measure_step_s(read_setup({**rate, "tflops_kind": "model"}))
    causal = read_setup({**rate, "tflops_kind": "model(causal attention)"})
    counted = model_flops(causal.model, 8192, 256, causal=True)
    assert measure_step_s(causal) == pytest.approx(counted / (400e12 * 16))
    assert measure_step_s(causal) < 0.95 * whole


def test_time_from_utilisation_alone() -> None:
    rate = {**ROW, "iter_time_s": "", "mfu_pct": "40"}
    setup = read_setup(rate)
    peak = setup.cluster.gpu.matrix_peak_flops("bf16")
    assert measure_step_s(setup) == pytest.approx(model_flops(setup.model, 8192, 256) / (0.4 * peak * 16))


@needs_data("published-new")
def test_the_zoo_of_mixtures_counts_causal_attention() -> None:
    """A row that states both: 276 TFLOP/s x 256 GPUs x 17.6 s are the causal count, 0.886 of the square."""
    with (DATA / "published-new" / "training_runs.csv").open(newline="") as lines:
        records = [row for row in csv.DictReader(lines) if row["id"] in ("gt0995", "gt1006")]
    both, rate = (read_setup(record) for record in correct_records(records, load_corrections()))
    done = both.run.flops_per_gpu * 256 * both.run.iteration_s  # type: ignore[operator]
    assert done == pytest.approx(model_flops(both.model, 4096, 2048, causal=True), rel=0.005)
    counted = model_flops(rate.model, 4096, 8192, causal=True)
    assert measure_step_s(rate) == pytest.approx(counted / (750e12 * 256))


@pytest.mark.parametrize(
    ("word", "modules"),
    [
        ("norm, act", (M.NORMS, M.EXPERT_ACTIVATION)),
        ("selective(layernorm, moe)", (M.NORMS, M.EXPERTS)),
        ("moe_act, layernorm", (M.EXPERT_ACTIVATION, M.NORMS)),
        ("selective(attn)", (M.CORE,)),
        ("selective AC", ()),
        ("per-op SAC", ()),
        ("selective", ()),
    ],
)
def test_words_for_recomputed_modules(word: str, modules: tuple[M, ...]) -> None:
    recompute = read_setup({**ROW, "recompute": word}).strategy.recompute
    assert recompute.kind is RecomputeKind.SELECTIVE
    assert recompute.modules == modules


def test_what_a_row_may_say_beyond_the_usual_columns() -> None:
    titan = {**ROW, "framework": "torchtitan"}
    assert read_setup({**titan, "compile": "0"}).framework.kernels is Kernels.PLAIN
    assert read_setup(titan).framework.kernels is Kernels.COMPILED
    core = {**ROW, "framework": "Megatron-Core (DeepEP)", "model": "qwen3-30b-a3b", "ep": "8", "seq": "4096"}
    assert read_setup(core).framework.dispatcher is Dispatcher.DEEPEP
    plain = read_setup({**core, "framework": "Megatron-Core"}).framework
    assert plain.dispatcher is Dispatcher.ALL_TO_ALL
    assert read_setup({**core, "schedule": "1F1B, a2a overlap"}).strategy.overlap.experts
    assert not read_setup(core).strategy.overlap.experts
    bridge = {**core, "framework": "Megatron-Bridge (NeMo container)", "model": "deepseek-v3"}
    bridge["table"] = "25.11 NeMo Container / Pre-Training Performance"
    assert read_setup(bridge).strategy.mtp_layers == 1
    assert read_setup({**bridge, "mtp": "0"}).strategy.mtp_layers == 0


def test_weights_kept_between_forward_and_backward_are_a_fact_of_the_row() -> None:
    kept = read_setup({**ROW, "zero_fsdp": "fsdp(no reshard after fwd)"})
    assert kept.strategy.reshard is False
    assert read_setup({**ROW, "zero_fsdp": "fsdp2"}).strategy.reshard is None


def test_the_baseline_of_megascale_is_of_2023() -> None:
    row = {**ROW, "framework": "Megatron-LM 2023 (285068c8)", "gpu": "A100(Ampere)", "model": "gpt3-175b"}
    row |= {"tp": "8", "pp": "2", "dp": "1", "seq": "2048", "precision": ""}
    strategy = read_setup(row).strategy
    assert strategy.recompute.kind is RecomputeKind.SELECTIVE
    assert strategy.sequence_parallel
    assert not strategy.overlap.gradients


@pytest.mark.parametrize(("gpus", "execution"), [("384.0", Execution.BLOCKING), ("80.0", Execution.EAGER)])
def test_runs_that_hung_otherwise_waited_for_each_kernel(gpus: str, execution: Execution) -> None:
    row = {
        **ROW,
        "source": "bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md",
        "framework": "Megatron-DeepSpeed",
        "model": "gpt3-175b",
        "num_gpus": gpus,
        "dp": str(float(gpus) / 8),
        "tp": "8.0",
        "seq": "2048",
        "global_batch": "1920",
    }
    (found,) = correct_records([row], load_corrections())
    setup = read_setup(found)
    assert setup.framework.execution is execution
    assert ("--execution blocking" in setup.command) == (execution is Execution.BLOCKING)
