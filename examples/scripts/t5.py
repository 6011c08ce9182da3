"""An encoder-decoder with learnt relative positions, in plain bf16, Adafactor-like settings of AdamW."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--d-model", type=int, default=768)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--batch", type=int, default=16)
opt = p.parse_args()
H = opt.d_model // 64


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, H)

    def forward(self, rows, columns, device):
        distance = torch.arange(columns, device=device)[None] - torch.arange(rows, device=device)[:, None]
        return self.table(distance.abs().clamp(max=31)).permute(2, 0, 1).unsqueeze(0)


class Layer(nn.Module):
    def __init__(self, cross):
        super().__init__()
        d = opt.d_model
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(3 if cross else 2))
        self.maps = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(8 if cross else 4))
        self.wi, self.gate, self.wo = (
            nn.Linear(d, 2048, bias=False),
            nn.Linear(d, 2048, bias=False),
            nn.Linear(2048, d, bias=False),
        )

    def attend(self, x, other, maps, bias, causal):
        q, k, v = (m(y).unflatten(-1, (H, 64)).transpose(1, 2) for m, y in zip(maps, (x, other, other)))
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        if causal:
            future = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        y = F.dropout(scores.float().softmax(-1).type_as(scores), 0.1, self.training) @ v
        return maps[3](y.transpose(1, 2).flatten(2))

    def forward(self, x, bias, memory=None):
        y = self.norms[0](x)
        x = x + self.attend(y, y, self.maps[:4], bias, memory is not None)
        if memory is not None:
            x = x + self.attend(self.norms[1](x), memory, self.maps[4:], None, False)
        y = self.norms[-1](x)
        return x + self.wo(F.gelu(self.wi(y)) * self.gate(y))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(32128, opt.d_model)
        self.enc, self.dec = (nn.ModuleList(Layer(cross) for _ in range(opt.layers)) for cross in (False, True))
        self.enc_bias, self.dec_bias, self.norm = Bias(), Bias(), nn.RMSNorm(opt.d_model)

    def forward(self, source, target):
        memory, y = self.shared(source), self.shared(target)
        bias = self.enc_bias(source.shape[1], source.shape[1], source.device)
        for layer in self.enc:
            memory = layer(memory, bias)
        bias = self.dec_bias(target.shape[1], target.shape[1], target.device)
        for layer in self.dec:
            y = layer(y, bias, memory)
        return F.linear(self.norm(y) * opt.d_model**-0.5, self.shared.weight)


model = T5().to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
losses = []
for i in range(30):
    source = torch.randint(0, 32128, (opt.batch, 512)).cuda(non_blocking=True)
    target = torch.randint(0, 32128, (opt.batch, 115)).cuda(non_blocking=True)
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
print("mean of losses", torch.stack(losses).mean().item())
