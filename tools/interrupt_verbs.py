"""Interrupt and kill verbs at random moments: ``python tools/interrupt_verbs.py --count 100 --seed 1``.

After each SIGINT the command must have ended with status 130 or 0, in one line and without a traceback; after each
SIGKILL no process of it may be left. In both cases no output file may be torn: it is as before, or complete. The verb
``serve`` needs the extra web: ``--only serve`` in an environment that has it.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "128")
SPEC = """
[fixed]
model = "llama-3.2-1b"
cluster = "dgx-h100"
global-batch = 64
[[axis]]
tp = [1, 2, 4]
[[axis]]
gpus = "8..64"
"""
VERBS = {
    "predict": ("predict", *RUN, "--tp", "2", "--html", "out.html"),
    "search": ("search", *RUN, "--workers", "2", "--html", "out.html"),
    "sweep": ("sweep", "spec.toml", "-o", "answers", "--workers", "2"),
    "validate": ("validate", "--set", "h200", "--html", "out.html"),
    "serve": ("serve", "--port", "0"),
}
BEFORE = b"<!doctype html>before</html>"
WAIT_S = 60.0


def descendants(process: int) -> set[int]:
    """Return the processes below *process*."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found, new = set(), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def faults_of(verb: str, number: signal.Signals, delay_s: float, folder: Path) -> list[str]:
    """Return what was wrong after a signal that came *delay_s* after the start."""
    (folder / "spec.toml").write_text(SPEC)
    (folder / "out.html").write_bytes(BEFORE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "stepcast", *VERBS[verb]]
    running = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(delay_s)
    children = descendants(running.pid)
    if running.poll() is None:
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does
        else:
            os.kill(running.pid, number)
    faults = []
    try:
        _, err = running.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        return ["did not end, or its pipes stayed open"]
    text = err.decode(errors="replace")
    if "Traceback" in text and "src/stepcast/" in text:  # Python's own, before it has loaded anything, is not ours
        faults.append(f"traceback: {text[-1000:]}")
    if number == signal.SIGINT and running.returncode not in (0, 1, 130, -signal.SIGINT):
        faults.append(f"status {running.returncode}: {text[:100]!r}")
    until = time.monotonic() + 10
    while (left := [child for child in children if is_alive(child)]) and time.monotonic() < until:
        time.sleep(0.1)
    if left:
        faults.append(f"{len(left)} processes left")
    page = (folder / "out.html").read_bytes()
    if page != BEFORE and not page.rstrip().endswith(b"</html>"):
        faults.append("torn page")
    if verb == "sweep" and (folder / "answers" / "results.sqlite").exists():
        seen = subprocess.run(
            [sys.executable, "-m", "stepcast", "sweep", "status", "answers", "--json"], cwd=folder, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if seen.returncode and "before its first point" not in seen.stderr:
            faults.append(f"store: {seen.stderr[:100]}")
        elif not seen.returncode and json.loads(seen.stdout)["errors"]:
            faults.append("store: has errors")
    hidden = [name for name in os.listdir(folder) if re.fullmatch(r"\..*\.part", name)]
    if hidden and number == signal.SIGINT:
        faults.append(f"left {hidden[0]}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="signals of each kind for each verb (default: 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=4.0, help="latest signal, in seconds after the start")
    parser.add_argument("--only", choices=VERBS)
    args = parser.parse_args()
    chance, bad = random.Random(args.seed), 0
    for verb in VERBS:
        if args.only in (None, verb):
            for number in (signal.SIGINT, signal.SIGKILL):
                found = 0
                for _ in range(args.count):
                    with tempfile.TemporaryDirectory() as folder:
                        delay_s = chance.uniform(0.05, args.longest)
                        faults = faults_of(verb, number, delay_s, Path(folder))
                    found += bool(faults)
                    for fault in faults:
                        print(f"BAD {verb} {number.name} after {delay_s:.2f} s: {fault}", flush=True)
                print(f"{verb:9} {number.name:8} {args.count:4} signals  {found:3} bad", flush=True)
                bad += found
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
