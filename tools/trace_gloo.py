"""A real profiler trace of two ranks without a GPU: three steps of data-parallel training over gloo.

Rank 1 works on twice as many samples, so that rank 0 waits for it. Needs PyTorch; writes FOLDER/rank0.json.gz
and FOLDER/rank1.json.gz, which tests/data/kineto-gloo holds:

    python tools/trace_gloo.py FOLDER
"""

import gzip
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

RANKS, WIDTH, SAMPLES, STEPS = 2, 512, 256, 3


def train(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(SAMPLES * (1 + rank), WIDTH)
    path = Path(folder) / f"rank{rank}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS),
        record_shapes=True,
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(2 + STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            dist.all_reduce(torch.ones(1000))
            profiler.step()
    with gzip.GzipFile(f"{path}.gz", "wb", mtime=0) as packed:
        packed.write(path.read_bytes())
    path.unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(train, args=(sys.argv[1],), nprocs=RANKS)
