"""Fine-tuning with the Trainer of transformers and LoRA of peft, on a small Llama built from a config."""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()


class Instructions(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        ids = torch.randint(0, 32000, (512,))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


config = LlamaConfig(
    hidden_size=args.hidden,
    intermediate_size=4 * args.hidden,
    num_hidden_layers=args.layers,
    num_attention_heads=args.hidden // 64,
    num_key_value_heads=args.hidden // 128,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(
    model, LoraConfig(r=args.rank, lora_alpha=32, lora_dropout=0.05, target_modules=targets, task_type="CAUSAL_LM")
)
model.print_trainable_parameters()
if args.checkpointing:
    model.enable_input_require_grads()
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=args.batch,
    gradient_accumulation_steps=2,
    gradient_checkpointing=args.checkpointing,
    learning_rate=2e-4,
    warmup_steps=5,
    max_steps=30,
    logging_steps=10,
    save_strategy="no",
    bf16=True,
    report_to=[],
)
Trainer(model, settings, train_dataset=Instructions(), data_collator=default_data_collator).train()
