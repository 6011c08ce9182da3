"""The entry point of the command, which handles Ctrl-C before it loads the rest."""

import os
import sys

from stepcast.cli.interrupts import end_on_interrupt


def main() -> int:
    """Run the command line and return its exit status."""
    end_on_interrupt()
    if not {"capture", "profile", "record", "run"}.intersection(sys.argv):  # these may run PyTorch, which multiplies
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting numpy's threads takes 0.08 s of processor time
    from stepcast.cli.main import main as run

    return run()
