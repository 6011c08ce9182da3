"""Words that people use for our options and their values: of other tools, longer or shorter, in any case.

``renamed`` turns them into ours before arguments are read; what is neither is left for the error to name.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

# Other names of options that take a value.
SAME: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size", "tensor-parallelism"),
    "pp": ("pipeline-parallel", "pipeline-parallel-size", "pipeline-model-parallel-size", "pipeline-stages"),
    "cp": ("context-parallel", "context-parallel-size", "ring-size"),
    "ep": ("expert-parallel", "expert-parallel-size", "expert-model-parallel-size"),
    "dp": ("data-parallel", "data-parallel-size", "data-parallelism", "replicas"),
    "vpp": ("virtual-pipeline", "virtual-pipeline-model-parallel-size", "model-chunks", "vp", "interleave"),
    "expert-tp": ("etp", "expert-tensor-parallel", "expert-tensor-parallel-size"),
    "gpus": ("num-gpus", "ngpus", "n-gpus", "gpu-count", "world-size", "nproc", "devices", "num-devices"),
    "nodes": ("nnodes", "num-nodes", "hosts", "servers"),
    "gpu": ("gpu-type", "gpu-name", "accelerator", "device"),
    "cluster": ("system", "machine", "hardware", "platform", "cluster-name"),
    "model": ("model-name", "arch", "architecture", "model-name-or-path", "hf-model", "model-id"),
    "seq": (
        "seq-length",
        "seq-len",
        "sequence-length",
        "seqlen",
        "sequence",
        "max-seq-len",
        "context-length",
        "ctx",
    ),
    "micro-batch": (
        "micro-batch-size",
        "mbs",
        "microbatch",
        "microbatch-size",
        "per-device-train-batch-size",
    ),
    "global-batch": ("global-batch-size", "gbs", "batch-size", "batch", "train-batch-size", "globalbatch"),
    "precision": ("dtype", "mixed-precision", "data-type", "compute-dtype", "number-format"),
    "sharding": (
        "zero",
        "zero-stage",
        "shard-states",
        "sharding-strategy",
        "data-parallel-sharding-strategy",
    ),
    "recompute": (
        "recompute-granularity",
        "activation-recompute",
        "activation-recomputation",
        "recomputation",
    ),
    "framework": ("software", "backend", "stack", "trainer", "library"),
    "schedule": ("pipeline-schedule", "pp-schedule"),
    "optimizer": ("optim",),
    "gradients": ("grad-dtype", "gradient-dtype", "grad-reduce-dtype"),
    "lora-rank": ("lora", "lora-r", "lora-dim"),
    "tokens": ("train-tokens", "total-tokens", "num-tokens", "training-tokens"),
    "price": ("cost-per-gpu-hour", "gpu-price", "price-per-gpu-hour", "gpu-hour-price", "usd-per-gpu-hour"),
    "trace": ("timeline", "perfetto", "chrome-trace"),
    "output": ("out", "outfile", "output-file"),
    "what-if": ("whatif",),
    "calibration": ("calibrate", "calib"),
    "set": ("override", "overrides"),
    "failures": ("failure-profile", "failure-model"),
    "checkpoint-every": ("checkpoint-interval", "save-interval"),
    "top": ("top-k", "limit", "best"),
    "objective": ("minimize", "optimize-for", "goal"),
    "data": ("data-dir", "rows"),
    "size": ("bytes", "message-size"),
    "ranks": ("nranks", "num-ranks"),
}
# Options that carry their value in their name.
MEANT: Mapping[str, tuple[str, str]] = {
    "fsdp": ("sharding", "fsdp"),
    "fsdp2": ("sharding", "fsdp"),
    "hsdp": ("sharding", "hybrid-fsdp"),
    "ddp": ("sharding", "none"),
    "zero1": ("sharding", "zero-1"),
    "zero2": ("sharding", "zero-2"),
    "zero3": ("sharding", "zero-3"),
    "zero-1": ("sharding", "zero-1"),
    "zero-2": ("sharding", "zero-2"),
    "zero-3": ("sharding", "zero-3"),
    "distributed-optimizer": ("sharding", "zero-1"),
    "use-distributed-optimizer": ("sharding", "zero-1"),
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
    "fp32": ("precision", "fp32"),
    "tf32": ("precision", "tf32"),
    "fp8": ("precision", "fp8"),
    "mxfp8": ("precision", "mxfp8"),
    "nvfp4": ("precision", "nvfp4"),
    "fp4": ("precision", "nvfp4"),
    "amp": ("precision", "autocast-bf16"),
    "activation-checkpointing": ("recompute", "full"),
    "gradient-checkpointing": ("recompute", "full"),
    "checkpoint-activations": ("recompute", "full"),
    "full-recompute": ("recompute", "full"),
    "recompute-activations": ("recompute", "selective"),
    "selective-recompute": ("recompute", "selective"),
    "compile": ("kernels", "compiled"),
    "torch-compile": ("kernels", "compiled"),
    "eager": ("execution", "eager"),
    "cuda-graphs": ("execution", "graphs"),
    "cpu-offload": ("offload", "optimizer"),
    "offload-optimizer": ("offload", "optimizer"),
    "interleaved": ("schedule", "interleaved"),
    "dualpipe": ("schedule", "dualpipe"),
}
SWITCHES: Mapping[str, str] = {
    "sp": "sequence-parallel",
    "use-flash-attn": "flash-attention",
    "flash-attn": "flash-attention",
    "memory": "explain-memory",
    "why-memory": "explain-memory",
    "check-fit": "require-fit",
    "must-fit": "require-fit",
    "fail-if-oom": "require-fit",
}
OTHER = {other: ours for ours, others in SAME.items() for other in others} | dict(SWITCHES)

# Verbs that are spelt in two ways.
SPELT: Mapping[str, str] = {"analyse": "analyze"}
# Verbs of other tools and of everyday speech.
VERBS: Mapping[str, str] = {
    "estimate": "predict",
    "forecast": "predict",
    "run-model": "predict",
    "optimize": "search",
    "optimise": "search",
    "tune": "search",
    "autotune": "search",
    "find": "search",
    "best": "search",
    "recommend": "search",
    "cost": "plan",
    "budget": "plan",
    "inspect": "show",
    "info": "show",
    "describe": "show",
    "cat": "show",
    "diff": "compare",
    "what-if": "replay",
    "whatif": "replay",
    "export": "convert",
    "accuracy": "validate",
    "verify": "validate",
    "measure": "profile",
    "benchmark": "profile",
    "ls": "list",
    "models": "list",
    "gpus": "list",
    "clusters": "list",
    "allreduce": "collective",
    "nccl": "collective",
    "matmul": "op",
    "gemm": "op",
    "example": "demo",
    "quickstart": "demo",
}


# Choices that 'search' makes; a value given to one is fixed.
SEARCHED = ("tp", "cp", "ep", "expert-tp", "pp", "vpp", "micro-batch", "schedule", "recompute", "sharding")
FIX = "--fix"


def renamed(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """*arguments* with other words for *options* replaced by those."""
    found: list[str] = []
    for at, word in enumerate(arguments):
        if word == "--":
            return [*found, *arguments[at:]]
        found += _renamed(word, options) if _is_option(word) and word not in options else [word]
    return _fixed(found) if FIX in options else found


def _fixed(arguments: Sequence[str]) -> list[str]:
    """``--tp 8`` as ``--fix tp=8``."""
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*SEARCHED, "precision"):
            found.append(word)
            continue
        value = value if equals else next(words, "")
        meant = READ[name](value) if name in READ else value
        found += [FIX, f"{name}={meant}"] if "," not in meant else ["--allow", f"{name}={meant}"]
    return found


def _is_option(word: str) -> bool:
    return len(word) > 2 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _renamed(word: str, options: Collection[str]) -> list[str]:
    name, equals, value = word.partition("=")
    plain = name.lstrip("-").lower().replace("_", "-")
    rest = [value] if equals else []
    if FIX in options:
        options = {*options, *(f"--{name}" for name in (*SEARCHED, "precision"))}
    if f"--{plain}" in options:
        return [f"--{plain}", *rest]
    if plain in OTHER and f"--{OTHER[plain]}" in options:
        return [f"--{OTHER[plain]}", *rest]
    if plain in MEANT and f"--{MEANT[plain][0]}" in options and not rest:
        ours, meant = MEANT[plain]
        return [f"--{ours}", meant]
    return [word]


def known_words(options: Collection[str]) -> list[str]:
    """Everything that could have been meant by a word that is nothing here."""
    others = {f"--{other}" for other, ours in OTHER.items() if f"--{ours}" in options}
    meant = {f"--{other}" for other, (ours, _) in MEANT.items() if f"--{ours}" in options}
    return [*options, *sorted(others | meant)]


# ---- values --------------------------------------------------------------------------------------------

PRECISIONS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "bf-16": "bf16",
    "brain-float": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "fp16-mixed": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
    "full": "fp32",
    "32": "fp32",
    "16": "fp16",
    "float8": "fp8",
    "e4m3": "fp8",
    "fp8-hybrid": "fp8",
    "hybrid": "fp8",
    "fp4": "nvfp4",
    "amp": "autocast-bf16",
    "autocast": "autocast-bf16",
}
SHARDINGS: Mapping[str, str] = {
    "fsdp2": "fsdp",
    "fsdp1": "fsdp",
    "full-shard": "fsdp",
    "shard-grad-op": "zero-2",
    "hybrid-shard": "hybrid-fsdp",
    "hsdp": "hybrid-fsdp",
    "no-shard": "none",
    "no": "none",
    "off": "none",
    "ddp": "none",
    "0": "none",
    "optim": "zero-1",
    "optim-grads": "zero-2",
    "optim-grads-params": "zero-3",
    "distributed-optimizer": "zero-1",
}
SCHEDULES: Mapping[str, str] = {
    "1f1b-interleaved": "interleaved",
    "interleaved-1f1b": "interleaved",
    "interleaved1f1b": "interleaved",
    "vpp": "interleaved",
    "zero-bubble": "zb-h1",
    "zb": "zb-h1",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "zbv": "zb-v",
    "zbvzerobubble": "zb-v",
    "dual-pipe": "dualpipe",
    "afab": "gpipe",
    "fill-drain": "gpipe",
}
RECOMPUTES: Mapping[str, str] = {
    **dict.fromkeys(("no", "off", "false", "never"), "none"),
    **dict.fromkeys(("yes", "on", "true", "all", "uniform"), "full"),
    **dict.fromkeys(("attention", "core-attn", "core_attn"), "selective"),
}
STAGE = re.compile(r"(?:zero|stage|zero-stage|z)?-?([123])")


def meaning(words: Mapping[str, str]) -> Callable[[str], str]:
    """The usual word for what is typed, as an argparse type; what is unknown stays, for the error to name."""

    def read(text: str) -> str:
        plain = text.strip().lower().replace("_", "-").replace(" ", "-")
        return words.get(plain, plain)

    read.__name__ = "word"
    return read


def sharding_word(text: str) -> str:
    """``ZeRO-3``, ``zero3``, ``stage 3`` and ``3`` are one."""
    plain = text.strip().lower().replace("_", "-").replace(" ", "-")
    stage = STAGE.fullmatch(plain)
    return f"zero-{stage[1]}" if stage else SHARDINGS.get(plain, plain)


def recompute_text(text: str) -> str:
    """Kinds in any letter case; what follows a colon is left as it is."""
    kind, colon, rest = text.strip().partition(":")
    plain = kind.lower()
    return RECOMPUTES.get(plain, plain) + colon + rest


READ: Mapping[str, Callable[[str], str]] = {
    "precision": meaning(PRECISIONS),
    "schedule": meaning(SCHEDULES),
    "sharding": sharding_word,
    "recompute": recompute_text,
}
