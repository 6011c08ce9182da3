"""Words that people use for our options and their values: of other tools, longer or shorter, in any case.

``renamed`` turns them into ours before arguments are read; what is neither is left for the error to name.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence


def _by_word(words: Mapping[str, str]) -> dict[str, str]:
    """Each of the words behind ours, which blanks separate, as the key of ours."""
    return {other: ours for ours, others in words.items() for other in others.split()}


# Other names of options.
OTHER = _by_word(
    {
        "tp": "tensor-parallel tensor-parallel-size tensor-model-parallel-size tensor-parallelism",
        "pp": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pipeline-stages",
        "cp": "context-parallel context-parallel-size ring-size",
        "ep": "expert-parallel expert-parallel-size expert-model-parallel-size",
        "dp": "data-parallel data-parallel-size data-parallelism replicas",
        "vpp": "virtual-pipeline virtual-pipeline-model-parallel-size model-chunks vp interleave",
        "expert-tp": "etp expert-tensor-parallel expert-tensor-parallel-size",
        "gpus": "num-gpus ngpus n-gpus gpu-count world-size nproc devices num-devices",
        "nodes": "nnodes num-nodes hosts servers",
        "gpu": "gpu-type gpu-name accelerator device",
        "cluster": "system machine hardware platform cluster-name",
        "model": "model-name arch architecture model-name-or-path hf-model model-id",
        "seq": "seq-length seq-len sequence-length seqlen sequence max-seq-len context-length ctx",
        "micro-batch": "micro-batch-size mbs microbatch microbatch-size per-device-train-batch-size",
        "global-batch": "global-batch-size gbs batch-size batch train-batch-size globalbatch",
        "precision": "dtype mixed-precision data-type compute-dtype number-format",
        "sharding": "zero zero-stage shard-states sharding-strategy data-parallel-sharding-strategy",
        "recompute": "recompute-granularity activation-recompute activation-recomputation recomputation",
        "framework": "software backend stack trainer library",
        "schedule": "pipeline-schedule pp-schedule",
        "optimizer": "optim",
        "gradients": "grad-dtype gradient-dtype grad-reduce-dtype",
        "lora-rank": "lora lora-r lora-dim",
        "tokens": "train-tokens total-tokens num-tokens training-tokens",
        "price": "cost-per-gpu-hour gpu-price price-per-gpu-hour gpu-hour-price usd-per-gpu-hour",
        "trace": "timeline perfetto chrome-trace",
        "output": "out outfile output-file",
        "what-if": "whatif",
        "calibration": "calibrate calib",
        "set": "override overrides",
        "failures": "failure-profile failure-model",
        "checkpoint-every": "checkpoint-interval save-interval",
        "top": "top-k limit best",
        "objective": "minimize optimize-for goal",
        "data": "data-dir rows",
        "size": "bytes message-size",
        "ranks": "nranks num-ranks",
        "sequence-parallel": "sp",
        "flash-attention": "use-flash-attn flash-attn",
        "explain-memory": "memory why-memory",
        "require-fit": "check-fit must-fit fail-if-oom",
    }
)
# Options that carry their value in their name.
MEANT = {
    other: (ours, value)
    for ours, values in {
        "sharding": {
            "fsdp": "fsdp fsdp2",
            "hybrid-fsdp": "hsdp",
            "none": "ddp",
            "zero-1": "zero1 zero-1 distributed-optimizer use-distributed-optimizer",
            "zero-2": "zero2 zero-2",
            "zero-3": "zero3 zero-3",
        },
        "precision": {
            "bf16": "bf16",
            "fp16": "fp16",
            "fp32": "fp32",
            "tf32": "tf32",
            "fp8": "fp8",
            "mxfp8": "mxfp8",
            "nvfp4": "nvfp4 fp4",
            "autocast-bf16": "amp",
        },
        "recompute": {
            "full": "activation-checkpointing gradient-checkpointing checkpoint-activations full-recompute",
            "selective": "recompute-activations selective-recompute",
        },
        "kernels": {"compiled": "compile torch-compile"},
        "execution": {"eager": "eager", "graphs": "cuda-graphs"},
        "offload": {"optimizer": "cpu-offload offload-optimizer"},
        "schedule": {"interleaved": "interleaved", "dualpipe": "dualpipe"},
    }.items()
    for other, value in _by_word(values).items()
}

# Verbs that are spelt in two ways.
SPELT: Mapping[str, str] = {"analyse": "analyze"}
# Verbs of other tools and of everyday speech.
VERBS: Mapping[str, str] = _by_word(
    {
        "predict": "estimate forecast run-model",
        "search": "optimize optimise tune autotune find best recommend",
        "plan": "cost budget",
        "show": "inspect info describe cat",
        "compare": "diff",
        "replay": "what-if whatif",
        "convert": "export",
        "validate": "accuracy verify",
        "profile": "measure benchmark",
        "list": "ls models gpus clusters",
        "collective": "allreduce nccl",
        "op": "matmul gemm",
        "demo": "example quickstart",
    }
)

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

PRECISIONS: Mapping[str, str] = _by_word(
    {
        "bf16": "bfloat16 bf-16 brain-float bf16-mixed",
        "fp16": "float16 fp16-mixed half 16",
        "fp32": "float32 float single full 32",
        "fp8": "float8 e4m3 fp8-hybrid hybrid",
        "nvfp4": "fp4",
        "autocast-bf16": "amp autocast",
    }
)
SHARDINGS: Mapping[str, str] = _by_word(
    {
        "fsdp": "fsdp2 fsdp1 full-shard",
        "zero-2": "shard-grad-op optim-grads",
        "hybrid-fsdp": "hybrid-shard hsdp",
        "none": "no-shard no off ddp 0",
        "zero-1": "optim distributed-optimizer",
        "zero-3": "optim-grads-params",
    }
)
SCHEDULES: Mapping[str, str] = _by_word(
    {
        "interleaved": "1f1b-interleaved interleaved-1f1b interleaved1f1b vpp",
        "zb-h1": "zero-bubble zb zbh1",
        "zb-h2": "zbh2",
        "zb-v": "zbv zbvzerobubble",
        "dualpipe": "dual-pipe",
        "gpipe": "afab fill-drain",
    }
)
RECOMPUTES: Mapping[str, str] = _by_word(
    {
        "none": "no off false never",
        "full": "yes on true all uniform",
        "selective": "attention core-attn core_attn",
    }
)
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
