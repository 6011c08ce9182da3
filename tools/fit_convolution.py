"""Fit the constants of convolutions; writes data/fits/convolution.toml.

    python tools/fit_convolution.py

Dense convolutions are fitted by pass and format; errors of shapes that were left out (a quarter at a time) are printed,
and the spread covers nine of ten of them. Groups, data of few channels and single channels have too few shapes to leave
any out.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from minimise import Vector, minimise

from stepcast.cost.fits import ComputeFit, ConvolutionFit, DepthwiseFit, default_fit
from stepcast.cost.power import ALONE
from stepcast.cost.scan_and_convolution import price_convolution
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.types import DType
from stepcast.ir.work import Convolution, ConvolutionPass

DATA = Path(__file__).parents[1] / "src" / "stepcast" / "data"
GPU = load_gpu("h200")
PASSES = {"forward": ConvolutionPass.FORWARD, "dgrad": ConvolutionPass.DATA, "wgrad": ConvolutionPass.WEIGHT}
FORMATS = {"half": ("bf16", "fp16"), "tf32": ("tf32",), "fp32": ("fp32",)}
# Name, start, least and most of each constant.
PRODUCT = {
    "efficiency": (0.9, 0.2, 1.0), "operand_clocks": (0.006, 1e-4, 0.2), "store_exposure": (1.0, 0.01, 20.0),
    "memory_efficiency": (0.8, 0.4, 0.95), "partial_wave": (0.5, 0.01, 1.0), "split_s": (5e-6, 1e-7, 1e-4),
}  # fmt: skip
COPIES = {"copy_efficiency": (0.4, 0.1, 0.9), "weight_copy_efficiency": (0.2, 0.02, 0.9)}
UNALIGNED = dict.fromkeys(("unaligned_operands", "odd_operands", "unaligned_memory", "odd_memory"), 1.0)
Case = tuple[Convolution, float, tuple[str, ...]]


def read_cases() -> Iterator[Case]:
    with (DATA / "captured" / "operators.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if not row["op"].startswith("conv"):
                continue
            batch, inner, size, outer, kernel, stride, groups = (int(row[name]) for name in "abcdefg")
            dimensions = {"conv1d": 1, "conv3d": 3}.get(row["op"], 2)
            transposed = row["op"].endswith("transposed")
            padding = 0 if kernel == stride else kernel // 2
            result = size * stride if transposed else (size + 2 * padding - kernel) // stride + 1
            inputs, outputs, of = batch * size**dimensions, batch * result**dimensions, PASSES[row["pass"]]
            if transposed:
                inputs, outputs, inner, outer = outputs, inputs, outer, inner
                swapped = {ConvolutionPass.FORWARD: ConvolutionPass.DATA, ConvolutionPass.DATA: ConvolutionPass.FORWARD}
                of = swapped.get(of, of)
            last = row["layout"] == "nhwc" or (kernel == 1 and size**dimensions % 8 == 0)
            work = Convolution(inputs, outputs, inner, outer, kernel**dimensions, groups, of, last, DType(row["dtype"]))
            yield work, float(row["us"]) * 1e-6, tuple(row[name] for name in ("op", *"abcdefg"))


def with_fit(name: str, entry: ConvolutionFit | DepthwiseFit) -> ComputeFit:
    fit = default_fit()
    if isinstance(entry, DepthwiseFit):
        return msgspec.structs.replace(fit, depthwise={**fit.depthwise, name: entry})
    return msgspec.structs.replace(fit, convolutions={**fit.convolutions, name: entry})


def ratios(cases: Sequence[Case], fit: ComputeFit) -> Vector:
    return np.array([price_convolution(work, GPU, fit, ALONE).seconds / seconds for work, seconds, _ in cases])


def build_dense(values: Sequence[float]) -> ConvolutionFit:
    numbers = dict(zip((*PRODUCT, *COPIES), values, strict=True))
    product = msgspec.structs.replace(
        default_fit().tensor, batched=None, **UNALIGNED, **{name: numbers[name] for name in PRODUCT}
    )
    return ConvolutionFit(product, **{name: numbers[name] for name in COPIES})


def fit_dense(name: str, cases: Sequence[Case]) -> ConvolutionFit:
    start, low, high = (np.array(column) for column in zip(*(PRODUCT | COPIES).values(), strict=True))
    found = minimise(lambda values: ratios(cases, with_fit(name, build_dense(values))), start, low, high)
    return build_dense(found)


def fit_depthwise(name: str, cases: Sequence[Case]) -> DepthwiseFit:
    start, low, high = np.array([0.5, 0.1]), np.array([1e-3, 1e-3]), np.array([20.0, 20.0])
    small = [case for case in cases if case[0].taps <= 25]
    large = [case for case in cases if case[0].taps > 25]

    def build(values: Vector) -> DepthwiseFit:
        return DepthwiseFit(*map(float, values))

    made = build(minimise(lambda values: ratios(cases, with_fit(name, build(values))), start, low, high))
    if np.median(np.abs(np.log(ratios(cases, with_fit(name, made))))) < 0.5:
        return made
    made = build(minimise(lambda values: ratios(small, with_fit(name, build(values))), start, low, high))
    clocks = [made.tap_clocks / ratio for ratio in ratios(large, with_fit(name, made))]
    return msgspec.structs.replace(made, large_tap_clocks=float(np.median(clocks)))


def report(name: str, found: Vector) -> None:
    errors = np.abs(found - 1)
    figures = f"mean {errors.mean():.1%} median {np.median(errors):.1%} most {errors.max():.0%}"
    print(f"{name:34} {found.size:3} rows: {figures}")


def lines() -> Iterator[str]:
    cases = list(read_cases())
    left_out: list[float] = []
    entries: dict[str, str] = {}
    for format_name, dtypes in FORMATS.items():
        for of in ConvolutionPass:
            own = [case for case in cases if case[0].dtype in dtypes and case[0].of is of and not case[0].is_depthwise]
            thin = [case for case in own if case[0].in_channels < 8]
            dense = [case for case in own if case[0].groups == 1 and case[0].in_channels >= 8]
            grouped = [case for case in own if case[0].groups > 1]
            name = f"{format_name}.{of}"
            made = fit_dense(name, dense)
            report(name, ratios(dense, with_fit(name, made)))
            shapes = sorted({case[2] for case in dense})
            tried = []
            for fold in range(4):
                out = set(shapes[fold::4])
                fitted = fit_dense(name, [case for case in dense if case[2] not in out])
                tried += list(ratios([case for case in dense if case[2] in out], with_fit(name, fitted)))
            report(f"{name}, left out", np.array(tried))
            left_out += [] if format_name == "fp32" else tried
            factor = float(np.exp(-np.median(np.log(ratios(grouped, with_fit(name, made))))))
            shares = []
            for work, seconds, _ in thin:
                padded = round(16 / work.dtype.bytes)
                flops = 2.0 * work.outputs * work.out_channels * padded * work.taps
                shares.append(flops / seconds / GPU.matrix_peak_flops(work.dtype))
            made = msgspec.structs.replace(made, grouped=max(1.0, factor), thin_share=float(np.median(shares)))
            report(f"{name}, groups", ratios(grouped, with_fit(name, made)))
            report(f"{name}, few channels", ratios(thin, with_fit(name, made)))
            numbers = {field: getattr(made, field) for field in (*COPIES, "grouped", "thin_share")}
            product = {field: getattr(made.product, field) for field in (*PRODUCT, *UNALIGNED)}
            entries[f'pass."{name}"'] = _table(numbers) + f'\n[pass."{name}".product]\n' + _table(product)
    for layout, is_last, wide in (("first", False, None), ("last", True, False), ("last-wide", True, True)):
        for of in ConvolutionPass:
            own = [
                case
                for case in cases
                if case[0].is_depthwise and case[0].of is of and case[0].channels_last == is_last
                and wide in (None, case[0].dtype.bytes >= 4)
            ]  # fmt: skip
            clocks = fit_depthwise(f"{layout}.{of}", own)
            report(f"single channels, {layout}.{of}", ratios(own, with_fit(f"{layout}.{of}", clocks)))
            entries[f'depthwise."{layout}.{of}"'] = _table(msgspec.structs.asdict(clocks))
    errors = np.abs(np.log(left_out))
    report("left out, all", np.array(left_out))
    yield 'source = "tools/fit_convolution.py on data/captured/operators.csv (H200, torch 2.11, cuDNN 9.19)"'
    yield f"spread = {np.quantile(errors, 0.9):.3g}"
    yield from (f"\n[{name}]\n{text}" for name, text in entries.items())


def _table(numbers: dict[str, float]) -> str:
    return "\n".join(f"{name} = {value:.4g}" for name, value in numbers.items())


if __name__ == "__main__":
    (DATA / "fits" / "convolution.toml").write_text("\n".join(lines()) + "\n", encoding="utf-8")
