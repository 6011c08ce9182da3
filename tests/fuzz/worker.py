"""Runs something in a process of its own, with little memory and time, and tells how it ended.

A fork of this process: modules that are loaded need not be loaded again, so that a command takes
milliseconds, and what it breaks is gone with it.
"""

import faulthandler
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import walk_packages

from tests.shared import ROOT

MOST_SECONDS = 20.0
MOST_BYTES = 3 * 10**9
# Status of a child that raised; no verb returns it.
RAISED = 99
# Run once before the forks, which then have the catalogues that these commands read.
EXAMPLE = str(ROOT / "examples" / "simai-gpt-13b.txt")
USUAL_COMMANDS = (
    ("list", "models"),
    ("list", "gpus"),
    ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8"),
    ("predict", "--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "16", "--ep", "8"),
    ("simulate", EXAMPLE, "--cluster", "dgx-h100"),
)
ASIDE = ("stepcast.pytorch", "stepcast.serve", "stepcast.sweep.engines")


@dataclass(frozen=True)
class Outcome:
    """How a run ended. *status* is negative where a signal ended it."""

    status: int
    out: str
    err: str
    cpu_s: float
    peak_bytes: int
    timed_out: bool = False

    @property
    def fault(self) -> str:
        """What is wrong with it; nothing where it gave an answer or one clear line."""
        if self.timed_out:
            return f"took more than {MOST_SECONDS:.0f} s"
        if self.status == RAISED or "Traceback (most recent call last)" in self.err:
            return "raised: " + (self.err.strip().splitlines() or ["?"])[-1][:300]
        if self.status < 0:
            return f"ended by signal {-self.status}"
        if self.peak_bytes > MOST_BYTES or "out of memory" in self.err:
            return f"took {self.peak_bytes / 1e9:.1f} GB"
        if self.cpu_s > MOST_SECONDS:
            return f"took {self.cpu_s:.0f} s of processor time"
        if self.status not in (0, 1, 2):
            return f"ended with status {self.status}"
        lines = [line for line in self.err.splitlines() if not line.startswith(("warning: ", " "))]
        if self.status == 2 and len(lines) != 1:
            return f"an error of {len(lines)} lines: {lines[:3]}"
        return ""


@cache
def loaded() -> int:
    """Import the modules and read the catalogues that commands use, so that forks need not.

    Return how many modules were imported.

    A module that needs a package of an extra is left out where that package is not installed.
    """
    import stepcast

    modules = [found.name for found in walk_packages(stepcast.__path__, "stepcast.")]
    # Importing PyTorch takes seconds, and __main__ would run.
    modules = [name for name in modules if not name.startswith(ASIDE) and not name.endswith("__main__")]
    imported = 0
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "stepcast").partition(".")[0] == "stepcast":
                raise
        else:
            imported += 1
    from stepcast.cli.main import main

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for words in USUAL_COMMANDS:
            assert main(list(words)) == 0, words
    return imported


def run_bounded(
    work: Callable[[], int], seconds: float = MOST_SECONDS, most_bytes: int = MOST_BYTES, stdin: str = os.devnull
) -> Outcome:
    """*work* in a child, ended when it takes longer; its number is the status."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _child(work, out.fileno(), err.fileno(), most_bytes, seconds, stdin)
        timed_out = not _ended(child, 30 * seconds)  # by the clock, on a machine that others use too
        if timed_out:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(10**7).decode(errors="replace"))
    timed_out = timed_out or code == -signal.SIGXCPU
    cpu_s = used.ru_utime + used.ru_stime
    return Outcome(code, texts[0], texts[1], cpu_s, used.ru_maxrss * 1024, timed_out)


def run_command(arguments: Sequence[str], **limits: float | str) -> Outcome:
    """One command line, in a child."""

    loaded()

    def work() -> int:
        from stepcast.cli.main import main

        try:
            return main(list(arguments))
        except SystemExit as stop:  # argparse: help, or what is wrong
            return stop.code if isinstance(stop.code, int) else 2

    return run_bounded(work, **limits)  # type: ignore[arg-type]


def _child(work: Callable[[], int], out: int, err: int, most_bytes: int, seconds: float, stdin: str) -> None:
    """Never returns: what pytest would do at its end is not done twice."""
    status = RAISED
    try:
        os.dup2(os.open(stdin, os.O_RDONLY | os.O_NONBLOCK), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        faulthandler.disable()  # pytest's would print to the terminal
        _limit(most_bytes, seconds)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _limit(most_bytes: int, seconds: float) -> None:
    """On top of what the parent had: addresses (some room for what is mapped and not used) and time."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + most_bytes, mapped + most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ended(child: int, seconds: float) -> bool:
    """Whether *child* ends within so many seconds by the clock."""
    try:
        handle = os.pidfd_open(child)
    except OSError:  # an old kernel: look again and again
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
            time.sleep(0.005)
        return False
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
