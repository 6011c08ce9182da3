"""Ask the same random questions in every way and compare the answers bit for bit.

``python tools/compare_answers.py --count 200 --seed 1``: the Python library, the command line, the app and a sweep, in
this process; then the command line again in other processes, with other hash seeds, without compiled engines, and with
the other Pythons that ``--python`` names.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "llama-3.2-1b", "deepseek-v3", "qwen3-30b-a3b")
CLUSTERS = ("dgx-h100", "dgx-a100", "hgx-h200", "gb200-nvl72", "dgx-b200")


def questions(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield *count* questions that have an answer, by the names of fields."""
    chance = random.Random(seed)
    for _ in range(count):
        yield {
            "model": chance.choice(MODELS),
            "cluster": chance.choice(CLUSTERS),
            "framework": chance.choice(("megatron-core", "megatron-lm", "torchtitan", "pytorch-fsdp")),
            "gpus": 2 ** chance.randrange(3, 9),
            "tp": 2 ** chance.randrange(4),
            "pp": 2 ** chance.randrange(3),
            "micro_batch": chance.choice((1, 2)),
            "global_batch": 2 ** chance.randrange(6, 11),
            "seq": 1024 * chance.choice((1, 2, 4, 8)),
        }


def by_command(question: dict[str, Any]) -> str:
    from stepcast.cli.main import main

    words = [word for name, value in question.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["predict", *words, "--json"])
    return _figures(json.loads(out.getvalue())) if status in (0, 1) and out.getvalue() else "refused"


def by_library(question: dict[str, Any]) -> str:
    import stepcast

    try:
        found = stepcast.predict(**question)
    except ValueError:
        return "refused"
    return _figures(found.facts() if hasattr(found, "facts") else found)


def by_app(question: dict[str, Any]) -> str:
    from stepcast.cli.served import predict_choices
    from stepcast.serve.fields import PREDICT, read_form

    try:
        return _figures(predict_choices(read_form(PREDICT, {name: str(value) for name, value in question.items()}))[1])
    except ValueError:
        return "refused"


def by_sweep(question: dict[str, Any]) -> str:
    from stepcast.cli.sweep_points import answers

    (row,) = answers("predict", [question])
    if row.get("error"):
        return "refused"
    return f"{float(row['step_s']).hex()} {float(row['memory_bytes']).hex()}"


def _figures(facts: Any) -> str:
    return f"{float(facts['step_s']).hex()} {float(facts['memory_bytes']['total']).hex()}"


def digest_elsewhere(python: str, args: argparse.Namespace, **environment: str) -> str:
    command = [python, __file__, "--count", str(args.count), "--seed", str(args.seed), "--digest"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], help="another interpreter with our dependencies")
    parser.add_argument("--digest", action="store_true", help="print the digest of the command line's answers alone")
    args = parser.parse_args()
    asked = list(questions(args.count, args.seed))
    expected = [by_command(question) for question in asked]
    digest = hashlib.sha256("\n".join(expected).encode()).hexdigest()
    if args.digest:
        print(digest)
        return 0
    bad = 0
    for way in (by_library, by_sweep, by_app):
        try:
            differ = [at for at, question in enumerate(asked) if way(question) != expected[at]]
        except ImportError as error:
            print(f"{way.__name__}: skipped, {error}")
            continue
        bad += len(differ)
        print(
            f"{way.__name__:12} {len(differ)} of {len(asked)} differ {[asked[at] for at in differ[:2]] or ''}",
            flush=True,
        )
    print(f"answered {sum(text != 'refused' for text in expected)} of {len(expected)}, the rest refused everywhere")
    runs = [
        (sys.executable, {"PYTHONHASHSEED": "0"}),
        (sys.executable, {"PYTHONHASHSEED": "4242"}),
        (sys.executable, {"NUMBA_DISABLE_JIT": "1"}),
        *((python, {}) for python in args.python),
    ]
    for python, environment in runs:
        other = digest_elsewhere(python, args, **environment)
        bad += other != digest
        print(f"{python} {environment}: {'equal' if other == digest else f'differs: {other}'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
