"""What each rank of a Megatron-LM trace shows of its run, and whether ranks can be of one run."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepcast.inputs.errors import FormatError
from stepcast.inputs.megatron.lines import file_name_hints
from stepcast.ir.dtype import DType


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What one rank's operations show of the run."""

    rank: int
    stage: int
    path: str
    transfer: tuple[int, int, int] | None  # sequence, micro-batch, hidden
    tokens: tuple[int, int] | None  # micro-batch, sequence
    word_embedding: tuple[int, int] | None  # this rank's rows of the vocabulary, hidden
    hidden: int | None
    dtype: DType | None
    gradients: int | None
    forward_reduces: int | None  # activations reduced over tp in one forward pass; None: not traced
    micro_batches: int
    has_loss: bool
    # Rows that each all-to-all between experts of a forward pass is handed; None: experts do not communicate.
    exchanges: tuple[int, ...] | None = None

    @property
    def is_last(self) -> bool:
        return self.has_loss or (self.stage > 0 and self.word_embedding is not None)


def check_same_run(ranks: Sequence[RankEvidence]) -> None:
    """Ranks of one run share the tensors between stages, the batch and each stage's parameters."""
    for word, what in (
        ("transfer", "tensors between stages"),
        ("tokens", "batches"),
        ("hidden", "hidden sizes"),
    ):
        seen = [rank for rank in ranks if getattr(rank, word) is not None]
        for rank in seen[1:]:
            if getattr(rank, word) != getattr(seen[0], word):
                raise FormatError(
                    f"rank {rank.rank} has {what} of {getattr(rank, word)}, but rank {seen[0].rank} of "
                    f"{getattr(seen[0], word)}; expected ranks of one run",
                    rank.path,
                )
    first_on: dict[int, RankEvidence] = {}
    for rank in ranks:
        other = first_on.setdefault(rank.stage, rank)
        if None not in (rank.gradients, other.gradients) and rank.gradients != other.gradients:
            raise FormatError(
                f"rank {rank.rank} has {rank.gradients} gradients, but rank {other.rank} of the same stage "
                f"{other.gradients}; expected ranks of one run",
                rank.path,
            )
    last = min((rank for rank in ranks if rank.is_last), key=lambda rank: rank.stage, default=None)
    later = None if last is None else next((rank for rank in ranks if rank.stage > last.stage), None)
    if last is not None and later is not None:
        raise FormatError(
            f"rank {later.rank} is on stage {later.stage}, but stage {last.stage} of rank {last.rank} is the "
            "last one; expected ranks of one run",
            later.path,
        )


def common_hints(ranks: Sequence[RankEvidence]) -> dict[str, int]:
    """What all file names agree on; nothing where a file has no such name."""
    each = [file_name_hints(rank.path) for rank in ranks]
    return {word: value for word, value in each[0].items() if all(one.get(word) == value for one in each)}
