"""``predict --framework``, ``list frameworks`` and ``show`` of a profile."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.hardware.catalog import data_names
from tests.cli.test_main import run_json

PREDICT = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64", "--seq", "8192")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def step_s(capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    status, out, err = run(capsys, *PREDICT, *arguments, "--json")
    assert status == 0, err
    return float(json.loads(out)["step_s"])


def test_the_default_is_megatron_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_s(capsys) == step_s(capsys, "--framework", "megatron-core")
    found = json.loads(run(capsys, *PREDICT, "--json")[1])
    assert found["run"]["framework"] == "megatron-core"


def test_a_profile_is_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--tp", "8", "--seq", "512", "--framework")
    eager = step_s(capsys, *small, "megatron-core-eager")
    assert eager == step_s(capsys, *small, "megatron-core", "--execution", "eager", "--check-gradients")
    assert eager > step_s(capsys, *small, "megatron-core-eager", "--execution", "graphs")


@pytest.mark.parametrize(
    "options",
    [
        ("--kernels", "plain"),
        ("--gradients", "bf16", "--tp", "8"),
        ("--no-flash-attention",),
        ("--dropout",),
        ("--sharding", "zero-1"),
        ("--recompute", "full"),
        ("--precision", "fp8"),
    ],
    ids=" ".join,
)
def test_options_count_more_than_the_profile(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    layout = ("--tp", "8") if "--tp" in options else ()
    usual = step_s(capsys, "--framework", "torchtitan", *layout)
    assert step_s(capsys, "--framework", "torchtitan", *options) != usual


def test_an_optimizer_by_name_runs_as_the_profile_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's AdamW goes over lists of tensors unless it is asked to fuse."""
    plain = ("--framework", "pytorch", "--optimizer", "adamw:bf16")
    assert step_s(capsys, *plain) == step_s(capsys, "--framework", "pytorch")


def test_every_profile_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    for name in data_names("frameworks"):
        assert 0.5 < step_s(capsys, "--framework", name, "--tp", "2", "--global-batch", "256") < 60, name


def test_older_attention_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for generation in ("current", "flash-2", "flash-1"):
        path = tmp_path / f"{generation}.toml"
        path.write_text(f'extends = "torchtitan"\n[software]\nattention = "{generation}"\n')
        steps.append(step_s(capsys, "--framework", str(path)))
    assert steps == sorted(set(steps))


def test_an_interleaved_schedule_takes_the_chunks_of_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ("--pp", "4", "--schedule", "interleaved")
    said = step_s(capsys, *stages, "--framework", "megatron-lm", "--vpp", "2")
    assert step_s(capsys, *stages, "--framework", "megatron-lm") == said
    status, _, err = run(capsys, *PREDICT, *stages)
    assert status == 2
    assert "vpp of 2 or more" in err


def test_an_unknown_framework_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *PREDICT, "--framework", "torchtitn")
    assert (status, out) == (2, "")
    assert err == "stepcast: unknown framework 'torchtitn'; did you mean torchtitan or pytorch or trainer?\n"
    path = tmp_path / "mine.toml"
    path.write_text("[software]\nkernels = 'quick'\n")
    status, _, err = run(capsys, *PREDICT, "--framework", str(path))
    assert status == 2
    assert err.startswith(f"stepcast: {path}:2: software.kernels: 'quick' is not known")


def test_frameworks_are_listed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(run(capsys, "list", "frameworks", "--json")[1])["frameworks"]
    assert [each["name"] for each in listed] == list(data_names("frameworks"))
    path = tmp_path / "mine.toml"
    path.write_text('extends = "transformers"\n')
    status, out, _ = run(capsys, "show", str(path), "--json")
    assert status == 0
    found = json.loads(out)
    assert found["kind"] == "framework"
    assert found["software"]["gradient_dtype"] == found["optimizer"]["moment_dtype"] == "as trained"
    assert "mine: Hugging Face transformers" in run(capsys, "show", str(path))[1]


def test_sizes_of_a_model_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    whole = step_s(capsys)
    words = list(PREDICT)
    words[2] = "llama-3.1-8b:layers=16"
    half = float(json.loads(run(capsys, *words, "--json")[1])["step_s"])
    assert 0.45 * whole < half < 0.6 * whole
    words[2] = "mine:layers=16,hidden=4096,seq=8192"
    assert json.loads(run(capsys, *words, "--json")[1])["run"]["model"] == "mine"
    for wrong, message in (("llama-3.1-8b:depth=3", "is no size"), ("llama-3.1-8b:layers=x", "is not a number")):
        words[2] = wrong
        status, _, err = run(capsys, *words)
        assert status == 2
        assert message in err


def test_fsdp_as_software_splits_states(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "16")
    for name in ("fsdp", "FSDP2", "pytorch-fsdp"):
        found = run_json(capsys, *words, "--framework", name)
        assert (found["framework"], found["strategy"]["sharding"]) == ("pytorch-fsdp", "fsdp")
    plain = run_json(capsys, *words, "--framework", "pytorch", "--sharding", "fsdp")
    assert (found["step_s"], found["memory_bytes"]) == (plain["step_s"], plain["memory_bytes"])
