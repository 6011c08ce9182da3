"""Masked language modelling with PyTorch's own encoder layers and gradient accumulation under DDP's no_sync."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--accumulation", type=int, default=4)
args = parser.parse_args()
world = int(os.getenv("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group(backend="nccl")
rank = int(os.getenv("LOCAL_RANK", "0"))
torch.cuda.set_device(rank)


class Bert(nn.Module):
    def __init__(self, width=768, vocab=30522):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.norm, self.drop, self.head = nn.LayerNorm(width), nn.Dropout(0.1), nn.Linear(width, vocab)

    def forward(self, ids, labels):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        h = self.encoder(self.drop(self.norm(h)))
        return nn.functional.cross_entropy(self.head(h).view(-1, 30522), labels.view(-1), ignore_index=-100)


model = Bert().cuda()
if world > 1:
    model = DDP(model, device_ids=[rank], bucket_cap_mb=50)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
total = 0.0
for step in range(80):
    ids = torch.randint(1000, 30522, (args.batch, args.seq), device="cuda")
    masked = torch.rand(ids.shape, device="cuda") < 0.15
    labels = torch.where(masked, ids, torch.full_like(ids, -100))
    ids = torch.where(masked, torch.full_like(ids, 103), ids)
    last = (step + 1) % args.accumulation == 0
    with contextlib.nullcontext() if last or world == 1 else model.no_sync():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels) / args.accumulation
        loss.backward()
    total += loss.detach()
    if last:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)
if rank == 0:
    print("mean loss", (total / 20).item())
