"""Whole searches, one worker each: ``python -m benchmarks.whole_searches [WORD ...]``.

For each: CPU seconds and peak memory of the command from its start to its answer, the number of candidates and how many
were simulated. Bars are seconds on a machine where ten million additions in Python take 0.57 s; they are scaled to this
one. WORD: only searches with it.

On a machine as fast as that (measured with other work on it, at 1.1 times the pace; bars in brackets): GPT-3 3.2 (4),
Mixtral 5.7 (12), Llama-405B 3.9 (6), gpt-oss-120b 6.4 (10), Qwen3-Next 7.3 (10), Llama-70B on 64 to 1,024 GPUs 7.0 s
(25), each below 0.3 GB; DeepSeek-V3 9 s (60), with --any-framework 31 s and 1.0 GB.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.predictions import additions

ADDITIONS_S = 0.57
SEARCHES = {
    "gpt3-175b --cluster dgx-a100 --gpus 512 --global-batch 1536 --seq 2048": 4,
    "mixtral-8x7b --cluster dgx-h100 --gpus 64 --global-batch 256": 12,
    "llama-3.1-405b --cluster dgx-h100 --gpus 16384 --global-batch 2048 --seq 8192": 6,
    "gpt-oss-120b --cluster dgx-h100 --gpus 64 --global-batch 256": 10,
    "qwen3-next-80b-a3b --cluster dgx-h100 --gpus 64 --global-batch 256": 10,
    "llama-3.1-70b --cluster dgx-h100 --gpus 64..1024 --global-batch 1024": 25,
    "deepseek-v3 --cluster dgx-h100 --gpus 2048 --global-batch 8192": 60,
}


def run() -> None:
    began = time.process_time()
    additions()
    scale = (time.process_time() - began) / ADDITIONS_S
    print(f"ten million additions take {scale:.2f} times as long as where the bars are from")
    for words, bar_s in SEARCHES.items():
        if sys.argv[1:] and not any(word in words for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            command = [sys.executable, "-m", "stepcast", "search", *words.split(), "--workers", "1", "--json"]
            began = time.monotonic()
            with answer.open("w") as file:
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
                _, status, usage = os.wait4(process.pid, 0)
            spent_s = usage.ru_utime + usage.ru_stime
            facts = json.loads(answer.read_text()) if status == 0 else {}
        counts = facts.get("counts", {})
        best = facts["rows"][0]["step_s"] if facts.get("rows") else None
        print(
            f"{words}: {spent_s:.1f} s CPU (bar {bar_s * scale:.1f}), {time.monotonic() - began:.0f} s clock, "
            f"{usage.ru_maxrss / 1e6:.2f} GB, status {status}, best {best}, {counts}",
            flush=True,
        )


if __name__ == "__main__":
    run()
