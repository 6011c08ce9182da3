"""Running workloads and recording jobs on CPUs, where PyTorch is installed."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'stepcast[torch]'")

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


Ops = dict[tuple[int, str], list[str]]


def ops_of(path: Path) -> Ops:
    """Names of ops by rank and lane, in the order in which they began."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["ph"] == "M" and each["name"] == "thread_name"
    }
    found: Ops = {}
    for each in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):
        if each["name"] != "slowed by communication":  # an op's own time, not an op
            found.setdefault((each["pid"], lanes[each["pid"], each["tid"]]), []).append(each["name"])
    return found


@pytest.mark.parametrize("ways", [["--tp", "2"], ["--pp", "2"], [], ["--sharding", "fsdp"]])
def test_predict_run_compare(ways: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes run every op and collective that was predicted, in its order."""
    config, ran, predicted = tmp_path / "config.json", tmp_path / "ran.json", tmp_path / "predicted.json"
    config.write_text(json.dumps(MODEL))
    words = ["--model", str(config), "--cluster", "hgx-h200", "--gpus", "2", *ways, "--seq", "32",
             "--global-batch", "4", "--micro-batch", "1"]  # fmt: skip
    traces = [tmp_path / "ran.trace.json", tmp_path / "predicted.trace.json"]
    running = ["--steps", "1", "--device", "cpu", "-o", str(ran), "--trace", str(traces[0]), "--json"]
    assert main(["run", *words, *running]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [0, 1]
    assert main(["predict", *words, "--trace", str(traces[1]), "--json"]) == 0
    predicted.write_text(capsys.readouterr().out)
    assert main(["compare", str(predicted), str(ran), "--json"]) == 0
    run, expected = ops_of(traces[0]), ops_of(traces[1])
    ranks = sorted({rank for rank, _ in run})
    assert len(ranks) == 2
    for rank in ranks:
        # Ranks that do the same are predicted once.
        like = rank if (rank, "compute") in expected else min(rank for rank, _ in expected)
        for lane in {lane for each, lane in run if each == rank and lane != "pp"}:
            assert run[rank, lane] == expected[like, lane], (rank, lane)
        lanes = {lane for each, lane in expected if each == like and not lane.startswith("pp")}
        assert lanes == {lane for each, lane in run if each == rank and lane != "pp"}
        sends = [name for name in run.get((rank, "pp"), []) if name.endswith("send")]
        asked = [name for (each, lane), names in expected.items() if each == like and lane.startswith("pp")
                 for name in names]  # fmt: skip
        assert len(sends) == len(asked)


def recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[Path, dict[str, Any]]:
    job, folder = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job)]
    words = ["record", "-o", str(folder), "--skip", "3", "--steps", "4", *options, "--json", "--", *start]
    assert main(words) == 0
    return folder, json.loads(capsys.readouterr().out[-4000:].partition("{")[2].join(("{", "")))


def test_record_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A machine that does much else may stop a process between two looks at the clock: the best of three.
    for attempt in range(3):
        place = tmp_path / str(attempt)
        place.mkdir()
        folder, found = recorded(place, capsys, "--flight-recorder")
        assert main(["analyze", str(folder), "--json"]) == 0
        analyzed = json.loads(capsys.readouterr().out)
        clock_s = max(rank["window_step_s"] for rank in found["ranks"])
        if analyzed["step_s"] == pytest.approx(clock_s, rel=0.02):
            break
    assert analyzed["step_s"] == pytest.approx(clock_s, rel=0.02)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["traces"] == ["rank00000.json", "rank00001.json"]
    assert found["ranks"][0]["ahead_s"] == 0.0
    assert abs(found["ranks"][1]["ahead_s"]) < 0.1  # one host has one clock
    assert analyzed["recorded"]["wall_step_s"] == clock_s
    log = analyzed["recorded"]["logs"][0]
    gradients = next(row for row in log["collectives"] if row["kind"] == "all-reduce")
    # Twelve steps on two ranks, of which the profiler saw four; one bucket holds all gradients.
    assert (gradients["logged"], gradients["traced"]) == (24, 8)
    assert gradients["size_bytes"] == 4 * 4 * (256 * 256 + 256)
    assert main(["analyze", str(folder)]) == 0
    assert "flight recorder" in capsys.readouterr().out


def test_record_takes_what_the_inspector_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines as NCCL's ext-profiler/inspector writes them, of the gradients that the job sums."""
    left = tmp_path / "left"
    left.mkdir()
    size = 4 * 4 * (256 * 256 + 256)
    for rank in range(2):
        lines = [
            {
                "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 2, "nnodes": 1},
                "metadata": {"inspector_output_format_version": "v4.0", "hostname": "host"},
                "coll_perf": {"coll": "AllReduce", "coll_sn": turn, "coll_msg_size_bytes": size,
                              "coll_exec_time_us": 400 + turn, "coll_algobw_gbs": 2.6, "coll_busbw_gbs": 2.6},
            }
            for turn in range(12)
        ]  # fmt: skip
        (left / f"host-pid{rank}.log").write_text("\n".join(map(json.dumps, lines)))
    folder, found = recorded(tmp_path, capsys, "--inspector", str(left))
    assert found["warnings"] == []
    assert main(["analyze", str(folder), "--json"]) == 0
    log = json.loads(capsys.readouterr().out)["recorded"]["logs"][0]
    row = log["collectives"][0]
    assert (row["logged"], row["traced"], row["size_bytes"]) == (24, 8, size)
    assert row["logged_s"] == pytest.approx(405.5e-6)
    assert row["busbw_bytes_per_s"] == pytest.approx(2.6e9)


def test_a_job_killed_within_the_window_keeps_its_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, folder = tmp_path / "job.py", tmp_path / "run"
    job.write_text(
        "import os, signal, torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(12):\n"
        "    if step == 6:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = ["record", "-o", str(folder), "--skip", "2", "--steps", "6", "--json", "--", sys.executable, str(job)]
    assert main(words) == 1
    found = json.loads(capfd.readouterr().out.partition("{")[2].join(("{", "")))
    assert found["status"] == -9
    assert [rank["steps"] for rank in found["ranks"]] == [5]
    assert "the job ended with status -9" in found["warnings"]


def test_outside_of_the_window_a_step_costs_microseconds(tmp_path: Path) -> None:
    """What the recorder does at each step, its hooks and stamps: under 1 % of a step of 20 ms."""
    import torch

    from stepcast.pytorch.record.recorder import Recorder

    model = torch.nn.Linear(2, 2)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(1, 2)

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()

    def seconds(steps: int) -> float:
        began = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - began) / steps

    seconds(50)
    plain_s = min(seconds(200) for _ in range(5))
    recorder = Recorder(str(tmp_path / "run"), skip=10**6).start()
    try:
        watched_s = min(seconds(200) for _ in range(5))
    finally:
        recorder.stop()
    assert watched_s - plain_s < 0.01 * 20e-3
