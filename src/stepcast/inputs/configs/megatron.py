"""Megatron-LM: argument files, launch scripts, and the YAML of its functional tests.

Names of arguments as in megatron/training/arguments.py; NeMo and Megatron-Bridge call most of them the same.
"""

import ast
import re
from collections.abc import Callable, Mapping

from stepcast.inputs.configs.keys import NO, Keys, Options, OptionValue, RunConfig, given_options, known_keys
from stepcast.inputs.model_table import shortest_period
from stepcast.inputs.source import FormatError, expect, read_words
from stepcast.ir.limits import LAYERS
from stepcast.ir.types import FactDict, Facts

WORDS = read_words("configs")
MODULES, ACTIVATIONS = WORDS["megatron_modules"], WORDS["activations"]
CONTEXTS = ("p2p", "a2a", "allgather")
FORMATS = ("fp32", "bf16", "fp16", "fp8")
TABLES = known_keys("megatron").table
DEFAULT_PARTS: FactDict = TABLES["default_parts"]
# Size of latent attention -> Megatron's argument and its default.
LATENT: Mapping[str, tuple[str, int]] = TABLES["latent"]
# Megatron's words for the positions of tokens -> ours.
POSITIONS: Mapping[str, str] = TABLES["positions"]
SWIFT = re.compile(r"\bmegatron\s+(sft|pt|rlhf)\b")
MOST_STAGES = 4_096
COUNTED_AS_LAYERS = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,6})|([^()*])\*(\d{1,6})")


def read_test(arguments: Mapping[str, object]) -> RunConfig:
    """Read the ``MODEL_ARGS`` of a functional test, which hold the flags."""
    flags = {str(name).lstrip("-").replace("_", "-"): value for name, value in arguments.items()}
    return read_arguments({name: value for name, value in flags.items() if value is not False})


def read_arguments(flags: Mapping[str, object], text: str = "") -> RunConfig:
    """Read the flags of a launch script, or of a file of arguments; its *text* may name another launcher."""
    keys = Keys(flags, "megatron")
    sizes = read_sizes(keys)
    if sizes.get("hidden"):
        sizes = {**fill_sizes(keys, sizes), **_own_sizes(keys, sizes)}
    options = read_options(keys, sizes)
    # What Megatron-Swift does without an argument; the arguments of experts matter with expert parallelism alone.
    for argument, (option, value) in keys.known.table["swift"].items() if SWIFT.search(text) else ():
        if argument not in keys and (_is_parallel(options, "ep") or not argument.startswith(("moe-", "expert-"))):
            options[option] = value
            keys.assume(f"no --{argument}: --{option} {value}, the default of Megatron-Swift")
    options |= _own_defaults(keys, options)
    # Without sizes a checkpoint's name may name the model; with them a tokenizer may tell models of these sizes apart.
    model = keys.text("tokenizer-model" if sizes.get("hidden") else "model", "load")
    # Variables of a script say nothing beyond the flags that use them.
    keys.values = {name: value for name, value in keys.values.items() if not name.startswith("$")}
    return keys.config("megatron-lm", "megatron-core", options, sizes, model)


def fill_sizes(keys: Keys, sizes: Facts) -> FactDict:
    """Return the *sizes* of a model with what Megatron-LM, and NeMo, does where its arguments say nothing."""
    hidden, heads, own = sizes["hidden"], sizes.get("heads"), {**DEFAULT_PARTS}
    if "mla_kv_rank" not in sizes:
        own |= {"position": "learned", "qk_norm": "none"}
        if heads and hidden % heads == 0:
            own["head_dim"] = hidden // heads
    if "ffn" not in sizes:
        own["ffn"] = 4 * hidden * 2 // 3 // 64 * 64 if sizes.get("gated") else 4 * hidden
        keys.assume(f"no ffn-hidden-size: MLPs are {own['ffn']:,} wide, the tool's default")
    if "moe_experts" in sizes:
        own |= {"moe_ffn": {**own, **sizes}["ffn"], "moe_shared_ffn": 0, "moe_shared_gate": 0}
        own |= {"moe_dense_layers": 0, "moe_pattern": "1"}
    return {**own, "window_pattern": "1", **sizes}


def _own_sizes(keys: Keys, sizes: Facts) -> dict[str, int]:
    """Return the key heads of Megatron-LM (training/arguments.py): groups count with --group-query-attention alone;
    the words of the vocabulary (NullTokenizer adds one), and to which multiple it is padded, where it is
    (training/tokenizer, vocab_size_with_padding). A tokenizer's words are those of the model.
    """
    own: dict[str, int] = {}
    if {"heads", "kv_heads"} <= sizes.keys():
        if not keys.flag("group-query-attention"):
            own["kv_heads"] = sizes["heads"]
            if sizes["kv_heads"] != sizes["heads"]:
                keys.assume("--num-query-groups has no effect without --group-query-attention, as in Megatron-LM")
        elif "num-query-groups" not in keys:
            own["kv_heads"] = 1
    words, multiple = keys.number("vocab-size"), keys.number("make-vocab-size-divisible-by") or 128
    if keys.number("padded-vocab-size") is not None:
        return own
    if words is None:
        return {**own, "vocab_multiple": multiple}
    words += keys.word("tokenizer-type") == "nulltokenizer"
    is_padded = multiple > 1 and words % (multiple * (keys.number("tensor-model-parallel-size") or 1)) > 0
    return {**own, "vocab": words, "vocab_multiple": multiple if is_padded else 0}


def _own_defaults(keys: Keys, options: Options) -> Options:
    """Return what Megatron-LM does where its arguments do not ask for more (training/arguments.py)."""
    defaults: Options = {"execution": options.get("execution", "eager")}
    if "hidden-size" in keys:  # the arguments of the model are here, not in a file of their own
        defaults["dropout"] = any(share is None or share > 0 for share in _dropouts(keys))
    if _is_parallel(options, "tp"):
        defaults["sequence-parallel"] = options.get("sequence-parallel", False)
    if "precision" not in options:
        defaults["precision"] = "bf16"
        keys.assume("neither --bf16 nor --fp16 is set: taken for bf16 (--precision fp32 is what Megatron-LM does)")
    if options.get("precision") == "fp16" and "gradients" not in options:
        defaults["gradients"] = "fp16"
    splits = _is_parallel(options, "ep") or _is_parallel(options, "expert-tp" if "expert-tp" in options else "tp")
    if "num-experts" in keys and splits and "dispatcher" not in options:
        defaults["dispatcher"] = "allgather"
        keys.assume("no --moe-token-dispatcher-type: Megatron-LM's default is allgather")
    if "global-batch" not in options:
        defaults["accumulation"] = 1
        keys.assume("no --global-batch-size: one micro-batch for each replica, as Megatron-LM does")
    return defaults


def _dropouts(keys: Keys) -> list[float | None]:
    return [keys.share(name) for name in ("attention-dropout", "hidden-dropout")]


def _is_parallel(options: Options, degree: str) -> bool:
    value = options.get(degree, 1)
    return isinstance(value, int) and value > 1


def read_sizes(keys: Keys) -> FactDict:
    """Return the sizes and parts of the model by the names that its tables have."""
    is_grouped = keys.flag("group-query-attention")
    heads = keys.size("num-attention-heads")
    groups = keys.size("num-query-groups", least=0)
    is_latent = keys.flag("multi-latent-attention")
    channels = keys.size("kv-channels")
    layers, window = keys.size("num-layers"), re.match(r"[\[(]?(\d{1,9})", keys.text("window-size"))
    sizes: dict[str, int | str | None] = {
        "layers": layers,
        "hidden": keys.size("hidden-size"),
        "heads": heads,
        "kv_heads": (groups or heads) if is_grouped is not False and not is_latent else None,
        "head_dim": None if is_latent else channels,
        "ffn": keys.size("ffn-hidden-size"),
        "vocab": keys.size("padded-vocab-size", "vocab-size"),
        # Keys before a query, and its own.
        "window": int(window[1]) + 1 if window else None,
        "moe_experts": keys.size("num-experts", "num-moe-experts", least=0),
        "next_token_layers": keys.size("mtp-num-layers", least=0),
    }
    if sizes["moe_experts"]:
        sizes["moe_topk"] = keys.size("moe-router-topk") or 2
        sizes["moe_ffn"] = keys.size("moe-ffn-hidden-size") or sizes["ffn"]
        sizes["moe_shared_ffn"] = keys.size("moe-shared-expert-intermediate-size", least=0)
        if digits := _layer_digits(keys, "moe-layer-freq", layers, lambda every: "1" + "0" * (every - 1)):
            dense = re.fullmatch("(0+)1+", digits)
            sizes["moe_dense_layers"] = len(dense[1]) if dense else 0
            sizes["moe_pattern"] = "1" if dense else "".join(shortest_period(digits))
        limits = [keys.number(f"moe-router-{name}") for name in ("num-groups", "group-topk")]
        if all(limits) or "hidden-size" in keys:  # without these arguments routing is not limited
            sizes["moe_groups"], sizes["moe_top_groups"] = limits if all(limits) else (1, 1)
    digits = _layer_digits(keys, "window-attn-skip-freq", layers, lambda every: "1" * (every - 1) + "0")
    if window and "1" in (digits or "1"):
        sizes["window_pattern"] = "".join(shortest_period(digits))
    else:
        sizes["window"] = None
    if is_latent:
        # Zero is a size here: queries that are projected directly.
        ranks = {size: keys.size(name, least=0) for size, (name, _) in LATENT.items()}
        if any(value is not None for value in ranks.values()):
            sizes |= {size: LATENT[size][1] if value is None else value for size, value in ranks.items()}
    zeros = ("mla_query_rank", "moe_dense_layers")
    set_values = {name: value for name, value in sizes.items() if value or (name in zeros and value == 0)}
    return {**set_values, **_read_parts(keys, is_latent or False)}


def _layer_digits(keys: Keys, name: str, layers: int | None, repeat: Callable[[int], str]) -> str:
    """Return a digit for each layer, or those that *repeat* makes of a number N (one layer in N).

    Lists are written as in Python, ``([0]*3+[1]*58)`` (training/arguments.py, moe_freq_type).
    """
    text = keys.text(name)
    if not text:
        return ""
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise FormatError(f"{name} {text[:60]!r} is neither a number nor a list of layers") from None
    if isinstance(value, int):
        return repeat(value)
    digits = "".join("1" if layer else "0" for layer in value)
    if layers is not None and len(digits) != layers:
        raise FormatError(f"{name} lists {len(digits)} layers of {layers} (Megatron-LM refuses it too)")
    return digits


def _evaluate(node: ast.expr) -> int | list[int]:
    """Return a number above 0, or a list of numbers that is written with + and *."""
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 < node.value <= LAYERS.most:
        return node.value
    if isinstance(node, ast.List):
        numbers = [ast.literal_eval(item) for item in node.elts]
        if all(isinstance(number, int) for number in numbers):
            return list(map(int, numbers))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            LAYERS.check(len(left) * right)
            return left * right
    raise ValueError


def _read_parts(keys: Keys, is_latent: bool) -> FactDict:
    """Return what the model is made of, as far as the file says: activations, norms, biases, positions and switches.

    Latent attention has its own rotation and its own norms, whatever these arguments say.
    """
    flags = [name for name in ("swiglu", "squared-relu", "quick-geglu") if keys.flag(name)]
    activation = keys.word("activation") or next(iter(flags), "")
    norm, softmax, position = (keys.word(name) for name in ("normalization", "softmax-type", "position-embedding-type"))
    if keys.flag("use-rotary-position-embeddings"):
        position = "rope"
    if position and position not in POSITIONS:
        keys.report("predicted with rotary positions", "position-embedding-type")
    has_biases = False if keys.flag("disable-bias-linear") else keys.flag("bias", "add-bias-linear")
    other_biases = "qkv" if keys.flag("add-qkv-bias", "qkv-bias") else "none"
    has_qk_norm, has_plain_norm = keys.flag("qk-layernorm"), keys.flag("qk-l2-norm")
    untied = keys.flag("untie-embeddings-and-output-weights")
    parts = {
        "gated": "glu" in activation if activation else keys.flag("swiglu", "gated-linear-unit"),
        "activation": ACTIVATIONS.get(re.sub("^(fast|quick)-", "", activation).replace("-", "_")),
        "tied": keys.flag("share-embeddings-and-output-weights") if untied is None else not untied,
        "norm": TABLES["norms"].get(norm),
        "biases": None if has_biases is None else DEFAULT_PARTS["biases"] if has_biases else other_biases,
        "attention_sinks": softmax == "learnable" if softmax else None,
        "attention_gate": keys.flag("attention-output-gate"),
        "moe_shared_gate": keys.flag("moe-shared-expert-gate"),
        "seq": keys.size("max-position-embeddings"),
    }
    if not is_latent:
        parts["position"] = POSITIONS.get(position, "rotary") if position else None
        parts["qk_norm"] = "head" if has_qk_norm else "plain" if has_plain_norm else None
    set_values = {name: value for name, value in parts.items() if value is not None}
    return {name: int(value) if isinstance(value, bool) else value for name, value in set_values.items()}


def read_options(keys: Keys, sizes: Facts) -> Options:
    """Return the options of ``predict`` that the arguments stand for."""
    stated, precision = keys.options(), _precision(keys)
    tp, pp, cp = (int(stated.get(axis, 1)) for axis in ("tp", "pp", "cp"))
    # Without sizes the model is stated elsewhere, and has experts where they are spread.
    has_experts = "moe_experts" in sizes or ("hidden" not in sizes and _is_parallel(stated, "ep"))
    layers = sizes.get("layers", 0)
    if tp == 1:
        stated.pop("sequence-parallel", None)
    gathers_fp8 = keys.flag("fp8-param-gather", "fp8-param")
    nodes, per_node = (keys.number(*TABLES["launchers"][name].split()) for name in ("nodes", "gpus_per_node"))
    # A script that names its GPUs and not its nodes runs on one.
    gpus = per_node * (nodes or 1) if per_node else keys.number("$WORLD_SIZE")
    stated_layout = keys.raw("pipeline-model-parallel-layout")
    if isinstance(stated_layout, list):  # of stages, each a list of layers by name
        layout = tuple(str(stage).count("decoder") for stage in stated_layout)
    else:
        layout = parse_layout(str(stated_layout), pp) if stated_layout else ()
        layout = layout if len(layout) > 1 else ()
    chunks = len(layout) // pp if layout else _chunks(keys, layers, pp)
    stages = layout or uneven_stages(keys, layers, pp, chunks or 1)
    return stated | given_options(
        gpus=gpus,
        cp_comm=_context(keys, cp),
        vpp=chunks if (chunks or 1) > 1 or not layout else None,
        stage_layers=",".join(map(str, stages)) if stages else None,
        precision=precision,
        fp8_params=True if gathers_fp8 and precision in ("fp8", "mxfp8") else None,
        **_sharding(keys),
        recompute=_recompute(keys),
        overlap=_overlap(keys, tp, pp),
        **_training_options(keys, pp, has_experts),
    )


def _training_options(keys: Keys, pp: int, has_experts: bool) -> dict[str, OptionValue | None]:
    """Return the options that do not concern the layout."""
    dropouts = [share for share in _dropouts(keys) if share is not None]
    narrow = keys.flag("grad-reduce-in-bf16")
    wide = keys.flag("grad-reduce-in-fp32", "accumulate-allreduce-grads-in-fp32")
    if narrow or (_format(keys.text("main-grads-dtype")) == "bf16" and not wide):
        wide = False
    gradients = None if wide is None else "fp32" if wide else "bf16"

    # Last layers that stay in bf16; those at the start are not modelled.
    final_layers = keys.number("num-layers-at-end-in-bf16")
    keys.number("num-layers-at-start-in-bf16")
    if keys.flag("first-last-layers-bf16"):
        keys.report("the first layers are predicted in fp8; the last are in bf16", "num-layers-at-start-in-bf16")
        final_layers = 1 if final_layers is None else final_layers
    else:
        final_layers = None

    elements = keys.number("ddp-bucket-size", "bucket-size")
    fused, kind = keys.flag("cross-entropy-loss-fusion"), keys.word("cross-entropy-fusion-impl")
    loss = "in-place" if not fused else "engine" if kind == "te" else "compiled"
    offload = None
    if keys.flag("optimizer-cpu-offload"):
        share = keys.share("optimizer-offload-fraction")
        offload = "optimizer" if share is None else f"optimizer={share:g}"
    return {
        "gradients": gradients,
        "dropout": any(dropouts) if dropouts else None,
        "dispatcher": _dispatcher(keys, has_experts),
        "loss": None if fused is None else loss,
        "bf16_final_layers": final_layers,
        "deferred_gradients": _deferred_gradients(keys, pp),
        # Megatron-LM counts elements.
        "bucket_mb": None if elements is None else elements * (2 if gradients == "bf16" else 4) / 1e6,
        "offload": offload,
        "execution": _execution(keys, has_experts),
        "optimizer": _optimizer(keys),
        "lora_rank": (keys.number("lora-rank") or 8) if keys.text("train-type", "tuner-type") == "lora" else None,
    }


def _chunks(keys: Keys, layers: int, pp: int) -> int | None:
    chunks = keys.size("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank", least=0)
    per_chunk = keys.size("num-layers-per-virtual-pipeline-stage", least=0)
    if pp == 1 or chunks or not (per_chunk and layers):
        return chunks if pp > 1 else None
    counted_layers = layers + sum(bool(keys.flag(name)) for name in COUNTED_AS_LAYERS)
    if counted_layers % (pp * per_chunk):
        raise FormatError(
            f"{counted_layers} layers are not a multiple of {pp} pipeline stages times {per_chunk} of a virtual one "
            "(Megatron-LM refuses it too)"
        )
    return counted_layers // pp // per_chunk


def _precision(keys: Keys) -> str | None:
    plain = [name for name in ("bf16", "fp16") if keys.flag(name)]
    fp8 = keys.word("fp8-format", "fp8")
    is_on = fp8 not in ("false", "no", "none")  # NeMo's files keep the format of an fp8 that they switch off
    recipe = keys.word("fp8-recipe")
    if keys.word("fp4-format", "fp4") not in ("", "false", "none"):
        return "nvfp4"
    if recipe == "mxfp8" and is_on:
        return "mxfp8"
    formats = [keys.flag(name) for name in ("fp8-hybrid", "fp8-e4m3")]
    if is_on and (fp8 in ("hybrid", "e4m3", "true") or any(formats)):
        return "fp8"
    words = keys.word("precision", "mixed-precision")
    stated = [precision for part, precision in TABLES["precisions"].items() if part in words]
    return next(iter([*stated, *plain]), None)


def parse_layout(layout: str, pp: int) -> tuple[int, ...]:
    """Return the decoder layers of each stage that ``E|(t|)*3,m|m||L`` describes.

    megatron/core/transformer/pipeline_parallel_layer_layout.py: stages end with a bar, commas are cosmetic,
    ``*N`` repeats the character or the group in parentheses before it. E, m and L are the embedding, the MTP module and
    the loss.
    """
    text = layout.replace(",", "").replace(" ", "")
    size, fault = 0, f"pipeline-model-parallel-layout {text[:60]!r}"
    while match := REPEATED.search(text):
        piece, times = match[1] if match[2] else match[3], int(match[2] or match[4])
        size += len(piece) * times
        expect(size <= 100_000, f"{fault} repeats too much")
        text = text[: match.start()] + piece * times + text[match.end() :]
    stages = text.split("|")
    if set(text) - set("EtmL|") or len(stages) % pp or len(stages) > MOST_STAGES:
        raise FormatError(f"{fault} is not E, t, m and L in a multiple of {pp} stages separated by |")
    return tuple(stage.count("t") for stage in stages)


def uneven_stages(keys: Keys, layers: int, pp: int, chunks: int) -> tuple[int, ...]:
    """Return the layers of each stage and chunk where the first or the last rank has fewer than the others.

    megatron/core/transformer/transformer_block.py, get_num_layers_to_build: the first and the last rank have
    the layers that are named for them, the others share the rest, each in equal chunks. Counting the
    embedding or the loss as a layer takes one from the first or the last chunk.
    """
    names = [(f"decoder-{end}-pipeline-num-layers", f"num-layers-in-{end}-pipeline-stage") for end in ("first", "last")]
    first, last = (keys.number(*pair) for pair in names)
    embedding, loss = (int(keys.flag(name) or False) for name in COUNTED_AS_LAYERS)
    if pp == 1 or (first is None and last is None and not embedding and not loss):
        return ()
    expect(0 < pp * chunks <= MOST_STAGES, f"{pp * chunks:,} pipeline stages are more than {MOST_STAGES:,}")
    if not layers:
        why = "the file has no number of layers, so stages are predicted as equal; give --stage-layers"
        keys.report(why, *names[0], *names[1], *COUNTED_AS_LAYERS)
        return ()
    if first is None and last is None:
        share, rest = divmod(layers + embedding + loss, pp * chunks)
        stages = (share - embedding, *[share] * (pp * chunks - 2), share - loss)
    else:
        middle = pp - (first is not None) - (last is not None)
        share, rest = divmod(layers - (first or 0) - (last or 0), middle) if middle else (0, 0)
        ranks = [share if first is None else first, *[share] * (pp - 2), share if last is None else last]
        rest = rest or sum(ranks) != layers or any(count % chunks or count < 0 for count in ranks)
        stages = tuple(count // chunks for count in ranks) * chunks
    if rest:
        raise FormatError(
            f"its first, last and other pipeline stages cannot share {layers} layers in equal parts (Megatron-LM "
            "refuses it too)"
        )
    return stages


def _context(keys: Keys, cp: int) -> str | None:
    kinds = re.findall(r"[a-z0-9+]+", str(keys.raw("cp-comm-type") or "").lower())
    keys.raw("hierarchical-context-parallel-sizes")
    if cp == 1:
        return None
    if set(kinds) == {"a2a+p2p"}:
        why = "predicted as a ring (p2p) over all context parallel ranks"
        keys.report(why, "cp-comm-type", "hierarchical-context-parallel-sizes")
        return "p2p"
    if len(set(kinds)) > 1:
        keys.report(f"all layers are predicted with the exchange of the first, {kinds[0]}", "cp-comm-type")
        return kinds[0] if kinds[0] in CONTEXTS else "p2p"
    return kinds[0] if kinds and kinds[0] in CONTEXTS else None


def _sharding(keys: Keys) -> dict[str, OptionValue]:
    strategy = keys.word("data-parallel-sharding-strategy")
    is_own = keys.flag("use-megatron-fsdp", "use-custom-fsdp")
    is_fsdp = is_own or keys.flag("use-torch-fsdp2", "fsdp")
    if keys.tool == "megatron":  # recipes of NeMo and Megatron-Bridge state the rest
        if is_own and not strategy:
            keys.assume("no sharding: --data-parallel-sharding-strategy is no_shard, Megatron's default")
        strategy = (strategy or "no_shard") if is_own else ""
    is_distributed = keys.flag("use-distributed-optimizer") or keys.word("optimizer") == "dist_muon"
    copies = keys.number("num-distributed-optimizer-instances") or 1
    kind = TABLES["shardings"].get(strategy, "fsdp" if is_fsdp else "zero-1" if is_distributed else "none")
    if copies == 1 or kind == "none":
        return {"sharding": kind}
    return {"sharding": "hybrid-fsdp" if kind in ("zero-3", "fsdp") else kind, "replicate": copies}


def _recompute(keys: Keys) -> str | None:
    kind = keys.word("recompute-granularity", "activations-checkpoint-granularity")
    method = keys.word("recompute-method", "activations-checkpoint-method")
    names = ("recompute-num-layers", "activations-checkpoint-num-layers", "checkpoint-num-layers")
    layers = keys.size(*names, least=0)
    modules = keys.raw("recompute-modules")
    if keys.flag("recompute-activations"):
        kind = "selective"
    if keys.flag("checkpoint-activations"):  # before 2022
        kind, method = "full", method or "uniform"
    if keys.flag("moe-layer-recompute") and not kind:
        kind, modules = "selective", ["moe"]
    if kind == "full" and method == "block" and layers is not None:
        return f"block:{layers}" if layers else "none"
    if kind == "full" and method == "uniform" and (layers or 1) > 1:
        keys.report(f"an input is saved for every layer, not for every {layers} layers", *names)
    if kind == "selective" and modules:
        words = [*map(str, modules)] if isinstance(modules, list) else str(modules).replace(",", " ").split()
        known = [MODULES[word] for word in words if word in MODULES]
        if unknown := [word for word in words if word not in MODULES]:
            keys.report(f"{', '.join(unknown)}: predicted as saved, not recomputed", "recompute-modules")
        return f"selective:{','.join(known)}" if known else "none" if unknown else "selective"
    if kind != "full":
        keys.report_without_effect(*names, "recompute-method", "activations-checkpoint-method")
    if kind != "selective":
        keys.report_without_effect("recompute-modules")
    if kind not in ("full", "selective", *NO):
        keys.report("predicted without recomputation", "recompute-granularity", "activations-checkpoint-granularity")
    return kind if kind in ("full", "selective") else None


def _overlap(keys: Keys, tp: int, pp: int) -> str:
    flags = {
        "gradients": keys.flag("overlap-grad-reduce", "overlap-grad-sync"),
        "parameters": keys.flag("overlap-param-gather", "overlap-param-sync", "use-torch-fsdp2"),
        "tensor": keys.flag("tp-comm-overlap", "ub-tp-comm-overlap") and tp > 1,
        # Input gradients are reduced while weight gradients are computed unless that is switched off.
        "tensor-gradients": tp > 1 and not keys.flag("no-async-tensor-model-parallel-allreduce"),
        "transfers": keys.flag("overlap-p2p-communication", "overlap-p2p-comm") is not False
        and not keys.flag("no-overlap-p2p-communication")
        and pp > 1,
        "experts": keys.flag("overlap-moe-expert-parallel-comm"),
    }
    return ",".join(name for name, on in flags.items() if on) or "none"


def _format(text: str) -> str:
    """Return the format that an argument (fp8) or a dtype of PyTorch (torch.uint8) names, or nothing."""
    word = text.lower().removeprefix("torch.")
    word = TABLES["formats"].get(word, word)
    return word if word in FORMATS else ""


def _dispatcher(keys: Keys, has_experts: bool) -> str | None:
    """Return how tokens reach their experts: the flex dispatcher (DeepEP) sends them once for each node."""
    kind = keys.word("moe-token-dispatcher-type")
    keys.raw("moe-enable-deepep")
    backend = keys.word("moe-flex-dispatcher-backend")
    if not has_experts:
        return None
    if kind == "flex":
        return "hybridep" if backend == "hybridep" else "deepep"
    if kind not in ("alltoall", "allgather", *NO):
        keys.report("predicted with the default dispatcher", "moe-token-dispatcher-type")
    return kind if kind in ("alltoall", "allgather") else None


def _deferred_gradients(keys: Keys, pp: int) -> int | None:
    on, limit = keys.flag("defer-embedding-wgrad-compute"), keys.number("wgrad-deferral-limit")
    if not on or pp == 1:
        keys.report_without_effect("defer-embedding-wgrad-compute", "wgrad-deferral-limit")
        return None
    if not limit:
        keys.report(
            "the output projection's weight gradient is predicted with each micro-batch: give "
            "--deferred-gradients N, the micro-batches that wait",
            "defer-embedding-wgrad-compute",
        )
    return limit or None


def _execution(keys: Keys, has_experts: bool) -> str | None:
    """Return how kernels are launched; routed experts are captured only by a graph of the full iteration."""
    kind = keys.word("cuda-graph-impl")
    on = keys.flag("enable-cuda-graph", "external-cuda-graph")
    scope = keys.word("cuda-graph-scope")
    if not on and kind in ("", "none"):
        return None if on is None and not kind else "eager"
    if "full_iteration" in scope or scope in ("", "full", "[]"):
        return "partial-graphs" if has_experts and "iteration" not in scope else "graphs"
    if has_experts:
        return "partial-graphs"
    if "mlp" not in scope:
        keys.report("predicted as if complete layers were captured", "cuda-graph-scope")
    return "graphs"


def _optimizer(keys: Keys) -> str | None:
    name = keys.word("optimizer")
    has_momentum = keys.share("sgd-momentum", "optim.momentum") != 0
    words = {"sgd": "sgd-momentum" if has_momentum else "sgd", "muon": "muon", "dist_muon": "muon"}
    kind = {**words, "adafactor": "adafactor"}.get(name)  # of NeMo
    if kind is None and name and "adam" not in name:
        keys.report("predicted as AdamW", "optimizer")
    moments = [keys.word(f"exp-avg{part}-dtype") for part in ("", "-sq")]
    formats = [_format(word) or "fp32" for word in moments]
    if not any(moments):
        return kind
    if formats[0] != formats[1] or kind is not None:
        wide = min(formats, key=FORMATS.index)
        why = f"both moments are predicted in {wide if kind is None else 'fp32'}"
        keys.report(why, "exp-avg-dtype", "exp-avg-sq-dtype")
        return kind or f"adamw:{wide}"
    return f"adamw:{formats[0]}"
