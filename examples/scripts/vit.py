"""A vision transformer in the manner of timm: patches, drop path, mixup, an average of the weights."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--ema", action="store_true")
args = parser.parse_args()
device = torch.device("cuda")
torch.set_float32_matmul_precision("high")


def drop_path(x, rate, training):
    if rate == 0.0 or not training:
        return x
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * keep.div_(1 - rate)


class Layer(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.rate = rate

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, c // 64, 64).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        x = x + drop_path(self.proj(y), self.rate, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.rate, self.training)


class VisionTransformer(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 197, width) * 0.02)
        self.blocks = nn.Sequential(*[Layer(width, 0.1 * i / depth) for i in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


model = VisionTransformer(args.width, args.depth).to(device)
average = copy.deepcopy(model).eval() if args.ema else None
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for update in range(40):
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (args.batch_size,), device=device)
    target = F.one_hot(labels, 1000).float() * 0.9 + 1e-4
    target = 0.8 * target + 0.2 * target.flip(0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(images)
        loss = torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if average is not None:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 1e-4)
    if update % 20 == 0:
        print(f"update {update} loss {loss.item():.3g} rate {schedule.get_last_lr()[0]:.2e}")
