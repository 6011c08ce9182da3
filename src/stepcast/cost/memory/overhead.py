"""The communication groups of a GPU, which take buffers; what else a process needs is the framework's."""

from stepcast.ir.strategy import Strategy


def communicators(strategy: Strategy) -> int:
    """Groups of more than one rank that a GPU takes part in."""
    layout = strategy.layout
    sizes = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp, layout.ep]
    return sum(size > 1 for size in sizes)
