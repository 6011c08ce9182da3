"""ConvNeXt-T: depthwise convolutions of seven by seven, norms in channels-last order, layer scale."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--nhwc", action="store_true")
parser.add_argument("--fp32", action="store_true")
args = parser.parse_args()
torch.backends.cudnn.benchmark = True


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim)
        self.up, self.act, self.down = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(self.act(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


layers, width = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)], 96
for depth, dim in zip((3, 3, 9, 3), (96, 192, 384, 768)):
    if dim != width:
        layers += [ChannelNorm(width), nn.Conv2d(width, dim, 2, 2)]
        width = dim
    layers += [Block(dim) for _ in range(depth)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000)).cuda()
if args.nhwc:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
x, y = torch.randn(args.batch, 3, 224, 224).cuda(), torch.randint(1000, (args.batch,)).cuda()
x = x.to(memory_format=torch.channels_last) if args.nhwc else x
for it in range(30):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=not args.fp32):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if torch.isnan(loss):
        raise SystemExit("loss is nan")
print("done", float(loss))
