"""Seconds of convolutions, as cuDNN and PyTorch run them.

A convolution is a product of the windows of all positions by the weights, computed in the tiles of ``matmul`` but read
from the data itself, whose windows overlap. cuDNN's kernels take channels last: other data and weights are copied to
that layout and the result back. Small groups
of channels share a tile. Data of fewer channels than a load has elements (an image of three) run far below the peak.
Where each channel is convolved by itself, every element of the result takes its own instructions and some for each tap.
"""

import numpy as np

from stepcast.cost.fits import ComputeFit
from stepcast.cost.matmul import fastest_s
from stepcast.cost.power import Load, launch_s, limit_power
from stepcast.cost.price import Price, matrix_rates, price_kernel, scale_rates, vector_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.tables import constants
from stepcast.ir.types import DType
from stepcast.ir.work import Convolution, ConvolutionPass

LOAD_BYTES = 16  # of the widest load; channels are padded to it
GROUP_CHANNELS = 64  # channels of the narrowest tile, which small groups share
LARGE_WINDOW = 25
MEASURED = constants("convolution")


def price_convolution(work: Convolution, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    seconds = _depthwise_s(work, gpu, fit) if work.is_depthwise else _product_s(work, gpu, fit, load)
    rates = matrix_rates(gpu, work.dtype)
    seconds += float(launch_s(rates, 1e-6, fit, load))
    return price_kernel("convolution", seconds, work.flops, work.moved_bytes, rates, gpu, fit)


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
    moved = work.moved_bytes
    seconds = float(fastest_s(column, columns, depth, groups, size, rates, product_fit.product, moved)[0])
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
