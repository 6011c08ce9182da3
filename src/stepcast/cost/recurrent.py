"""Bytes that the kernels of delta nets and of Mamba's selective scan read and write, from their sources."""

from stepcast.ir.recurrent import DeltaRule, SelectiveScan


def delta_bytes(work: DeltaRule) -> float:
    """Of flash-linear-attention's chain of kernels (ops/gated_delta_rule/chunk.py), norms of queries and keys
    included; counted in tensors as large as the keys, as the values, as all states and as all solved systems.

    Forward: norms; the system with what it makes of keys and values; states; the result. Backward: the last
    two of the system again and the states; gradients within chunks; of states; of queries, keys and read
    keys; of the system; their sum; norms.
    """
    keys, values, states, systems = (26, 15, 4, 2) if work.backward else (10, 6, 2, 1)
    elements = keys * work.keys + values * work.inputs + states * work.states
    return (elements + systems * work.rows * work.chunk) * work.dtype.bytes


def selective_bytes(work: SelectiveScan) -> float:
    """Of one kernel (mamba_ssm, csrc/selective_scan): input, time steps and gate in, the result before and
    after the gate out; backward the gradient and the result in, three gradients out. B and C are read again
    for every channel, but from the cache.
    """
    whole = 8 if work.backward else 5
    return (whole * work.inputs + (4 if work.backward else 2) * work.shared) * work.dtype.bytes
