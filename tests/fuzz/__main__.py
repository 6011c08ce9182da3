"""``python -m tests.fuzz``: damaged files and random command lines, for as long as you like.

The same seed gives the same cases. What goes wrong is written to a folder; put such a file into
``tests/fuzz/cases`` and it is tried by every run of the tests.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.bombs import write
from tests.fuzz.commands import GOOD, command
from tests.fuzz.greedy import greedy
from tests.fuzz.readers import BATCH, Bad, run_cases
from tests.fuzz.targets import seed_files, targets
from tests.fuzz.worker import run_command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other cases")
    parser.add_argument("--cases", type=int, default=100_000, help="damaged files, over all readers")
    parser.add_argument("--commands", type=int, default=10_000, help="command lines")
    parser.add_argument("--first", type=int, default=0, help="number of the first command line")
    parser.add_argument("--greedy", type=int, default=500, help="commands that ask for much")
    parser.add_argument("--minutes", type=float, help="go on with further seeds until then")
    parser.add_argument("--only", metavar="NAME", help="one reader, 'commands' or 'greedy'")
    parser.add_argument("--save", type=Path, default=Path("fuzz-found"), metavar="DIR")
    args = parser.parse_args()
    until, bad = time.monotonic() + 60 * (args.minutes or 0), 0
    while True:
        if args.only not in ("commands", "greedy"):
            bad += _readers(args)
        if args.only in (None, "commands"):
            bad += _commands(args)
        if args.only in (None, "greedy"):
            bad += _greedy(args)
        if time.monotonic() >= until:
            return 1 if bad else 0
        args.seed += 1


def _readers(args: argparse.Namespace) -> int:
    chosen = [target for target in targets() if args.only in (None, target.name)]
    each = -(-args.cases // len(chosen))
    bad = 0
    for target in chosen:
        began, found = time.monotonic(), 0
        for first in range(0, each, BATCH):
            for one in run_cases(target, args.seed, first, min(BATCH, each - first)):
                found += 1
                _save(args.save, one)
        bad += found
        took = time.monotonic() - began
        print(f"{target.name:18} {each:7,} files  {found:3} bad  {took:6.1f} s", flush=True)
    return bad


def _commands(args: argparse.Namespace) -> int:
    began, bad, slowest, home = time.monotonic(), 0, (0.0, ""), os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            seed_files(Path(folder))
            warm()
            for number in range(args.first, args.first + args.commands):
                words = command(args.seed, number)
                outcome = run_command(words)
                if number and number % 1000 == 0:
                    print(f"{number:,} command lines, {bad} bad", flush=True)
                slowest = max(slowest, (outcome.cpu_s, " ".join(words)[:100]))
                if outcome.fault:
                    bad += 1
                    _save(Path(home) / args.save, Bad("command", json.dumps(words).encode(), outcome.fault))
        finally:
            os.chdir(home)
    print(f"{'commands':18} {args.commands:7,} lines  {bad:3} bad  {time.monotonic() - began:6.1f} s")
    print(f"slowest: {slowest[0]:.1f} s  {slowest[1]}", flush=True)
    return bad


def _greedy(args: argparse.Namespace) -> int:
    began, bad, most, home = time.monotonic(), 0, (0.0, 0), os.getcwd()
    for number in range(args.greedy):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                files, words = greedy(args.seed, number)
                write(files, Path(folder))
                outcome = run_command(words)
            finally:
                os.chdir(home)
        most = max(most[0], outcome.cpu_s), max(most[1], outcome.peak_bytes)
        if outcome.fault:
            bad += 1
            _save(args.save, Bad("greedy", json.dumps([args.seed, number, words]).encode(), outcome.fault))
    took = time.monotonic() - began
    print(f"{'greedy':18} {args.greedy:7,} lines  {bad:3} bad  {took:6.1f} s")
    print(f"at most: {most[0]:.1f} s and {most[1] / 1e9:.1f} GB", flush=True)
    return bad


def warm() -> None:
    """Load here what every command would load again: a fork has it for nothing."""
    out, err = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            from stepcast.cli.main import main as stepcast

            for words in GOOD:
                stepcast(words)
        finally:
            sys.stdout, sys.stderr = out, err


def _save(folder: Path, bad: Bad) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{bad.target.replace(' ', '-')}.{hashlib.sha256(bad.data).hexdigest()[:10]}"
    (folder / name).write_bytes(bad.data)
    print(f"BAD {name}: {bad.fault}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
