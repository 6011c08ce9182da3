"""The entry point of the command, which handles Ctrl-C before it loads the rest."""

from stepcast.cli.interrupts import end_on_interrupt


def main() -> int:
    """Run the command line and return its exit status."""
    end_on_interrupt()
    from stepcast.cli.main import main as run

    return run()
