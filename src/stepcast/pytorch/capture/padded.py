"""Products whose sizes suit no vector load, as torch.compile runs them: with operands copied and padded.

Source: torch/_inductor/fx_passes/pad_mm.py, where products that compute decides are padded.
"""

from dataclasses import replace

from stepcast.ir.work import Compute, Elementwise, ElementwiseKind, Matmul

ALIGNED_BYTES = 16
# Operations for each byte, from which on a product is padded: what GPUs compute while they move one.
BOUND_BY_COMPUTE = 150.0


def padded(work: Compute) -> tuple[Compute, ...]:
    """Copies of the operands with a size that is no multiple of a vector load's, and their product."""
    if not isinstance(work, Matmul):
        return (work,)
    whole = round(ALIGNED_BYTES / work.dtype.bytes)
    m, n, k = work.m, work.n, work.k
    wider = replace(work, m=_next(m, whole), n=_next(n, whole), k=_next(k, whole))
    moved = work.dtype.bytes * (m * k + k * n + m * n)
    if wider == work or 2.0 * m * n * k / moved < BOUND_BY_COMPUTE:
        return (work,)
    copies = [
        Elementwise(
            ElementwiseKind.COPY,
            work.batch * rows,
            columns,
            work.batch * rows * columns * work.dtype.bytes,
            work.batch * rows * columns * work.dtype.bytes,
            dtype=work.dtype,
        )
        for rows, columns in ((m, k), (k, n))
        if rows % whole or columns % whole
    ]
    return (*copies, wider)


def _next(size: int, whole: int) -> int:
    return -(-size // whole) * whole
