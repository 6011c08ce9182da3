"""Image classification with timm: a model by name, mixup, soft targets, an average of weights, gradients scaled."""

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

device = torch.device("cuda")
model = timm.create_model(args.model, num_classes=1000, drop_path_rate=0.1).to(device)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
average = ModelEmaV3(model, decay=0.9998)
optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=300, warmup_t=5)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)
loss_fn, scaler, losses = SoftTargetCrossEntropy(), NativeScaler(), AverageMeter()
model.train()
for update in range(30):
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    images, targets = mixup(images, torch.randint(0, 1000, (args.batch_size,), device=device))
    with torch.autocast("cuda", torch.float16):
        loss = loss_fn(model(images), targets)
    scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
    optimizer.zero_grad()
    average.update(model, step=update)
    schedule.step_update(update)
    if update % 50 == 0:
        losses.update(loss.item(), args.batch_size)
        print(f"train {update}: loss {losses.avg:.4f}")
