"""Measured collectives against predicted ones: a folder of nccl-tests logs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepcast.cost.collectives import Algorithm, Protocol, price
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route
from stepcast.hardware.cluster import Cluster
from stepcast.inputs.errors import FormatError
from stepcast.inputs.table import folder_files, read
from stepcast.ir.sweep import CollectiveSweep
from stepcast.ir.work import CollectiveKind


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One size of one log. Measured is the mean of out-of-place and in-place, which differ by noise."""

    source: str
    kind: CollectiveKind
    ranks: int
    size_bytes: int
    measured_s: float
    predicted_s: float
    algorithm: Algorithm | None
    protocol: Protocol | None

    @property
    def error(self) -> float:
        """Signed, as a share of the measured time."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Skipped:
    source: str
    reason: str


def compare_folder(
    folder: str, cluster: Cluster
) -> tuple[tuple[MeasuredCollective, ...], tuple[Skipped, ...]]:
    """Every row of every log in *folder*, priced on *cluster*; and what could not be compared."""
    compared: list[MeasuredCollective] = []
    skipped: list[Skipped] = []
    for path in folder_files(folder):
        try:
            sweep = read(path)
        except FormatError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        if not isinstance(sweep, CollectiveSweep):
            skipped.append(Skipped(path, "is no nccl-tests log"))
        elif sweep.kind is None:
            skipped.append(Skipped(path, "does not say which collective it timed"))
        elif sweep.ranks < 2:
            skipped.append(Skipped(path, "a single rank does not communicate"))
        else:
            compared += compare_sweep(sweep, cluster)
    return tuple(compared), tuple(skipped)


def compare_sweep(sweep: CollectiveSweep, cluster: Cluster) -> list[MeasuredCollective]:
    kind, route = kind_of(sweep), sweep_route(sweep, cluster)
    rows = []
    for row in sweep.rows:
        measured_s = measured_time_s(row)
        if measured_s is None or row.size_bytes == 0:
            continue
        predicted = price(kind, row.size_bytes, route)
        rows.append(
            MeasuredCollective(
                source=sweep.source,
                kind=kind,
                ranks=sweep.ranks,
                size_bytes=row.size_bytes,
                measured_s=measured_s,
                predicted_s=predicted.seconds,
                algorithm=predicted.algorithm,
                protocol=predicted.protocol,
            )
        )
    return rows


def mean_abs_error(rows: Iterable[MeasuredCollective], at_least_bytes: int = 0) -> float:
    """Mean of the errors without their signs, over sizes of *at_least_bytes* and more."""
    errors: Sequence[float] = [abs(row.error) for row in rows if row.size_bytes >= at_least_bytes]
    if not errors:
        raise ValueError("no measurements to compare with")
    return sum(errors) / len(errors)
