"""A measured run taken apart: what each rank did alone, and where ranks met.

A rank's step is a row of pieces. A **Local** piece needs nobody else. A **Join** takes part in one or more
**meetings** (a collective, a message, a synchronisation): a meeting starts when its last member has arrived
and takes its transfer time, so waiting is never recorded, it follows from who is late. Pieces lie in
**blocks**, one for each forward, backward, message and finishing operation, so that a run can be laid out
anew.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stepcast.ir.check import require
from stepcast.ir.layout import Layout


class TimePart(StrEnum):
    """Where a moment of a rank goes."""

    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PP = "pp"
    EMBEDDING = "embedding"
    EXPERT_DP = "expert-dp"
    WAIT = "wait"  # for a rank of the same stage
    BUBBLE = "bubble"  # for another stage
    HOST = "host"  # launching, loading data, logging
    OTHER = "other"


COMMUNICATION = (
    TimePart.TP,
    TimePart.CP,
    TimePart.EP,
    TimePart.DP,
    TimePart.PP,
    TimePart.EMBEDDING,
    TimePart.EXPERT_DP,
)


class BlockKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    MESSAGE = "message"
    FINISH = "finish"
    START = "start"


@dataclass(frozen=True, slots=True)
class Local:
    """What a rank does alone. Pieces of the same *role* do the same work, whichever rank runs them."""

    part: TimePart
    operation: str
    role: str
    micro_batch: int
    start_s: float
    duration_s: float
    tokens: int | None = None  # of experts: what a router sent, so not the same work on every rank

    def __post_init__(self) -> None:
        require(self.duration_s >= 0, f"{self.operation}: a piece cannot last {self.duration_s!r} s")


@dataclass(frozen=True, slots=True)
class Join:
    """Taking part in meetings. It ends when its own overlapped work and the meetings it waits for have ended,
    and *tail_s* later."""

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
        require(set(self.waits) <= set(self.meetings), f"{self.operation}: waits for what it is no part of")


Piece = Local | Join


@dataclass(frozen=True, slots=True)
class Meeting:
    """Members arrive; from the last arrival on it takes *transfer_s*. Its times are those measured."""

    group: str  # a Group, or "model": all ranks that hold one copy of the model
    kind: str
    name: str
    members: tuple[int, ...]
    size_bytes: int | None
    transfer_s: float
    start_s: float = 0.0
    end_s: float = 0.0
    overlapped: bool = False  # members compute beside it
    uneven: bool = False  # members hand in different sizes; size_bytes is the largest

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
    def whole(self) -> bool:
        """Whether every rank of the run is there."""
        return len(self.ranks) == self.layout.gpus

    def record_of(self, rank: int) -> RankRecord:
        for record in self.ranks:
            if record.rank == rank:
                return record
        raise ValueError(f"rank {rank} is not in this run; it has {', '.join(str(one.rank) for one in self.ranks)}")

    def compute_s(self, record: RankRecord, kind: BlockKind) -> float:
        """Time *record* computes alone in its blocks of *kind*, overlapped work included."""
        total_s = 0.0
        for block in record.blocks:
            if block.kind is kind:
                for piece in block.pieces:
                    if isinstance(piece, Join):
                        total_s += piece.own_s
                    elif piece.part is TimePart.COMPUTE:
                        total_s += piece.duration_s
        return total_s


def configuration(recording: Recording) -> dict[str, object]:
    """What the trace says of the model and the batch."""
    return {key: value for key, value in recording.facts.items() if key not in ("basis", "gradient_bytes")}
