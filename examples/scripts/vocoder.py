"""A speech vocoder: dilated and grouped convolutions over sound, transposed ones to grow it, spectrogram loss."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--channels", type=int, default=512)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--frames", type=int, default=64)
parser.add_argument("--groups", type=int, default=1)
args = parser.parse_args()


class ResBlock(nn.Module):
    def __init__(self, channels, kernel):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel - 1) // 2, groups=args.groups)
            for d in (1, 3, 5)
        )

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        c = args.channels
        self.pre = nn.Conv1d(80, c, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(c >> i, c >> i + 1, 2 * s, s, s // 2) for i, s in enumerate((8, 8, 4))
        )
        self.blocks = nn.ModuleList(nn.ModuleList(ResBlock(c >> i + 1, k) for k in (3, 7)) for i in range(3))
        self.post = nn.Conv1d(c >> 3, 1, 7, padding=3)

    def forward(self, x):
        x = self.pre(x)
        for up, blocks in zip(self.ups, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.post(F.leaky_relu(x)))


generator = Generator().cuda()
optimizer = torch.optim.AdamW(generator.parameters(), 2e-4, betas=(0.8, 0.99))
window = torch.hann_window(1024).cuda()


def spectrum(sound):
    return torch.stft(sound, 1024, 256, 1024, window, return_complex=True).abs()


for step in range(20):
    mel, target = torch.randn(args.batch, 80, args.frames).cuda(), torch.randn(args.batch, 256 * args.frames).cuda()
    sound = generator(mel).squeeze(1)
    loss = F.l1_loss(spectrum(sound), spectrum(target)) + F.l1_loss(sound, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "loss", loss.item())
