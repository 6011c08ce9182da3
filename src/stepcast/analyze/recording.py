"""A measured run as the work of each rank and the meetings between ranks.

The step of a rank is a sequence of pieces. A **Local** piece needs no other rank. A **Join** takes part in one or
more **meetings** (a collective, a message, a synchronisation): a meeting starts when its last member has arrived and
takes its transfer time, so waiting is not recorded but follows from who is late. Pieces are grouped in **blocks**,
one for each forward, backward, message and final operation, so that a run can be rescheduled.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from enum import StrEnum
from itertools import islice

from stepcast.ir.layout import Layout
from stepcast.ir.types import dataclass, require


class TimePart(StrEnum):
    """The parts into which the time of a rank is divided."""

    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PP = "pp"
    EMBEDDING = "embedding"
    EXPERT_DP = "expert-dp"
    WAIT = "wait"  # waiting for a rank of the same stage
    BUBBLE = "bubble"  # waiting for another stage
    HOST = "host"  # launching, loading data, logging
    OTHER = "other"


COMMUNICATION = tuple(map(TimePart, ("tp", "cp", "ep", "dp", "pp", "embedding", "expert-dp")))


class BlockKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    MESSAGE = "message"
    FINISH = "finish"
    START = "start"


@dataclass(frozen=True, slots=True)
class Local:
    """Work of a rank alone. Pieces of the same *role* do the same work on every rank."""

    part: TimePart
    operation: str
    role: str
    micro_batch: int
    start_s: float
    duration_s: float
    tokens: int | None = None  # sent to experts by the router: the work differs between ranks

    def __post_init__(self) -> None:
        require(self.duration_s >= 0, f"{self.operation}: a piece cannot last {self.duration_s!r} s")

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Join:
    """Participation in meetings. It ends *tail_s* after its overlapped work and the meetings it waits for."""

    part: TimePart
    operation: str
    role: str
    micro_batch: int
    start_s: float
    end_s: float
    meetings: tuple[int, ...]
    waits: tuple[int, ...]
    own_s: float = 0.0
    tail_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.own_s >= 0 and self.tail_s >= 0, f"{self.operation}: times must be zero or more")
        require(set(self.waits) <= set(self.meetings), f"{self.operation}: waits for a meeting it does not attend")


Piece = Local | Join


@dataclass(frozen=True, slots=True)
class Meeting:
    """A meeting takes *transfer_s* from the arrival of its last member; start and end are measured."""

    group: str  # a Group, or "model": all ranks that hold one copy of the model
    kind: str
    name: str
    members: tuple[int, ...]
    size_bytes: int | None
    transfer_s: float
    start_s: float = 0.0
    end_s: float = 0.0
    overlapped: bool = False  # members compute during it
    uneven: bool = False  # members contribute different sizes; size_bytes is the largest

    def __post_init__(self) -> None:
        require(self.transfer_s >= 0, f"{self.name}: a meeting cannot take {self.transfer_s!r} s")


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    kind: BlockKind
    micro_batch: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    stage: int
    blocks: tuple[RecordedBlock, ...]

    def pieces(self) -> Iterator[Piece]:
        for block in self.blocks:
            yield from block.pieces

    def with_pieces(self, pieces: Iterable[Piece]) -> "RankRecord":
        """Return the record with as many other *pieces*."""
        rest = iter(pieces)
        blocks = (replace(block, pieces=tuple(islice(rest, len(block.pieces)))) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))


@dataclass(frozen=True)
class Recording:
    """All given ranks of one run."""

    layout: Layout
    ranks: tuple[RankRecord, ...]
    meetings: tuple[Meeting, ...]
    measured_step_s: float
    micro_batches: int
    facts: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.ranks), "a run needs at least one rank")

    @property
    def is_complete(self) -> bool:
        """True if every rank of the run is present."""
        return len(self.ranks) == self.layout.gpus

    @property
    def configuration(self) -> dict[str, object]:
        """The facts of the trace about the model and the batch."""
        return {key: value for key, value in self.facts.items() if key not in ("basis", "gradient_bytes")}

    @property
    def layers(self) -> int | None:
        layers = self.facts.get("layers")
        return layers if isinstance(layers, int) else None

    def layers_on(self, stage: int) -> int | None:
        """Return the number of layers of a stage; None if it is unknown."""
        known = self.facts.get("layers_on")
        if isinstance(known, dict) and stage in known:
            return int(known[stage])
        return None if self.layers is None else self.layers // self.layout.pp

    def record_of(self, rank: int) -> RankRecord:
        records = {record.rank: record for record in self.ranks}
        if rank not in records:
            raise ValueError(f"rank {rank} is not in this run; it has {', '.join(map(str, records))}")
        return records[rank]

    def compute_s(self, record: RankRecord, kind: BlockKind) -> float:
        """Return the compute time of *record* in its blocks of *kind*, with overlapped work."""
        pieces = [piece for block in record.blocks if block.kind is kind for piece in block.pieces]
        computed = [piece for piece in pieces if isinstance(piece, Join) or piece.part is TimePart.COMPUTE]
        return sum((piece.own_s if isinstance(piece, Join) else piece.duration_s for piece in computed), 0.0)
