"""FullyShardedDataParallel with a wrapping policy, mixed precision and its own clipping."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--strategy", default="FULL_SHARD")
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl", rank=rank, world_size=world)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32000, args.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, args.width // 64, 4 * args.width, 0.0, batch_first=True)
            for _ in range(args.layers)
        )
        self.head = nn.Linear(args.width, 32000)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, is_causal=False)
        return self.head(x)


policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
model = FSDP(
    Decoder(),
    auto_wrap_policy=policy,
    mixed_precision=bf16,
    device_id=torch.cuda.current_device(),
    sharding_strategy=getattr(ShardingStrategy, args.strategy),
    limit_all_gathers=True,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
fsdp_loss = torch.zeros(2, device="cuda")
for step in range(10):
    ids = torch.randint(0, 32000, (8, 513), device="cuda")
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    fsdp_loss[0] += loss.item()
    fsdp_loss[1] += len(ids)
dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
dist.barrier()
if rank == 0:
    print("loss", fsdp_loss[0] / fsdp_loss[1])
dist.destroy_process_group()
