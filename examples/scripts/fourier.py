"""A Fourier neural operator: products in frequency space between pointwise convolutions, relative L2 loss."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--modes", type=int, default=24)
parser.add_argument("--grid", type=int, default=128)
parser.add_argument("--batch", type=int, default=16)
args = parser.parse_args()


class SpectralConv2d(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes, scale = modes, 1 / width**2
        self.weights1 = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))

    def forward(self, x):
        b, c, h, w = x.shape
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weights1)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.weights2)
        return torch.fft.irfft2(out, s=(h, w))


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, args.width)
        self.spectral = nn.ModuleList(SpectralConv2d(args.width, args.modes) for _ in range(4))
        self.local = nn.ModuleList(nn.Conv2d(args.width, args.width, 1) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(args.width, 128), nn.Linear(128, 1)

    def forward(self, x):
        x = self.lift(x).permute(0, 3, 1, 2)
        for number, (spectral, local) in enumerate(zip(self.spectral, self.local)):
            x = spectral(x) + local(x)
            x = F.gelu(x) if number < 3 else x
        return self.fc2(F.gelu(self.fc1(x.permute(0, 2, 3, 1))))


model = FNO().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=40)
train_l2 = 0
for step in range(30):
    x = torch.randn(args.batch, args.grid, args.grid, 3, device="cuda")
    y = torch.randn(args.batch, args.grid, args.grid, 1, device="cuda")
    optimizer.zero_grad()
    out = model(x)
    loss = (torch.norm((out - y).flatten(1), dim=1) / torch.norm(y.flatten(1), dim=1)).mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    train_l2 += loss.item()
print("relative error", train_l2 / 30)
