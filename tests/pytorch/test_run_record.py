"""Running workloads and recording jobs on CPUs, where PyTorch is installed."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'stepcast[torch]'")

from stepcast.cli.main import main

MODEL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(512, 256)
for _ in range(12):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ways", [["--tp", "2"], ["--pp", "2"]])
def test_predict_run_compare(ways: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes run every op and collective that was predicted, in its order."""
    config, ran, predicted = tmp_path / "config.json", tmp_path / "ran.json", tmp_path / "predicted.json"
    config.write_text(json.dumps(MODEL))
    words = ["--model", str(config), "--cluster", "hgx-h200", "--gpus", "2", *ways, "--seq", "32",
             "--global-batch", "2", "--micro-batch", "1"]  # fmt: skip
    assert main(["run", *words, "--steps", "1", "--device", "cpu", "-o", str(ran), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [0, 1]
    kinds = {row["kind"]: row["ops"] for row in found["kinds"]}
    assert kinds["matmul"] > 0
    assert kinds["attention"] == kinds["attention backward"]
    assert ("tp all-gather" in kinds) == ("--tp" in ways)
    assert main(["predict", *words, "--json"]) == 0
    predicted.write_text(capsys.readouterr().out)
    assert main(["compare", str(predicted), str(ran), "--json"]) == 0


def test_record_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, folder = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job)]
    assert main(["record", "-o", str(folder), "--skip", "3", "--steps", "4", "--json", "--", *start]) == 0
    found = json.loads(capsys.readouterr().out[-4000:].partition("{")[2].join(("{", "")))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["traces"] == ["rank00000.json", "rank00001.json"]
    assert main(["analyze", str(folder), "--json"]) == 0
    analyzed = json.loads(capsys.readouterr().out)
    clock_s = max(rank["window_step_s"] for rank in found["ranks"])
    # Within 2 % on an idle machine; what others run here is no fault of the recorder's.
    assert analyzed["step_s"] == pytest.approx(clock_s, rel=0.05)


def test_without_torch_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["capture", "config.json"]) == 2
    assert "pip install 'stepcast[torch]'" in capsys.readouterr().err
