"""Classification with a BERT of transformers under accelerate: prepare, accumulate, gather for metrics."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16")
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--layers", type=int, default=6)
args = parser.parse_args()

accelerator = Accelerator(
    mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps
)
set_seed(42)
ids, labels = torch.randint(0, 30000, (4096, 128)), torch.randint(0, 2, (4096,))
loader = DataLoader(TensorDataset(ids, labels), shuffle=True, batch_size=args.per_device_train_batch_size)
model = BertForSequenceClassification(BertConfig(num_hidden_layers=args.layers))
no_decay = ("bias", "LayerNorm.weight")
groups = [
    {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=2e-5)
schedule = get_linear_schedule_with_warmup(optimizer, 10, 100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
model.train()
total = 0.0
for step, (input_ids, targets) in enumerate(loader):
    with accelerator.accumulate(model):
        outputs = model(input_ids=input_ids, labels=targets)
        total += outputs.loss.detach().float()
        accelerator.backward(outputs.loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if step % 20 == 0:
        right = accelerator.gather_for_metrics((outputs.logits.argmax(-1) == targets).float().mean())
        accelerator.print(f"step {step}: accuracy {right.mean().item():.2f}")
accelerator.print(total.item() / (step + 1))
