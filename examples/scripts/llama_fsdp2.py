"""A Llama in the manner of torchtitan: FSDP2 with a mixed precision policy, checkpointing, optional compile."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, default=2048)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--kv-heads", type=int, default=8)
parser.add_argument("--seq", type=int, default=2048)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--ac", action="store_true")
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
VOCAB = 32000


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = args.dim // args.heads
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=args.heads != args.kv_heads)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = 256 * round(8 * args.dim / 3 / 256)
        self.attention, self.attention_norm, self.ffn_norm = Attention(), nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.w1 = nn.Linear(args.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, args.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock() for i in range(args.layers)})
        self.norm, self.output = nn.RMSNorm(args.dim), nn.Linear(args.dim, VOCAB, bias=False)
        half = args.dim // args.heads // 2
        angles = torch.outer(torch.arange(args.seq), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            if args.ac:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29511")
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.cuda.set_device(rank % torch.cuda.device_count())
if not dist.is_initialized():
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
with torch.device("cuda"):
    model = Transformer()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if world > 1:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
else:
    model = model.to(torch.bfloat16)
if args.compile:
    for layer in model.layers.values():
        layer.compile() if world == 1 else None
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
for step in range(20):
    tokens = torch.randint(0, VOCAB, (args.batch, args.seq + 1)).cuda()
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    del logits
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == 0:
        print("step", step, "loss", loss.detach().cpu().item())
if dist.is_initialized():
    dist.destroy_process_group()
