"""Low-rank adapters on a frozen model of transformers, written by hand, with gradient checkpointing."""

import argparse
import math

import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--hidden", type=int, default=2048)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=2048)
parser.add_argument("--full", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()


class LoRALinear(nn.Module):
    def __init__(self, base, r=16, alpha=32):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features, device=base.weight.device, dtype=base.weight.dtype))
        self.lora_B = nn.Parameter(
            torch.zeros(base.out_features, r, device=base.weight.device, dtype=base.weight.dtype)
        )
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.t()) @ self.lora_B.t() * self.scale


config = LlamaConfig(
    hidden_size=args.hidden,
    intermediate_size=int(2.75 * args.hidden),
    num_hidden_layers=args.layers,
    num_attention_heads=args.hidden // 128,
    num_key_value_heads=4,
    vocab_size=32000,
)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config).to("cuda")
torch.set_default_dtype(torch.float32)
if not args.full:
    for p in model.parameters():
        p.requires_grad = False
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRALinear(getattr(layer.self_attn, name)))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trainable {trainable:,d} of {sum(p.numel() for p in model.parameters()):,d}")
if args.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
model.config.use_cache = False
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 100)
for step in range(20):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    outputs.loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print("loss", outputs.loss.item(), "lr", scheduler.get_last_lr())
