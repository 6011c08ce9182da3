"""Constants as ``stepcast calibrate`` writes them and as the package ships them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stepcast.hardware.catalog import load_fit
from stepcast.inputs.errors import FormatError
from stepcast.inputs.toml import parse_toml
from stepcast.ir.check import require
from stepcast.ir.runlog import RunLog
from stepcast.optimus.cost import Constants
from stepcast.optimus.lengths import shuffled_length

FIT = "optimus"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Constants with the lengths of the steps they were fitted to and the runs that were used.

    Each length is that of *in_order* rows of the data (0: not known), *rows_per_text* of which share a text.
    """

    constants: Constants
    sequences: tuple[float, ...]
    runs: tuple[str, ...]
    in_order: int = 0
    rows_per_text: float = 1.0

    def lengths_of(self, log: RunLog) -> tuple[float, ...]:
        """Of *log*'s steps. With data parallelism each rank draws its own rows (DistributedSampler in
        prepare_dataloader of opt_prime/opti_pri.py), and the longest of all holds the others up."""
        if log.layout.dp == 1 or not self.in_order:
            return self.sequences
        length = shuffled_length(self.sequences, self.in_order, self.rows_per_text, log.global_batch)
        return (length,) * len(self.sequences)


def calibrated_of(text: str, where: str) -> Calibrated:
    """What ``stepcast calibrate`` writes."""
    return _calibrated(parse_toml(text, where), where)


def _calibrated(table: dict[str, Any], where: str) -> Calibrated:
    try:
        constants = Constants(**{name: float(value) for name, value in table["constants"].items()})
        sequences = tuple(float(value) for value in table["sequences"])
        runs = tuple(str(run) for run in table.get("runs", ()))
        samples = table.get("samples", {})
        in_order, rows_per_text = int(samples.get("in_order", 0)), float(samples.get("rows_per_text", 1))
        require(in_order >= 0 and rows_per_text >= 1, "a text has at least one row")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            f"holds no OptimusPrime constants ({error}); expected [constants] and sequences", where
        ) from None
    return Calibrated(constants, sequences, runs, in_order, rows_per_text)


@lru_cache(maxsize=1)
def shipped() -> Calibrated:
    """Constants that come with the package."""
    return _calibrated(load_fit(FIT), f"{FIT}.toml")
