"""Runs that files describe: saved ones, and models or configurations named without an option."""

import json
from pathlib import Path

import pytest

from tests.cli.test_main import run, run_json

CONFIGS = Path(__file__).parents[1] / "inputs" / "configs"
WORDS = (
    *("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--nodes", "2", "--tp", "2", "--zero", "2"),
    *("--no-sequence-parallel", "--set", "node.nics=4", "--recompute", "full", "--no-clipping"),
)


def test_a_saved_run_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "run.toml")
    first = run_json(capsys, "predict", *WORDS, "--save", file)
    again = run_json(capsys, "predict", file)
    for name in ("strategy", "step_s", "memory_bytes", "breakdown_s", "framework"):
        assert first[name] == again[name]
    assert again["strategy"]["sequence_parallel"] is False
    assert not any("--seq" in note for note in again["assumptions"])
    other = run_json(capsys, "predict", file, "--tp", "4", "--sequence-parallel")
    assert (other["strategy"]["tp"], other["strategy"]["dp"]) == (4, 4)
    assert all(f"# - {note}\n" in Path(file).read_text() for note in first["assumptions"])
    accumulated = run_json(capsys, "predict", *WORDS, "--accumulation", "4", "--save", file)
    doubled = run_json(capsys, "predict", file, "--micro-batch", "2")
    assert doubled["strategy"]["global_batch"] == 2 * accumulated["strategy"]["global_batch"]


def test_a_run_may_be_a_model_or_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "predict", "llama-3.2-1b", "--gpu", "h200")["model"] == "llama-3.2-1b"
    found = run_json(capsys, "predict", str(CONFIGS / "nemo/llama3_8b.yaml"), "--cluster", "dgx-h100")
    assert found["config"]["format"] == "nemo"
    _, out, _ = run(capsys, "predict", str(CONFIGS / "nemo/llama3_8b.yaml"), "--cluster", "dgx-h100")
    told = " ".join(out.split())
    assert "(nemo): 35 keys used" in told
    assert "no effect on step time or memory (12): run.time_limit" in told


def test_a_model_without_an_option_goes_with_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's files name no model."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    )
    where = ("--config", str(file), "--cluster", "dgx-h100", "--gpus", "8")
    plain, named = (
        run_json(capsys, "predict", *words, *where) for words in (("llama-3.2-1b",), ("--model", "llama-3.2-1b"))
    )
    assert (plain["model"], plain["strategy"], plain["step_s"]) == (named["model"], named["strategy"], named["step_s"])
    assert plain["config"]["format"] == "deepspeed"
    assert "describes a run already" in run(capsys, "predict", str(file), *where)[2]
    assert (
        "--model names the model already"
        in run(capsys, "predict", "llama-3.2-1b", "--model", "llama-3.1-8b", *where)[2]
    )


def test_a_size_that_is_no_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    sizes = "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64"
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers thirty {sizes}\n")
    status, _, err = run(capsys, "predict", "--config", str(file), "--cluster", "dgx-h100")
    assert (status, err) == (2, f"stepcast: {file}: num-layers: 'thirty' is no number\n")


def test_a_model_in_a_file_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 1000}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"model_type": "llama", "intermediate_size": 4096, **sizes}))
    assert run_json(capsys, "predict", str(file), "--gpu", "h200")["model"] == "mine"
    file.write_text(json.dumps({"model_type": "llama", **sizes}))
    assert (
        "mine.json: the llama config lacks intermediate_size" in run(capsys, "predict", str(file), "--gpu", "h200")[2]
    )
    table = tmp_path / "mine.toml"
    table.write_text("layers = 2\nhiden = 64\nheads = 4\nffn = 128\nvocab = 100\nmax_seq = 32\n")
    _, _, err = run(capsys, "predict", str(table), "--gpu", "h200")
    assert "mine.toml: model mine: unknown key hiden; did you mean hidden?" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("llama-3.1-8b", "--model", "llama-3.2-1b", "--gpu", "h200"), "leave one of them out"),
        (("--config", str(CONFIGS / "accelerate/fsdp.yaml"), "--cluster", "dgx-h100"), "use --model as well"),
        (("--config", "nowhere.yaml", "--cluster", "dgx-h100"), "no such file"),
        (("llama-3.1-8b", "--gpu", "h200", "--save", "run.txt"), "ends in .toml"),
        (("lama-3.1-8b", "--gpu", "h200"), "did you mean llama-3.1-8b"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str) -> None:
    status, out, err = run(capsys, "predict", *words)
    assert (status, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


def test_a_damaged_saved_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[predict]\nmodel = "llama-3.1-8b"\ngpu = "h200"\ntpp = 2\n')
    status, _, err = run(capsys, "predict", str(file))
    assert status == 2
    assert "did you mean tp?" in err
