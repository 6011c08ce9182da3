"""Bytes that gated delta nets and Mamba blocks of the first version keep between their projections, and need
for a moment in their backward.

flash-linear-attention keeps queries and keys as they are normed, values, decays summed along a chunk and the
solved system of each chunk, and computes states again. mamba_ssm's selective scan keeps its inputs, its
result before the gate and the states at every 2,048th token.
"""

from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.model import Model
from stepcast.ir.recurrent import delta_rule_of

# Tokens between those whose states the selective scan keeps (csrc/selective_scan/selective_scan.cpp).
SCAN_CHUNK = 2048


def delta_kept(
    model: Model, tokens: int, batch: int, tp: int, cp: int, element: float, matmul: float
) -> float:
    """From the in-projection's result to the out-projection's input, which is kept in *matmul* bytes: the
    convolution's input and the gate, copied out of it; what the rule keeps; its result and the norm's root.
    """
    delta, ways = model.delta, tp * cp
    assert delta is not None
    rule = delta_rule_of(delta, batch, max(1, tokens * cp // batch), ways)
    steps = rule.batch * rule.seq
    convolved = steps * delta.channels / ways
    inside = 2 * rule.keys + rule.inputs + rule.rows * (rule.chunk + 1)  # the system, and strengths
    decays = rule.rows * FP32_BYTES * 5  # two of the gate's, the sum, and roots of queries and keys
    result = 2 * rule.inputs + rule.inputs * matmul / element  # gate, result, what the norm makes of them
    return (convolved + inside + result) * element + decays + rule.rows * FP32_BYTES


def delta_transient(model: Model, tokens: int, batch: int, tp: int, cp: int, element: float) -> float:
    """Gradient of the projection; states of all chunks and their gradients; what the system solved and its
    gradients; gradients of queries, keys and values.
    """
    delta, ways = model.delta, tp * cp
    assert delta is not None
    rule = delta_rule_of(delta, batch, max(1, tokens * cp // batch), ways)
    projected = rule.batch * rule.seq * delta.projected / ways
    return (projected + 2 * rule.states + 5 * rule.keys + 4 * rule.inputs) * element


def selective_kept(model: Model, tokens: int, batch: int, element: float) -> float:
    """From the in-projection's result to the out-projection's input: the projection, the convolved channels,
    time step, B and C before and after their norms, the time steps of channels, the result and its product
    with the gate; in fp32 the states in between, twice: what they were and what they were multiplied by.
    """
    own = model.selective
    assert own is not None
    wide = 2 * own.inner + own.inner + own.inner + 2 * own.inner
    narrow = own.steps * (2 if own.normed else 1)
    seq = max(1, tokens // batch)
    states = batch * -(-seq // SCAN_CHUNK) * own.inner * own.state * 2 * FP32_BYTES
    return tokens * (wide + narrow) * element + states


def selective_transient(model: Model, tokens: int, element: float) -> float:
    """Gradients of the channels, time steps, gate and the projection."""
    own = model.selective
    assert own is not None
    return tokens * 5.0 * own.inner * element
