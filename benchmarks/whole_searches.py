"""Whole searches, one worker each: ``python -m benchmarks.whole_searches [WORD ...]``.

For each: CPU seconds and peak memory of the command from its start to its answer, the CPU seconds until its first
answer and until the first whose step is within 3 % of the final best, the number of candidates and how many were
simulated. Bars are seconds on a machine where ten million additions in Python take 0.57 s; they are scaled to this
one. WORD: only searches with it.

Measured while ten million additions took 0.87 times as long, with other work on the machine, in CPU seconds until the
first answer, until a good one (bar 2.6) and until the last (its bar in brackets): GPT-3 0.4, 0.4, 2.8 (3.5); Mixtral
0.3, 1.0, 5.1 (10.5); Llama-405B 0.3, 0.8, 3.4 (5.2); gpt-oss-120b 0.4, 1.5, 6.1 (8.7); Qwen3-Next 0.4, 1.8, 6.4 (8.7);
Llama-70B on 64 to 1,024 GPUs 0.3, 1.1, 5.9 (21.9); DeepSeek-V3 0.5, 2.4, 8.3 (52.5), each below 0.31 GB. DeepSeek-V3
with --any-framework 0.5, 2.9, 29.5 and 1.1 GB.
"""

import sys
import time

from benchmarks.predictions import additions
from benchmarks.streamed import run_search

ADDITIONS_S = 0.57
GOOD_BAR_S = 3
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
        search = run_search(words)
        print(
            f"{words}: first {search.first_s:.1f} s CPU, good {search.good_s:.1f} s (bar {GOOD_BAR_S * scale:.1f}), "
            f"answer {search.last_s:.1f} s (bar {bar_s * scale:.1f}), {search.peak_bytes / 1e9:.2f} GB, "
            f"best {search.best_s if search.answer else None}, {search.answer.get('counts')}",
            flush=True,
        )


if __name__ == "__main__":
    run()
