"""Ten searches as a lead would ask them: ``python -m benchmarks.ten_searches [WORD ...]``.

For each: the CPU seconds of the whole program until its first row, until the first row whose step is within 3 % of the
final best, and until its answer; whether ranks are distinct families; the smallest share of memory that a row leaves
free; and which configurations of rank 1 read back to the same step, each with the framework of its tool (in brackets:
the tool or its framework has no such layout, and says so). Megatron-LM's are also parsed by its own options
(tests/megatron_parser.py). WORD: only searches with it.
"""

import json
import shlex
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.streamed import run_search
from stepcast.cli.main import main
from stepcast.outputs.configs import WRITERS
from tests.megatron_parser import failed_checks, parse_script
from tests.questions.test_emitting import FRAMEWORKS, SAME

SEARCHES = (
    "llama-3.1-8b --cluster dgx-h100 --gpus 16 --global-batch 32 --seq 8192",
    "llama-3.1-70b --cluster dgx-h100 --gpus 64 --global-batch 256",
    "llama-3.1-70b --cluster dgx-h100 --gpus 1024 --global-batch 1024 --seq 8192",
    "llama-3.1-405b --cluster dgx-h100 --gpus 512 --global-batch 256 --seq 8192 --precision fp8",
    "gpt3-175b --cluster dgx-a100 --gpus 1024 --global-batch 1536",
    "deepseek-v3 --cluster dgx-h100 --gpus 256 --global-batch 2048",
    "mixtral-8x7b --cluster dgx-h100 --gpus 64 --global-batch 256 --framework nemo",
    "qwen3-30b-a3b --cluster dgx-b200 --gpus 32 --global-batch 256",
    "llama-3.1-8b --cluster dgx-h100 --gpus 64 --global-batch 128 --seq 8192 --framework torchtitan",
    "llama-3.1-8b --cluster dgx-h100 --gpus 16 --global-batch 64 --framework deepspeed-transformers",
)
FAMILY = ("gpus", "tp", "cp", "ep", "pp")


def run_json(words: list[str]) -> tuple[int, dict[str, Any]]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(StringIO()):
        status = main([*words, "--json"])
    return status, json.loads(out.getvalue()) if status == 0 else {}


def emitted(command: str, gpus: int) -> str:
    """Return the tools whose configuration of a row's layout reads back to the same bits, and those that lack it."""
    words, results = shlex.split(command)[1:], []
    cluster, framework = words[words.index("--cluster") + 1], words.index("--framework") + 1
    for tool, (ending, _) in WRITERS.items():
        words[framework] = FRAMEWORKS[tool]
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / f"run{ending}")
            status, wanted = run_json([*words, "--emit", f"{tool}={file}"])
            if status:
                results.append(f"({tool})")
                continue
            again = ["predict", "--config", file, "--cluster", cluster, *wanted["emitted"]["remaining"]]
            read = run_json(again)[1]
            same = all(read.get(name) == wanted[name] for name in SAME)
            text = wanted["emitted"]["text"]
            failed = [*failed_checks(parse_script(text), gpus, text)] if tool == "megatron" else []
            results.append(tool if same and not failed else f"{tool} NOT ({', '.join(failed) or 'other bits'})")
    return ", ".join(results)


def run() -> None:
    print("| search | first row | within 3 % | answer | rank 1 | families | least free | emitted, read back |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for words in SEARCHES:
        if not all(word in words for word in sys.argv[1:]):
            continue
        search = run_search(words)
        answer, rows = search.answer, search.answer["rows"]
        families = len({tuple(row[name] for name in FAMILY) for row in rows})
        free = min(row["free_bytes"] for row in rows) / answer["gpu_bytes"]
        best = rows[0]
        layout = ", ".join(f"{name} {best[name]}" for name in ("tp", "cp", "ep", "pp", "vpp") if best[name] > 1)
        cells = [words, *(f"{used_s:.1f} s" for used_s in search[:3]), f"{best['step_s']:.2f} s: {layout or 'dp'}"]
        cells += [f"{families} of {len(rows)}", f"{100 * free:.1f} %", emitted(best["command"], best["gpus"])]
        print("|", " | ".join(cells), "|", flush=True)
        print(f"    {best['command']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
