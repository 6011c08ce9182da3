"""Random command lines: good ones of every verb, with options of that verb added, dropped and given odd values."""

import argparse
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from stepcast.cli.main import VERBS, build_parser

PREDICT = ("predict", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16")
# Of few candidates, so that each takes little.
SMALL = ("pp=1", "cp=1", "ep=1", "micro-batch=1", "recompute=none", "sharding=zero-1")
SEARCH = ("search", "--cluster", "dgx-h100", "--global-batch", "16", *(f"--fix={choice}" for choice in SMALL))
GOOD: tuple[tuple[str, ...], ...] = (
    PREDICT,
    (*PREDICT, "--tp", "4", "--pp", "2", "--global-batch", "32"),
    ("predict", "--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "16", "--ep", "8"),
    ("predict", "--model", "llama3-8b", "--cluster", "gb200-nvl72", "--gpus", "8", "--framework", "torchtitan"),
    ("predict", "--model", "config.json", "--cluster", "cluster.toml", "--gpus", "8", "--framework", "framework.toml"),
    ("simulate", "w.txt", "--cluster", "dgx-h100"),
    ("simulate", "w.txt", "--engine", "simai"),
    ("simulate", "t.tsv", "--cluster", "dgx-h100", "--gpus", "8"),
    ("simulate", "c.et", "--cluster", "dgx-h100", "--gpus", "8"),
    ("simulate", "w.txt", "--cluster", "dgx-h100", "--schedule", "s.sched"),
    ("analyze", "benchmark-data-7.txt"),
    ("analyze", "k.json"),
    ("analyze", "log.txt"),
    ("replay", "benchmark-data-7.txt", "--what-if", "tp=2x"),
    ("replay", "k.json", "--what-if", "compute=0.5x"),
    ("compare", "benchmark-data-7.txt", "k.json"),
    ("convert", "w.txt", "out.json", "--to", "json"),
    ("convert", "t.tsv", "out.et", "--to", "chakra"),
    ("convert", "k.json", "out.json", "--to", "perfetto"),
    ("collective", "all-reduce", "--size", "1GB", "--ranks", "16", "--cluster", "dgx-h100"),
    ("op", "matmul", "--m", "64", "--n", "64", "--k", "64", "--gpu", "h100"),
    ("op", "attention", "--seq", "1024", "--heads", "8", "--head-dim", "64", "--gpu", "h200"),
    ("calibrate", "o.csv", "--gpu", "h200"),
    ("calibrate", "benchmark-data-7.txt", "--gpu", "a100", "--model", "llama3-8b"),
    (*SEARCH, "--model", "llama3-8b-l2", "--gpus", "8"),
    (*SEARCH, "--model", "mixtral-8x7b-l2", "--gpus", "4..8", "--objective", "cost", "--top", "2"),
    ("plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--tokens", "1T"),
    ("plan", "--gpus", "1024", "--step-s", "10", "--steps", "1000", "--failures", "none"),
    ("validate", "--set", "published", "--data", "o.csv"),
    ("show", "w.txt"),
    ("show", "cluster.toml"),
    ("show", "calibration.toml"),
    ("show", "captured.json"),
    ("predict", "--captured", "captured.json", "--gpu", "h100"),
    ("predict", "saved.toml"),
    ("predict", "--config", "run.sh", "--cluster", "dgx-h100", "--gpus", "64", "--model", "llama3-8b"),
    ("predict", "run.yaml", "--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3-8b"),
    ("predict", "tune.yaml", "--cluster", "dgx-h100", "--gpus", "8"),
    ("predict", "--config", "tune.py", "--cluster", "dgx-h100", "--gpus", "8"),
    ("generate", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8"),
    ("generate", "qwen3-0.6b", "--cluster", "dgx-h100", "--gpus", "1", "--response-length", "lengths.txt"),
    ("rl", "qwen3-0.6b", "--cluster", "dgx-h100", "--gpus", "8"),
    ("rl", "--config", "rl.sh", "--cluster", "dgx-h100"),
    ("rl", "--config", "rl.yaml", "--cluster", "dgx-h100"),
    ("watch", "m.log", "--once"),
    ("gate", "m.log", "--baseline", "m.log"),
    ("gate", "m.log", "--baseline", "baseline.json"),
    ("gate", "m.log", "--history", "h.sqlite"),
    ("analyze", "spans.json"),
    ("analyze", "r.csv"),
    ("analyze", "m.log"),
    ("analyze", "g.csv"),
    ("analyze", "fr.json"),
    ("analyze", "report.sqlite"),
    ("network", "w.txt", "--cluster", "dgx-h100"),
    ("network", "--model", "llama3-8b-l2", "--cluster", "dgx-h100", "--gpus", "16"),
    ("sweep", "sweep.toml", "--dry-run"),
    ("sweep", "status", "answers"),
    ("sweep", "show", "answers"),
    ("sweep", "export", "answers", "--to", "csv", "--to-file", "rows.csv"),
    ("capture", "config.json"),
    ("run", "w.txt"),
    ("record", "-o", "recorded", "--", "true"),
    ("profile", "-o", "mine.toml"),
    ("demo", "-o", "shown"),
    ("list", "clusters"),
    ("list", "formats"),
    ("completion", "bash"),
)
FILES = (
    "w.txt", "t.tsv", "o.csv", "benchmark-data-7.txt", "n.log", "log.txt", "k.json", "config.json", "c.et",
    "cluster.toml", "framework.toml", "calibration.toml", "s.sched", "captured.json", "m.log",
    "g.csv", "fr.json", "report.sqlite", "sweep.toml", "saved.toml", "run.sh", "run.yaml", "answers", "lengths.txt", "rl.sh",
    "rl.yaml", "spans.json", "r.csv", "baseline.json", "h.sqlite", "tune.yaml", "tune.py", "load.txt", "none.txt", ".", "/dev/null", "/dev/zero",
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "3", "4", "7", "8", "16", "32", "64", "100", "128", "1000", "4096", "-1", "0.5", "1.5", "1e-9",
    "1e300", "1e-320", "nan", "inf", "-inf", "x", "", "9" * 30, "9" * 5000, "1e3", "0x10", "1_0", "٣", "1,2", "2x",
)  # fmt: skip
NAMES = (
    "llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "llama3-8b-l2", "mine:layers=2,hidden=64", "dgx-h100",
    "dgx-a100", "gb200-nvl72", "generic:gpu=h200,node.gpus=4", "h100", "a100", "pytorch", "torchtitan", "nemo",
    "adamw", "adamw:bf16", "muon", "full", "selective", "block:2", "selective:mlp", "gradients,tensor", "none",
)  # fmt: skip
PAIRS = (
    "tp=2x", "dp=2", "0=2", "3=1.5", "gpu=h200", "node.gpus=4", "node.nics=0", "node.nics=1e9", "compute=0.5x",
    "network.oversubscription=4", "ep=0", "tp=", "=1", "=", "a=b=c", "node.gpus=[1", "gpu.memory=1 GB", "1=nan",
)  # fmt: skip


@cache
def options(verb: str) -> tuple[argparse.Action, ...]:
    """The options that *verb* knows."""
    chosen = build_parser([entry for entry in VERBS if entry.name == verb])
    sub: Any = next(action for action in chosen._actions if isinstance(action, argparse._SubParsersAction))
    return tuple(action for action in sub.choices[verb]._actions if action.option_strings and action.dest != "help")


def command(seed: int, number: int) -> tuple[str, ...]:
    """Command line *number* of *seed*."""
    random = Random(f"{seed}/commands/{number}")
    words = list(random.choice(GOOD))
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 5)) if options(words[0]) else 0):
        action = random.choice(options(words[0]))
        words.append(random.choice(action.option_strings))
        if action.nargs != 0:
            words += _values(action, random)
    match random.randrange(12):
        case 0:  # a word goes
            del words[random.randrange(1, len(words))]
        case 1:  # a word becomes another
            words[random.randrange(1, len(words))] = _word(random)
        case 2:  # a word more
            words.insert(random.randrange(1, len(words) + 1), _word(random))
    if words[0] == "watch" and "--once" not in words:
        words.append("--once")  # it follows the log for ever otherwise
    return tuple(words)


def _values(action: argparse.Action, random: Random) -> Sequence[str]:
    if action.choices and random.random() < 0.9:
        return [random.choice(list(map(str, action.choices)))]
    if action.type is not None and random.random() < 0.9:
        return [random.choice(NUMBERS)]
    return [_word(random)]


def _word(random: Random) -> str:
    return random.choice(random.choice((FILES, NUMBERS, NAMES, PAIRS)))
