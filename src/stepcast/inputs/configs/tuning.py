"""Fine-tuning tools: Axolotl, LLaMA-Factory, torchtune, and the arguments of Trainer, TRL, peft and Unsloth; also
DeepSpeed's JSON (deepspeed.ai/docs/config-json) and accelerate's YAML (huggingface.co/docs/accelerate).

``data/configs/TOOL.toml`` says what each key means (``[keys]``: meaning -> spellings) and what its words mean
(``[words]``: a word -> ours, nothing where the framework does it anyway); this module knows the meanings alone.
"""

import ast
import itertools
import math
import os
import re
from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, Options, OptionValue, RunConfig, flat, given_options, is_on, known_keys
from stepcast.inputs.source import FormatError, expect, prefix_errors, read_words
from stepcast.ir.limits import SCRIPT

DEEPSPEED = "deepspeed-transformers"
DEEPSPEED_ONLY = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
# Key of accelerate that names a file of DeepSpeed, and the stage that the names of such files have.
FILE = "deepspeed_config.deepspeed_config_file"
STAGE = re.compile(r"(?:zero|stage|z)[_-]?([0-3])|([0-3])$", re.IGNORECASE)
WORDS = read_words("configs")


def read_deepspeed(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(flat(table), "deepspeed")
    options, rounds = keys.options(), keys.size("gradient_accumulation_steps")
    batch, micro, tp, pp = (int(options.get(name, 0)) for name in ("global-batch", "micro-batch", "tp", "pp"))
    is_open = keys.is_unset("gradient_accumulation_steps")
    gpus = batch // (micro * (rounds or 1)) * (tp or 1) * (pp or 1) if batch and micro and not is_open else None
    # Two of the three sizes give the third, and all of them must agree (deepspeed/runtime/config.py,
    # _set_batch_related_parameters and _batch_assertion), but for ranks that share a sequence and for elastic training.
    accumulation = rounds or (None if batch and "train_micro_batch_size_per_gpu" in keys else 1)
    if batch and ("sequence_parallel_size" in keys or is_on(keys.values.get("elasticity.enabled", False))):
        accumulation = None
    if rounds is None and not is_open:
        basis = f", so that train_batch_size means {gpus:,} GPUs (--gpus)" if gpus else ", DeepSpeed's default"
        keys.assume(f"no gradient_accumulation_steps: taken for 1{basis}")
    # A switch until 2020: stage 1 (deepspeed/runtime/zero/config.py).
    stage = keys.number("zero_optimization.stage") or int(keys.flag("zero_optimization") or False)
    precision, size = _deepspeed_precision(keys), "zero_optimization.reduce_bucket_size"
    bucket, width = keys.share(size), 4 if precision == "fp32" else 2  # elements of the training precision
    norm = keys.share("gradient_clipping")
    states = "zero_optimization.offload_optimizer"
    device, share = keys.word(f"{states}.device"), keys.share(f"{states}.ratio")
    offloads = keys.flag("zero_optimization.cpu_offload") or device in ("cpu", "nvme")
    keys.raw(f"{states}.pin_memory")
    if device == "nvme":
        keys.report("predicted in the host's memory, not on NVMe", f"{states}.device")
    options |= given_options(
        accumulation=accumulation,
        gpus=gpus,
        precision=precision,
        sharding=f"zero-{stage}" if stage else "none",
        offload=("optimizer" if share in (None, 1.0) else f"optimizer={share:g}") if offloads else None,
        overlap=_overlap(stage, keys.flag("zero_optimization.overlap_comm")),
        bucket_mb="auto" if keys.is_unset(size) else bucket and round(bucket * width / 1e6, 3),
        clipping=keys.is_unset("gradient_clipping") if norm is None else norm > 0,
    )
    for name, value in WORDS["trainer"].items():
        if keys.is_unset(name) and not (batch and rounds and name.startswith("train_micro_batch")):
            keys.assume(f'{name} "auto": {value}')
    return keys.config("deepspeed", DEEPSPEED, options)


def _overlap(stage: int, overlap_comm: bool | None) -> str:
    """Return what communication overlaps: gathers of ZeRO-3 use a stream of their own where reductions do.

    overlap_comm is on for stage 3 unless it is set (deepspeed/runtime/zero/config.py, overlap_comm_valid).
    """
    if not (stage == 3 if overlap_comm is None else overlap_comm):
        return "none"
    return "gradients,parameters" if stage == 3 else "gradients"


def _deepspeed_precision(keys: Keys) -> str | None:
    """Return the format; None where the file leaves it open, for that of the GPU."""
    switches = {f"{name}.enabled": name for name in ("bf16", "bfloat16", "fp16")}
    for switch, name in switches.items():
        if keys.flag(switch):
            return "fp16" if name == "fp16" else "bf16"
    open_keys = [switch for switch in switches if keys.is_unset(switch)]
    if not open_keys:
        return "fp32"
    # Where bf16 is left open, callers switch it on, or fp16 on GPUs without it; Trainer sets one of the two at most.
    precision = "fp16" if open_keys == ["fp16.enabled"] else None
    keys.assume(f'{" and ".join(open_keys)} "auto": taken for {precision or "bf16, or fp16 without it"} (--precision)')
    return precision


# Values of distributed_type, with those that mean data parallelism (accelerate/utils/dataclasses.py, DistributedType).
LAUNCHED = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
# Tables of options, and the distributed_type under which each has an effect (commands/launch.py).
PLUGINS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
PREFETCH = (
    *("fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_backward_prefetch_policy"),
    "fsdp_config.backward_prefetch",
)
GATHERED_AHEAD = "recomputed layers are predicted as gathered ahead, which FSDP1 with NO_PREFETCH does not do"
FSDP_VERSION = ("fsdp_config.fsdp_version", "fsdp_config.version", "fsdp_version")
# Strategies of accelerate that keep gathered parameters until the backward pass.
WITHOUT_RESHARD = ("2", "shard_grad_op", "5", "hybrid_shard_zero2")


def read_accelerate(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(flat(table), "accelerate")
    kind = keys.text("distributed_type").upper()
    if not kind:  # commands/config/config_args.py, process_config
        raise FormatError("accelerate refuses a file without distributed_type: set FSDP, DEEPSPEED, MULTI_GPU or NO")
    others, file = tuple(f"{part}." for part, owner in PLUGINS.items() if owner != kind), f"{FILE}."
    idle = {name: keys.values.pop(name) for name in [*keys.values] if name.startswith(others)}
    names = [name for name in keys.values if name.startswith(file)]
    inner = read_deepspeed({name.removeprefix(file): keys.values.pop(name) for name in names}) if names else None
    if kind not in LAUNCHED:
        keys.report("predicted as data parallelism without sharding", "distributed_type")
    options, machines = keys.options(), keys.number("num_machines") or 1
    gpus, stage = int(options.get("gpus", 0)), 0
    if kind == "DEEPSPEED" and inner is None:  # ZeRO-2 unless a stage is given, or that of a file by its name
        path, stated = keys.text(FILE), keys.number("deepspeed_config.zero_stage")
        stage = stage_by_name(keys, path) if path else 2 if stated is None else stated
    strategy, sharding = keys.word("fsdp_config.fsdp_sharding_strategy"), f"zero-{stage}" if stage else "none"
    if kind == "FSDP":
        keys.raw("fsdp_config.fsdp_version", "fsdp_config.fsdp_forward_prefetch")
        sharding = WORDS["accelerate_sharding"].get(strategy, "fsdp")
        if strategy and strategy not in WORDS["accelerate_sharding"]:
            keys.report("predicted as FULL_SHARD", "fsdp_config.fsdp_sharding_strategy")
    copies = keys.number("parallelism_config.parallelism_config_dp_replicate_size") or 1
    split = keys.number("parallelism_config.parallelism_config_dp_shard_size") or 1
    if sharding == "hybrid-fsdp" and machines == 1:
        sharding = "fsdp"  # copies are one to a machine
    shard = gpus // machines if sharding == "hybrid-fsdp" and gpus else None
    if copies > 1 and kind == "FSDP":
        sharding, shard = ("hybrid-fsdp", split) if split > 1 else ("none", None)
    rounds = keys.size("deepspeed_config.gradient_accumulation_steps", "gradient_accumulation_steps")
    if rounds is None and inner is None:
        keys.assume("gradient accumulation of 1 step (--accumulation), accelerate's default")
    if strategy in WITHOUT_RESHARD:
        options["reshard"] = False
    offloads_parameters = keys.flag("fsdp_config.fsdp_offload_params")
    offloads_states = keys.word("deepspeed_config.offload_optimizer_device") in ("cpu", "nvme")
    options |= given_options(
        accumulation=rounds or 1,
        sharding=sharding,
        shard=shard,
        offload="optimizer" if offloads_parameters or offloads_states else None,
    )
    if kind == "FSDP":
        options |= _read_prefetch(keys, options, usual_version=1)
    # A DeepSpeed file may leave its format to accelerate, which names one.
    is_open = inner is None or ("mixed_precision" in keys and any(name.endswith("16.enabled") for name in inner.unset))
    own = given_options(**_accelerate_precision(keys, kind, sharding)) if is_open else {}
    if kind == "DEEPSPEED":  # accelerate/utils/dataclasses.py, DeepSpeedPlugin
        norm = keys.share("deepspeed_config.gradient_clipping")
        options |= given_options(overlap=_overlap(stage, None), clipping=None if norm is None else norm > 0)
    if inner is not None:  # the file says all of it
        if "global-batch" in inner.options:
            options.pop("accumulation")
        options = {**options, **inner.options, **given_options(gpus=options.get("gpus"))}
        for text in inner.assumed:
            if not (own and "16.enabled" in text):
                keys.assume(text)
    keys.values |= idle
    keys.report_without_effect(*idle)
    config = keys.config("accelerate", DEEPSPEED if kind == "DEEPSPEED" else "transformers", {**options, **own})
    return config if inner is None else config.add_inner(FILE, inner)


def _read_prefetch(keys: Keys, options: Options, usual_version: int) -> Options:
    """Return when FSDP gathers a layer for the backward, where it is later than usual (torch/distributed/fsdp/api.py,
    BackwardPrefetch, whose BACKWARD_POST and None hide nothing). FSDP2 has no such choice.

    FSDP1 under accelerate and Trainer does not prefetch unless it is set (accelerate/utils/dataclasses.py,
    FullyShardedDataParallelPlugin; transformers/training_args.py: NO_PREFETCH).
    """
    word, version = keys.last_word(*PREFETCH).replace("none", "no_prefetch"), keys.number(*FSDP_VERSION)
    is_recomputed, is_first = options.get("recompute") == "full", (version or (1 if word else usual_version)) == 1
    gathers = options.get("sharding") in ("fsdp", "hybrid-fsdp") and options.get("reshard") is not False
    if word not in ("", "no_prefetch", "backward_post"):
        if word != "backward_pre":
            keys.report("parameters are predicted as gathered ahead", *PREFETCH)
        return {}
    if not (gathers and is_first) or is_recomputed:
        keys.report_without_effect(*PREFETCH)
    if gathers and is_first and word != "backward_post":
        keys.assume(GATHERED_AHEAD if is_recomputed else "FSDP1 with NO_PREFETCH, its default, gathers no layer ahead")
    return {"backward-prefetch": "post"} if gathers and is_first and not is_recomputed else {}


def stage_by_name(keys: Keys, path: str) -> int:
    """Return the stage that the name of a DeepSpeed file carries; 3 if it has none."""
    match = STAGE.search(os.path.basename(path))
    stage = int(match[1] or match[2]) if match else 3
    keys.assume(f"{path}: no such file here, taken for ZeRO-{stage} by its name (--sharding, --offload)")
    return stage


def guess_accelerate(path: str) -> dict[str, object]:
    """Return what a file of accelerate that is not here holds by its name, such as TRL's zero3.yaml and fsdp2.yaml."""
    name = os.path.basename(path).lower()
    if "fsdp" in name:  # version 1 with BACKWARD_PRE, or version 2
        return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE"}}
    if match := re.search(r"zero[_-]?([1-3])", name):
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": int(match[1])}}
    return {"distributed_type": "MULTI_GPU"} if "multi_gpu" in name else {}


def _accelerate_precision(keys: Keys, kind: str, sharding: str) -> dict[str, OptionValue | None]:
    """Return the format of matmuls, and of the weights and states that are saved.

    accelerate/accelerator.py, prepare_model: FSDP upcasts the sharded parameters to fp32 and gathers them in
    the lower precision; without it, autocast casts fp32 weights for each use. DeepSpeed keeps fp32 weights.
    """
    word = keys.word("mixed_precision")
    if "mixed_precision" not in keys:
        keys.assume("no mixed_precision: the model's own precision is taken for bf16, or fp16 without it (--precision)")
        return {}
    precision = WORDS["accelerate_precision"].get(word)
    if precision is None and word:
        keys.report("predicted in bf16, or fp16 without it", "mixed_precision")
    if precision not in ("bf16", "fp16") or kind == "DEEPSPEED":
        return {"precision": precision}
    if sharding in ("fsdp", "hybrid-fsdp"):
        # Reduced in the lower precision, saved in fp32 as the parameters are.
        return {"precision": precision, "master_weights": True, "optimizer": "adamw:fp32"}
    return {"precision": f"autocast-{precision}"}


# The more specific tools first. Each has the keys that no other has (marks), those of another tool that has some of its
# marks as well (not_with), and the commands that name it, with the keys that they imply.
TOOLS = ("axolotl", "llama-factory", "swift", "torchtune", "trainer", "openrlhf")
# Keys that hold, or name a file of, the configuration of another tool; later ones win.
INNER = {
    "config_file": read_accelerate,
    "accelerate_config": read_accelerate,
    "deepspeed_config_file": read_deepspeed,
    "deepspeed": read_deepspeed,
}
COMPONENT = re.compile(r"(?:q?lora_)?([a-z]+)(\d(?:_\d(?=_))?)_([a-z]+|\d+(?:_\d+)?b)")
# Calls of Python scripts whose keywords are arguments.
CALLS = re.compile(r"(\w*Config|\w*Arguments|from_pretrained|get_peft_model|\w*Trainer)$")
TRAINERS = {kind.lower(): re.compile(rf"{kind}(Config|Trainer)") for kind in ("SFT", "DPO", "Reward")}


def find_tool(table: Mapping[str, object]) -> str:
    """Return the tool that a table of keys is for, or nothing."""
    components = [key for key, value in table.items() if isinstance(value, Mapping) and "_component_" in value]
    names = {*table, *(f"{key}._component_" for key in components)}
    tables = {tool: known_keys(tool).table for tool in TOOLS}
    tool = next((tool for tool, known in tables.items() if names & {*known.get("marks", "").split()}), "")
    return "" if tool and names & {*tables[tool].get("not_with", "").split()} else tool


def read_command(text: str, table: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Return the tool of a launch script, and its options with those that its command implies."""
    for tool in TOOLS:
        for pattern, implied in known_keys(tool).table.get("commands", {}).items():
            if re.search(rf"\b{pattern}\b", text):
                return tool, {**implied, **table}
    return find_tool(table), table


def parse_python(text: str) -> dict[str, object]:
    """Return the arguments that a Python script passes to Trainer, TRL, peft or Unsloth, without running it."""
    expect(len(text) <= SCRIPT.most, f"{SCRIPT.message}; is it a training script?")
    unreadable = (SyntaxError, ValueError, RecursionError, MemoryError)
    with prefix_errors("is not a Python script that can be read", "", unreadable):
        tree = ast.parse(text)
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
        if name == "from_pretrained" and "Model" in ast.unparse(call.func):
            table["from_pretrained"] = True
        if name == "from_pretrained" and call.args:
            table["model_name_or_path"] = _evaluate(call.args[0], known)
        if not name.endswith("Trainer"):
            table |= {word.arg: _evaluate(word.value, known) for word in call.keywords if word.arg}
    if find_tool(table) != "trainer":
        raise FormatError("calls no TrainingArguments, TRL configuration or LoraConfig whose arguments can be read")
    return table


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


def read(table: Mapping[str, object], tool: str) -> RunConfig:
    """Read the configuration of a fine-tuning *tool*."""
    files = {name: file for name in ("config_file", "accelerate_config") if isinstance(file := table.get(name), str)}
    paths = {name: file.split(maxsplit=1)[0] for name, file in files.items() if file.strip()}  # more words may follow
    guesses = {name: guess for name, path in paths.items() if (guess := guess_accelerate(path))}
    table = _move_launch_options({**table, **guesses})
    inner = {name: read_inner(part) for name, read_inner in INNER.items() if isinstance(part := table.get(name), dict)}
    keys = Keys(flat({name: value for name, value in table.items() if name not in inner}), tool)
    known = keys.known.table
    keys.raw(*known["keys"])  # also where another key decides what one means
    for name in guesses:
        sharding_word = inner[name].options["sharding"]
        keys.assume(f"{paths[name]}: no such file here, taken for sharding {sharding_word} by its name (--sharding)")
    adapters, sharding = _read_adapters(keys), _read_sharding(keys)
    for part in inner.values():
        sharding |= part.options
    has_deepspeed = any(part.framework == DEEPSPEED for part in inner.values()) or bool(keys.text("deepspeed"))
    has_deepspeed = has_deepspeed or known["framework"] == DEEPSPEED
    is_sharded = has_deepspeed or sharding.get("sharding") in ("fsdp", "hybrid-fsdp")
    format_inside = str(sharding.pop("precision", "")).removeprefix("autocast-")
    if format_inside == "fp32" and not has_deepspeed:
        format_inside = ""  # weights stay in the format of the checkpoint
    options = _read_options(keys, adapters, is_sharded, format_inside)
    is_half = options.get("precision") in ("bf16", "fp16") or _leaves_format_open(keys, options)
    is_upcast = is_half and tool != "torchtune" and not keys.flag("pure")
    if sharding.get("sharding") in ("fsdp", "hybrid-fsdp") and is_upcast and not adapters:
        # Accelerate upcasts the parameters to fp32, and with them the moments (accelerator.py, prepare_model).
        options |= {"master-weights": True, "optimizer": options.get("optimizer", "adamw:fp32")}
    if loss := _read_loss(keys, options, has_deepspeed):
        options["loss"] = loss
    if {"accumulation", "global-batch"} & {*options}:
        sharding.pop("accumulation", None)
    elif not {"accumulation", "global-batch"} & {*sharding, *known.get("defaults", {})}:
        # 1, or as many steps as make the batch that the tool wants at least.
        usual, least = known.get("defaults", {}), int(known.get("least_batch", 1))
        at_once = int(options.get("gpus", 1)) * int(options.get("micro-batch", usual.get("micro-batch", 1)))
        sharding["accumulation"] = rounds = math.ceil(least / at_once)
        steps = "1 step" if rounds == 1 else f"{rounds} steps"
        keys.assume(f"gradient accumulation of {steps} (--accumulation), the tool's default")
    # A file of DeepSpeed and Trainer must agree (transformers, integrations/deepspeed.py, trainer_config_process).
    meant = {"micro-batch": 1, **known.get("defaults", {}), **sharding, **options}
    agreed = {"micro-batch": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}
    for (name, part), (option, key) in itertools.product(inner.items(), agreed.items()):
        own, wrong = part.options.get(option), meant.get(option)
        if key in part.understood and None not in (own, wrong) and own != wrong:
            raise FormatError(f'{name} has {key} {own}, and the arguments {wrong}: make them agree, or use "auto"')
    if has_deepspeed and "optimizer" in sharding:  # Trainer leaves it to DeepSpeed
        options.pop("optimizer", None)
    options = {**sharding, **options, **adapters}
    if not keys.flag("peft_type"):  # its file says nothing else
        for name, value in (known.get("defaults", {}) | (known.get("trl", {}) if _is_trl(keys) else {})).items():
            if name not in options:
                options[name] = value
                keys.assume(f"--{name} {value}, the tool's default")
    options |= _read_prefetch(keys, options, usual_version=2)
    # Accelerate's file does not know that layers are recomputed.
    is_late = options.get("recompute") != "full" or options.pop("backward-prefetch", None) is None
    for text in (text for part in inner.values() for text in part.assumed if "NO_PREFETCH" in text):
        keys.assume(text if is_late else GATHERED_AHEAD)
    framework = DEEPSPEED if has_deepspeed else "peft" if "lora-rank" in adapters else known["framework"]
    if framework == "peft" and tool == "torchtune":
        framework = "pytorch"
    model = keys.text("model")
    if "torchtune" in model and (parts := COMPONENT.match(model.rpartition(".")[2])):
        # Its builders carry the name, such as torchtune.models.llama3_1.lora_llama3_1_8b.
        model = "-".join(part.replace("_", ".") for part in parts.groups())
    config = keys.config(tool, framework, options, model=model)
    for name, part in inner.items():
        config = config.add_inner(name, part)
    return config


def _move_launch_options(table: Mapping[str, object]) -> Mapping[str, object]:
    """Return *table* with the options of ``accelerate launch`` for FSDP or DeepSpeed as the file they stand for."""
    kind = next((kind for kind in ("fsdp", "deepspeed") if is_on(table.get(f"use_{kind}", False))), "")
    if not kind:
        return table
    first = {name: [*str(value).split(), ""][0] for name, value in table.items()}  # a script may follow
    own = {name: first[name] for name in ("num_processes", "num_machines", "mixed_precision") if name in table}
    script = ("gradient_accumulation_steps", "deepspeed_config_file")  # that of Trainer; of DeepSpeed's own keys
    known = known_keys("accelerate")
    moved = [name for name in table if name not in script and known.find(f"{kind}_config.{name}")]
    file = table.get("config_file")
    part: dict[str, object] = {**(file if isinstance(file, Mapping) else {}), **own, "distributed_type": kind.upper()}
    rest = {name: value for name, value in table.items() if name not in (*moved, f"use_{kind}", "mixed_precision")}
    return {**rest, "config_file": {**part, f"{kind}_config": {name: first[name] for name in moved}}}


def _read_options(keys: Keys, adapters: Options, is_sharded: bool, format_inside: str) -> Options:
    """Return the options of training that the file states: its format, task, batches and kernels."""
    stated = keys.options()
    task, attention = str(stated.pop("task", "sft")), str(stated.pop("attention", ""))
    loss = keys.text("loss")
    if re.search("Chunk|LinearCross", loss):
        keys.report("logits of all tokens are predicted at once, which take more memory", "loss")
    task = "reward" if keys.flag("reward") else "dpo" if "dpo" in loss.lower() else task
    attention = "flash-2" if keys.flag("flash") else attention
    is_eager = attention == "eager" or bool(keys.flag("eager"))

    precision = _read_precision(keys, adapters, is_sharded, format_inside)
    checkpointing = keys.flag("checkpointing")
    if keys.known.table.get("checkpoints"):
        checkpointing = not keys.flag("no_checkpointing")
    else:
        names = ("fsdp_config.fsdp_activation_checkpointing", "fsdp_config.activation_checkpointing")
        activations = keys.flag(*names)
        checkpointing = checkpointing if activations is None else checkpointing or activations
    is_packed = keys.flag("packing")
    if is_packed:
        keys.assume("packed sequences are full, and each is one document; --lengths says how long documents are")
    is_grouped = keys.flag("group_by_length") or keys.text("sampling") == "group_by_length"
    # All of Liger's kernels; some of them alone are reported.
    liger = True if keys.flag("liger") else None
    if liger and task != "sft":
        keys.report("its loss is predicted for SFT alone: here all logits exist at once", "liger")
    elif not liger and any(is_on(keys.values[name]) for name in keys.own_names("liger_parts")):
        keys.report("predicted with transformers' own kernels, which take more time and memory", "liger_parts")
    accumulation, batch, norm = keys.size("accumulation"), keys.size("global_batch"), keys.share("max_norm")
    if batch and keys.known.table.get("batch_of_a_gpu"):
        accumulation, batch = accumulation or max(1, batch // int(stated.get("micro-batch", 1))), None
    return stated | given_options(
        global_batch=batch if accumulation is None else None,
        accumulation=accumulation,
        gpus=keys.count("gpus") or (keys.count("gpus_per_node") or 0) * (keys.count("nodes") or 1) or None,
        precision=precision,
        recompute=None if checkpointing is None else "full" if checkpointing else "none",
        clipping=None if norm is None else norm > 0,
        task=None if task == "sft" else task,
        batching="packed" if is_packed else "grouped" if is_grouped else None,
        epochs=keys.share("epochs") or None,
        liger=liger,
        attention_kernel="flash-2" if attention == "flash-2" else None,
        flash_attention=False if is_eager else None,
    )


def _is_trl(keys: Keys) -> bool:
    """Return whether TRL's trainers are meant, whose configurations have max_length; Unsloth replaces parts of them."""
    return bool(keys.text("task") or keys.text("trl")) and "trl" in keys.known.table and not keys.flag("unsloth")


def _read_loss(keys: Keys, options: Options, has_deepspeed: bool) -> str | None:
    """Return the loss of TRL's SFT: in chunks of tokens, or another, or Liger's (trl, trainer/sft_config.py)."""
    kind = keys.word("loss_type")
    if not _is_trl(keys) or options.get("task", "sft") != "sft" or kind not in ("", "chunked_nll"):
        return None
    if options.get("liger") or options.get("kernels") == "compiled":
        return None
    if not kind:
        keys.assume(
            "the loss in chunks of 256 tokens (--loss), the tool's default; loss_type nll has all logits at once"
        )
    return "chunked-fp32" if has_deepspeed else "chunked"


def _read_adapters(keys: Keys) -> dict[str, OptionValue]:
    """Return the choices of LoRA and of 4-bit weights, where adapters are trained."""
    kind = keys.text("adapter").lower() or keys.known.table.get("adapter", "")
    component = keys.text("model").rpartition(".")[2]
    rank = keys.count("lora_rank")
    is_asked = kind in ("lora", "qlora") or keys.flag("use_lora") or component.startswith(("lora_", "qlora_"))
    if kind in ("full", "freeze") or keys.flag("full") or not (is_asked or (rank and not kind)):
        if kind == "freeze":
            layers = keys.number("freeze") or 2
            if layers < 0:
                keys.report("predicted as training of the last layers, not the first", "freeze")
            return {"train-layers": abs(layers)}
        if kind and kind != "full":
            keys.report("predicted as training of all weights", "adapter")
        if keys.flag("use_lora") is False:
            keys.report_without_effect("lora_rank", "lora_targets", "lora_dropout")
        return {}
    # The tool's own arguments have these defaults; peft's LoraConfig in a script has others.
    is_own = keys.flag("use_lora") or not keys.spell("use_lora")
    usual: Mapping[str, float] = keys.known.table.get("lora", {}) if is_own else {}
    if rank is None and keys.size("lora_rank") is None:
        rank = int(usual.get("rank", 8))
        keys.assume(f"LoRA rank {rank} (--lora-rank), the tool's default")
    dropout = keys.share("lora_dropout")
    if dropout is None and (dropout := usual.get("dropout")):
        keys.assume(f"LoRA dropout {dropout:g} (--lora-dropout), the tool's default")
    bits = keys.count("bits")
    is_four = kind == "qlora" or keys.flag("load_4bit") or bits == 4 or component.startswith("qlora_")
    is_eight = keys.flag("load_8bit") or bits == 8
    if bits not in (None, 4, 8):
        keys.report("weights are predicted as frozen in the training precision", "bits")
    if keys.flag("unsloth"):
        keys.report("predicted with transformers' own kernels, which take more time and memory", "unsloth")
    base = "int8" if is_eight else None
    if is_four or keys.flag("quantize"):
        nested = keys.flag("nested")
        twice = keys.known.table.get("quantises_twice", True) or keys.flag("unsloth") if nested is None else nested
        base = "nf4" if twice else "nf4-single"
        if keys.text("quant_type").lower() == "fp4":
            keys.report("predicted as NF4, which takes as many bits", "quant_type")
    return given_options(
        lora_rank=rank,
        lora_targets=_read_targets(keys),
        lora_dropout=dropout or None,
        dora=keys.flag("dora") or None,
        base_weights=base,
    )


def _read_targets(keys: Keys) -> str | None:
    """Return the modules with adapters, or None for all linear layers."""
    targets = keys.raw("lora_targets")
    words = targets if isinstance(targets, list | tuple | set) else re.split(r"[\s,]+", str(targets or ""))
    modules = [str(module) for module in words if module]
    mlp = keys.flag("lora_mlp")
    if mlp is not None:
        modules = [module.replace("output_proj", "o_proj") for module in modules] + (["mlp"] if mlp else [])
    if keys.flag("lora_all") or any(module in ("all", "all-linear") for module in modules):
        return None
    predicted = [module for module in modules if module not in ("lm_head", "embed_tokens")]
    if predicted != modules:
        keys.report("adapters of embeddings and of the output projection are not predicted", "lora_targets")
    if modules:
        return ",".join(predicted) or None
    default = "" if keys.flag("unsloth") else keys.known.table.get("lora_targets", "")
    keys.assume(f"adapters on {default or 'all linear'} layers (--lora-targets)")
    return default.replace(" and ", ",") or None


def _read_sharding(keys: Keys) -> dict[str, OptionValue]:
    """Return sharding and offload from the name of a DeepSpeed file, from a stage, or from FSDP's options."""
    if path := keys.text("deepspeed") or keys.text("stage"):
        if own := keys.known.table.get("deepspeed_files", {}).get(path):
            return dict(own)
        number = keys.number("stage")
        stage = stage_by_name(keys, path) if number is None else number
        is_named = "offload" in path.lower() and "no_offload" not in path.lower()
        offload = "optimizer" if is_named or keys.flag("offload") else None
        return given_options(sharding=f"zero-{stage}" if stage else "none", offload=offload)
    fsdp = keys.raw("fsdp")
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")
    strategy = keys.word("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy")
    version = keys.number(*FSDP_VERSION)
    if words.lower() in ("", "none", "false") and not strategy and version is None and not keys.count("shard"):
        return {}
    chosen = next((ours for word, ours in WORDS["fsdp"].items() if word in f"{words.lower()} {strategy}"), "fsdp")
    offloads = keys.flag("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "offload")
    reshard = keys.word("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward")
    if "shard_grad_op" in f"{words.lower()} {strategy}":  # gathered once for both passes
        reshard = "false"
    copies = keys.count("replicate")
    return given_options(
        sharding="hybrid-fsdp" if copies and copies > 1 else chosen,
        replicate=copies if copies and copies > 1 else None,
        offload="optimizer" if offloads or "offload" in words.lower() else None,
        reshard={"true": True, "false": False}.get(reshard),
    )


def _read_precision(keys: Keys, adapters: Options, is_sharded: bool, inside: str) -> str | None:
    """Return the format; training whose weights stay in fp32 casts them for each use.

    TRL loads a model that it is given by name in fp32, and trains in bf16, unless keys say otherwise (trl 1.14,
    trainer/utils.py, create_model_from_path; trainer/model_config.py; trainer/base_config.py).

    *inside*: the format of an inner configuration, for what the file itself leaves open.
    """
    narrow = "bf16" if keys.flag("bf16") else "fp16" if keys.flag("fp16") else inside.removeprefix("fp32") or None
    stored = re.sub("b?float", lambda word: {"bfloat": "bf", "float": "fp"}[word[0]], keys.text("dtype").lower())
    if stored in ("bf16", "fp16", "fp32") and narrow is None:
        return stored
    if keys.flag("tf32") and narrow is None:
        return "tf32"
    has_adapters = "lora-rank" in adapters
    is_named = _is_trl(keys) and not keys.flag("loaded") and not any(keys.own_names("dtype"))
    if is_named and not (is_sharded or "base-weights" in adapters):
        narrow = narrow or (None if keys.flag("bf16") is False else "bf16")
        keys.assume(
            "no dtype: TRL loads a model that it is given by name in fp32 (--precision bf16 for dtype bfloat16)"
        )
        return f"autocast-{narrow}" if narrow else "tf32" if keys.flag("tf32") else "fp32"
    wide = stored == "fp32" or (bool(keys.known.table.get("fp32_trained")) and not keys.flag("pure"))
    if narrow and wide and not (has_adapters or is_sharded):
        return f"autocast-{narrow}"
    if narrow and not (stored or has_adapters or is_sharded) and "dtype" in keys.known.table["keys"]:
        keys.assume(
            f"no dtype: weights are loaded in {narrow}, as transformers 5 does; version 4 takes fp32 (--precision "
            f"autocast-{narrow})"
        )
    return narrow or inside or None


def _leaves_format_open(keys: Keys, options: Options) -> bool:
    """Return True for ``bf16: auto``: bf16, or fp16 on GPUs without it (Axolotl, utils/config/__init__.py)."""
    return "precision" not in options and any(map(keys.is_unset, keys.own_names("bf16")))
