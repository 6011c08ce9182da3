"""Seconds of what runs along the sequence, and of convolutions, as cuDNN and PyTorch run them.

Along the sequence run a Mamba-2 block's chunked scan, a delta net's rule in chunks, the selective scan of Mamba's first
version, and recurrent cells. Mamba-2's scan is a chain of kernels that hand states and chunk products to each other
through memory. Measured on an H200 (tools/measure_mamba.py), none comes near the tensor cores' peak, and those with
products inside move a quarter to a half of what the memory could: they wait for their own instructions. So, as for
element-wise kernels of ``memory_bound``, the time is the longer of moving the bytes and of issuing on all
multiprocessors; issuing is counted per element of the input and per element of the states. Other GPUs were
not measured. A delta net's rule moves its bytes and then waits for its states, handed from chunk to chunk of
a sequence by one kernel, as long as heads are too few to fill the GPU.

A convolution is a product of the windows of all positions by the weights, computed in the tiles of ``matmul`` but read
from the data itself, whose windows overlap. cuDNN's kernels take channels last: other data and weights are copied to
that layout and the result back. Small groups of channels share a tile. Data of fewer channels than a load has elements
(an image of three) run far below the peak. Where each channel is convolved by itself, every element of the result takes
its own instructions and some for each tap.
"""

import numpy as np

from stepcast.cost.fits import ComputeFit, ScanFit
from stepcast.cost.matmul import fastest_s, time_product
from stepcast.cost.memory_bound import time_stream
from stepcast.cost.power import Load, launch_s, limit_power
from stepcast.cost.price import Number, Rates, matrix_rates, scale_rates, vector_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.recurrent import FLOAT, DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.tables import constants
from stepcast.ir.types import DType
from stepcast.ir.work import Convolution, ConvolutionPass, Elementwise, ElementwiseKind, Matmul

Scanned = Scan | DeltaRule | SelectiveScan
SCAN_KINDS: dict[type[Scanned], str] = {Scan: "scan", DeltaRule: "delta", SelectiveScan: "selective"}
"""The names under which works are fitted and calibrated."""
BLOCK_COLUMNS, BLOCKS_PER_SM = 64, 2
CELLS = constants("cells")


def time_scan(work: Scanned, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    """Each kernel is launched by itself; they are too far from the peak to heat the GPU."""
    scan_fit, rates = fit.scan(SCAN_KINDS[type(work)], work.backward), matrix_rates(gpu, work.dtype)
    seconds = scan_s(work, rates.peak_flops, scale_rates(vector_rates(gpu), gpu, fit), scan_fit)
    return float(seconds + scan_fit.kernels * launch_s(rates, 0.0, fit, load))


def scan_s(work: Scanned, peak_flops: Number, rates: Rates, fit: ScanFit) -> Number:
    """Return the seconds of one pass without launches; *peak_flops* is that of its products, which no kernel beats."""
    memory_s = work.moved_bytes / (rates.bandwidth_bytes_per_s * fit.bandwidth_efficiency)
    clocks = fit.input_clocks * work.inputs + fit.state_clocks * work.states
    issue_s = clocks / (rates.sms * rates.clock_hz)
    longer_s = np.sqrt(np.sqrt(memory_s**4 + issue_s**4))
    chain_s = fit.chunk_clocks * chunk_steps(work, rates.sms) / rates.clock_hz
    return np.maximum(longer_s, work.flops / peak_flops) + chain_s + fit.fixed_s


def chunk_steps(work: Scanned, sms: Number) -> Number:
    """Return the chunks that a delta net's states pass through one by one. A block of such a kernel holds 64 columns
    of one head's state; two blocks per multiprocessor run at once, not measured beyond one each.
    """
    if not isinstance(work, DeltaRule):
        return 0.0
    blocks = work.batch * work.heads * max(1.0, work.value_dim / BLOCK_COLUMNS)
    return -(-work.seq // work.chunk) * np.maximum(1.0, blocks / (BLOCKS_PER_SM * sms))


def time_cells(work: RecurrentCells, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    """Price LSTM, GRU and RNN cells: one kernel that keeps its weights on chip, or for each step a product and a small
    kernel, which the host launches.
    """
    if work.is_persistent:
        weights = work.gates * work.hidden * work.width
        spills = CELLS["spilled"][work.backward] if weights * FLOAT > gpu.shared_memory_per_sm_bytes else 1.0
        step_s, weight_s = CELLS["persistent"][work.backward]
        step_s = (step_s + weight_s * weights * spills) * max(1.0, work.batch / CELLS["batch"])
    else:
        product, gates = _cell_kernels(work)
        step_s = time_product(product, gpu, fit, load) + time_stream(gates, gpu, fit, load)
        step_s *= CELLS["narrow" if work.dtype.bytes < FLOAT else "wide"][work.backward]
    return float(work.steps * step_s)


def _cell_kernels(work: RecurrentCells) -> tuple[Matmul, Elementwise]:
    """Return the product of one step and the kernel that makes its gates and states, which stay in the cache."""
    wide = work.gates * work.hidden
    columns, depth = (work.width, wide) if work.backward else (wide, work.width)
    size = work.batch * work.hidden * work.dtype.bytes
    moved = (2 * work.gates + 2) * size
    gates = Elementwise(ElementwiseKind.ADD, work.batch, work.hidden, moved / 2, moved / 2, dtype=work.dtype)
    return Matmul(work.batch, columns, depth, 1, work.dtype), gates


LOAD_BYTES = 16  # of the widest load; channels are padded to it
GROUP_CHANNELS = 64  # channels of the narrowest tile, which small groups share
LARGE_WINDOW = 25
MEASURED = constants("convolution")


def time_convolution(work: Convolution, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    seconds = _depthwise_s(work, gpu, fit) if work.is_depthwise else _product_s(work, gpu, fit, load)
    return seconds + float(launch_s(matrix_rates(gpu, work.dtype), 1e-6, fit, load))


def _depthwise_s(work: Convolution, gpu: Gpu, fit: ComputeFit) -> float:
    layout = "first" if not work.channels_last else "last" if work.dtype.bytes < DType.FP32.bytes else "last-wide"
    kernel_fit, rates = fit.depthwise[f"{layout}.{work.of}"], vector_rates(gpu)
    large = kernel_fit.large_tap_clocks and work.taps > LARGE_WINDOW
    clocks = kernel_fit.element_clocks + work.taps * (kernel_fit.large_tap_clocks if large else kernel_fit.tap_clocks)
    positions = work.inputs if work.of is ConvolutionPass.DATA else work.outputs
    return float(positions * work.out_channels * clocks / (rates.sms * rates.clock_hz))


def _product_s(work: Convolution, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    form = "half" if work.dtype.bytes < DType.FP32.bytes else str(work.dtype)
    product_fit = fit.convolutions[f"{form}.{work.of}"]
    size, rates = work.dtype.bytes, scale_rates(matrix_rates(gpu, work.dtype), gpu, fit)
    channels = round(LOAD_BYTES / size)
    thin = work.in_channels < channels
    inner = -(-work.in_channels // channels) * channels / work.groups
    outer, groups = work.out_channels / work.groups, float(work.groups)
    if groups > 1.0:
        shared = min(groups, max(1.0, GROUP_CHANNELS // inner))
        inner, outer, groups = inner * shared, outer * shared, groups / shared
    windows = work.taps * work.outputs / work.inputs  # that a position of the data is part of
    rows, columns, depth = {
        ConvolutionPass.FORWARD: (work.outputs, outer, inner * work.taps),
        ConvolutionPass.DATA: (work.inputs, inner, outer * windows),
        ConvolutionPass.WEIGHT: (outer, inner * work.taps, work.outputs),
    }[work.of]
    column = np.array([rows], dtype=np.float64)
    seconds = float(fastest_s(column, columns, depth, groups, size, rates, product_fit.product, work.moved_bytes)[0])
    if work.groups > 1:
        seconds *= product_fit.grouped
        own_channels = work.in_channels // work.groups
        wide = work.taps >= MEASURED["separate_taps"] and own_channels >= MEASURED["separate_channels"]
        if work.of is not ConvolutionPass.WEIGHT and wide:
            seconds = max(seconds, work.groups * MEASURED["separate_s"])
            half = work.of is ConvolutionPass.FORWARD and size < DType.FP32.bytes
            if half and own_channels & (own_channels - 1) and work.taps >= MEASURED["serial_taps"]:
                seconds = max(seconds, work.in_channels * work.taps * MEASURED["serial_s"])
    if thin:
        flops = 2.0 * work.outputs * outer * inner * work.taps
        seconds = max(seconds, flops / (float(rates.peak_flops) * product_fit.thin_share))
    seconds = float(limit_power(seconds, work.flops, gpu, work.dtype, fit, load))
    if not work.channels_last:  # data, weights and result are copied to another layout, which takes memory too
        data = work.data_elements / product_fit.copy_efficiency + work.weights / product_fit.weight_copy_efficiency
        seconds += 2.0 * size * data / float(rates.bandwidth_bytes_per_s) + 3 * fit.step_launch_s
    return seconds
