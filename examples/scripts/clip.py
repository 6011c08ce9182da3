"""Contrastive training of an image and a text tower, with negatives gathered from all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--grad-checkpointing", action="store_true")
args = parser.parse_args()
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("nccl")
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
torch.cuda.set_device(device)


class Tower(nn.Module):
    def __init__(self, width, layers, heads, causal):
        super().__init__()
        self.causal = causal
        make = lambda: nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device) if self.causal else None
        for layer in self.layers:
            if args.grad_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        return x


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.text = nn.Conv2d(3, 768, 32, 32, bias=False), nn.Embedding(49408, 512)
        self.image_pos, self.text_pos = nn.Parameter(torch.zeros(49, 768)), nn.Parameter(torch.zeros(77, 512))
        self.visual, self.language = Tower(768, 12, 12, False), Tower(512, 12, 8, True)
        self.image_proj, self.text_proj = nn.Linear(768, 512, bias=False), nn.Linear(512, 512, bias=False)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.659)

    def forward(self, images, texts):
        image = self.visual(self.patch(images).flatten(2).transpose(1, 2) + self.image_pos).mean(1)
        text = self.language(self.text(texts) + self.text_pos)
        text = text[torch.arange(text.shape[0], device=text.device), texts.argmax(dim=-1)]
        return (
            F.normalize(self.image_proj(image), dim=-1),
            F.normalize(self.text_proj(text), dim=-1),
            self.logit_scale.exp(),
        )


def gather(features):
    if world == 1:
        return features
    parts = [torch.zeros_like(features) for _ in range(world)]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


model = CLIP().to(device)
if world > 1:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
for step in range(30):
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    texts = torch.randint(0, 49408, (args.batch_size, 77), device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        image, text, scale = model(images, texts)
        image, text = gather(image), gather(text)
        logits = scale * image @ text.t()
        labels = torch.arange(logits.shape[0], device=device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        (model.module if world > 1 else model).logit_scale.clamp_(0, 4.6052)
    if step % 10 == 0:
        print(f"loss {loss.item():.4f} scale {scale.item():.2f}")
