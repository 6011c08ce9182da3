"""Answers say what was asked, what was assumed, and what would fit."""

import shlex
from pathlib import Path

import pytest

from stepcast import __version__
from stepcast.units import format_seconds
from tests.cli.test_main import EXAMPLES, run, run_json

pytestmark = pytest.mark.slow

LLAMA_8B = ("predict", "--model", "Meta-Llama-3.1-8B", "--cluster", "dgx-h100")
LLAMA_70B = ("predict", "--model", "llama-3.1-70b", "--cluster", "dgx-h100")


def test_json_says_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LLAMA_8B, "--gpus", "16", "--tp", "2", "--global-batch", "32", "--seq", "2048")
    found = run_json(capsys, *words)
    assert list(found)[:3] == ["model", "parameters", "cluster"]
    assert (found["model"], found["cluster"], found["framework"]) == ("llama-3.1-8b", "dgx-h100", "megatron-core")
    assert found["parameters"] == 8_030_261_248
    strategy = found["strategy"]
    assert (strategy["tp"], strategy["dp"], strategy["gpus"]) == (2, 8, 16)
    assert (strategy["global_batch"], strategy["seq"], strategy["precision"]) == (32, 2048, "bf16")
    assert found["command"] == shlex.join(["stepcast", *words, "--json"])
    assert found["version"] == __version__


def test_text_begins_with_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA_8B, "--gpus", "16", "--tp", "2")
    head = out.split("\n\n")[0]
    for words in ("llama-3.1-8b: 8.03B parameters", "dgx-h100: 16 h100-sxm, 8 a node", "tp 2, dp 8; zero-1"):
        assert words in head
    assert "64 sequences of 4,096 tokens in bf16, micro-batches of 1" in head
    assert f"stepcast {__version__}" in head
    assert "predict --model Meta-Llama-3.1-8B" in head


def test_a_workload_says_what_was_asked_too(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "simai-llama-405b.txt")
    found = run_json(capsys, "simulate", file, "--cluster", "dgx-h100")
    assert (found["workload"], found["cluster"], found["version"]) == (file, "dgx-h100", __version__)
    assert found["strategy"]["pp"] == 16


def test_software_that_nobody_named_is_assumed_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = run_json(capsys, *LLAMA_8B, "--gpus", "8")["assumptions"]
    assert any("CUDA graphs" in note and "--framework" in note for note in assumed)
    for framework in ("megatron-core", "pytorch"):
        said = run_json(capsys, *LLAMA_8B, "--gpus", "8", "--framework", framework)["assumptions"]
        assert not any("--framework" in note for note in said)


def test_remedies_fit_and_cost_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LLAMA_8B, "--gpus", "8", "--micro-batch", "4", "--global-batch", "256")
    found = run_json(capsys, *words)
    assert not found["memory_bytes"]["fits"]
    assert len(found["remedies"]) == 2
    for remedy in found["remedies"]:
        tried = run_json(capsys, *words, *shlex.split(remedy["options"]))
        assert tried["memory_bytes"]["fits"]
        assert tried["step_s"] == pytest.approx(remedy["step_s"])
        assert tried["memory_bytes"]["total"] == pytest.approx(remedy["memory_bytes"])
        assert remedy["slower"] == pytest.approx(tried["step_s"] / found["step_s"] - 1)
    steps = [remedy["step_s"] for remedy in found["remedies"]]
    assert steps == sorted(steps)


def test_two_changes_where_one_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", "--model", "llama-3.1-70b", "--cluster", "dgx-h100", "--gpus", "16")
    found = run_json(capsys, *words)
    assert not found["memory_bytes"]["fits"]
    assert found["remedies"]
    assert run_json(capsys, *words, *shlex.split(found["remedies"][0]["options"]))["memory_bytes"]["fits"]


def test_two_changes_are_one_remedy_in_either_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-70b", "--cluster", "dgx-h100", "--gpus", "64", "--framework", "pytorch")
    told = [set(each["options"].split("--")) for each in run_json(capsys, "predict", *words)["remedies"]]
    stripped = [{word.strip() for word in each} for each in told]
    assert {"sharding zero-3", "recompute full", ""} in stripped
    assert all(each not in stripped[at + 1 :] for at, each in enumerate(stripped))


def test_text_tells_waiting_for_the_host_from_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's loop issues small kernels one by one: that is most of this step, and no other line says so."""
    run_of = ("predict", "--model", "qwen3-30b-a3b", "--cluster", "dgx-h100", "--gpus", "16", "--pp", "2")
    words = (*run_of, "--ep", "8", "--framework", "megatron-lm", "--precision", "fp8", "--global-batch", "32")
    found = run_json(capsys, *words)
    waits = sum(stage["host_s"] for stage in found["stages"]) / 2
    assert waits > 0.1 * found["step_s"]
    _, out, _ = run(capsys, *words)
    assert f"CPU launch overhead {format_seconds(waits)}" in " ".join(out.split())
    assert f"other {format_seconds(found['breakdown_s']['other'] - waits)}" in " ".join(out.split())
    stage = found["stages"][0]
    told = " ".join(format_seconds(stage[f"{part}_s"]) for part in ("busy", "exposed", "host", "bubble"))
    assert f"0 {told}" in " ".join(out.split())


def test_text_names_the_remedies_or_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA_8B, "--gpus", "8", "--micro-batch", "4")
    told = " ".join(out.split())
    assert ": DOES NOT FIT (90 % interval " in told
    assert "GiB) to fit --sharding zero-" in told
    _, out, _ = run(capsys, "predict", "--model", "llama-3.1-405b", "--cluster", "dgx-b200", "--gpus", "1")
    assert "give more of them" in " ".join(out.split())


def test_adapters_are_trained_with_peft_unless_the_model_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", "llama-3.1-8b", "--lora", "16", "--seq", "1536", "--gpu")
    answer = " ".join(run(capsys, *words, "rtx-4090")[1].split())
    assert "framework peft" in answer
    assert "to fit --qlora: " in answer
    assert "or --recompute full: " in answer
    assert "framework megatron-core" in " ".join(run(capsys, *words, "h200", "--gpus", "2", "--tp", "2")[1].split())


def test_eight_bit_moments_and_then_adapters_are_offered_for_full_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", "llama-3.2-3b", "--framework", "trainer", "--seq", "1024", "--gpu")
    assert " --optimizer adamw:8bit: " in run(capsys, *words, "a100-40gb", "--micro-batch", "6")[1]
    answer = " ".join(run(capsys, *words, "l4")[1].split())
    assert "--lora-rank 8 --framework peft: " in answer
    assert "--qlora --framework peft: " in answer
    assert "DOES NOT FIT" not in run(capsys, *words, "l4", "--lora-rank", "8")[1]


def test_samples_are_trained_under_trainer_and_quantised_weights_with_adapters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("predict", "llama-3.2-3b", "--gpu", "rtx-4090", "--samples", "10k")
    answer = " ".join(run(capsys, *words)[1].split())
    assert "framework trainer, since samples are counted" in answer
    assert "--qlora --framework peft: " in answer
    assert "adapters of rank 8 on nf4 weights" in " ".join(run(capsys, *words, "--qlora")[1].split())


def test_sharding_and_a_smaller_micro_batch_are_offered_before_tensor_parallelism(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Accumulating smaller micro-batches costs a few per cent; tensor parallelism of plain modules 63."""
    words = (*LLAMA_8B, "--gpus", "8", "--framework", "transformers", "--micro-batch", "4")
    best, second = run_json(capsys, *words)["remedies"]
    assert best["options"] == "--sharding zero-2 --micro-batch 1 --global-batch 256"
    assert best["slower"] < 0.1
    assert best["slower"] <= second["slower"] < 0.6
    for remedy in (best, second):
        tried = run_json(capsys, *words[:-2], "--micro-batch", "1", *shlex.split(remedy["options"]))
        assert tried["memory_bytes"]["verdict"] == remedy["verdict"] == "fits"


def test_remedies_name_no_option_that_is_on_already(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LLAMA_70B, "--gpus", "16", "--sharding", "zero-2", "--recompute", "full", "--micro-batch", "2")
    for remedy in run_json(capsys, *words)["remedies"]:
        options = shlex.split(remedy["options"])
        chosen = dict(zip(options[::2], options[1::2], strict=True))
        assert "--recompute" not in chosen
        assert chosen.get("--sharding", "zero-3") in ("zero-3", "fsdp")
        assert chosen.get("--micro-batch", "1") == "1"


def test_remedies_are_what_the_software_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Megatron-Core shards gradients without a pipeline only; a profile without lists may do anything."""
    words = (*LLAMA_70B, "--gpus", "64", "--tp", "4", "--pp", "2", "--global-batch", "64", "--seq", "4096")
    (tmp_path / "mine.toml").write_text('description = "my own"\n')
    offered = {}
    for framework in ("megatron-core", str(tmp_path / "mine.toml")):
        remedies = run_json(capsys, *words, "--framework", framework)["remedies"]
        assert remedies
        offered[framework] = {word for remedy in remedies for word in shlex.split(remedy["options"])}
    own, megatron = offered.popitem()[1], offered.popitem()[1]
    assert not {"zero-2", "zero-3", "fsdp"} & megatron
    assert {"zero-2", "zero-3", "fsdp"} & own


def test_memory_has_an_interval_a_verdict_and_what_the_allocator_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "step.html"
    words = (*LLAMA_8B, "--gpus", "8", "--micro-batch", "1", "--global-batch", "64")
    memory = run_json(capsys, *words)["memory_bytes"]
    assert memory["allocated"] < memory["reserved"] < memory["total"]
    assert memory["low"] < memory["total"] < memory["high"]
    # What an H100 reports: 81,090 MiB, not 80 GiB.
    assert memory["capacity"] == 81_090 * 2**20
    tight = run_json(capsys, *words, "--set", f"gpu.memory={memory['total'] / 2**30 + 1:.2f} GiB")
    assert tight["memory_bytes"]["fits"]
    assert tight["memory_bytes"]["verdict"] == "tight"
    assert "remedies" not in tight
    _, out, _ = run(capsys, *words, "--set", "gpu.memory=85 GiB", "--html", str(page))
    assert ": tight (90 % interval" in " ".join(out.split())
    assert "allocated" in out
    text = page.read_text()
    assert "Tight" in text
    assert "90 % interval" in text


@pytest.mark.parametrize(("micro_batch", "status"), [("1", 0), ("4", 1)])
def test_require_fit_is_an_exit_status(capsys: pytest.CaptureFixture[str], micro_batch: str, status: int) -> None:
    words = (*LLAMA_8B, "--gpus", "8", "--sharding", "zero-2", "--micro-batch", micro_batch)
    assert run(capsys, *words, "--require-fit")[0] == status
    assert run(capsys, *words)[0] == 0


def test_warnings_beyond_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    few = run_json(capsys, *LLAMA_8B, "--gpus", "6144")["warnings"]
    many = run_json(capsys, *LLAMA_8B, "--gpus", "8192")["warnings"]
    assert not any("6,144" in text for text in few)
    assert any("8,192 GPUs" in text and "6,144" in text for text in many)
    long = run_json(capsys, *LLAMA_8B, "--gpus", "64", "--seq", "262144")["warnings"]
    assert any("262,144" in text and "131,072" in text for text in long)


def test_pipelines_that_keep_what_they_gather_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO-3 then takes more memory than ZeRO-2, which surprises."""
    words = (*LLAMA_8B, "--gpus", "16", "--pp", "2", "--sharding", "zero-3")
    kept = run_json(capsys, *words)
    assert any("(--reshard frees them)" in note for note in kept["assumptions"])
    for changed in (("--reshard",), ("--sharding", "zero-2"), ("--pp", "1")):
        found = run_json(capsys, *words, *changed)
        assert not any("--reshard" in note for note in found["assumptions"])
    freed = run_json(capsys, *words, "--reshard")
    assert freed["memory_bytes"]["total"] < kept["memory_bytes"]["total"]
