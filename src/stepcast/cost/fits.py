"""The fitted constants of operator times: their types, and the files that ship with the package.

The physics is in the functions that take them; msgspec checks every number of a file.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from stepcast.hardware.catalog import load_fit
from stepcast.ir.tables import Amount, Count, Positive, Share, TableError, convert_table
from stepcast.ir.types import FactDict, Facts
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul

Efficiency = Annotated[float, Meta(gt=0, le=1)]  # at most 1, so that no price beats the hardware
AtLeastOne = Annotated[float, Meta(ge=1)]
DEFAULT_STREAM = "other"
UNSEEN = "unseen"
SCANS = ("scan", "delta", "selective")
ATTENTION = "attention"
UPDATES = {
    ElementwiseKind.OPTIMIZER: "update_s", ElementwiseKind.IDLE_OPTIMIZER: "update_s",
    ElementwiseKind.LISTED_OPTIMIZER: "listed_update_s", ElementwiseKind.QUANTISED_OPTIMIZER: "quantised_update_s",
}  # fmt: skip
# Architectures whose products in training have the constants of data/fits/operators.toml.
TRAINED_AS_SERVED = ("blackwell", "blackwell-ultra", "ada", "blackwell-rtx")
# Products in NVFP4 keep those of the H200, scaled: with the tables' own, published steps are predicted 2 % worse.
# Those in MXFP8 run at fp8's rate: scales of blocks cannot make them faster, but the tables' share of quantisation can.
SERVED_FORMATS = {"bf16": "bf16", "fp16": "bf16", "tf32": "bf16", "fp8": "fp8", "mxfp8": "fp8"}
# Tables that changes replace completely: an architecture that was left out must not be in them.
REPLACED = ("memory_efficiency",)


class FitError(ValueError):
    """A fit file that lacks what the model needs, or holds something else."""


class MatmulFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of matrix products on one kind of units."""

    efficiency: Share  # of the peak, in the inner loop of a tile
    operand_clocks: float  # of a multiprocessor, to bring one operand byte from shared memory to its cores
    store_exposure: float  # share of writing a tile that nothing hides
    memory_efficiency: Share  # of the memory bandwidth
    reread: Share  # share of operand traffic that goes to memory once a wave's panels overflow the L2 cache
    unaligned_operands: AtLeastOne  # times the operand clocks when rows miss 16-byte boundaries
    odd_operands: AtLeastOne  # when they miss even 4-byte boundaries
    unaligned_memory: Share  # of the memory efficiency when rows miss 16-byte boundaries
    odd_memory: Share  # when they miss even 4-byte boundaries
    partial_wave: Share  # 1: a partly filled last wave costs a full one; 0: only what it holds
    split_s: float  # summing the pieces of a split reduction
    latency_s: float  # beyond the launch
    k_step: Count  # a tile goes through the reduction in steps of this length
    tiles: Annotated[tuple[tuple[int, int], ...], Meta(min_length=1)]
    batched: "MatmulFit | None" = None  # where batched products differ

    def __post_init__(self) -> None:
        if self.unaligned_operands > self.odd_operands:
            raise ValueError("narrower loads must cost more: unaligned_operands <= odd_operands")


class AttentionFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of fused attention, forward or backward."""

    efficiency: Efficiency  # of the matrix peak, in the inner loop
    flops_per_score: float  # softmax work, in matrix operations of the same duration
    tail: float  # share of the longest query tile during which the others wait
    memory_exposure: float  # share of reading and writing the tensors that nothing hides
    latency_s: float  # beyond the launch; backward is several kernels
    # Factors on that time: within a step, for heads wider than DEFAULT_HEAD, for pairs that a tensor selects
    # (over all pairs without one), and for dropout of probabilities.
    in_step: float = 1.0
    wide: float = 1.0
    masked: float = 1.0
    dropping: float = 1.0


class StreamFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of one kind of memory-bound kernel."""

    bandwidth_efficiency: Efficiency  # of the memory bandwidth
    elements_per_clock: float = 0.0  # instruction limit per multiprocessor; 0: memory is the only limit
    row_clocks: float = 0.0  # cost of starting a row, per multiprocessor
    column_clocks: float = 0.0  # time of one element of a row within its thread block
    passes: float = 0.0  # additional reads of a row that does not stay in the cache between passes
    latency_s: float = 0.0  # beyond the launch
    serial_clocks: float = 0.0  # of each of the first serial_rows rows, which follow one another
    serial_rows: float = float("inf")


class ConvolutionFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of one pass of convolutions in one group of formats."""

    product: MatmulFit  # of the windows by the weights
    copy_efficiency: Efficiency  # of the memory bandwidth: data that are copied to channels last and back
    weight_copy_efficiency: Efficiency
    grouped: float = 1.0  # factor on the product of groups
    thin_share: Share = 1.0  # of the peak where the data have fewer channels than a load has elements


class DepthwiseFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Clocks of a multiprocessor for each element of the result of one pass, where each channel is by itself."""

    element_clocks: Amount
    tap_clocks: Amount
    large_tap_clocks: Amount = 0.0  # of windows larger than 5 x 5, where these have other kernels


class ScanFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of kernels that run along the sequence, forward or backward."""

    kernels: int  # that one pass launches
    bandwidth_efficiency: Efficiency  # of the memory bandwidth
    input_clocks: Amount  # of a multiprocessor, for each element of the input
    state_clocks: Amount  # and for each element of the chunks' states
    fixed_s: Amount  # of the kernels of one pass, however little there is to do
    chunk_clocks: Amount = 0.0  # of one chunk after another of a sequence, where a kernel hands on its state


class PowerFit(Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """The slowdown of a GPU under its power limit."""

    idle_share: Annotated[float, Meta(ge=0, lt=1)]  # of the board's power that is spent without load
    memory_share: float  # of the board's power that kernels bound by memory draw
    exponent: Share  # slowdown = (power wanted / power allowed) ** exponent
    warm_up_s: Positive  # a burst much shorter than this runs at full clock
    joule_per_flop: Mapping[str, Mapping[str, float]]  # architecture -> format
    attention: float = 1.0  # energy of an operation of fused attention, as a multiple of a product's
    # By GPU: time of products on a cool one over that of the fit, whose operators others had heated.
    cool: Mapping[str, float] = {}
    # Architectures on which seconds of work were measured with their power, and their own constants.
    measured: "Mapping[str, PowerFit]" = {}

    def of(self, architecture: str) -> "PowerFit":
        return self.measured.get(architecture, self)

    def energy(self, architecture: str, dtype: str) -> float:
        """Return the joule per operation; 0 (no limit known) where the table has none."""
        return self.joule_per_flop.get(architecture, {}).get(dtype, 0.0)

    def with_energies(self, architecture: str, energies: Mapping[str, float]) -> "PowerFit":
        """Return this fit with the *energies* of one GPU: joule per operation, and ``attention``'s as a multiple."""
        measured = self.of(architecture)
        joule_per_flop = {**measured.joule_per_flop.get(architecture, {}), **energies}
        attention = joule_per_flop.pop(ATTENTION, measured.attention)
        measured = replace(measured, joule_per_flop={architecture: joule_per_flop}, attention=attention, cool={})
        return replace(self, measured={**self.measured, architecture: measured})


class DispatchFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Host seconds to issue one kernel of eager PyTorch."""

    light_s: float  # element-wise kernels
    heavy_s: float  # a linear or attention module: Python layers, autograd bookkeeping, library heuristics
    backward_light_s: float  # from the autograd engine, which is C++
    backward_heavy_s: float
    call_s: float  # of one call from a measuring loop: events, graph set-up
    # In addition, for the code of a layer around its attention, and around each grouped product of experts.
    layer_s: float = 0.0
    backward_layer_s: float = 0.0
    grouped_s: float = 0.0
    backward_grouped_s: float = 0.0
    # For each tensor in the optimizer's lists: updated in one kernel, operation by operation, or in a call of its own.
    update_s: float = 0.0
    listed_update_s: float = 0.0
    quantised_update_s: float = 0.0

    def issue_s(self, work: Compute, backward: bool) -> float:
        """Return the seconds to issue the kernel of *work* and to run the code around it."""
        if isinstance(work, Elementwise):
            tensor_s: float = getattr(self, UPDATES.get(work.kind, ""), 0.0)
            return tensor_s or (self.backward_light_s if backward else self.light_s)
        kernel_s = self.backward_heavy_s if backward else self.heavy_s
        if isinstance(work, GroupedMatmul):
            return kernel_s + (self.backward_grouped_s if backward else self.grouped_s)
        layer_s = self.backward_layer_s if backward else self.layer_s
        if isinstance(work, Attention):
            return kernel_s + layer_s
        # Attention that is written out has two batched products, and four in the backward.
        batched = isinstance(work, Matmul) and work.batch > 1
        return kernel_s + layer_s / (4 if backward else 2) if batched else kernel_s


class ComputeFit(Struct, frozen=True, eq=False):
    """All fitted constants of the model of operator times."""

    source: str
    tensor: MatmulFit
    simt: MatmulFit
    # By architecture, where its kernels differ from ``tensor`` and ``simt``.
    tensor_of: Mapping[str, MatmulFit]
    simt_of: Mapping[str, MatmulFit]
    matrix_efficiency: Mapping[str, float]  # by number format, of the matmul efficiency
    grouped_efficiency: float  # factor on the matmul efficiency of a grouped multiply
    grouped_s: float  # per group of a grouped multiply: setting up its descriptors
    attention_forward: AttentionFit
    attention_backward: AttentionFit
    streams: Mapping[str, StreamFit]
    power: PowerFit
    step_launch_s: float  # a kernel behind others in a busy stream
    backward_call_s: float  # the least that one backward call through the autograd engine takes by itself
    # Kind of work -> architecture on which it was measured, or UNSEEN -> half width of the 90 % range.
    spread: Mapping[str, Mapping[str, float]]
    # By architecture and number format, where it differs from ``matrix_efficiency``.
    matrix_efficiency_of: Mapping[str, Mapping[str, float]] = {}
    # Share of the memory bandwidth that library kernels reach, by architecture.
    memory_efficiency: Mapping[str, float] = {}
    # By format (half, tf32, fp32) and pass; of single channels also by layout.
    convolutions: Mapping[str, ConvolutionFit] = {}
    depthwise: Mapping[str, DepthwiseFit] = {}
    # Kind of scan -> phase -> constants, which fits of other operators need not have.
    scans: Mapping[str, Mapping[str, ScanFit]] = {}

    def scan(self, kind: str, backward: bool) -> ScanFit:
        if kind not in self.scans:
            raise FitError(f"fit: {kind} is missing: this fit cannot price what runs along the sequence")
        return self.scans[kind]["backward" if backward else "forward"]

    def stream(self, key: str) -> StreamFit:
        """Return the constants of a kind of memory-bound kernel, or of kinds without their own."""
        return self.streams.get(key) or self.streams[DEFAULT_STREAM]

    def is_measured(self, kind: str, architecture: str) -> bool:
        """Return whether work of *kind* was measured on *architecture*, or is scaled from others."""
        return architecture in self.spread[kind]

    def half_width(self, kind: str, architecture: str) -> float:
        known = self.spread[kind]
        return known.get(architecture, known[UNSEEN])

    def memory_share(self, architecture: str) -> float:
        """Return the share of the bandwidth that the architecture reaches, relative to the streams of the fit."""
        known = self.memory_efficiency
        return known.get(architecture, known.get(UNSEEN, 1.0))

    def efficiency_of(self, architecture: str, dtype: str) -> float:
        efficiencies = self.matrix_efficiency_of.get(architecture, {})
        return efficiencies.get(dtype, self.matrix_efficiency.get(dtype, 1.0))


def compute_fit(table: Facts) -> ComputeFit:
    """Return a parsed fit file as a ComputeFit; a FitError names what is missing or unknown."""
    try:
        values = {**table, "streams": table["stream"], "scans": {kind: table[kind] for kind in SCANS if kind in table}}
        for phase in ("forward", "backward"):
            values[f"attention_{phase}"] = table["attention"][phase]
        for unit in ("tensor", "simt"):
            common = table["matmul"][unit]
            values[unit] = _complete_batched(common)
            # Entries of architectures hold the differences from the common one.
            values[f"{unit}_of"] = {
                name: _complete_batched(merge_tables(common, entry))
                for name, entry in table["matmul"].get(f"{unit}_of", {}).items()
            }
        fit = convert_table(values, ComputeFit)
    except KeyError as missing:
        raise FitError(f"fit: {missing} is missing") from None
    except TableError as error:
        raise FitError(f"fit: {error}") from None
    if DEFAULT_STREAM not in fit.streams:
        raise FitError(f"stream.{DEFAULT_STREAM} is missing: it replaces kinds without their own fit")
    return fit


def _complete_batched(entry: Facts) -> FactDict:
    """Return *entry* with all constants of batched products, of which it holds the differences."""
    single = {name: value for name, value in entry.items() if name != "batched"}
    return single | {"batched": single | entry["batched"]} if entry.get("batched") else single


@lru_cache(maxsize=1)
def default_fit() -> ComputeFit:
    """Return the constants fitted on an H200 with current PyTorch, and for fp32 on five older GPUs."""
    table, mamba, traced, linear = (load_fit(name) for name in ("compute", "mamba", "transformers", "linear"))
    table["stream"] |= mamba["stream"] | traced["stream"] | load_fit("captured")["stream"]
    table["attention"] = merge_tables(table["attention"], traced["attention"])
    spreads = {"scan": mamba["spread"], **linear["spread"]}
    for kind, scans in (("scan", mamba), ("delta", linear), ("selective", linear)):
        table[kind] = scans[kind]
        table["spread"][kind] = {**table["spread"]["attention"], "hopper": spreads[kind]}
    convolution = load_fit("convolution")
    tiles = {**table["matmul"]["tensor"], "batched": None}
    table["convolutions"] = {
        name: {**entry, "product": {**tiles, **entry["product"]}} for name, entry in convolution["pass"].items()
    }
    table["depthwise"] = convolution["depthwise"]
    table["spread"]["convolution"] = {**table["spread"]["attention"], "hopper": convolution["spread"]}
    # Products of architectures that public tables measured, and we did not.
    recipes = set(SERVED_FORMATS.values())
    sections = tuple(f"[architecture.{name}.linear.{kind}.product]" for name in TRAINED_AS_SERVED for kind in recipes)
    for name, entry in load_fit("operators", sections)["architecture"].items():
        products = {dtype: entry["linear"][recipe]["product"] for dtype, recipe in SERVED_FORMATS.items()}
        table["matmul"]["tensor_of"] |= {f"{name}-{dtype}": values for dtype, values in products.items()}
        table["spread"]["tensor"].setdefault(name, table["spread"]["tensor"]["blackwell"])
    # Architectures that were measured at their power limit.
    measured = {name: entry for name, entry in load_fit("power").items() if isinstance(entry, dict)}
    for name, entry in measured.items():
        entry["joule_per_flop"] = {name: entry["joule_per_flop"]}
    table["power"]["measured"] = measured
    return compute_fit(table)


@lru_cache(maxsize=4)
def default_dispatch(modules: str = "torch", kind: str = "dispatch") -> DispatchFit:
    """Return the host times of the measured H200, under PyTorch's own modules or those of transformers, these eager or
    compiled.
    """
    return convert_table(load_fit("compute" if modules == "torch" else modules)[kind], DispatchFit)


@lru_cache(maxsize=1)
def neusight_fit() -> tuple[ComputeFit, dict[str, float], dict[str, float]]:
    """Return the fit of NeuSight's set of older kernels, and by operator what measuring adds and the least it reads."""
    table = load_fit("neusight")
    changes = {section: table[section] for section in ("matmul", "stream")}
    return compute_fit(merge_tables(load_fit("compute"), changes)), table["added_s"], table["least_s"]


def merge_tables(base: Facts, changes: Facts) -> FactDict:
    """Return *base* with the values of *changes*, table by table."""
    result = dict(base)
    for key, value in changes.items():
        old, is_table = result.get(key), isinstance(value, Mapping) and key not in REPLACED
        result[key] = merge_tables(old, value) if is_table and isinstance(old, Mapping) else value
    return result
