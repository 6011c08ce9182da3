"""Ctrl-C at any moment, start-up included, is one line; a machine that keeps nothing for numba still answers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT

# Interrupts itself when Python has loaded so many modules since the command began: as early as a person can.
AT_IMPORT = """
import os, sys
from stepcast.cli.start import main
left = [int(sys.argv.pop(1))]
def count(event, arguments):
    if event == "import":
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 2)
sys.addaudithook(count)
sys.exit(main())
"""
# Interrupts itself while the new file waits beside the old one.
AT_WRITE = """
import os, sys
from stepcast.cli.start import main
real = os.fsync
os.fsync = lambda handle: (os.kill(os.getpid(), 2), real(handle))
sys.exit(main())
"""
# Interrupts itself in a callback, where Python would show an exception and go on, and when it ends.
AT_END = """
import atexit, os, sys
from stepcast.cli.start import main
atexit.register(lambda: os.kill(os.getpid(), 2))
sys.exit(main())
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
EXAMPLE = str(ROOT / "examples" / "simai-gpt-13b.txt")


def run_python(program: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    # Whoever runs the tests in the background has it ignore interrupts, and its children with it.
    heard = "import signal; signal.signal(2, signal.default_int_handler)\n"
    command = [sys.executable, "-c", heard + program, *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment)


@pytest.mark.parametrize("modules", [1, 3, 10, 30, 60, 90, 120])
def test_an_interrupt_while_loading_is_one_line(modules: int) -> None:
    found = run_python(
        AT_IMPORT, str(modules), "predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8"
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "stepcast: interrupted\n")


# As early as there is anything of ours: counted from the moment at which the package itself is being loaded.
FROM_THE_START = """
import os, sys
armed, left = [], [int(os.environ["INTERRUPT_AT"])]
def count(event, arguments):
    if event == "import" and (armed or arguments[0] == "stepcast"):
        left[0] -= bool(armed)
        armed.append(1)
        if left[0] == 0:
            os.kill(os.getpid(), 2)
import _signal
_signal.signal(2, _signal.default_int_handler)
sys.addaudithook(count)
"""


@pytest.mark.parametrize("modules", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("started", ["module", "script"])
def test_an_interrupt_of_the_first_files_is_one_line(started: str, modules: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FROM_THE_START)
    (tmp_path / "stepcast").write_text("import sys\nfrom stepcast.cli.start import main\nsys.exit(main())\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    command = [sys.executable, *(["-m", "stepcast"] if started == "module" else [str(tmp_path / "stepcast")])]
    environment = {**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": str(modules)}
    found = subprocess.run([*command, "list", "gpus"], capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "stepcast: interrupted\n")


def test_a_program_that_uses_the_library_keeps_its_own_interrupt(tmp_path: Path) -> None:
    """Even while its own package is being found, as with ``python -m``."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import stepcast\n")
    (tmp_path / "mine" / "__main__.py").write_text(
        "import signal\nprint(signal.getsignal(2) is signal.default_int_handler)\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    found = subprocess.run(
        [sys.executable, "-m", "mine"],
        capture_output=True,
        text=True,
        env=environment,
        # Whoever runs the tests in the background has it ignore interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (found.stdout, found.stderr) == ("True\n", "")


def test_an_interrupt_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("before")
    found = run_python(AT_WRITE, "convert", EXAMPLE, str(target), "--to", "json")
    assert (found.returncode, found.stderr) == (130, "stepcast: interrupted\n")
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.json"]


def test_an_interrupt_at_the_end_is_one_line() -> None:
    found = run_python(AT_END, "list", "gpus")
    assert (found.returncode, found.stderr) == (130, "stepcast: interrupted\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As for a command that a shell runs in the background."""
    program = "import signal; signal.signal(2, signal.SIG_IGN)\n" + AT_WRITE
    found = run_python(program, "list", "gpus")
    assert (found.returncode, found.stderr) == (0, "")


def test_numba_without_a_place_to_keep_its_code_still_runs(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    home = tmp_path / "file"
    home.write_text("no folder can be made in here")
    program = """
import numba.core.caching as caching, sys
class Nowhere(caching._CacheLocator):
    @classmethod
    def from_function(cls, function, file):
        return None
caching.CacheImpl._locator_classes = [Nowhere]
from stepcast.simulation.kernels import compile_functions, find_kernel, find_levels
from stepcast.simulation.unfolded import _longest_path
print(*compile_functions((_longest_path,)), find_kernel(find_levels, 2**15 + 1), find_kernel(find_levels, 2**30) is None)
"""
    found = run_python(program, HOME=str(home), NUMBA_CACHE_DIR=str(home / "below"))
    assert (found.stdout, found.stderr) == ("_longest_path None False\n", "")


FIRST_CHILD = """
import multiprocessing, time
from stepcast.ir.children import block_interrupts
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
with block_interrupts():
    child.start()
print(open(f"/proc/{child.pid}/status").read().partition("SigBlk:")[2].split()[0])
child.kill()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_first_child_is_deaf_to_interrupts_while_it_loads() -> None:
    found = run_python(FIRST_CHILD)
    assert int(found.stdout, 16) & 1 << (signal.SIGINT - 1), found.stderr
