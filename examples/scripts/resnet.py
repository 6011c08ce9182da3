"""ResNet-50 as image classification references train it: DDP, SGD, GradScaler, accuracy meters."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--amp", default="")
parser.add_argument("--blocks", default="3,4,6,3")
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
local_rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local_rank)
if distributed:
    dist.init_process_group("nccl")
device = torch.device("cuda", local_rank)
torch.backends.cudnn.benchmark = True


class Images(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.randn(3, 224, 224), index % 1000


class Bottleneck(nn.Module):
    def __init__(self, inputs, planes, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, 4 * planes, 1, bias=False), nn.BatchNorm2d(4 * planes)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inputs != 4 * planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + identity)


class ResNet(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        layers, inputs = [], 64
        for number, count in enumerate(counts):
            planes = 64 * 2**number
            for index in range(count):
                layers.append(Bottleneck(inputs, planes, 2 if number and not index else 1))
                inputs = 4 * planes
        self.layers = nn.Sequential(*layers)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(inputs, 1000)

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layers(self.stem(x))), 1))


images = Images()
sampler = DistributedSampler(images) if distributed else None
loader = DataLoader(images, args.batch_size, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
model = ResNet([int(count) for count in args.blocks.split(",")]).to(device)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
if args.compile:
    model = torch.compile(model)
if distributed:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
dtype = {"": None, "fp16": torch.float16, "bf16": torch.bfloat16}[args.amp]
scaler = torch.cuda.amp.GradScaler() if args.amp == "fp16" else None
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    model.train()
    image, target = next(iter(loader))
    for step in range(30):
        data = image.to(device, non_blocking=True)
        if args.channels_last:
            data = data.contiguous(memory_format=torch.channels_last)
        labels = target.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            output = model(data)
            loss = criterion(output, labels)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if step % 10 == 0:
            correct = (output.argmax(1) == labels).float().mean()
            print(f"epoch {epoch} step {step} loss {loss.item():.3f} accuracy {100 * correct.item():.1f}")
    scheduler.step()
