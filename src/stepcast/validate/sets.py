"""The measurement sets we check ourselves against: a plain table, each loaded when it is asked for."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from stepcast.validate.scoreboard import Measurements


@dataclass(frozen=True, slots=True)
class MeasurementSet:
    """*module* has ``measure_folder(folder) -> Measurements``; *folder* is its name beside the others, and
    *further* are folders with more rows of the set, which it then takes together.
    """

    name: str
    about: str
    module: str
    folder: str
    further: tuple[str, ...] = ()
    when_named: bool = False  # left out unless it is asked for: it takes long, and packages of its own

    @property
    def exists(self) -> bool:
        return find_spec(f"stepcast.validate.{self.module}") is not None

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.folder, *self.further)

    def measure(self, *folders: str, **options: str) -> Measurements:
        found = import_module(f"stepcast.validate.{self.module}").measure_folder(*folders, **options)
        if not isinstance(found, Measurements):
            raise TypeError(f"{self.module}.measure_folder must return Measurements")
        return found


_TABLE = (
    MeasurementSet("h200", "operators, blocks and training steps on one H200", "h200", "h200"),
    MeasurementSet("neusight", "fp32 operators and models, five GPUs", "neusight", "neusight"),
    MeasurementSet("nccl-tests", "all-reduce on 2 to 64 A100", "nccl_tests", "nccl-tests"),
    MeasurementSet(
        "collectives",
        "public nccl-tests and rccl-tests tables, A100 to GB300 and MI355X",
        "collective_tables",
        "collectives",
    ),
    MeasurementSet("megatron-traces", "Megatron-LM runs, every rank traced", "megatron", "megatron-traces"),
    MeasurementSet("optimus", "OptimusPrime sweep of a 1B model", "optimus", "optimus-sweep"),
    MeasurementSet(
        "published", "published training runs", "published.comparison", "published", further=("published-new",)
    ),
    MeasurementSet("transformers", "training steps of Hugging Face models on one H200", "transformers", "transformers"),
    MeasurementSet(
        "captured",
        "the same steps, captured (needs PyTorch and transformers)",
        "captured",
        "transformers",
        further=("captured",),
        when_named=True,
    ),
    MeasurementSet("mlperf", "MLPerf Training runs of language models", "mlperf", "mlperf"),
    MeasurementSet(
        "megatron-memory", "peak memory of Megatron-LM's functional tests", "megatron_memory", "megatron-memory"
    ),
)


def measurement_sets() -> dict[str, MeasurementSet]:
    """The sets that this version can predict, by name."""
    return {entry.name: entry for entry in _TABLE if entry.exists}
