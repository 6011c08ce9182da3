"""Options given in vain: an error that says why and what to do, or a note where they do no harm."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import build_parser
from stepcast.questions.question import rules_of
from tests.cli.test_main import EXAMPLES, run, run_json
from tests.cli.test_mistakes import LLAMA, PREDICT, SIMULATE, TABLE

MEGATRON = str(EXAMPLES / "megatron-rank7.txt")
KINETO = str(EXAMPLES / "kineto-llama-1b.json.gz")
OPTIMUS = str(EXAMPLES / "optimus-llama-1b.txt")
OPERATORS = str(EXAMPLES / "operators-h200.csv")
EXPERTS = ("predict", "--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "64")
ONE_GPU = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "1")
ONE_STAGE = ("simulate", TABLE, "--cluster", "dgx-h100")
SIMAI = ("simulate", LLAMA, "--engine", "simai")
ALL_REDUCE = ("collective", "all-reduce", "--cluster", "dgx-h100", "--size", "1MiB", "--ranks", "8")
SEND = ("collective", "send-receive", "--cluster", "dgx-h100", "--size", "1MiB", "--ranks", "2")
BARRIER = ("collective", "barrier", "--cluster", "dgx-h100", "--ranks", "8")
MATMUL = ("op", "matmul", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", "h200")
ATTENTION = ("op", "attention", "--seq", "4096", "--heads", "8", "--head-dim", "128", "--gpu", "h200")
NORM = ("op", "rms-norm", "--rows", "4096", "--columns", "4096", "--gpu", "h200")

ERRORS = [
    ((*PREDICT, "--context", "all-to-all"), "--cp-comm", "use --cp 2 or more"),
    ((*PREDICT, "--expert-tp", "2"), "--expert-tp", "llama-3.1-8b has no experts"),
    ((*PREDICT, "--expert-imbalance", "1.5"), "--expert-imbalance", "has no experts"),
    ((*PREDICT, "--overlap", "gradients,experts"), "--overlap", "leave the word experts out"),
    ((*EXPERTS, "--expert-imbalance", "1.5"), "--expert-imbalance", "use --ep 2 or more"),
    ((*PREDICT, "--fused-experts"), "--fused-experts", "has no experts"),
    ((*EXPERTS, "--fused-experts", "--kernels", "plain"), "--fused-experts", "--kernels is plain"),
    ((*PREDICT, "--execution", "partial-graphs"), "--execution", "choose graphs or eager"),
    ((*PREDICT, "--further-tokens", "1"), "--mtp-layers", "has no module for multi-token prediction"),
    ((*PREDICT, "--recompute", "selective:mlp,experts"), "--recompute", "choose from core-attention, mlp"),
    ((*EXPERTS, "--recompute", "selective:latent-up"), "--recompute", "experts, norms"),
    ((*PREDICT, "--framework", "torchtitan", "--recompute", "selective:mlp"), "--recompute", "every second"),
    (
        (*EXPERTS, "--fused-experts", "--recompute", "selective:expert-activation"),
        "--recompute",
        "leave the word expert-activation out",
    ),
    (
        (*PREDICT, "--tp", "2", "--kernels", "plain", "--overlap", "tensor-gradients"),
        "--overlap",
        "leave the word tensor-gradients out",
    ),
    ((*PREDICT, "--schedule", "zb-h1"), "--schedule", "use --pp 2 or more"),
    ((*PREDICT, "--no-reshard"), "--no-reshard", "--sharding zero-1 does not shard them"),
    ((*PREDICT, "--backward-prefetch", "post"), "--backward-prefetch", "--sharding zero-1 does not shard them"),
    (
        (*PREDICT, "--sharding", "fsdp", "--recompute", "full", "--backward-prefetch", "post"),
        "--backward-prefetch",
        "full",
    ),
    (
        (*PREDICT, "--sharding", "fsdp", "--no-reshard", "--backward-prefetch", "pre"),
        "--backward-prefetch",
        "--reshard",
    ),
    ((*PREDICT, "--fp8-params"), "--fp8-params", "use --precision fp8 or mxfp8"),
    (
        (*PREDICT, "--framework", "torchtitan", "--no-gradient-accumulation-fusion"),
        "--no-gradient-accumulation-fusion",
        "compiled kernels never do",
    ),
    ((*PREDICT, "--precision", "fp32", "--no-master-weights"), "--no-master-weights", "themselves in fp32"),
    ((*PREDICT, "--op-fuser", "--kernels", "plain"), "--op-fuser", "--kernels is plain"),
    ((*PREDICT, "--fp8-activations", "--kernels", "compiled"), "--fp8-activations", "--kernels is compiled"),
    ((*PREDICT, "--fp8-attention"), "--fp8-attention", "use --precision fp8"),
    ((*PREDICT, "--bf16-final-layers", "2"), "--bf16-final-layers", "bf16 has no layers in fp8"),
    ((*PREDICT, "--check-gradients"), "--check-gradients", "use --execution eager"),
    ((*ONE_GPU, "--deferred-gradients", "2"), "--deferred-gradients", "use --pp 2 or more"),
    ((*PREDICT, "--tp", "2", "--loss", "composer"), "--loss", "use --loss compiled"),
    ((*PREDICT, "--liger"), "--liger", "use --framework trainer or peft"),
    ((*PREDICT, "--lora-a2a"), "--lora-a2a", "there are no adapters"),
    ((*PREDICT, "--runs", "5"), "--runs", "use --jitter"),
    ((*SIMULATE, "--seed", "5"), "--seed", "use --jitter"),
    ((*SIMULATE, "--slow-group", "ep=2"), "--slow-group", "it has dp, expert-dp, pp, tp"),
    ((*ONE_STAGE, "--slow-group", "dp=2"), "--slow-group", "it has none"),
    ((*ONE_STAGE, "--all-reduce", "tree"), "--all-reduce", "no all-reduce over several ranks"),
    ((*ONE_STAGE, "--schedule", "zb-v"), "--schedule", "has one"),
    ((*SIMULATE, "--all-reduce", "tree", "--ideal-communication"), "--all-reduce", "leave one of them out"),
    ((*SIMULATE, "--nic-gb-per-s", "20"), "--nic-gb-per-s", "use that engine"),
    ((*SIMAI, "--gantt"), "--gantt", "leave one of them out"),
    ((*SIMAI, "--overlap", "ep=0.5"), "--overlap", "it has dp, expert-dp, pp, tp"),
    ((*ALL_REDUCE, "--imbalance", "2"), "--imbalance", "for all-to-all"),
    ((*SEND, "--algorithm", "ring"), "--algorithm", "leave it out"),
    ((*MATMUL, "--seq", "7"), "--seq", "sizes of matmul are --m, --n, --k, --batch"),
    ((*MATMUL, "--no-causal"), "--no-causal", "for attention"),
    ((*MATMUL, "--backward"), "--backward", "use (m, k, n)"),
    ((*ATTENTION, "--m", "7"), "--m", "--seq, --keys, --batch"),
    ((*NORM, "--head-dim", "7"), "--head-dim", "--rows, --columns"),
    ((*NORM, "--to", "fp8"), "--to", "for cast"),
    (("op", "fill", *NORM[2:], "--backward"), "--backward", "has no gradient"),
    (("analyze", KINETO, "--trace", "t.json"), "--trace", f"stepcast convert {KINETO} OUT --to perfetto"),
    (("analyze", OPTIMUS, "--trace", "t.json"), "--trace", "leave it out"),
    (("analyze", KINETO, "--cluster", "dgx-h100"), "--cluster", "needs no cluster"),
    (("analyze", MEGATRON, "--calibration", "c.toml"), "--calibration", "this is megatron"),
    (("analyze", MEGATRON, "--set", "node.nics=4"), "--set", "use --cluster"),
    (("replay", MEGATRON, "--set", "node.nics=4"), "--set", "use --cluster"),
    (("show", MEGATRON, "--repeat-layers", "3"), "--repeat-layers", "is a measured run"),
    (("convert", MEGATRON, "t.json", "--to", "json", "--backward-factor", "2"), "--backward-factor", MEGATRON),
    (
        (
            "predict",
            "--model",
            "mixtral-8x7b",
            "--cluster",
            "dgx-h100",
            "--gpus",
            "64",
            "--pp",
            "2",
            "--ep",
            "8",
            "--overlap",
            "experts",
        ),
        "--overlap",
        "use --vpp 2 or more",
    ),
    (("calibrate", OPERATORS, "--gpu", "h200", "--cluster", "dgx-h100"), "--cluster", "use --gpu instead"),
    (("calibrate", OPERATORS, "--gpu", "h200", "--sequence", "3"), "--sequence", "leave it out"),
    (("calibrate", OPTIMUS, "--gpu", "a40"), "--gpu", "use --cluster instead"),
    (("validate", "--set", "h200", "--cluster", "dgx-h100"), "--cluster", "--set nccl-tests"),
]
NOTES = [
    ((*ONE_GPU, "--no-sequence-parallel"), "--no-sequence-parallel"),
    ((*ONE_GPU, "--overlap", "gradients,tensor"), "--overlap"),
    ((*ONE_GPU, "--overlap", "gradients,tensor-gradients"), "--overlap"),
    ((*ONE_GPU, "--sharding", "zero-2"), "--sharding"),
    ((*ONE_GPU, "--bucket-mb", "25"), "--bucket-mb"),
    ((*EXPERTS, "--dispatcher", "deepep"), "--dispatcher"),
    ((*ONE_GPU, "--framework", "nemo", "--lora", "16", "--lora-a2a"), "--lora-a2a"),
    ((*EXPERTS, "--ep", "8", "--expert-capacity", "1.2"), "--expert-capacity"),
    ((*ONE_GPU, "--framework", "pytorch", "--zero-gradients", "0.1"), "--zero-gradients"),
    ((*ONE_GPU, "--framework", "pytorch", "--loss", "engine"), "--loss"),
    ((*PREDICT, "--gantt"), "--gantt"),
    ((*PREDICT, "--explain-memory"), "--explain-memory"),
    ((*ONE_STAGE, "--body", "model"), "--body"),
    ((*ONE_STAGE, "--messages", "blocking"), "--messages"),
    ((*SIMAI, "--cluster", "dgx-h100"), "--cluster"),
    ((*ALL_REDUCE[:-1], "1", "--algorithm", "ring"), "--algorithm"),
    (("replay", MEGATRON, "--gpu", "h200"), "--gpu"),
    (("replay", MEGATRON, "--cluster", "dgx-h100"), "--cluster"),
]
EFFECTIVE: list[tuple[str, ...]] = [
    (*PREDICT, "--cp", "2", "--context", "all-to-all"),
    (*PREDICT, "--schedule", "gpipe"),
    (*PREDICT, "--precision", "fp8", "--fp8-attention", "--bf16-final-layers", "2", "--no-op-fuser", "--no-liger"),
    (*PREDICT, "--execution", "eager", "--check-gradients", "--kernels", "plain", "--no-fp8-activations"),
    (*PREDICT, "--sharding", "fsdp", "--no-reshard", "--precision", "fp8", "--fp8-params"),
    (*PREDICT, "--sharding", "fsdp", "--backward-prefetch", "post"),
    (*PREDICT, "--no-gradient-accumulation-fusion"),
    (*PREDICT, "--tp", "2", "--no-sequence-parallel"),
    (*EXPERTS, "--ep", "8", "--expert-imbalance", "1.5"),
    (*EXPERTS, "--fused-experts", "--execution", "partial-graphs", "--recompute", "selective:norms"),
    (*PREDICT, "--tp", "2", "--overlap", "tensor-gradients", "--dropout"),
    (*SIMULATE, "--slow-group", "pp=2"),
    (*SIMULATE, "--slow-group", "expert-dp=2"),
    (*SIMULATE, "--all-reduce", "ring"),
    (*ONE_STAGE, "--gpus", "8", "--slow-group", "dp=2"),
    (*SIMAI, "--overlap", "dp_ep=0.5"),
    (*MATMUL, "--batch", "7"),
    (*ATTENTION, "--kv-heads", "2", "--no-causal", "--backward"),
]


@pytest.mark.parametrize(("arguments", "option", "remedy"), ERRORS)
def test_an_option_that_cannot_be_meant_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    option: str,
    remedy: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"stepcast: {option} has no effect: ")
    assert err.count("\n") == 1
    assert remedy in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "option"), NOTES)
def test_an_option_that_does_no_harm_is_noted(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], option: str
) -> None:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert notes[0].startswith(f"note: {option} has no effect: ")
    plain = arguments[: arguments.index(option)]
    without, found = json.loads(run(capsys, *plain, "--json")[1]), json.loads(out)
    for asked in ("command", "strategy"):  # what was typed is told, effect or not
        without.pop(asked, None)
        found.pop(asked, None)
    assert without == found


@pytest.mark.parametrize("verb", [PREDICT, MATMUL])
def test_a_calibration_without_corrections_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    path = tmp_path / "run.toml"
    assert run(capsys, "calibrate", OPTIMUS, "-o", str(path))[0] == 0
    status, out, err = run(capsys, *verb, "--calibration", str(path))
    assert (status, out) == (2, "")
    assert "no corrections of operators; 'stepcast profile'" in err


def test_a_calibration_of_another_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    measured = str(EXAMPLES / "calibrations" / "h200.toml")
    status, _, err = run(capsys, *PREDICT, "--calibration", measured)
    assert status == 2
    assert "was measured on h200, not on h100-sxm: leave --calibration out" in err


@pytest.mark.parametrize("arguments", EFFECTIVE)
def test_an_option_with_an_effect_is_taken(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    status, _, err = run(capsys, *arguments, "--json")
    assert status == 0
    assert "has no effect" not in err


def test_a_default_said_aloud_is_not_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, *PREDICT, "--cp-comm", "p2p", "--runs", "100", "--expert-imbalance", "1")
    assert (status, err) == (0, "")


def test_every_rule_names_an_option_of_its_verb() -> None:
    parser = build_parser()
    for verb in ("show", "convert", "simulate", "collective", "op", "calibrate", "validate"):
        known = set(vars(parser.parse_args(REQUIRED[verb])))
        named = {option for rule in rules_of(verb) for option in rule.options}
        assert named - known <= SHARED_RULES, verb


REQUIRED = {
    "show": ["show", "f"],
    "convert": ["convert", "f", "g", "--to", "json"],
    "predict": list(PREDICT),
    "plan": ["plan", *PREDICT[1:]],
    "network": ["network", *PREDICT[1:]],
    "simulate": list(SIMULATE),
    "analyze": ["analyze", "f"],
    "replay": ["replay", "f"],
    "run": ["run", "f"],
    "collective": list(ALL_REDUCE),
    "op": list(MATMUL),
    "calibrate": ["calibrate", "f"],
    "validate": ["validate"],
}
# Of a rule that two verbs share, one has all the options.
SHARED_RULES = {"explain_memory"}


def test_a_format_that_the_gpu_lacks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    dtype, gpu, used = "bf16", "v100-sxm-32gb", "fp32"
    sizes = ("op", "matmul", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", gpu)
    found = run_json(capsys, *sizes, "--dtype", dtype)
    assert f"no {dtype} matrix units" in found["warnings"][0]
    assert f"multiplied in {used}" in found["warnings"][0]
    status, _, err = run(capsys, *sizes, "--dtype", dtype)
    assert status == 0
    assert err.startswith(f"warning: {gpu} has no {dtype} matrix units")
    assert run_json(capsys, *sizes, "--dtype", used)["warnings"] == []


@pytest.mark.parametrize(
    ("expert_tp", "is_idle"), [((), False), (("--expert-tp", "2"), False), (("--expert-tp", "1"), True)]
)
def test_tokens_are_gathered_where_experts_are_split(
    expert_tp: tuple[str, ...], is_idle: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's allgather also collects the tokens of ranks that share experts by tensor parallelism."""
    asked = (*EXPERTS[:-1], "8", "--tp", "2", *expert_tp, "--recompute", "full")
    gathered, sent = (run_json(capsys, *asked, "--dispatcher", kind) for kind in ("allgather", "alltoall"))
    assert (gathered["step_s"] == sent["step_s"]) is is_idle
    _, _, err = run(capsys, *asked, "--dispatcher", "allgather")
    assert ("--dispatcher has no effect" in err) is is_idle
