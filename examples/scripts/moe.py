"""A decoder with routed experts: top-k gates, tokens picked by index and added back, an auxiliary loss."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=4)
args = parser.parse_args()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.gate, self.experts = (
            nn.Linear(args.width, args.experts, bias=False),
            nn.ModuleList(Expert() for _ in range(args.experts)),
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, -1, 64).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        h = self.norm2(x).view(-1, c)
        shares = self.gate(h).float().softmax(-1)
        weights, chosen = shares.topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(h.dtype)
        result = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            result.index_add_(0, rows, expert(h[rows]) * weights[rows, slot, None])
        load = F.one_hot(chosen[:, 0], args.experts).float().mean(0)
        return x + result.view(b, t, c), args.experts * (load * shares.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(32000, args.width), nn.ModuleList(Layer() for _ in range(args.layers))
        self.head = nn.Linear(args.width, 32000, bias=False)

    def forward(self, ids):
        x, extra = self.embed(ids), 0.0
        for layer in self.layers:
            x, own = layer(x)
            extra = extra + own
        return self.head(x), extra


model = Model().to("cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
for step in range(20):
    ids = torch.randint(0, 32000, (args.batch, 1025), device="cuda")
    logits, extra = model(ids[:, :-1])
    loss = F.cross_entropy(logits.view(-1, 32000), ids[:, 1:].reshape(-1)) + 0.01 * extra
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(step, loss.item())
