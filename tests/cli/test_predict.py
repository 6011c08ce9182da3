"""``stepcast predict`` from outside."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from stepcast.cli.main import build_parser
from stepcast.cli.options import read_question
from stepcast.forecast.options import Options
from stepcast.forecast.predict import predict
from stepcast.hardware import load_cluster
from stepcast.inputs.table import read
from stepcast.ir.framework import Execution, Kernels
from stepcast.ir.strategy import OVERLAPS, PRECISIONS, Overlap, Recompute, RecomputeKind, RecomputeModule, Strategy
from stepcast.models.catalog import load_model
from stepcast.questions import question
from stepcast.questions.settle import settle
from tests.cli.test_main import run, run_json

pytestmark = pytest.mark.slow

SMALL = ("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64")
LLAMA_405B = ("--model", "llama-3.1-405b", "--cluster", "dgx-h100", "--gpus", "16384", "--tp", "8", "--pp", "16")
LLAMA_BATCH = ("--seq", "8192", "--global-batch", "2048")
SPREAD = ("--model", "deepseek-v3", "--cluster", "dgx-b200", "--gpus", "64", "--ep", "64", "--expert-tp", "1")
DEEPSEEK = ("--model", "deepseek-v3", "--cluster", "h800-node", "--gpus", "2048", "--pp", "16", "--ep", "64")


def test_choices_are_those_of_the_strategy() -> None:
    assert set(question.PRECISIONS) == {str(kind) for kind in PRECISIONS}
    for name, kinds in (("execution", Execution), ("kernels", Kernels)):
        assert set(question.CHOICES[name].values) == set(map(str, kinds))
    assert {name.replace("-", "_") for name in OVERLAPS} == {field.name for field in fields(Overlap)}


def strategy(*arguments: str) -> Strategy:
    return settle(read_question(build_parser().parse_args(["predict", *arguments]))[0]).strategy


def test_overlap_is_what_is_named_and_nothing_else() -> None:
    def overlapped(*arguments: str) -> set[str]:
        return {name for name, on in asdict(strategy(*SMALL, *arguments).overlap).items() if on}

    assert overlapped() == {"gradients", "parameters", "tensor_gradients", "transfers"}
    assert overlapped("--overlap", "none") == set()
    assert overlapped("--overlap", "tensor-gradients,gradients") == {"tensor_gradients", "gradients"}


def test_recompute_takes_modules() -> None:
    def recompute(text: str) -> Recompute:
        return strategy(*SMALL, "--recompute", text).recompute

    assert recompute("selective") == Recompute(RecomputeKind.SELECTIVE)
    assert recompute("block:3") == Recompute(RecomputeKind.BLOCK, 3)
    modules = (RecomputeModule.MLP, RecomputeModule.CORE)
    assert recompute("selective:mlp,core-attention,mlp") == Recompute(RecomputeKind.SELECTIVE, modules=modules)


@pytest.mark.parametrize(
    ("option", "slower"),
    [
        (("--recompute", "selective:latent-up,experts"), True),
        (("--further-tokens", "1"), True),
        (("--dropout",), True),
        (("--execution", "partial-graphs"), True),
        (("--fused-experts",), False),
    ],
)
def test_options_of_experts_change_the_step(
    capsys: pytest.CaptureFixture[str], option: tuple[str, ...], slower: bool
) -> None:
    base = ("predict", *SPREAD, "--global-batch", "256")
    without, with_it = run_json(capsys, *base), run_json(capsys, *base, *option)
    assert (with_it["step_s"] > without["step_s"]) == slower
    assert with_it["step_s"] != without["step_s"]


def test_gathered_parameters_are_freed_or_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Freed by default; in a pipeline kept, which saves the gathers of all micro-batches but the first."""
    for shape, usual, other in (((), True, "--no-reshard"), (("--pp", "4"), False, "--reshard")):
        default = run_json(capsys, "predict", *SMALL, *shape, "--sharding", "fsdp")
        stated = "--reshard" if usual else "--no-reshard"
        same = run_json(capsys, "predict", *SMALL, *shape, "--sharding", "fsdp", stated)
        changed = run_json(capsys, "predict", *SMALL, *shape, "--sharding", "fsdp", other)
        assert same["memory_bytes"] == default["memory_bytes"]
        assert same["step_s"] == default["step_s"]
        communicated, less = (one["communication_s"]["dp"]["total"] for one in (changed, default))
        needed, more = (one["memory_bytes"]["temporary"] for one in (changed, default))
        assert (communicated < less) == (needed > more) == usual


def test_gathers_after_a_layer_hide_nothing_in_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", *SMALL, "--sharding", "fsdp")
    default, early, late = (
        run_json(capsys, *words, *option)
        for option in ((), ("--backward-prefetch", "pre"), ("--fsdp-backward-prefetch", "post"))
    )
    assert early["step_s"] == default["step_s"]
    data_parallel = [one["communication_s"]["dp"] for one in (early, late)]
    assert data_parallel[0]["total"] == pytest.approx(data_parallel[1]["total"])
    assert data_parallel[0]["exposed"] < data_parallel[1]["exposed"]


def test_sums_of_gradients_without_fusion_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel reads the gradient of each parameter in bf16 and its sum in fp32, and writes the sum: 10 bytes."""
    words = ("predict", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "32")
    fused, default, separate = (
        run_json(capsys, *words, *option)["step_s"]
        for option in (("--gradient-accumulation-fusion",), (), ("--no-gradient-accumulation-fusion",))
    )
    read_and_written_s = 4 * 8.03e9 * 10 / 3.35e12  # four micro-batches at the peak bandwidth of an H100
    assert fused == default
    assert 0.5 * read_and_written_s < separate - fused < 2 * read_and_written_s


def test_parameters_in_fp8_need_less_memory_and_communication(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("predict", *SMALL, "--precision", "fp8")
    without, with_it = run_json(capsys, *base), run_json(capsys, *base, "--fp8-params")
    assert with_it["memory_bytes"]["parameters"] < without["memory_bytes"]["parameters"]
    assert with_it["communication_s"]["dp"]["total"] < without["communication_s"]["dp"]["total"]


def test_recomputed_modules_need_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("none", "selective:norms", "selective:norms,latent-up", "selective:norms,latent-up,experts")
    found = [run_json(capsys, "predict", *SPREAD, "--recompute", kind) for kind in kinds]
    totals = [one["memory_bytes"]["total"] for one in found]
    assert totals == sorted(set(totals), reverse=True)


def test_simai_text_holds_no_mtp_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    further = ("predict", *SPREAD, "--further-tokens", "1", "--to-workload")
    status, _, err = run(capsys, *further, str(tmp_path / "w.txt"))
    assert status == 2
    assert "AICB cannot describe MTP layers" in err
    assert run(capsys, *further, str(tmp_path / "w.et"))[0] == 0


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["predict", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [(*LLAMA_405B, *LLAMA_BATCH), (*DEEPSEEK, "--seq", "4096", "--global-batch", "15360", "--precision", "fp8"), SMALL],
    ids=["llama-405b on 16,384", "deepseek-v3 on 2,048", "defaults"],
)
def test_json_follows_the_contract(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    found = run_json(capsys, "predict", *arguments)
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"], rel=1e-12)
    for stage in found["stages"]:
        spent_s = stage["busy_s"] + stage["exposed_s"] + stage["host_s"] + stage["bubble_s"]
        assert spent_s == pytest.approx(found["step_s"], rel=1e-9)
    assert found["uncertainty"]["low_s"] <= found["step_s"] <= found["uncertainty"]["high_s"]
    memory = found["memory_bytes"]
    assert {"parameters", "gradients", "optimizer", "activations", "total", "capacity", "fits"} <= set(memory)
    assert memory["fits"] == (max(stage["total"] for stage in memory["stages"]) <= memory["capacity"])
    assert 0 < found["mfu"] < 1
    assert found["tokens_per_s"] > 0
    assert found["sources"]["matmul"] == "fitted"


def test_what_is_left_out_is_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "predict", *LLAMA_405B)
    notes = " ".join(found["assumptions"])
    assert "--seq" in notes
    assert "--global-batch" in notes
    assert "7, 14 x 8, 7" in notes


def test_an_eager_host_never_makes_a_step_faster(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--model", "gpt2-large", "--cluster", "hgx-h200", "--gpus", "1", "--seq", "1024", "--global-batch", "4")
    graphs = run_json(capsys, "predict", *one, "--kernels", "plain")
    eager = run_json(capsys, "predict", *one, "--kernels", "plain", "--execution", "eager")
    assert eager["step_s"] > graphs["step_s"]
    assert eager["breakdown_s"]["other"] > 0


@pytest.mark.parametrize("name", ["w.txt", "w.et"])
def test_the_workload_is_written_for_other_simulators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    run_json(capsys, "predict", *SMALL, "--gpus", "8", "--tp", "2", "--to-workload", str(path))
    workload = read(path)
    assert (workload.layout.tp, workload.layout.dp) == (2, 4)
    simulated = run_json(capsys, "simulate", str(path), "--cluster", "dgx-h100")
    assert simulated["breakdown_s"]["compute"] > 0


def test_text_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "predict", *SMALL, "--tp", "2", "--pp", "4")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SMALL, "--tp", "64"), "tp 64 does not divide heads 32: the nearest legal tp is 32"),
        ((*SMALL, "--tp", "3"), "64 GPUs are not a multiple of tp x cp x pp = 3"),
        ((*SMALL, "--recompute", "some"), "expected none, selective, full, or block:N"),
        ((*SMALL, "--recompute", "selective:some"), "'some' is not a module; expected core-attention"),
        ((*SMALL, "--recompute", "selective:"), "'' is not a module"),
        ((*SMALL, "--overlap", "everything"), "expected gradients"),
        ((*SMALL, "--stage-layers", "a,b"), "expected whole numbers"),
        ((*SMALL, "--calibration", "nowhere.toml"), "nowhere.toml: cannot be read: no such file"),
        (("--model", "lama", "--cluster", "dgx-h100", "--gpus", "8"), "lama"),
        (("--model", "llama-3.1-8b", "--cluster", "dgx", "--gpus", "8"), "unknown cluster 'dgx'"),
        (("--model", "llama-3.1-8b", "--gpu", "dgx9", "--gpus", "8"), "unknown gpu 'dgx9'; known are a10,"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    status, _, err = run(capsys, "predict", *arguments)
    assert status == 2
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "llama-3.1-8b"),
        ("--model", "llama-3.1-8b", "--tp", "2"),
        ("--model", "llama-3.1-8b", "--tp", "2", "--no-sequence-parallel"),
        ("--model", "mixtral-8x7b", "--ep", "8"),
        ("--model", "mixtral-8x7b", "--tp", "2", "--ep", "4"),
    ],
    ids=" ".join,
)
def test_simai_text_holds_all_computation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    path = str(tmp_path / "workload.txt")
    machine = ("--cluster", "dgx-h100", "--gpus", "64")
    status, _, _ = run(capsys, "predict", *arguments, *machine, "--to-workload", path)
    assert status == 0
    written = run_json(capsys, "simulate", path, *machine)
    # Ideal communication leaves computation alone, as the text does: collectives beside it slow it down.
    args = build_parser().parse_args(["predict", *arguments, *machine])
    alone = predict(
        load_model(args.model),
        load_cluster(args.cluster),
        strategy(*arguments, *machine),
        options=Options(ideal_communication=True),
    )
    computed_s = alone.report.breakdown_s["compute"]
    assert written["breakdown_s"]["compute"] == pytest.approx(computed_s, rel=1e-3)


@pytest.mark.parametrize("tp", ["1", "2"])
def test_simai_text_holds_the_exchange_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str], tp: str) -> None:
    path = str(tmp_path / "workload.txt")
    machine = ("--cluster", "dgx-h100", "--gpus", "64")
    layout = ("--model", "mixtral-8x7b", "--ep", "8", "--tp", tp)
    found = run_json(capsys, "predict", *layout, *machine, "--to-workload", path)
    written = run_json(capsys, "simulate", path, *machine)
    assert written["communication_s"]["ep"]["total"] == pytest.approx(found["communication_s"]["ep"]["total"], rel=1e-3)


def test_an_exported_step_is_the_predicted_one_or_the_answer_says_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AICB's form overlaps no gradients; Chakra holds the step as it is, paired micro-batches included."""
    machine = ("--cluster", "dgx-h100")
    mixtral = ("predict", "mixtral-8x7b", *machine, "--gpus", "16", "--ep", "8", "--global-batch", "16")
    text = str(tmp_path / "workload.txt")
    predicted = run_json(capsys, *mixtral, "--to-workload", text)
    simulated = run_json(capsys, "simulate", text, *machine)
    longer = simulated["step_s"] / predicted["step_s"] - 1
    assert longer > 0.2
    assert any(f"{longer * 100:+.0f} % against this prediction" in warning for warning in predicted["warnings"])
    for overlap in ("gradients", "gradients,experts"):
        prefix = str(tmp_path / overlap / "w.et")
        Path(prefix).parent.mkdir()
        predicted = run_json(capsys, *mixtral, "--overlap", overlap, "--to-workload", prefix)
        assert predicted["warnings"] == []
        simulated = run_json(capsys, "simulate", prefix, *machine)
        assert simulated["step_s"] == pytest.approx(predicted["step_s"], rel=1e-9)


def test_capacity_bounds_what_imbalance_costs(capsys: pytest.CaptureFixture[str]) -> None:
    experts = ("predict", "--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "64", "--ep", "8")
    even, uneven, bounded = (
        run_json(capsys, *experts, *more)["step_s"]
        for more in ((), ("--expert-imbalance", "1.5"), ("--expert-imbalance", "1.5", "--expert-capacity", "1.2"))
    )
    assert even < bounded < uneven


def test_gradients_in_bf16_halve_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = (
        run_json(capsys, "predict", *SMALL, "--gradients", dtype)["memory_bytes"]["gradients"]
        for dtype in ("fp32", "bf16")
    )
    assert half == pytest.approx(whole / 2)
