"""Bytes that gated delta nets and Mamba blocks of the first version keep between their projections, and need
for a moment in their backward.

flash-linear-attention keeps queries and keys as they are normed, values, decays summed along a chunk and the
solved system of each chunk, and computes states again. mamba_ssm's selective scan keeps its inputs, its
result before the gate and the states at every 2,048th token.
"""

from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.model import Model
from stepcast.ir.recurrent import DeltaRule, SelectiveScan, delta_rule_of

# Tokens between those whose states the selective scan keeps (csrc/selective_scan/selective_scan.cpp).
SCAN_CHUNK = 2048


def rule_saved(rule: DeltaRule, element: float) -> float:
    """What flash-linear-attention keeps of its own, its result included: queries and keys as they are normed,
    the solved systems, decays summed along a chunk, and the roots of both norms.
    """
    narrow = 2 * rule.keys + rule.inputs + rule.rows * rule.chunk
    return narrow * element + 3 * rule.rows * FP32_BYTES


def scan_saved(scan: SelectiveScan, element: float) -> float:
    """What mamba_ssm keeps of its own: the result before its gate and after it, and in fp32 states in
    between, twice: what they were, and what they had been multiplied by.
    """
    states = scan.batch * -(-scan.seq // SCAN_CHUNK) * scan.channels * scan.state
    return 2 * scan.inputs * element + 2 * states * FP32_BYTES


def delta_kept(model: Model, tokens: int, batch: int, tp: int, cp: int, element: float, matmul: float) -> float:
    """From the in-projection's result to the out-projection's input, which is kept in *matmul* bytes: the
    convolution's input and the gate, copied out of it; values and strengths; what the rule keeps; what decays
    are made of, in fp32; the norm's root.
    """
    delta, ways = model.delta, tp * cp
    assert delta is not None
    rule = delta_rule_of(delta, batch, max(1, tokens * cp // batch), ways)
    convolved = rule.batch * rule.seq * delta.channels / ways
    narrow = convolved + 2 * rule.inputs + rule.rows
    wide = 3 * rule.rows * FP32_BYTES
    return narrow * element + rule_saved(rule, element) + wide + rule.inputs * matmul


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
    """From the in-projection's result to the out-projection's input, which is the scan's: the projection, the
    convolved channels, time step, B and C before and after their norms, and the time steps of channels.
    """
    own = model.selective
    assert own is not None
    scan = SelectiveScan(batch, max(1, tokens // batch), own.inner, own.state)
    narrow = own.steps * (2 if own.normed else 1)
    return tokens * (4 * own.inner + narrow) * element + scan_saved(scan, element)


def selective_transient(model: Model, tokens: int, element: float) -> float:
    """Gradients of the channels, time steps, gate and the projection."""
    own = model.selective
    assert own is not None
    return tokens * 5.0 * own.inner * element
