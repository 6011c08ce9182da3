"""A diffusion transformer: patches, adaptive norms by class and time, velocity loss, two sizes."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    hidden: int = 1152
    depth: int = 12
    heads: int = 16
    batch: int = 32
    size: int = 32


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class DiTBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.hidden, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(cfg.hidden, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(cfg.hidden, cfg.heads)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.hidden, 4 * cfg.hidden), nn.GELU("tanh"), nn.Linear(4 * cfg.hidden, cfg.hidden)
        )
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(cfg.hidden, 6 * cfg.hidden))

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.ada(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate_a * self.attn(self.norm1(x) * (1 + scale_a) + shift_a)
        return x + gate_m * self.mlp(self.norm2(x) * (1 + scale_m) + shift_m)


class DiT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patch, self.labels = nn.Conv2d(4, cfg.hidden, 2, 2), nn.Embedding(1001, cfg.hidden)
        self.time = nn.Sequential(nn.Linear(256, cfg.hidden), nn.SiLU(), nn.Linear(cfg.hidden, cfg.hidden))
        self.pos = nn.Parameter(torch.zeros(1, (cfg.size // 2) ** 2, cfg.hidden), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(cfg) for _ in range(cfg.depth))
        self.final = nn.Linear(cfg.hidden, 16)
        self.norm = nn.LayerNorm(cfg.hidden, elementwise_affine=False, eps=1e-6)

    def forward(self, x, t, y):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        freqs = torch.exp(-9.21 * torch.arange(128, device=t.device, dtype=torch.float32) / 128)
        waves = t[:, None].float() * freqs[None]
        c = self.time(torch.cat([waves.cos(), waves.sin()], -1)) + self.labels(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final(self.norm(x))
        side = int(x.shape[1] ** 0.5)
        return torch.einsum("nhwpqc->nchpwq", x.reshape(-1, side, side, 2, 2, 4)).reshape(-1, 4, 2 * side, 2 * side)


def main():
    parser = argparse.ArgumentParser()
    for name, value in Config().__dict__.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    cfg = Config(**vars(parser.parse_args()))
    torch.backends.cuda.matmul.allow_tf32 = True
    model = DiT(cfg).cuda()
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    running = 0.0
    for step in range(30):
        x = torch.randn(cfg.batch, 4, cfg.size, cfg.size).to("cuda")
        y = torch.randint(0, 1000, (cfg.batch,)).to("cuda")
        t = torch.rand(cfg.batch, device="cuda")
        noise = torch.randn_like(x)
        mixed = (1 - t.view(-1, 1, 1, 1)) * x + t.view(-1, 1, 1, 1) * noise
        with torch.autocast("cuda", torch.bfloat16):
            loss = ((model(mixed, t * 1000, y) - (noise - x)) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                ema[name].mul_(0.9999).add_(p.data, alpha=1e-4)
        running += loss.item()
        if step % 10 == 9:
            print(f"(step={step:07d}) Train Loss: {running / 10:.4f}")
            running = 0


if __name__ == "__main__":
    main()
