"""Collectives of captured scripts: the order and sizes that two processes over gloo record for the same script."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'stepcast[torch]'")

from stepcast.cli.capture import read_captured
from stepcast.forecast.captured import CapturedSharding, Spread, spread_out
from stepcast.forecast.predict import compute_pricer
from stepcast.hardware import load_cluster
from stepcast.ir.work import Collective

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2] / "src"
JOB = """
import torch, torch.nn as nn, torch.distributed as dist
cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
dist.init_process_group("nccl" if cuda else "gloo")
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 129), nn.Linear(129, 64)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(101, 64), nn.Linear(64, 101)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model = Model().to(device)
WRAP
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 101, (2, 16), device=device)
    loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
DDP = "model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)"
# One unit of two layers, one unit that stays gathered, and rows that two ranks cannot share equally.
FSDP = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard([model.layers[0], model.layers[1]], mp_policy=policy)
fully_shard(model.layers[2], mp_policy=policy, reshard_after_forward=False)
fully_shard(model.layers[3], mp_policy=policy)
fully_shard(model, mp_policy=policy)
"""
NAMES = {
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
}


def run_stepcast(*words: str, cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "stepcast", *words],
        capture_output=True, text=True, cwd=cwd, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def list_recorded(trace: Path) -> list[tuple[str, int]]:
    """Return kind and bytes of each collective of the recorded step; sizes are those of the full buffer."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") in NAMES]
    found = []
    for event in sorted(events, key=lambda event: event["ts"]):
        dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
        tensors = dims[0] if dims[0] and isinstance(dims[0][0], list) else [dims[0], dims[1]]
        width = 2 if "BFloat16" in types[0] else 4
        found.append((NAMES[event["name"]], width * max(math.prod(shape) for shape in tensors)))
    return found


def list_predicted(path: Path, sharding: CapturedSharding) -> list[tuple[str, int]]:
    captured = read_captured(str(path))
    bucket_mb = dict(captured.facts).get("bucket_mb")
    spread = Spread(dp=2, sharding=sharding, bucket_bytes=None if bucket_mb is None else float(bucket_mb) * 2**20)
    workload, _ = spread_out(captured, spread, compute_pricer(captured.workload, load_cluster("hgx-h200")))
    layers = [layer for block in workload.stages[0].body for _ in range(block.repeat) for layer in block.layers]
    ops = [op for layer in layers for op in layer.forward]
    ops += [op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)]
    return [(str(op.work.kind), int(op.work.size_bytes)) for op in ops if isinstance(op.work, Collective)]


@pytest.mark.parametrize(("wrap", "sharding", "count"), [(DDP, "none", None), (FSDP, "fsdp", 10)])
def test_collectives_of_a_script_are_those_of_two_processes(
    wrap: str, sharding: str, count: int | None, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("WRAP", wrap))
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py")
    window = ("-o", "run", "--skip", "1", "--steps", "1")
    run_stepcast("record", *window, "--", sys.executable, *start, cwd=tmp_path)
    run_stepcast("capture", "-o", "step.json", "--", "torchrun", "--nproc-per-node", "2", "job.py", cwd=tmp_path)
    recorded = list_recorded(tmp_path / "run" / "rank00000.json")
    assert recorded == list_predicted(tmp_path / "step.json", CapturedSharding(sharding))
    assert len(recorded) == count or count is None
