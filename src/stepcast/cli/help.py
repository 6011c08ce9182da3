"""What each verb is for, in a paragraph and two commands: for its ``--help`` and ``stepcast help VERB``."""

from dataclasses import dataclass

LLAMA = "--model llama-3.1-8b --cluster dgx-h100"


@dataclass(frozen=True, slots=True)
class Page:
    about: str
    examples: tuple[str, str]
    page: str


PAGES: dict[str, Page] = {
    "show": Page(
        "Says what is in a file of any known format, or in an entry of the catalogue. Files are recognised "
        "by their content, not by their name.",
        ("show examples/simai-llama-405b.txt", "show dgx-h100"),
        "command-line",
    ),
    "predict": Page(
        "Takes a model, a place to run and a strategy, and says how long a training step takes, where the "
        "time goes and whether it fits. What is left out is the framework's usual choice, and said.",
        (
            "predict llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 8 --pp 2",
            "predict llama-3.1-8b --gpu h200 --framework pytorch",
        ),
        "predict",
    ),
    "search": Page(
        "Finds the best strategies of a model on so many GPUs, proves that no other is better, and says what "
        "binds. Choices that are given, as --tp 8, stay as they are.",
        (
            f"search {LLAMA} --gpus 16 --gbs 128",
            "search --model llama-3.1-8b --cluster h100 --gpus 8 --gbs 64 --tp 2",
        ),
        "search",
    ),
    "sweep": Page(
        "Asks for every point of a spec, models x clusters x sizes x strategies, into one store that no kill "
        "or full disk tears; the same command goes on where it stopped.",
        (
            "sweep examples/sweeps/small.toml --dry-run",
            "sweep examples/sweeps/small.toml -o answers",
        ),
        "sweep",
    ),
    "plan": Page(
        "Days, GPU-hours, cost and energy of a whole run, with failures, checkpoints and repairs.",
        (
            f"plan {LLAMA} --gpus 64 --tokens 1T",
            "plan --step-s 12 --gpus 1024 --steps 100000 --failures none",
        ),
        "plan",
    ),
    "network": Page(
        "Runs a step whose collectives and messages share NICs, rails and spines as they come, and says how "
        "full each tier is over time, which links are hottest, who shares them, and what that costs.",
        (
            "network llama-3.1-8b --cluster dgx-h100 --gpus 64 --html links.html",
            "network examples/simai-gpt-13b.txt --cluster dgx-h100",
        ),
        "network",
    ),
    "simulate": Page(
        "Runs a workload file (SimAI text, operator table, Chakra) on a cluster.",
        (
            "simulate examples/simai-llama-405b.txt --cluster dgx-h100",
            "simulate examples/simai-gpt-13b.txt --cluster dgx-a100 --gantt",
        ),
        "simulate",
    ),
    "analyze": Page(
        "Says where the time of a measured run went: waits, stragglers, bubble, what was hidden.",
        (
            "analyze examples/kineto-llama-1b.json.gz",
            "analyze examples/nccl-32-h100.txt --cluster dgx-h100",
        ),
        "analyze",
    ),
    "replay": Page(
        "Runs a traced Megatron-LM run again under changed conditions: other links, healthy ranks, other "
        "micro-batches.",
        ("replay runs/gpt --what-if rank.7=healthy", "replay runs/gpt --what-if bandwidth.tp=2x"),
        "analyze",
    ),
    "compare": Page(
        "Puts two accounts of a step side by side: predicted beside measured, or measured beside measured.",
        ("compare predicted.json runs/gpt", "compare before.json after.json --json"),
        "analyze",
    ),
    "convert": Page(
        "Writes a file in another format: simai, optable, chakra, perfetto or json.",
        (
            "convert examples/simai-gpt-13b.txt gpt.et --to chakra",
            "convert examples/megatron-rank7.txt rank7.json --to perfetto",
        ),
        "command-line",
    ),
    "collective": Page(
        "What one collective costs on a cluster: time, algorithm bandwidth, bus bandwidth.",
        (
            "collective all-reduce --ranks 64 --size 1GiB --cluster dgx-h100",
            "collective all-to-all --ranks 8 --size 64MB --cluster h200",
        ),
        "collectives",
    ),
    "op": Page(
        "What one operator costs on a GPU: time, what bounds it, where the number comes from.",
        (
            "op matmul --m 8192 --n 8192 --k 8192 --gpu h100",
            "op attention --seq 8192 --heads 32 --head-dim 128 --gpu h200",
        ),
        "compute",
    ),
    "calibrate": Page(
        "Fits named constants to your own runs, operators or collectives, and checks them on what was "
        "left out.",
        (
            "calibrate examples/operators-h200.csv --gpu h200 -o my-h200.toml",
            "calibrate examples/nccl-32-h100.txt --cluster dgx-h100 -o mine.toml",
        ),
        "calibrate",
    ),
    "validate": Page(
        "The accuracy scoreboard: predictions beside measurements, set by set, with the worst rows.",
        ("validate --set h200", "validate --set published -o rows.csv"),
        "validate",
    ),
    "profile": Page(
        "Measures this machine's GPU with PyTorch and writes a calibration of it.",
        ("profile -o my-gpu.toml", "profile --quick -o my-gpu.toml"),
        "profile",
    ),
    "capture": Page(
        "Traces one training step of any PyTorch model without a GPU, and prices it on any.",
        ("capture config.json --predict --gpu h200", "capture my_model:make -o mine.json"),
        "capture",
    ),
    "record": Page(
        "Writes down what a real job does, per rank, for analyze.",
        ("record -o run -- torchrun --nproc-per-node 8 train.py", "record -o run -- python train.py"),
        "record",
    ),
    "run": Page(
        "Executes a workload for real over torch.distributed, beside what was predicted of it.",
        ("run examples/simai-gpt-13b.txt --cluster dgx-h100 --rank 0", f"run {LLAMA} --gpus 8 --rank 0"),
        "run",
    ),
    "list": Page(
        "What stepcast knows: formats, GPUs, clusters, models, frameworks, failure profiles.",
        ("list gpus", "list models --json"),
        "models",
    ),
    "demo": Page(
        "A first look: reads the shipped examples, forecasts one of them and writes traces to open.",
        ("demo", "demo --output first-look"),
        "tutorial",
    ),
}


def epilog(verb: str) -> str | None:
    """Two commands to begin with; nothing for a verb that has no page here."""
    if verb not in PAGES:
        return None
    lines = [f"  stepcast {command}" for command in PAGES[verb].examples]
    return "\n".join(["examples:", *lines])


def summary(verb: str, usual: str, width: int) -> str:
    """What ``stepcast help VERB`` prints."""
    from stepcast.report.text import wrap

    if verb not in PAGES:
        return f"{usual}\n\nAll options: stepcast {verb} --help"
    page = PAGES[verb]
    parts = ["\n".join(wrap(page.about, width)), epilog(verb) or ""]
    return "\n\n".join([*parts, f"All options: stepcast {verb} --help. The page: docs/{page.page}.md"])
