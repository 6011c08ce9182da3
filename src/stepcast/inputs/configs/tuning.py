"""Fine-tuning tools: Axolotl, LLaMA-Factory, torchtune, and the arguments of Trainer, TRL, peft and Unsloth.

``data/configs/TOOL.toml`` says what each key means (``[keys]``: meaning -> spellings) and what its words mean
(``[words]``: a word -> ours, nothing where the framework does it anyway); this module knows the meanings alone.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepcast.inputs.configs.accelerate import read_deepspeed
from stepcast.inputs.configs.keys import DATA, Keys, OptionValue, RunConfig, flat, given_options
from stepcast.inputs.source import FormatError, read_toml
from stepcast.ir.limits import SCRIPT

# Keys that only a tool has, the more specific tools first.
RECOGNISED = {
    "axolotl": {"base_model"},
    "llama-factory": {"finetuning_type", "cutoff_len", "quantization_bit"},
    "torchtune": {"tokenizer._component_", "model._component_"},
    "trainer": {"per_device_train_batch_size", "peft_type", "use_peft", "lora_r", "max_seq_length", "num_train_epochs"},
}
STAGE = re.compile(r"(?:zero|stage|z)[_-]?([0-3])|([0-3])$", re.IGNORECASE)
COMPONENT = re.compile(r"(?:q?lora_)?([a-z]+)(\d(?:_\d(?=_))?)_([a-z]+|\d+(?:_\d+)?b)")
FSDP_WORDS = {"full_shard": "fsdp", "shard_grad_op": "zero-2", "hybrid_shard": "hybrid-fsdp", "no_shard": "none"}
# Calls of Python scripts whose keywords are arguments.
CALLS = re.compile(r"(\w*Config|\w*Arguments|from_pretrained|get_peft_model|\w*Trainer)$")
TRAINERS = {"dpo": re.compile(r"DPO(Config|Trainer)"), "reward": re.compile(r"Reward(Config|Trainer)")}


def find_tool(table: Mapping[str, object]) -> str:
    """Return the tool that a table of keys is for, or nothing."""
    inside = [key for key, value in table.items() if isinstance(value, Mapping) and "_component_" in value]
    names = {*table, *(f"{key}._component_" for key in inside)}
    return next((tool for tool, keys in RECOGNISED.items() if keys & names), "")


def read_python(text: str) -> RunConfig:
    """Read the arguments that a Python script passes to Trainer, TRL, peft or Unsloth, without running it."""
    if len(text) > SCRIPT.most:
        raise FormatError(f"{SCRIPT.message}; is it a training script?")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"is not a Python script that can be read: {error}") from None
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    table: dict[str, object] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if not CALLS.fullmatch(name) or "okenizer" in ast.unparse(call.func):
            continue
        if tasks := [task for task, kind in TRAINERS.items() if kind.match(name)]:
            table["trainer_kind"] = tasks[0]
        if "Fast" in ast.unparse(call.func):
            table["use_unsloth"] = True
        if name == "from_pretrained" and call.args:
            table["model_name_or_path"] = _evaluate(call.args[0], known)
        if not name.endswith("Trainer"):
            table |= {word.arg: _evaluate(word.value, known) for word in call.keywords if word.arg}
    if find_tool(table) != "trainer":
        raise FormatError("calls no TrainingArguments, TRL configuration or LoraConfig whose arguments can be read")
    return read(table, "trainer")


def _evaluate(node: ast.expr, known: Mapping[str, ast.expr], depth: int = 0) -> object:
    """Return the value of a literal, of a variable set to one, or the last word of a name such as torch.bfloat16."""
    if isinstance(node, ast.Name) and node.id in known and depth < 5:
        return _evaluate(known[node.id], known, depth + 1)
    if isinstance(node, ast.Attribute):
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return "<expression>"


class _Meanings:
    """The values of a tool's keys by what they mean."""

    def __init__(self, table: Mapping[str, object], tool: str) -> None:
        self.tool: dict[str, Any] = read_toml(DATA / f"{tool}.toml")
        self.keys = Keys(flat(table), tool)
        for meaning in self.tool["keys"]:  # also where another key decides what it means
            self.keys.raw(*self.names(meaning))

    def names(self, meaning: str) -> list[str]:
        spellings: str = self.tool["keys"].get(meaning, "")
        return spellings.split()

    def number(self, meaning: str) -> int | None:
        value = self.keys.number(*self.names(meaning))
        return value if value is not None and value > 0 else None

    def share(self, meaning: str) -> float | None:
        return self.keys.share(*self.names(meaning))

    def flag(self, meaning: str) -> bool | None:
        return self.keys.flag(*self.names(meaning))

    def text(self, meaning: str) -> str:
        return self.keys.text(*self.names(meaning))

    def word(self, meaning: str, default: str = "") -> str | None:
        """Return our word for a value; one without any is reported, with what is predicted instead."""
        text = self.text(meaning).rpartition(".")[2].lower()
        words: dict[str, str] = self.tool.get("words", {}).get(meaning, {})
        if text and text not in words and text not in ("none", "null"):
            self.keys.report(f"predicted as {default}", *self.names(meaning))
        return words.get(text) or None


def read(table: Mapping[str, object], tool: str) -> RunConfig:
    """Read the configuration of a fine-tuning *tool*."""
    deepspeed = table.get("deepspeed")
    nested = read_deepspeed(deepspeed) if isinstance(deepspeed, dict) else None
    values = _Meanings({name: value for name, value in table.items() if name != "deepspeed" or nested is None}, tool)
    adapters = _read_adapters(values)
    sharding = _read_sharding(values) if nested is None else dict(nested.options)
    is_sharded = sharding.get("sharding") in ("fsdp", "hybrid-fsdp", "zero-3")
    has_deepspeed = nested is not None or bool(values.text("deepspeed"))
    accumulation, batch, norm = values.number("accumulation"), values.number("global_batch"), values.share("max_norm")
    options = given_options(
        micro_batch=values.number("micro_batch") or sharding.pop("micro-batch", None),
        global_batch=batch if accumulation is None else None,
        accumulation=accumulation if batch is None or accumulation else None,
        seq=values.number("seq"),
        gpus=values.number("gpus") or (values.number("gpus_per_node") or 0) * (values.number("nodes") or 1) or None,
        tp=values.number("tp"),
        cp=values.number("cp"),
        precision=_read_precision(values, "lora-rank" in adapters, is_sharded or has_deepspeed),
        recompute=_read_checkpointing(values),
        optimizer=values.word("optimizer", "AdamW"),
        clipping=None if norm is None else norm > 0,
        kernels="compiled" if values.flag("compile") else None,
        task=_read_task(values),
        batching=_read_batching(values),
        samples=values.number("samples"),
        epochs=values.share("epochs") or None,
        steps=values.number("steps"),
        liger=_read_liger(values),
        **_read_attention(values),
    )
    own = {*options, "accumulation", "gpus"}
    used = {name: value for name, value in sharding.items() if name not in own}
    options |= {**adapters, **used}
    if "accumulation" not in options and "global-batch" not in options:
        options["accumulation"] = sharding.get("accumulation", 1)
        values.keys.assume("gradient accumulation of 1 step (--accumulation), the tool's default")
    framework = (
        "deepspeed-transformers" if has_deepspeed else "peft" if "lora-rank" in adapters else values.tool["framework"]
    )
    if framework == "peft" and tool == "torchtune":
        framework = "pytorch"
    config = values.keys.config(tool, framework, options, model=_name_model(values.text("model")))
    return config if nested is None else _join(config, nested)


def _join(config: RunConfig, nested: RunConfig) -> RunConfig:
    """Return *config* with the lists of the DeepSpeed table inside it."""

    def prefix(names: Mapping[str, str]) -> dict[str, str]:
        return {f"deepspeed.{name}": text for name, text in names.items()}

    def joined(part: str) -> tuple[str, ...]:
        return (*getattr(config, part), *(f"deepspeed.{name}" for name in getattr(nested, part)))

    return replace(
        config,
        understood=joined("understood"),
        ignored=joined("ignored"),
        not_modelled={**config.not_modelled, **prefix(nested.not_modelled)},
        unknown={**config.unknown, **prefix(nested.unknown)},
    )


def _name_model(text: str) -> str:
    """Return a model's name; torchtune's builders carry it, such as torchtune.models.llama3_1.lora_llama3_1_8b."""
    if "torchtune" not in text:
        return text
    parts = COMPONENT.match(text.rpartition(".")[2])
    return "-".join(part.replace("_", ".") for part in parts.groups()) if parts else text


def _read_adapters(values: _Meanings) -> dict[str, OptionValue]:
    """Return the choices of LoRA and of 4-bit weights, where adapters are trained."""
    kind = values.text("adapter").lower()
    component = values.text("model").rpartition(".")[2]
    rank = values.number("lora_rank")
    is_asked = kind in ("lora", "qlora") or values.flag("use_lora") or component.startswith(("lora_", "qlora_"))
    if kind in ("full", "freeze") or values.flag("full") or not (is_asked or (rank and not kind)):
        if kind == "freeze":
            layers = values.keys.number(*values.names("freeze")) or 2
            if layers < 0:
                values.keys.report("predicted as training of the last layers, not the first", *values.names("freeze"))
            return {"train-layers": abs(layers)}
        if kind and kind != "full":
            values.keys.report("predicted as training of all weights", *values.names("adapter"))
        if values.flag("use_lora") is False:
            parts = ("lora_rank", "lora_targets", "lora_dropout")
            values.keys.report_without_effect(*(name for part in parts for name in values.names(part)))
        return {}
    if rank is None:
        rank = 8
        values.keys.assume("LoRA rank 8 (--lora-rank), peft's default")
    bits = values.number("bits")
    is_four = kind == "qlora" or values.flag("load_4bit") or bits == 4 or component.startswith("qlora_")
    is_eight = values.flag("load_8bit") or bits == 8
    if bits not in (None, 4, 8):
        values.keys.report("weights are predicted as frozen in the training precision", *values.names("bits"))
    if values.flag("unsloth"):
        why = "predicted with transformers' own kernels, which take more time and memory"
        values.keys.report(why, *values.names("unsloth"))
    base = "int8" if is_eight else None
    if is_four or values.flag("quantize"):
        nested = values.flag("nested")
        twice = values.tool.get("quantises_twice", True) or values.flag("unsloth") if nested is None else nested
        base = "nf4" if twice else "nf4-single"
        if values.text("quant_type").lower() == "fp4":
            values.keys.report("predicted as NF4, which takes as many bits", *values.names("quant_type"))
    return given_options(
        lora_rank=rank,
        lora_targets=_read_targets(values),
        lora_dropout=values.share("lora_dropout") or None,
        dora=values.flag("dora") or None,
        base_weights=base,
    )


def _read_targets(values: _Meanings) -> str | None:
    """Return the modules with adapters, or None for all linear layers."""
    asked = values.keys.raw(*values.names("lora_targets"))
    words = asked if isinstance(asked, list | tuple | set) else re.split(r"[\s,]+", str(asked or ""))
    modules = [str(module) for module in words if module]
    mlp = values.flag("lora_mlp")
    if mlp is not None:
        modules = [module.replace("output_proj", "o_proj") for module in modules] + (["mlp"] if mlp else [])
    if values.flag("lora_all") or any(module in ("all", "all-linear") for module in modules):
        return None
    kept = [module for module in modules if module not in ("lm_head", "embed_tokens")]
    if kept != modules:
        why = "adapters of embeddings and of the output projection are not predicted"
        values.keys.report(why, *values.names("lora_targets"))
    if not modules:
        values.keys.assume("adapters on all linear layers (--lora-targets)")
    return ",".join(kept) or None


def _read_sharding(values: _Meanings) -> dict[str, OptionValue]:
    """Return sharding and offload from the name of a DeepSpeed file, from a stage, or from FSDP's options."""
    keys = values.keys
    if path := values.text("deepspeed") or values.text("stage"):
        found = STAGE.search(path.rpartition("/")[2])
        stage = int(found[1] or found[2]) if found else 3
        keys.assume(f"{path}: taken for ZeRO-{stage} by its name (--sharding); give the file as --config for the rest")
        offload = "optimizer" if "offload" in path.lower() and "no_offload" not in path.lower() else None
        return given_options(sharding=f"zero-{stage}" if stage else "none", offload=offload)
    asked = keys.raw(*values.names("fsdp"))
    words = " ".join(map(str, asked)) if isinstance(asked, list) else str(asked or "")
    strategy = keys.word("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy")
    version = keys.number("fsdp_config.fsdp_version", "fsdp_config.version", *values.names("fsdp_version"))
    if words.lower() in ("", "none", "false") and not strategy and version is None and not values.number("shard"):
        return {}
    chosen = next((FSDP_WORDS[word] for word in FSDP_WORDS if word in f"{words.lower()} {strategy}"), "fsdp")
    offloads = keys.flag("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", *values.names("offload"))
    reshard = keys.word("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward")
    copies = values.number("replicate")
    return given_options(
        sharding="hybrid-fsdp" if copies and copies > 1 else chosen,
        replicate=copies if copies and copies > 1 else None,
        offload="optimizer" if offloads or "offload" in words.lower() else None,
        reshard={"true": True, "false": False}.get(reshard),
    )


def _read_precision(values: _Meanings, has_adapters: bool, is_sharded: bool) -> str | None:
    """Return the format; full training whose weights stay in fp32 casts them for each use."""
    narrow = "bf16" if values.flag("bf16") else "fp16" if values.flag("fp16") else None
    stored = re.sub("b?float", lambda word: {"bfloat": "bf", "float": "fp"}[word[0]], values.text("dtype").lower())
    if stored in ("bf16", "fp16", "fp32") and narrow is None:
        return stored
    if values.flag("tf32") and narrow is None:
        return "tf32"
    wide = stored == "fp32" or (bool(values.tool.get("fp32_trained")) and not (values.flag("pure") or is_sharded))
    if narrow and wide and not has_adapters:
        return f"autocast-{narrow}"
    return "bf16" if any(values.keys.is_unset(name) for name in values.names("bf16")) else narrow


def _read_checkpointing(values: _Meanings) -> str | None:
    asked = values.flag("checkpointing")
    if values.tool.get("checkpoints"):
        return "none" if values.flag("no_checkpointing") else "full"
    activations = values.keys.flag("fsdp_config.fsdp_activation_checkpointing", "fsdp_config.activation_checkpointing")
    return None if asked is None and activations is None else "full" if asked or activations else "none"


def _read_task(values: _Meanings) -> str | None:
    task = values.word("task", "SFT")
    if values.flag("reward"):
        return "reward"
    return "dpo" if "dpo" in values.text("loss").lower() else None if task == "sft" else task


def _read_batching(values: _Meanings) -> str | None:
    if values.flag("packing"):
        values.keys.assume("packed sequences are full, and each is one document; --lengths says how long documents are")
        return "packed"
    is_grouped = values.flag("group_by_length") or values.text("sampling") == "group_by_length"
    return "grouped" if is_grouped else None


def _read_liger(values: _Meanings) -> bool | None:
    """Return True if all of Liger's kernels are asked for; some of them alone are reported."""
    if values.flag("liger"):
        return True
    if any(values.keys.flag(name) for name in values.names("liger_parts")):
        why = "predicted with transformers' own kernels, which take more time and memory"
        values.keys.report(why, *values.names("liger_parts"))
    return None


def _read_attention(values: _Meanings) -> dict[str, OptionValue | None]:
    word = values.word("attention", "PyTorch's attention")
    if values.flag("flash"):
        word = "flash-2"
    is_eager = word == "eager" or bool(values.flag("eager"))
    return {"attention_kernel": word if word == "flash-2" else None, "flash_attention": False if is_eager else None}
