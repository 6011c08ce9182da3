"""Token mixers that carry a state along the sequence: gated delta nets and Mamba's selective scan.

Their sizes in a model, and their kernels as works: shapes and floating-point operations.
"""

from typing import TYPE_CHECKING

from stepcast.ir.types import DType, Size, dataclass, require

FLOAT = 4.0  # bytes

if TYPE_CHECKING:
    from stepcast.ir.model_parts import Hybrid


@dataclass(frozen=True, slots=True)
class Delta:
    """A gated delta net (Yang, Kautz, Hatamizadeh 2024) as in Qwen3-Next: linear attention whose state
    forgets by a gate and replaces what a key held. Queries and keys of *key_heads* serve several heads of
    values; *chunk* is that of its kernels, flash-linear-attention's unless given.
    """

    key_heads: Size
    value_heads: Size
    key_dim: Size
    value_dim: Size
    conv: Size = 4
    chunk: Size = 64

    def __post_init__(self) -> None:
        values, keys = self.value_heads, self.key_heads
        require(values % keys == 0, f"value_heads {values} is not a multiple of key_heads {keys}")

    @property
    def keys(self) -> int:
        """Width of all keys; queries are as wide."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values; the output gate and the result are as wide."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Width of the in-projection: those, the output gate, and decay and strength of each head."""
        return self.channels + self.values + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class Selective:
    """A block of Mamba's first version (Gu and Dao 2023, section 3.4): every channel of the *inner* width has
    *state* states of its own; B, C and a time step of low *rank* are projected from the channels. *normed*:
    a norm for each of these three (Jamba).
    """

    inner: Size
    state: Size
    rank: Size
    conv: Size = 4
    conv_bias: bool = True
    normed: bool = False

    @property
    def steps(self) -> int:
        """Width of the projection to time step, B and C."""
        return self.rank + 2 * self.state


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """All kernels of the gated delta rule in chunks of *chunk* tokens, queries and keys repeated for heads.

    Yang et al. 2024, section 3.3, as flash-linear-attention executes it (ops/gated_delta_rule): within a
    chunk a triangular system is solved, between chunks a state of key_dim x value_dim per head is handed on.
    The backward computes states and the system's results again instead of keeping them.
    """

    batch: Size
    seq: Size
    heads: Size
    key_dim: Size
    value_dim: Size
    chunk: Size
    backward: bool = False
    dtype: DType = DType.BF16

    @property
    def rows(self) -> int:
        """Tokens times heads."""
        return self.batch * self.seq * self.heads

    @property
    def inputs(self) -> int:
        """Elements of the values; the result is as large."""
        return self.rows * self.value_dim

    @property
    def keys(self) -> int:
        """Elements of the keys; queries are as many."""
        return self.rows * self.key_dim

    @property
    def chunks(self) -> int:
        return self.batch * -(-self.seq // self.chunk)

    @property
    def states(self) -> int:
        """Elements of the states of all chunks."""
        return self.chunks * self.heads * self.key_dim * self.value_dim

    @property
    def flops(self) -> float:
        """Executed products; squares within a chunk are worked on whole.

        Forward, for each row: keys by keys, the system's inverse by keys and by values; the state read by
        these, written, and read by queries; queries by keys, and that by values. Backward: the inverse's two
        products and the states again (two), gradients of states (three), of queries, keys and read keys from
        states (three); squares: queries by keys twice, that by the gradient, the gradient by values, back to
        queries and keys (two), and of the system eight more and two of chunk by chunk.
        """
        state, keyed = 2.0 * self.key_dim * self.value_dim, 2.0 * self.chunk * self.key_dim
        valued, square = 2.0 * self.chunk * self.value_dim, 2.0 * self.chunk * self.chunk
        if self.backward:
            return self.rows * (8 * state + 10 * keyed + 5 * valued + 2 * square)
        return self.rows * (3 * state + 3 * keyed + 2 * valued)

    @property
    def moved_bytes(self) -> float:
        """Bytes of flash-linear-attention's chain of kernels (ops/gated_delta_rule/chunk.py), norms of queries and
        keys included; counted in tensors as large as the keys, as the values, as all states and as all solved systems.

        Forward: norms; the system with what it makes of keys and values; states; the result. Backward: the last
        two of the system again and the states; gradients within chunks; of states; of queries, keys and read
        keys; of the system; their sum; norms.
        """
        keys, values, states, systems = (26, 15, 4, 2) if self.backward else (10, 6, 2, 1)
        elements = keys * self.keys + values * self.inputs + states * self.states
        return (elements + systems * self.rows * self.chunk) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Mamba's selective scan with its gate: one kernel that keeps states out of memory (Gu and Dao 2023,
    section 3.3.2); the backward runs the states again from those at every 2,048th token.
    """

    batch: Size
    seq: Size
    channels: Size
    state: Size
    backward: bool = False
    dtype: DType = DType.BF16

    @property
    def inputs(self) -> int:
        """Elements of the input; time steps, gate and output are as large."""
        return self.batch * self.seq * self.channels

    @property
    def shared(self) -> int:
        """Elements of B; C is as large."""
        return self.batch * self.seq * self.state

    @property
    def states(self) -> int:
        """Elements of the states at all tokens, none of which is stored."""
        return self.inputs * self.state

    @property
    def flops(self) -> float:
        """No matrix products: for each state and token its decay (a product and an exponential), the input's
        share, the step and the sum into the output, seven in all; backward those again and twice as many.
        """
        return 7.0 * self.states * (3 if self.backward else 1)

    @property
    def moved_bytes(self) -> float:
        """Bytes of one kernel (mamba_ssm, csrc/selective_scan): input, time steps and gate in, the result before and
        after the gate out; backward the gradient and the result in, three gradients out. B and C are read again for
        every channel, but from the cache.
        """
        tensors = 8 if self.backward else 5
        return (tensors * self.inputs + (4 if self.backward else 2) * self.shared) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class RecurrentCells:
    """The cells of one layer of an LSTM, GRU or RNN in one direction, step after step, as cuDNN runs them:
    each step multiplies what the last one handed on, *width* wide, with the weight of all gates.
    """

    steps: Size
    batch: Size
    hidden: Size
    width: Size
    gates: Size
    backward: bool = False
    dtype: DType = DType.FP32

    @property
    def flops(self) -> float:
        return 2.0 * self.steps * self.batch * self.gates * self.hidden * self.width

    @property
    def moved_bytes(self) -> float:
        """Bytes of the weights once, and of the gates and states of all steps."""
        states = self.steps * (2 * self.gates + 2) * self.batch * self.hidden
        return (self.gates * self.hidden * self.width + states) * self.dtype.bytes

    @property
    def is_persistent(self) -> bool:
        """Return True if PyTorch asks cuDNN for the one kernel that keeps its weights on chip.

        Source: use_rnn_persist_small_h and get_algo in aten/src/ATen/native/cudnn/RNN.cpp; cuDNN 9.19 has none in bf16.
        """
        if self.width != self.hidden or self.dtype is DType.BF16:
            return False
        limits = (384, 256) if self.gates == 1 else (192, 128)
        return self.hidden <= limits[self.backward]


def delta_rule_of(
    delta: Delta, batch: int, seq: int, ways: int = 1, *, backward: bool = False, dtype: DType = DType.BF16
) -> DeltaRule:
    """Return the rule on a rank that holds one of *ways* parts of the heads."""
    heads = max(1, delta.value_heads // ways)
    return DeltaRule(batch, seq, heads, delta.key_dim, delta.value_dim, delta.chunk, backward, dtype)


# The chunked scan of a Mamba-2 block as one work: its shapes and its floating-point operations.


@dataclass(frozen=True, slots=True)
class Scan:
    """All kernels of a state-space scan in chunks of *chunk* tokens, the gate included.

    Dao and Gu, "Transformers are SSMs" (2024), section 6: within a chunk products as in attention, a state of
    head_dim x state per head and chunk, a recurrence over the chunks' states, and their contribution to the
    output. *groups* of heads share B and C. The backward computes products and states of the forward again
    instead of keeping them, as mamba_ssm does (ops/triton/ssd_combined.py).
    """

    batch: Size
    seq: Size
    heads: Size
    head_dim: Size
    state: Size
    groups: Size
    chunk: Size
    backward: bool = False
    dtype: DType = DType.BF16

    def __post_init__(self) -> None:
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
        through_states, in_chunks = 2.0 * self.inputs * self.state, 1.0 * self.inputs * self.chunk
        square = 2.0 * self.shared * self.chunk
        if self.backward:
            return 5 * through_states + 3 * in_chunks + 3 * square
        return 2 * through_states + in_chunks + square

    @property
    def moved_bytes(self) -> float:
        """Bytes of Mamba-2's kernels, from the shapes in mamba_ssm's ops/triton.

        Chunk states and C B^T are in fp32 where they are summed, in the training format where they multiply.
        """
        element = self.dtype.bytes
        inputs, shared = self.inputs * element, self.shared * element
        states, squares = float(self.states), self.squares * FLOAT
        steps = self.batch * self.seq * self.heads * FLOAT  # dt and its sums along a chunk
        sums = steps / FLOAT * element + 2 * steps
        products = 2 * shared + squares
        chunk_states = inputs + shared + states * FLOAT + 2 * steps
        if not self.backward:
            passing = states * (FLOAT + element)
            output = 4 * inputs + shared + states * element + squares + 2 * steps
            return sums + products + chunk_states + passing + output
        passing = states * 2 * FLOAT
        gate = 5 * inputs
        state_gradients = inputs + shared + states * FLOAT
        passing_back = states * 2 * (FLOAT + element)
        input_gradients = 3 * inputs + shared + states * element + squares
        of_shared = 2 * (inputs + states * element + shared + shared / element * FLOAT)
        of_products = 2 * (2 * inputs + squares)  # of C B^T, and of the decay
        to_shared = 2 * (squares + 2 * shared + shared / element * FLOAT)
        again = sums + products + chunk_states + passing
        gradients = gate + state_gradients + passing_back + input_gradients + of_shared + of_products + to_shared
        return again + gradients


def scan_of(
    hybrid: "Hybrid", batch: int, seq: int, ways: int = 1, *, backward: bool = False, dtype: DType = DType.BF16
) -> Scan:
    """Return the scan of one Mamba block on a rank that holds one of *ways* parts of the heads.

    Groups that so many cannot split are repeated.
    """
    heads, groups = max(1, hybrid.mamba_heads // ways), max(1, hybrid.groups // ways)
    sizes = (heads, hybrid.mamba_head_dim, hybrid.state, groups, hybrid.chunk)
    return Scan(batch, seq, *sizes, backward, dtype)
