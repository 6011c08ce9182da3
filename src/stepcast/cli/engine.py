"""``--engine``: how a step is run."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepcast.forecast.options import Engine

# Written out, so that the help does not load the engine; a test compares them with the table.
ENGINES = ("fast", "fluid")
HELP = "fluid: communication that runs side by side shares the links of the network"


def engine_of(args: argparse.Namespace) -> "Engine":
    """Of verbs that know no other, the fast one."""
    from stepcast.forecast.options import Engine

    return Engine(getattr(args, "engine", ENGINES[0]))
