"""Write ``docs/json.md``: the JSON of every verb, described from answers to the commands below.

``tests/results/test_json.py`` compares fresh answers with the page: no key may be missing, new or of another type.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.pages.test_pages import EXAMPLES, MEGATRON, PREDICT, VERBS
from tests.shared import ROOT

PAGE = ROOT / "docs" / "json.md"
ROWS = (ROOT / "tests" / "data" / "h200" / "ops.csv").read_text().splitlines(keepends=True)[:30]
SHOWN = ("simai-gpt-13b.txt", "megatron-rank7.txt", "optimus-llama-1b.txt", "nccl-one-nic.txt", "operators-h200.csv")
SEARCHES = (
    [*VERBS["search"], "--tokens", "1e9", "--price", "2", "--explain", "--emit", "megatron"],
    ["search", "--model", "llama-3.1-70b", "--cluster", "dgx-h100", "--gpus", "4", "--global-batch", "8"],
    [
        "search",
        "--model",
        "llama-3.1-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--global-batch",
        "64",
        "--seq",
        "8192",
    ],
)
# Verb -> what its answer is, and commands that together have every key.
COMMANDS: Mapping[str, tuple[str, Sequence[Sequence[str]]]] = {
    "predict, simulate": (
        "A simulated step.",
        (
            [*PREDICT, "--jitter", "0.1", "--runs", "5", "--critical-path", "--tokens", "1e9", "--price", "2"],
            [*PREDICT, "--emit", "megatron", "--trace", "trace.json"],
            ["predict", "--model", "llama-3.1-70b", *PREDICT[3:]],
            VERBS["simulate"],
        ),
    ),
    "search": ("Ranked strategies.", SEARCHES),
    "plan": (
        "A training run from its first step to its last.",
        (VERBS["plan"], ["plan", *PREDICT[1:], "--tokens", "1e11", "--runs", "20", "--spares", "2"]),
    ),
    "predict, search or plan with several values": (
        "An answer for each of several clusters, frameworks or numbers of GPUs; `failed`: why one has none.",
        (VERBS["alternatives"],),
    ),
    "generate": (
        "Serving at a concurrency, or a batch of responses.",
        (VERBS["generate"], ["generate", "llama-3.1-8b", "--cluster", "dgx-h100", "--concurrency", "32"]),
    ),
    "rl": ("A step of RL post-training.", (VERBS["rl"], VERBS["rl"][:6])),
    "rl --search": ("The best uses of a number of GPUs.", (VERBS["rl search"],)),
    "network": ("A step whose communication shares links.", (VERBS["network"],)),
    "analyze a Megatron-LM trace": ("A measured step.", (VERBS["analyze a rank"],)),
    "analyze a PyTorch profile": ("A profiled step.", (VERBS["analyze a profile"],)),
    "analyze an OptimusPrime log": ("A logged run.", (VERBS["analyze a log"],)),
    "analyze a sweep": ("Measured collectives against a cluster.", (VERBS["analyze a sweep"],)),
    "replay": ("A replayed step, as it was and changed.", (VERBS["replay"], VERBS["replay changed"])),
    "compare": ("Two accounts of a step.", (VERBS["compare"],)),
    "gate": ("The verdict on a run.", (VERBS["gate"],)),
    "op": ("The estimated time of an operator.", (VERBS["op"],)),
    "op --sweep": ("The same for many sizes.", (VERBS["op sweep"],)),
    "collective": ("The estimated time of a collective.", (VERBS["collective"],)),
    "collective --sweep": ("The same for many sizes.", (VERBS["collective sweep"],)),
    "collective --engine fluid": ("A collective as flows over links.", (VERBS["collective on links"],)),
    "show": ("A document by its `kind`.", [["show", str(EXAMPLES / name)] for name in SHOWN]),
    "list": ("The entries of one catalogue.", [["list", name] for name in ("gpus", "clusters", "models", "failures")]),
    "validate": ("The errors of every measurement set.", (VERBS["validate"],)),
    "calibrate": (
        "Fitted constants, with errors before and after, and on points left out of the fit.",
        (VERBS["calibrate"], ["calibrate", MEGATRON, "--gpu", "a800-sxm-80gb"]),
    ),
}
# Objects whose keys are data: names of parts, ranks, options.
OPEN = (
    *("run", "config", "configuration", "configuration_basis", "facts", "notes", "sources", "failed", "idle_share"),
    *("constants", "classes", "unidentified", "titles", "spread", "groups", "selections", "figures", "skip_reasons"),
    *("ops", "users", "left_out", "sets", "shares", "training_layout", "tokens", "size", "operations", "worst"),
    *("shared_operations", "process_groups", "stage_of_rank"),
)
WORDS = {str: "text", bool: "boolean", int: "whole number", float: "number", type(None): "null"}
Rows = dict[str, tuple[set[str], bool]]  # by path: the words of its values, and whether it may be absent


def answer(words: Sequence[str], folder: str) -> object:
    """Return the JSON of a command that runs in *folder*."""
    Path(folder, "rows").mkdir(exist_ok=True)
    Path(folder, "rows", "ops.csv").write_text("".join(ROWS))
    command = [sys.executable, "-m", "stepcast", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def _walk(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the word of every value; ``rows[].step_s`` is in a list, ``breakdown_s.*`` of any name."""
    if isinstance(value, dict):
        name = path.rpartition(".")[2].removesuffix("[]")
        is_open = name in OPEN or name.endswith("_s") or not all(map(str.isidentifier, value))
        yield path, "object"
        for key, item in value.items():
            yield from _walk(item, f"{path}.{'*' if is_open and path else key}")
    elif isinstance(value, list):
        yield path, "list"
        for item in value:
            yield from _walk(item, f"{path}[]")
    else:
        yield path, WORDS[type(value)]


def describe(answers: Sequence[object]) -> Rows:
    """Return what the answers of one verb hold; a key is optional where an object lacks it."""
    words: dict[str, set[str]] = defaultdict(set)
    objects: Counter[str] = Counter()
    present: Counter[str] = Counter()
    for value in answers:
        seen = list(_walk(value, ""))
        for path, word in seen:
            words[path].add(word)
            objects[path] += word == "object"
            present[path] += 1
    return {
        path: (kinds, not path.endswith(("[]", "*")) and present[path] < objects[path.rpartition(".")[0]])
        for path, kinds in words.items()
        if path and not (path.endswith("[]") and kinds == {"object"})
    }


def find_mismatches(rows: Rows, described: Rows) -> list[str]:
    """Return the keys of an answer that its description lacks or types otherwise, and those that are missing."""
    problems = [f"{path}: not described" for path in rows if path not in described]
    parents = {path.rpartition(".")[0] for path in rows}
    for path, (kinds, may_lack) in described.items():
        words, is_lacking = rows.get(path, (set(), not path.endswith(("*", "[]"))))
        allowed = kinds | ({"whole number"} if "number" in kinds else set())
        problems += [f"{path}: {word}, described as {' or '.join(sorted(kinds))}" for word in sorted(words - allowed)]
        if is_lacking and not may_lack and path.rpartition(".")[0] in parents:
            problems.append(f"{path}: missing")
    return problems


def read_page(text: str) -> dict[str, Rows]:
    """Return the description of each verb on the page."""
    verbs: dict[str, Rows] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            rows = verbs[line[3:]] = {}
        elif line.startswith("| `"):
            name, words = line.strip("| ").split(" | ")
            path = name.strip("`")
            rows["." + path.removesuffix("?")] = set(words.split(" or ")), path.endswith("?")
    return verbs


def write_page() -> str:
    lines = [
        "# What is in the JSON?",
        "",
        "Every verb prints one JSON object with `--json`: the answer itself, from which its text and page are made.",
        "This page is made from answers (`python -m tools.describe_json`); a test compares fresh answers with it.",
        "Names end in their unit: `_s` seconds, `_bytes` bytes, `_per_s` per second; shares and errors are fractions.",
        "`rows[].step_s` is in each object of a list, `breakdown_s.*` has names that depend on the question.",
        "Keys marked `?` may be absent.",
        "",
        "```bash",
        "stepcast predict --model llama-3.1-8b --cluster dgx-h100 --gpus 8 --json | jq .step_s",
        "```",
        "",
    ]
    for verb, (summary, commands) in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = describe([answer(words, folder) for words in commands])
        lines += [f"## {verb}", "", summary, "", "| key | value |", "|---|---|"]
        for path, (kinds, optional) in rows.items():
            shown = kinds - {"whole number"} if "number" in kinds else kinds
            lines.append(f"| `{path[1:]}{'?' if optional else ''}` | {' or '.join(sorted(shown))} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
