# mypy: ignore-errors
"""Fine-tuning steps under transformers' Trainer with peft and bitsandbytes, on the GPU at hand.

    python tools/measure_tuning.py FOLDER CASES.txt [--seconds 240]

Needs PyTorch, transformers, accelerate, peft and bitsandbytes, no network: weights are random. A line of CASES.txt is
``MODEL | SETTING | BATCH SEQ ACCUMULATION DOCUMENT``: a config of data/transformers/configs, words of
data/rows/tuning.toml, and the tokens of a packed document or 0. Writes ``rows.jsonl``, a row when it is done: the
median step, the peaks of PyTorch's allocator and the bytes that earlier cases still held, the host's milliseconds of
forward, backward and update, and those of the small training step of ``stepcast profile`` before and after it.
``pace`` of data/transformers/tuning.csv is the mean of these two over that of the fitted host, to the power of 0.8, as
``check`` takes it.
"""

import argparse
import gc
import inspect
import json
import os
import time
import traceback
from pathlib import Path
from statistics import median

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import torch
import transformers
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments
from transformers.masking_utils import AttentionMaskInterface

from stepcast.pytorch.profile import host_s, small_step

WARM, LEAST, LONGEST_S, WINDOW_S = 2, 3, 5.0, 1.6
LOOKS = 20
CONFIGS = Path(__file__).parents[1] / "src" / "stepcast" / "data" / "transformers" / "configs"


class Packed:
    """The ends of documents in a micro-batch, which all layers read."""

    ends, longest = None, 0
    causal = (
        {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    )


def attend_packed(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    batch, heads, seq, dim = query.shape
    flat = (tensor.transpose(1, 2).reshape(batch * seq, tensor.shape[1], dim) for tensor in (query, key, value))
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    ends, longest = Packed.ends, Packed.longest
    result = varlen_attn(*flat, ends, ends, longest, longest, **Packed.causal, **grouped)
    return result.view(batch, seq, heads, dim), None


AttentionInterface.register("packed", attend_packed)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)


def build(name: str, words: set[str]):
    keys = json.loads((CONFIGS / f"{name}.json").read_text())
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    config.use_cache = False
    packed = {"attn_implementation": "packed"} if "packed" in words else {}
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **packed)


def quantise(model):
    """Turn linear layers into NF4 with double quantisation, as load_in_4bit does."""
    import bitsandbytes as bnb

    options = {"compress_statistics": True, "quant_type": "nf4"}
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and "lm_head" not in name:
            sizes, has_bias = (module.in_features, module.out_features), module.bias is not None
            new = bnb.nn.Linear4bit(*sizes, bias=has_bias, compute_dtype=torch.bfloat16, device="meta", **options)
            weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, module=new, **options)
            new.weight, new.bias = weight.to("cuda"), module.bias
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
            module.weight = None
    model.is_loaded_in_4bit = True
    return model


def adapt(model, words: set[str]):
    from peft import LoraConfig, get_peft_model

    rank = next(int(word[4:]) for word in words if word.startswith("lora"))
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "v_proj"] if "qv" in words else "all-linear",
        lora_dropout=0.05 if "dropout" in words else 0.0,
        use_dora="dora" in words,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


class Samples(torch.utils.data.Dataset):
    """Random tokens that are their own targets, or pairs of answers."""

    def __init__(self, seq: int, vocab: int, document: int, pairs: bool) -> None:
        self.seq, self.vocab, self.document, self.pairs = seq, vocab, document, pairs

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict:
        ids = torch.randint(0, self.vocab, (self.seq,), generator=torch.Generator().manual_seed(index % 64))
        if self.pairs:
            return {"chosen": ids, "rejected": ids.flip(0)}
        positions = {"position_ids": torch.arange(self.seq) % self.document} if self.document else {}
        return {"input_ids": ids, "labels": ids.clone(), **positions}


def collate(items: list[dict]) -> dict:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def log_probabilities(model, ids):
    """Sums over tokens, row by row as TRL's unfused loss computes them in fp32."""
    logits, labels = model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:]
    if logits.dtype is torch.float32:
        chosen = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
        return (chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])).sum(-1)
    rows = [torch.nn.functional.log_softmax(row, dim=-1) for row in logits]
    return torch.stack([row.gather(-1, label.unsqueeze(-1)).sum() for row, label in zip(rows, labels, strict=True)])


class TimedTrainer(Trainer):
    """Trainer, with DPO's loss for pairs, that notes the host's time of forward and backward."""

    reference, pairs, spans = None, False, None

    def compute_loss(self, model, inputs, *args, **kwargs):
        start = time.perf_counter()
        loss = self.dpo_loss(model, inputs) if self.pairs else super().compute_loss(model, inputs, *args, **kwargs)
        self.spans[0] += time.perf_counter() - start
        return loss

    def dpo_loss(self, model, inputs):
        ids = torch.cat([inputs["chosen"], inputs["rejected"]])
        policy = log_probabilities(model, ids)
        with torch.no_grad():
            if self.reference is not None:
                frozen = log_probabilities(self.reference, ids)
            else:
                with model.disable_adapter():
                    frozen = log_probabilities(model, ids)
        chosen, rejected = (policy - frozen).chunk(2)
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


class StepClock(TrainerCallback):
    """Ends of steps and the host's phases; stops after enough of them."""

    def __init__(self) -> None:
        self.ends, self.phases, self.warm, self.updated_s = [], [], WARM, 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.trainer.spans = [0.0, 0.0]

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.updated_s = -time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.updated_s += time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())
        self.phases.append([round(1e3 * seconds, 2) for seconds in (*self.trainer.spans, self.updated_s)])
        if len(self.ends) == 1 and args.gradient_accumulation_steps > 1 and sum(self.trainer.spans) > 0.8:
            self.warm = 1  # a second micro-batch has warmed up what a second step would
        done = len(self.ends) - self.warm
        if done == 0:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elapsed_s = self.ends[-1] - self.ends[self.warm - 1] if done > 0 else 0.0
        control.should_training_stop = (done >= LEAST and elapsed_s > WINDOW_S) or elapsed_s > LONGEST_S
        return control


def measure(case: tuple, folder: Path, look) -> dict:
    name, setting, batch, seq, accumulation, document = case
    words, held = set(setting.split()), torch.cuda.memory_allocated()
    model = build(name, words)
    reference = build(name, words).eval().requires_grad_(False) if {"dpo", "full"} <= words else None
    if "nf4" in words:
        quantise(model)
    if "full" not in words:
        model = adapt(model, words)
    forget()
    if document:
        Packed.ends = torch.arange(0, batch * seq + 1, document, dtype=torch.int32, device="cuda")
        Packed.longest = document
    checkpoints = "checkpoint" in words
    arguments = Arguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=checkpoints,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpoints else None,
        optim="adamw_bnb_8bit" if "adam8" in words else "adamw_torch_fused",
        use_liger_kernel="liger" in words,
        max_steps=10_000,
        bf16=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    clock, samples = StepClock(), Samples(seq, model.config.vocab_size, document, "dpo" in words)
    trainer = TimedTrainer(model, arguments, data_collator=collate, train_dataset=samples, callbacks=[clock])
    clock.trainer, trainer.pairs, trainer.reference = trainer, "dpo" in words, reference
    backward = trainer.accelerator.backward

    def timed_backward(*args, **kwargs) -> None:
        start = time.perf_counter()
        backward(*args, **kwargs)
        trainer.spans[1] += time.perf_counter() - start

    trainer.accelerator.backward = timed_backward
    before_s = look()
    trainer.train()
    steps = [1e3 * (end - start) for start, end in zip(clock.ends, clock.ends[1:], strict=False)][clock.warm - 1 :]
    return {
        "case": case,
        "step_ms": median(steps),
        "steps_ms": steps,
        "phases_ms": clock.phases[clock.warm :],
        "held": held,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "small_step_ms": [1e3 * before_s, 1e3 * look()],
    }


def forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tuning steps under Trainer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0, help="start no case that may end later")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    until = time.monotonic() + arguments.seconds - 10
    step = small_step(torch, "cuda")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for line in arguments.cases.read_text().splitlines():
        name, setting, sizes, *_ = (word.strip() for word in line.split("|"))
        case = name, setting, *map(int, sizes.split())
        row = {"case": case, "skipped": True}
        if time.monotonic() < until:
            try:
                row = measure(case, arguments.folder, lambda: host_s(torch, step, LOOKS))
            except Exception as error:  # the next one is measured
                row = {"case": case, "error": f"{error}", "trace": traceback.format_exc()[-1500:]}
            forget()
        with (arguments.folder / "rows.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(line, round(row.get("step_ms", 0.0), 1), row.get("error", ""), flush=True)


if __name__ == "__main__":
    main()
