"""A Mamba-like language model: depthwise causal convolutions and a chunked state-space product in plain PyTorch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--width", type=int, default=1024)
ap.add_argument("--layers", type=int, default=8)
ap.add_argument("--batch", type=int, default=4)
ap.add_argument("--seq", type=int, default=2048)
args = ap.parse_args()
CHUNK, HEAD, STATE = 64, 64, 64


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = 2 * width
        self.heads = self.inner // HEAD
        self.inputs = nn.Linear(width, 2 * self.inner + 2 * STATE + self.heads, bias=False)
        self.conv = nn.Conv1d(
            self.inner + 2 * STATE, self.inner + 2 * STATE, 4, groups=self.inner + 2 * STATE, padding=3
        )
        self.decay, self.norm = nn.Parameter(torch.zeros(self.heads)), nn.RMSNorm(self.inner)
        self.outputs = nn.Linear(self.inner, width, bias=False)

    def forward(self, u):
        b, t, _ = u.shape
        z, xbc, dt = self.inputs(u).split([self.inner, self.inner + 2 * STATE, self.heads], dim=-1)
        xbc = F.silu(self.conv(xbc.transpose(1, 2))[..., :t].transpose(1, 2))
        x, B, C = xbc.split([self.inner, STATE, STATE], dim=-1)
        dt = F.softplus(dt)
        a = (-self.decay.exp() * dt).view(b, t // CHUNK, CHUNK, self.heads).permute(0, 3, 1, 2).cumsum(-1)
        x = (x.view(b, t, self.heads, HEAD) * dt.unsqueeze(-1)).view(b, t // CHUNK, CHUNK, self.heads, HEAD)
        B, C = B.view(b, t // CHUNK, CHUNK, STATE), C.view(b, t // CHUNK, CHUNK, STATE)
        gaps = (a.unsqueeze(-1) - a.unsqueeze(-2)).tril().exp().tril()
        inside = torch.einsum("bcls,bhcls,bcshp->bclhp", C @ B.transpose(-1, -2), gaps.to(x.dtype), x)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", B, (a[..., -1:] - a).exp().to(x.dtype), x)
        state, carried = torch.zeros_like(states[:, 0]), []
        for c in range(t // CHUNK):
            carried.append(state)
            state = state * a[:, :, c, -1].exp()[..., None, None].to(x.dtype) + states[:, c]
        across = torch.einsum("bcln,bchpn,bhcl->bclhp", C, torch.stack(carried, 1), a.exp().to(x.dtype))
        y = (inside + across).reshape(b, t, self.inner)
        return self.outputs(self.norm(y * F.silu(z)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32000, args.width)
        self.mixers = nn.ModuleList(Mixer(args.width) for _ in range(args.layers))
        self.norms, self.head = (
            nn.ModuleList(nn.RMSNorm(args.width) for _ in range(args.layers)),
            nn.Linear(args.width, 32000),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return self.head(x)


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(20):
    ids = torch.randint(0, 32000, (args.batch, args.seq + 1), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss)
