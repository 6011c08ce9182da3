"""Documents of other programs: measured steps, collectives, operators and OptimusPrime runs; the wiring of nodes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import FloatArray, Int32Array
from stepcast.ir.layout import Layout
from stepcast.ir.types import DType, Facts, Natural, Quantity, Size, dataclass, require
from stepcast.ir.work import CollectiveKind, Compute


class LoggedStep(NamedTuple):
    """One line of a log; what it does not say is None."""

    step: int
    seconds: float | None = None
    tflops_per_gpu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples: int | None = None  # of the global batch
    memory_bytes: float | None = None
    loss: float | None = None


class LoggedTimer(NamedTuple):
    """A part of a step that a program timed: its shortest and longest time over ranks, or that of one rank."""

    name: str
    shortest_s: float
    longest_s: float
    rank: int | None = None


class LoggedScore(NamedTuple):
    """The speed of a rank's GPU relative to the fastest, as a straggler detection reports it."""

    rank: int
    node: str
    score: float


@dataclass(frozen=True, slots=True)
class StepLog:
    """The steps of one run, as its program printed them."""

    steps: tuple[LoggedStep, ...]
    source: str = ""
    program: str = ""
    peak_bytes: float | None = None
    facts: Facts = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class LoggedCollective(NamedTuple):
    """One collective that one rank called."""

    rank: int
    group: str
    turn: int  # among the calls of its group
    kind: str
    size_bytes: int
    state: str = "completed"
    issued_s: float | None = None
    seconds: float | None = None
    bus_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class CollectiveLog:
    """Calls of some or all ranks of a job, and who belongs to which group."""

    calls: tuple[LoggedCollective, ...]
    ranks: tuple[int, ...]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    source: str = ""
    program: str = ""
    warnings: tuple[str, ...] = ()


# Measured collectives: one kind, one group, many sizes.


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One size. Times are per operation; None where the test did not run that variant."""

    size_bytes: int
    out_of_place_s: float | None
    in_place_s: float | None

    def __post_init__(self) -> None:
        # Written out, not with the helpers of ir.types: long logs have one of these per line.
        if type(self.size_bytes) is not int or self.size_bytes < 0:
            raise ValueError(f"size_bytes must be a whole number, zero or more, not {self.size_bytes!r}")
        for time_s in (self.out_of_place_s, self.in_place_s):
            if time_s is not None and not 0 <= time_s < math.inf:
                raise ValueError(f"times must be finite numbers, zero or more, not {time_s!r}")


@dataclass(frozen=True, slots=True)
class CollectiveSweep:
    """One swept collective; *kind* is None where the log does not name it (two kinds can share one bandwidth rule).

    One host thread starts the kernels of *ranks_per_thread* ranks in turn, which small messages feel.
    """

    kind: CollectiveKind | None
    ranks: int
    nodes: int
    device: str
    dtype: DType | None
    rows: tuple[SweepRow, ...]
    source: str = ""
    warnings: tuple[str, ...] = ()
    ranks_per_thread: int = 1


# Operations of sampled steps, worker by worker: what a straggler analysis starts from.
#
# One worker represents its tensor-parallel group. Operations are known by their stage, their kind and their
# turn among that kind; each has a start and a duration in every step and replica.


class ReplicaOperation(NamedTuple):
    """One operation of every replica and step."""

    stage: int
    kind: str
    turn: int
    chunk: int = -1  # of the stage; -1: of none
    place: int = -1  # of the chunk in the model


@dataclass(frozen=True, eq=False)
class WorkerSteps:
    """Seconds by (step, replica, operation), in the order in which the first replica began them."""

    operations: tuple[ReplicaOperation, ...]
    steps: tuple[int, ...]
    ranks: npt.NDArray[np.int64]  # by (replica, stage)
    start_s: FloatArray
    duration_s: FloatArray
    source: str = ""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = (len(self.steps), self.replicas, len(self.operations))
        require(self.start_s.shape == self.duration_s.shape == shape, f"expected arrays of shape {shape}")
        require(len(self.operations) > 0 and len(self.steps) > 0, "expected operations of at least one step")

    @property
    def replicas(self) -> int:
        return int(self.ranks.shape[0])

    @property
    def stages(self) -> int:
        return int(self.ranks.shape[1])


# Measured operators: what ran and how long it took, without when.


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator of one size. *works* are its kernels, where it is several that were timed together."""

    name: str
    works: tuple[Compute, ...]
    seconds: float  # of one run; the median where it ran often
    runs: int = 1

    def __post_init__(self) -> None:
        require(len(self.works) > 0, f"{self.name}: an operator needs at least one kernel")
        require(0 < self.seconds < float("inf"), f"{self.name}: a time must be above zero")


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Operators of one GPU. *matrix_share* says what they are part of: None where each was timed by itself,
    else the share of a step's kernel time that matrix kernels take."""

    operators: Sequence[OperatorTime]
    source: str = ""
    device: str = ""  # the name that the driver gives the GPU; empty where the file does not say
    matrix_share: float | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> how many measurements
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.matrix_share is None or 0 <= self.matrix_share <= 1, "a share must lie within 0 and 1")


# Printed times of a training job: totals per stage, layer and step, without start times.
#
# Long jobs print millions of layer times, so they are stored as columns.

# The first step compiles, allocates and connects; it says nothing about the others.
FIRST_WARM_STEP = 2


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Forward times of layers on one rank each, summed over a step's micro-batches, in columns; ``layer_of`` points
    into *layers*, ``block_of`` numbers the reports.
    """

    layers: tuple[str, ...]
    rank_of: Int32Array
    stage_of: Int32Array
    step_of: Int32Array
    layer_of: Int32Array
    block_of: Int32Array
    ops_of: Int32Array
    total_s: FloatArray

    def __post_init__(self) -> None:
        columns = (self.rank_of, self.stage_of, self.step_of, self.layer_of, self.block_of, self.ops_of)
        require(all(len(column) == len(self.total_s) for column in columns), "all columns need one length")
        require(bool(np.isfinite(self.total_s).all() and (self.total_s >= 0).all()), "times must be finite")

    def __len__(self) -> int:
        return len(self.total_s)


@dataclass(frozen=True, slots=True)
class BatchTime:
    """One progress line: wall time per batch as the last stage saw it."""

    epoch: Natural
    index: Natural
    batch_s: Quantity
    loss: float


@dataclass(frozen=True, slots=True)
class Median:
    """The middle of *count* measured times, and the first and last step (or batch) they are from."""

    seconds: float
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class RunLog:
    """A job's log. *blocks* counts the per-rank reports found, whole or glued to others."""

    layout: Layout
    micro_batch: Size
    micro_batches: Size
    global_batch: Size
    parameters: Natural
    layer_times: LayerTimes
    batches: tuple[BatchTime, ...]
    blocks: Natural
    # The last module of each stage, in stage order: where the model was cut.
    stage_ends: tuple[str, ...] = ()
    source: str = ""
    facts: Facts = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that any rank reported."""
        return tuple(np.unique(self.layer_times.step_of).tolist())

    def stage_forward(self) -> dict[int, Median]:
        """Median forward time of one micro-batch on each stage, all its layers, warm steps."""
        return self._medians(np.ones(len(self.layer_times), dtype=bool))

    def layer_forward(self, layer: str) -> dict[int, Median]:
        """Return `stage_forward` for one layer alone; a cut layer has an entry for each stage it is on."""
        return self._medians(np.equal(self.layer_times.layer_of, self.layer_times.layers.index(layer)))

    def batch_time(self) -> Median | None:
        """Median wall time of a warm batch; None where no such batch was printed.

        Every tensor-parallel rank of the last stage prints a line, and each counts.
        """
        used = [batch for batch in self.batches if batch.index >= FIRST_WARM_STEP]
        if not used:
            return None
        indices = [batch.index for batch in used]
        seconds = float(np.median([batch.batch_s for batch in used]))
        return Median(seconds, min(indices), max(indices), len(used))

    def _medians(self, rows: npt.NDArray[np.bool_]) -> dict[int, Median]:
        times = self.layer_times
        rows = rows & np.greater_equal(times.step_of, FIRST_WARM_STEP)
        blocks, first_row, block = np.unique(times.block_of[rows], return_index=True, return_inverse=True)
        sums_s = np.bincount(block, weights=times.total_s[rows], minlength=len(blocks)) / self.micro_batches
        stages, steps = times.stage_of[rows][first_row], times.step_of[rows][first_row]
        medians = {}
        for stage in np.unique(stages).tolist():
            mine = stages == stage
            first, last = int(steps[mine].min()), int(steps[mine].max())
            medians[stage] = Median(float(np.median(sums_s[mine])), first, last, int(mine.sum()))
        return medians


@dataclass(frozen=True, slots=True)
class Wiring:
    """The statements of one file; None where it makes none. Rates are of one direction.

    ``fabric`` is what joins the GPUs of a node: nvswitch, nvlink-mesh, nvlink-pairs or pcie; ``fabric_links``
    are the NVLinks of a GPU's port on the switch, of an edge of the mesh, or of a bridge.
    """

    source_format: str  # the format that states it
    gpu: str | None = None  # as the catalogue calls it
    gpus: int | None = None  # of a node
    fabric: str | None = None
    fabric_links: float | None = None
    fabric_bytes_per_s: float | None = None
    in_switch_reduction: bool | None = None
    sockets: int | None = None
    nics: int | None = None
    nic_bytes_per_s: float | None = None
    nodes: int | None = None
    leaf_nodes: int | None = None
    pod_nodes: int | None = None
    scale_up_nodes: int | None = None
    warnings: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return the stated facts by name."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name not in ("warnings", "source_format")}
        return {"kind": "wiring", **{name: value for name, value in facts.items() if value is not None}}


def find_fabric(links: dict[tuple[int, int], int], gpus: int) -> tuple[str, float, tuple[str, ...]]:
    """Return what joins *gpus* by the NVLinks between each two of them: its kind, the links of one of its parts, and
    what is not as it seems.

    A GPU has at most 18 NVLinks: where each two show more than an equal share of those, a switch joins them.
    """
    pairs = [links.get((a, b), 0) for a in range(gpus) for b in range(a + 1, gpus)]
    if not any(pairs):
        return "pcie", 0.0, ()
    fewest, most = min(pairs), max(pairs)
    if fewest == most:
        return ("nvlink-mesh" if most * (gpus - 1) <= MOST_LINKS else "nvswitch"), float(most), ()
    if all(a // 2 == b // 2 for (a, b), count in links.items() if count):
        return "nvlink-pairs", float(most), ()
    note = f"pairs of GPUs have {fewest} to {most} NVLinks: modelled as a mesh in which each pair has the average"
    return "nvlink-mesh", sum(pairs) / len(pairs), (note,)


MOST_LINKS = 18  # of a GPU: Hopper's and Blackwell's
