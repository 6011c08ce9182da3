"""List the operators to measure: sizes of training (``data/profile.toml``), few enough for three minutes.

Matmuls are (tokens, outputs, inputs) of common layer widths, so that every class has points from small ones, where
launches and waves decide, to large ones, where the peak does.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, product

from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import ComputeFit
from stepcast.cost.power import ALONE
from stepcast.hardware.catalog import load_data
from stepcast.hardware.cluster import Gpu
from stepcast.ir.types import DType, dataclass
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul

Operator = Matmul | GroupedMatmul | Attention | Elementwise
K = ElementwiseKind

SIZES = load_data("profile")
LONGEST_S = 0.05  # longer operators are not measured
MEMORY_SHARE = 0.4  # of the GPU's memory that one case may take


@dataclass(frozen=True, slots=True)
class Case:
    """One operator to time; the name is its key in a calibration file."""

    work: Operator

    @property
    def kind(self) -> str:
        """Return the class under which it is calibrated."""
        return work_class(self.work)

    @property
    def name(self) -> str:
        work = self.work
        match work:
            case Matmul():
                batch = f" batch {work.batch}" if work.batch > 1 else ""
                return f"{self.kind} {work.m}x{work.n}x{work.k}{batch}"
            case GroupedMatmul():
                return f"{self.kind} {work.m}x{work.n}x{work.k} groups {work.groups}"
            case Attention():
                heads = f"heads {work.heads}/{work.kv_heads}x{work.head_dim}"
                return f"{self.kind} {work.batch}x{work.query_len} {heads}"
        return f"{self.kind} {work.dtype} {work.rows}x{work.columns}"


def gpu_cases(gpu: Gpu, fit: ComputeFit, formats: Sequence[DType], quick: bool = False) -> tuple[Case, ...]:
    """Return the cases worth measuring on *gpu*, the classes in turns so that an early end leaves some of each.

    *formats* are the matrix formats its PyTorch can multiply in.
    """
    cases = [Case(work) for work in dict.fromkeys(_list_works(formats, quick)) if _fits(work, gpu, fit)]
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    turns = {case: next(numbers[case.kind]) for case in cases}
    return tuple(sorted(cases, key=lambda case: turns[case]))


def sustained_cases(gpu: Gpu, fit: ComputeFit, formats: Sequence[DType]) -> tuple[Case, ...]:
    """Return the cases to run without a pause: products in the formats of training, and attention."""
    used = [dtype for dtype in (DType.BF16, DType.FP8, DType.FP16) if dtype in formats]
    works: list[Operator] = [Matmul(m, n, k, 1, dtype) for dtype in used for m, n, k in SIZES["sustained"]["products"]]
    batch, length, heads, kv_heads, dim = SIZES["sustained"]["attention"]
    for half, backward in product([dtype for dtype in used if dtype is not DType.FP8][:1], (False, True)):
        works.append(Attention(batch, length, length, heads, kv_heads, dim, dim, True, backward, half))
    return tuple(Case(work) for work in works if _fits(work, gpu, fit))


def _list_works(formats: Sequence[DType], quick: bool) -> Iterator[Operator]:
    chosen = SIZES["quick" if quick else "usual"]
    for dtype in formats:
        # The widest sweep for the format that training uses; half as many sizes for the others.
        sizes = [(m, n, k) for m in chosen["tokens"] for n, k in chosen["weights"]][:: 1 if dtype is DType.BF16 else 2]
        for m, n, k in _alternate_sizes(sizes):
            yield Matmul(m, n, k, 1, dtype)
    half = DType.BF16 if DType.BF16 in formats else DType.FP16
    if half in formats:
        for length in chosen["batched"]:
            yield Matmul(length, length, 128, 32, half)
            yield Matmul(length, 128, length, 32, half)
        for groups, rows in chosen["experts"] if half is DType.BF16 else ():
            yield GroupedMatmul(rows, 4096, 2048, groups, half)
            yield GroupedMatmul(rows, 2048, 4096, groups, half)
        for (batch, length), (query, key, dim), backward in product(chosen["lengths"], chosen["heads"], (False, True)):
            yield Attention(batch, length, length, query, key, dim, dim, True, backward, half)
    dtype = half if half in formats else DType.FP32
    for rows, columns in chosen["shapes"]:
        size = rows * columns * dtype.bytes
        for kind, reads in ((K.ADD, 2), (K.COPY, 1), (K.GELU, 1), (K.LAYER_NORM, 1), (K.RMS_NORM, 1)):
            yield Elementwise(kind, rows, columns, reads * size, size, False, dtype)
        # PyTorch has a kernel for rows of up to 1,024 elements, which unfused attention runs.
        short = min(columns, 1024)
        moved = rows * short * dtype.bytes
        yield Elementwise(K.SOFTMAX, rows, short, moved, moved, False, dtype)
        if dtype is not DType.FP32:
            yield Elementwise(K.CAST, rows, columns, size, 4.0 * rows * columns, False, dtype)
        yield Elementwise(K.OPTIMIZER, 1, rows * columns, 4 * size, 3 * size, False, dtype)


def _alternate_sizes(sizes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return small and large sizes in turns, so that the first few points already span the range."""
    ordered = sorted(sizes, key=lambda size: size[0] * size[1] * size[2])
    half = (len(ordered) + 1) // 2
    low, high = ordered[:half], ordered[half:]
    return [size for pair in zip(low, high, strict=False) for size in pair] + low[len(high) :]


def _fits(work: Operator, gpu: Gpu, fit: ComputeFit) -> bool:
    """Return True if *work* takes neither too long nor too much memory on *gpu*."""
    small = held_bytes(work) <= MEMORY_SHARE * gpu.memory_bytes
    return small and compute_price(work, gpu, fit, ALONE).seconds <= LONGEST_S


def held_bytes(work: Operator) -> float:
    """Return the bytes of the tensors that a case needs at once."""
    if not isinstance(work, Attention):
        return work.moved_bytes
    query = work.batch * work.query_len * work.heads * work.head_dim
    return (4 if not work.backward else 8) * 2 * query * work.dtype.bytes
