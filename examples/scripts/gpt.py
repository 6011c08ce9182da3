"""A small GPT in one file: batches from a memory of tokens, autocast, accumulation, clipping, optional compile."""

import argparse
import math
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--block", type=int, default=1024)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(1337)
torch.cuda.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device = "cuda" if torch.cuda.is_available() else "cpu"
context = torch.amp.autocast(device_type=device, dtype=getattr(torch, args.dtype))
tokens = np.random.randint(0, 50257, 500_000).astype(np.uint16)
vocab, heads = 50304, args.width // 64


def get_batch():
    starts = torch.randint(len(tokens) - args.block, (args.batch,))
    x = torch.stack([torch.from_numpy(tokens[i : i + args.block].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + args.block].astype(np.int64)) for i in starts])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, args.width), nn.Embedding(args.block, args.width)
        self.h = nn.ModuleList([Block(args.width) for _ in range(args.layers)])
        self.ln_f = nn.LayerNorm(args.width)
        self.lm_head = nn.Linear(args.width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        positions = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


model = GPT().to(device)
print(f"parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
if args.compile:
    model = torch.compile(model)
x, y = get_batch()
began = time.time()
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
    for _ in range(args.accumulate):
        with context:
            logits, loss = model(x, y)
            loss = loss / args.accumulate
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        value = loss.item() * args.accumulate
        assert math.isfinite(value), "the loss diverged"
        print(f"step {step}: loss {value:.4f}, {(time.time() - began) * 1000:.1f} ms")
