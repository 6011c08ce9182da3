"""A GPT with DistributedDataParallel and torch.compile, accumulation with no_sync, in the manner of modded nanoGPT runs."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--block", type=int, default=1024)
p.add_argument("--accumulate", type=int, default=2)
a = p.parse_args()
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29513")
rank, local, world = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
torch.cuda.set_device(local)
dist.init_process_group("nccl", rank=rank, world_size=world)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        w = a.width
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(w, 3 * w, bias=False),
            nn.Linear(w, w, bias=False),
            nn.Linear(w, 4 * w, bias=False),
            nn.Linear(4 * w, w, bias=False),
        )

    def forward(self, x):
        y = F.rms_norm(x, (a.width,))
        q, k, v = (z.unflatten(-1, (-1, 64)).transpose(1, 2) for z in self.qkv(y).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (a.width,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50304, a.width), nn.Embedding(a.block, a.width)
        self.h, self.head = nn.ModuleList(Block() for _ in range(a.layers)), nn.Linear(a.width, 50304, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(F.rms_norm(x, (a.width,))).float().flatten(0, 1), targets.flatten())


model = torch.compile(GPT().cuda())
model = DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
for step in range(20):
    for micro in range(a.accumulate):
        ids = torch.randint(0, 50304, (a.batch, a.block + 1), device="cuda")
        last = micro == a.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync(), torch.autocast("cuda", torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:]) / a.accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and step % 10 == 0:
        print(step, loss.item())
dist.destroy_process_group()
