"""Ask a running app many distinct questions and report its memory: ``python tools/soak_serve.py --requests 20000``.

The app listens at 127.0.0.1 alone. Questions are drawn with a seed; most are answered, some refused as they should be.
"""

import argparse
import http.client
import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "llama-3.2-1b", "deepseek-v3", "gpt3-175b", "qwen3-30b-a3b")
CLUSTERS = ("dgx-h100", "dgx-a100", "hgx-h200", "gb200-nvl72", "dgx-b200")


def resident_mb(process: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def queries(seed: int) -> "itertools.chain[str]":
    """Yield questions without end, each once."""
    chance, seen = random.Random(seed), set()
    while True:
        fields = {
            "model": chance.choice(MODELS),
            "cluster": chance.choice(CLUSTERS),
            "gpus": 2 ** chance.randrange(3, 11),
            "tp": 2 ** chance.randrange(4),
            "pp": 2 ** chance.randrange(4),
            "micro_batch": chance.randrange(1, 5),
            "global_batch": 2 ** chance.randrange(5, 12),
            "seq": 512 * chance.randrange(1, 33),
        }
        query = "&".join(f"{name}={value}" for name, value in fields.items())
        if query not in seen:
            seen.add(query)
            yield query


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1000, help="requests between two reports")
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "stepcast", "serve", "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as app:
        try:
            assert app.stdout
            found = re.search(r":(\d+)/([\w-]+)/", app.stdout.readline())
            assert found
            port, token = int(found[1]), found[2]
            counts: dict[int, int] = {}
            began = time.monotonic()
            for number, query in enumerate(itertools.islice(queries(args.seed), args.requests), 1):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                connection.request("GET", f"/{token}/answer?{query}", headers={"Host": f"127.0.0.1:{port}"})
                answer = connection.getresponse()
                answer.read()
                connection.close()
                counts[answer.status] = counts.get(answer.status, 0) + 1
                if number % args.every == 0:
                    took = time.monotonic() - began
                    print(f"{number:,} requests, {took:.0f} s, {resident_mb(app.pid):.0f} MB, {counts}", flush=True)
        finally:
            app.terminate()


if __name__ == "__main__":
    main()
