"""Where the command begins: Ctrl-C is answered before anything that takes time is loaded."""

from stepcast.cli.interrupts import end_on_interrupt


def main() -> int:
    end_on_interrupt()
    from stepcast.cli.main import main as run

    return run()
