"""The chunked scan of a Mamba-2 block as one work: its shapes and its floating-point operations."""

from dataclasses import dataclass

from stepcast.ir.check import require, require_counts
from stepcast.ir.dtype import DType
from stepcast.ir.model_parts import Hybrid


@dataclass(frozen=True, slots=True)
class Scan:
    """All kernels of a state-space scan in chunks of *chunk* tokens, the gate included.

    Dao and Gu, "Transformers are SSMs" (2024), section 6: within a chunk products as in attention, a state of
    head_dim x state per head and chunk, a recurrence over the chunks' states, and their contribution to the
    output. *groups* of heads share B and C. The backward computes products and states of the forward again
    instead of keeping them, as mamba_ssm does (ops/triton/ssd_combined.py).
    """

    batch: int
    seq: int
    heads: int
    head_dim: int
    state: int
    groups: int
    chunk: int
    backward: bool = False
    dtype: DType = DType.BF16

    def __post_init__(self) -> None:
        require_counts(self, 1, "batch", "seq", "heads", "head_dim", "state", "groups", "chunk")
        require(self.heads % self.groups == 0, f"heads {self.heads} is not a multiple of groups {self.groups}")

    @property
    def chunks(self) -> int:
        return self.batch * -(-self.seq // self.chunk)

    @property
    def inputs(self) -> int:
        """Elements of the scan's input x; gate and output are as large."""
        return self.batch * self.seq * self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Elements of B; C is as large."""
        return self.batch * self.seq * self.groups * self.state

    @property
    def states(self) -> int:
        """Elements of the states of all chunks."""
        return self.chunks * self.heads * self.head_dim * self.state

    @property
    def squares(self) -> int:
        """Elements of C B^T of all chunks."""
        return self.chunks * self.groups * self.chunk * self.chunk

    @property
    def flops(self) -> float:
        """Executed products, of which those within a chunk fill half a square.

        Forward: C B^T; states from inputs; output from states and from within the chunk. Backward: the first
        two again; gradients of the states, of x (two), of B and of C; of C B^T and of the decay; and from
        the gradient of C B^T to those of B and C.
        """
        through_states, within = 2.0 * self.inputs * self.state, 1.0 * self.inputs * self.chunk
        square = 2.0 * self.shared * self.chunk
        if self.backward:
            return 5 * through_states + 3 * within + 3 * square
        return 2 * through_states + within + square


def scan_of(
    hybrid: Hybrid, batch: int, seq: int, ways: int = 1, *, backward: bool = False, dtype: DType = DType.BF16
) -> Scan:
    """The scan of one Mamba block on a rank that holds one of *ways* parts of the heads.

    Groups that so many cannot split are repeated.
    """
    return Scan(
        batch=batch,
        seq=seq,
        heads=max(1, hybrid.mamba_heads // ways),
        head_dim=hybrid.mamba_head_dim,
        state=hybrid.state,
        groups=max(1, hybrid.groups // ways),
        chunk=hybrid.chunk,
        backward=backward,
        dtype=dtype,
    )
