"""A diffusion UNet: residual blocks with group norms and time embeddings, attention at low resolution, an average."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--nhwc", action="store_true")
args = parser.parse_args()
device = "cuda:0"


class Res(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time, self.norm2 = nn.Linear(time, outputs), nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, t):
        b, c, h, w = x.shape
        y = self.norm(x).view(b, c, h * w).transpose(1, 2)
        q, k, v = (part.view(b, h * w, c // 64, 64).transpose(1, 2) for part in self.qkv(y).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.out(y).transpose(1, 2).reshape(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        time, widths = 4 * width, [width, 2 * width, 4 * width]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.down, self.up, skips, last = (
            nn.Conv2d(4, width, 3, padding=1),
            nn.ModuleList(),
            nn.ModuleList(),
            [width],
            width,
        )
        for level, own in enumerate(widths):
            for _ in range(2):
                self.down.append(nn.ModuleList([Res(last, own, time), SelfAttention(own) if level else None]))
                skips.append(own)
                last = own
            if level < 2:
                self.down.append(nn.ModuleList([nn.Conv2d(own, own, 3, 2, 1)]))
                skips.append(own)
        self.middle = nn.ModuleList([Res(last, last, time), SelfAttention(last), Res(last, last, time)])
        for level, own in reversed(list(enumerate(widths))):
            for index in range(3):
                block = [Res(last + skips.pop(), own, time), SelfAttention(own) if level else None]
                last = own
                if level and index == 2:
                    block.append(nn.Conv2d(own, own, 3, padding=1))
                self.up.append(nn.ModuleList(block))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x, steps):
        half = self.first.out_channels // 2
        angles = steps[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        t = self.time(torch.cat((angles.cos(), angles.sin()), dim=-1))
        x = self.first(x)
        skips = [x]
        for block in self.down:
            if len(block) == 1:
                x = block[0](x)
            else:
                x = block[0](x, t)
                x = x if block[1] is None else block[1](x, t)
            skips.append(x)
        for block in self.middle:
            x = block(x, t)
        for block in self.up:
            x = block[0](torch.cat((x, skips.pop()), dim=1), t)
            x = x if block[1] is None else block[1](x, t)
            if len(block) == 3:
                x = block[2](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(F.silu(self.norm(x)))


model = UNet(args.width).to(device)
if args.nhwc:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-2)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)
for step in range(30):
    latents = torch.randn(args.batch, 4, args.size, args.size, device=device)
    if args.nhwc:
        latents = latents.to(memory_format=torch.channels_last)
    noise, steps = torch.randn_like(latents), torch.randint(0, 1000, (args.batch,), device=device)
    a = alphas[steps].view(-1, 1, 1, 1)
    noisy = a.sqrt() * latents + (1 - a).sqrt() * noise
    with torch.autocast("cuda", dtype=torch.bfloat16):
        predicted = model(noisy, steps)
    loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not step % 10:
        print({"loss": loss.detach().item(), "step": step})
