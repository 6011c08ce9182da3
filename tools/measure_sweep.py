# ruff: noqa: B023 -- every closure is called before its loop moves on
# mypy: ignore-errors
"""Measure batched products, softmax, small and fp32 products on the GPU at hand, in two ways.

    python tools/measure_sweep.py FOLDER

Needs PyTorch. Writes ``ops_batched.csv`` in the layout of the h200 set (median of repeated calls behind
others in the stream, the L2 cache flushed before each) and ``one_at_a_time_fp32.csv`` in the layout of
NeuSight's set (one call at a time on an idle GPU, TF32 off, the mean of the fastest 5 of 25), with
``kernels.txt`` beside them: which kernel ran a product, and what the board drew. The rows of an H200 in
``src/stepcast/data/h200`` came from this script, less those that ``ops.csv`` has (``again``) or covers
(linear bf16).
"""

import csv
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
OURS = "op,dtype,B,M,N,K,S,heads,kv,D,rows,cols,vocab,numel,ms"
THEIRS = "op,device,b,m,n,k,grid_x,grid_y,grid_z,ms,split,h"
FLUSH = torch.empty(256 << 20, dtype=torch.int32, device="cuda")  # 1 GiB: also hides the host
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 224)


def events():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def behind_others_ms(function, least=12, most=24, budget_s=0.1):
    """The median; the flush keeps the stream busy while the host issues the call."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times, start = [], time.perf_counter()
    while len(times) < least or (len(times) < most and time.perf_counter() - start < budget_s):
        pairs = []
        for _ in range(3):
            begin, end = events()
            FLUSH.zero_()
            begin.record()
            function()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) for begin, end in pairs]
    return statistics.median(times)


def one_at_a_time_ms(function):
    times = []
    for _ in range(25):
        begin, end = events()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sum(sorted(times)[:5]) / 5


def launched(function):
    """The longest kernel of a call: its name, grid and milliseconds by the profiler."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        function()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        found = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [event for event in found if event.get("cat") == "kernel"]
    main = max(kernels, key=lambda event: event["dur"])
    return main["name"], main["args"]["grid"], [(k["name"][:60], k["dur"]) for k in kernels]


def rand(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def log_uniform(generator, low, high):
    return round(low * (high / low) ** generator.random())


class Sweep:
    def __init__(self, folder):
        self.ours = (folder / "ops_batched.csv").open("w")
        self.theirs = (folder / "one_at_a_time_fp32.csv").open("w")
        self.kernels = (folder / "kernels.txt").open("w")
        self.products = 0
        print(OURS, file=self.ours)
        print(THEIRS, file=self.theirs)

    def our_row(self, op, dtype, function, **sizes):
        try:
            ms = behind_others_ms(function)
        except Exception as error:  # one failed case must not end the sweep
            print(op, sizes, "failed:", str(error)[:200], file=sys.stderr)
            return
        columns = OURS.split(",")[2:-1]
        cells = [str(sizes.get(name, "")) for name in columns]
        print(",".join([op, dtype, *cells, f"{ms:.6g}"]), file=self.ours, flush=True)

    def their_row(self, op, function, split, b="", m="", n="", k="", h=""):
        try:
            ms, grid = one_at_a_time_ms(function), ("", "", "")
            self.products += op in ("linear", "bmm")
            if op in ("linear", "bmm") and (split == "aligned" or self.products % 4 == 0):
                name, grid, all_kernels = launched(function)
                print(op, b, m, n, k, name, grid, all_kernels, file=self.kernels, flush=True)
        except Exception as error:
            print(op, b, m, n, k, h, "failed:", str(error)[:200], file=sys.stderr)
            return
        cells = [op, torch.cuda.get_device_name(), b, m, n, k, *grid, f"{ms:.6g}", split, h]
        print(",".join(map(str, cells)), file=self.theirs, flush=True)

    # ---- in the layout of the h200 set -----------------------------------------------------------------

    def attention_products(self):
        """Scores (queries by transposed keys) and their product with the values."""
        for dtype in (BF16, FP32):
            torch.backends.cuda.matmul.allow_tf32 = False
            for seq in (1024, 2048, 4096):
                for heads in (8, 32, 96):
                    for size in HEAD_SIZES if dtype is BF16 else (64, 128):
                        if dtype is FP32 and seq * seq * heads > 2e9:
                            continue
                        q, k = rand(heads, seq, size, dtype=dtype), rand(heads, seq, size, dtype=dtype)
                        scores = rand(heads, seq, seq, dtype=dtype)
                        self.our_row(
                            "bmm", NAMES[dtype], lambda: torch.bmm(q, k.transpose(1, 2)), B=heads, M=seq, N=seq, K=size
                        )
                        self.our_row("bmm", NAMES[dtype], lambda: torch.bmm(scores, k), B=heads, M=seq, N=size, K=seq)

    def again(self):
        """Products of the set's first file, to see that two days of measuring agree."""
        with (Path(__file__).parents[1] / "src/stepcast/data/h200/ops.csv").open() as lines:
            rows = list(csv.DictReader(lines))
        for row in [r for r in rows if r["op"] == "bmm"] + [r for r in rows if r["op"] == "linear"][::12]:
            dtype = {"bf16": BF16, "fp16": FP16, "fp32": FP32}.get(row["dtype"])
            b, m, n, k = (int(row[name] or 1) for name in "BMNK")
            if dtype is None:
                continue
            if row["op"] == "bmm":
                x, y = rand(b, m, k, dtype=dtype), rand(b, k, n, dtype=dtype)
                self.our_row("bmm", row["dtype"], lambda: torch.bmm(x, y), B=b, M=m, N=n, K=k)
            else:
                x, y = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype)
                self.our_row("linear", row["dtype"], lambda: torch.nn.functional.linear(x, y), M=m, N=n, K=k)

    def random_products(self):
        generator = random.Random(6)
        for index in range(400):

            def size(low, high, align):
                return max(align, log_uniform(generator, low, high) // align * align)

            b = log_uniform(generator, 2, 128)
            m, n = size(48, 4096, 1), size(48, 4096, (1, 2, 8)[index % 3])
            k = size(32, 1024, (8, 8, 2, 1)[index % 4])
            if b * m * n > 8e8:
                continue
            x, y = rand(b, m, k), rand(b, k, n)
            self.our_row("bmm", "bf16", lambda: torch.bmm(x, y), B=b, M=m, N=n, K=k)

    def softmaxes(self):
        for dtype in (BF16, FP32):
            for cols in (256, 512, 1000, 1024, 1536, 2048, 3072, 4096, 8192, 12288, 16384):
                for rows in (256, 2048, 16384, 131072):
                    if rows * cols > 1.1e9:
                        continue
                    x = rand(rows, cols, dtype=dtype)
                    self.our_row("softmax", NAMES[dtype], lambda: torch.softmax(x, -1), rows=rows, cols=cols)

    def small_products(self):
        generator = random.Random(7)
        for index in range(160):
            dtype = (BF16, FP32)[index % 2]
            m = log_uniform(generator, 16, 1024) // 8 * 8 or 8
            n, k = (max(64, log_uniform(generator, 64, 16384) // 8 * 8) for _ in range(2))
            x, w = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype)
            self.our_row("linear", NAMES[dtype], lambda: torch.nn.functional.linear(x, w), M=m, N=n, K=k)
            if index % 4 == 0:
                m, n, k = (max(64, size // 64 * 64) for size in (m, n, k))
                one = torch.tensor(1.0, device="cuda")
                x8 = rand(m, k).to(torch.float8_e4m3fn)
                w8 = rand(n, k).to(torch.float8_e4m3fn)
                self.our_row(
                    "linear", "fp8", lambda: torch._scaled_mm(x8, w8.t(), one, one, out_dtype=BF16), M=m, N=n, K=k
                )

    def power(self):
        """What the board draws, and at which clock, while one kind of kernel is kept up for some seconds."""
        wide = rand(8192, 8192, dtype=FP32)
        half, flat = wide.to(BF16), rand(1 << 28)
        kinds = {
            "fp32 matmul": (lambda: wide @ wide, 2 * 8192**3),
            "bf16 matmul": (lambda: half @ half, 2 * 8192**3),
            "bf16 add": (lambda: torch.add(flat, 1.0), 0),
            "idle": (lambda: time.sleep(0.01), 0),
        }
        for name, (function, flops) in kinds.items():
            query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
            start, readings, count = time.perf_counter(), [], 0
            while (spent := time.perf_counter() - start) < 3.0:
                for _ in range(20):
                    function()
                    count += 1
                if spent > 1.5:
                    readings.append(subprocess.run(query, capture_output=True, text=True).stdout.strip())
                torch.cuda.synchronize()
            rate = flops * count / (time.perf_counter() - start)
            print("power", name, f"{rate:.4g} flop/s", readings[-8:], file=self.kernels, flush=True)

    # ---- in the layout of NeuSight's set ---------------------------------------------------------------

    def fp32_products(self):
        generator = random.Random(8)
        shapes = []
        for _ in range(220):
            shapes.append(
                (
                    "linear",
                    1,
                    log_uniform(generator, 16, 16384),
                    log_uniform(generator, 16, 32768),
                    log_uniform(generator, 16, 16384),
                    "train",
                )
            )
        for _ in range(240):
            shapes.append(
                ("bmm", log_uniform(generator, 1, 1024), *(log_uniform(generator, 8, 1024) for _ in range(3)), "train")
            )
        for hidden, ffn in ((1024, 4096), (1280, 5120), (2048, 8192), (2560, 10240)):
            for tokens in (1024, 4096, 16384):
                shapes += [
                    ("linear", 1, tokens, hidden, 3 * hidden, "aligned"),
                    ("linear", 1, tokens, hidden, hidden, "aligned"),
                    ("linear", 1, tokens, hidden, ffn, "aligned"),
                    ("linear", 1, tokens, ffn, hidden, "aligned"),
                    ("linear", 1, tokens, hidden, 50257, "aligned"),
                ]
        for size in (64, 80, 128):
            for seq, heads in ((512, 16), (512, 256), (1024, 80), (2048, 64)):
                shapes += [("bmm", heads, seq, size, seq, "aligned"), ("bmm", heads, seq, seq, size, "aligned")]
        torch.backends.cuda.matmul.allow_tf32 = False
        for op, b, m, n, k, split in shapes:
            if b * m * n * k > 1.2e12 or b * (m * n + n * k + m * k) > 4e9:
                continue
            x = rand(b, m, n, dtype=FP32)
            if op == "linear":
                layer = torch.nn.Linear(n, k, bias=True, device="cuda")
                self.their_row(op, lambda: layer(x), split, b, m, n, k)
            else:
                y = rand(b, n, k, dtype=FP32)
                self.their_row(op, lambda: torch.bmm(x, y), split, b, m, n, k)

    def fp32_streams(self):
        generator = random.Random(9)
        binary = {"add": torch.add, "mul": torch.mul, "div": torch.div, "pow": torch.pow}
        unary = {
            "addu": lambda x: torch.add(x, 0.3), "mulu": lambda x: torch.mul(x, 0.3),
            "divu": lambda x: torch.div(x, 0.3), "powu": lambda x: torch.pow(x, 0.3), "tanh": torch.tanh,
            "relu": torch.nn.ReLU(), "gelu": torch.nn.GELU(), "softmax": torch.nn.Softmax(dim=-1),
        }  # fmt: skip
        for op in (*binary, *unary, "ln"):
            for index in range(32):
                b, h = log_uniform(generator, 4, 65536), log_uniform(generator, 256, 16384)
                if index % 4 == 0:
                    b, h = 2 ** round(generator.uniform(8, 17)), 256 * generator.randint(2, 40)
                if b * h > 2e9:
                    continue
                x = torch.zeros(b, h, device="cuda")
                split = "aligned" if index % 4 == 0 else "train"
                if op in binary:
                    y = torch.zeros(b, h, device="cuda")
                    self.their_row(op, lambda: binary[op](x, y), split, b=b, h=h)
                elif op == "ln":
                    norm = torch.nn.LayerNorm(h, device="cuda")
                    self.their_row(op, lambda: norm(x), split, b=b, h=h)
                else:
                    self.their_row(op, lambda: unary[op](x), split, b=b, h=h)


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(folder)
    print(torch.__version__, torch.cuda.get_device_name(), file=sys.stderr)
    parts = (
        sweep.again,
        sweep.attention_products,
        sweep.random_products,
        sweep.softmaxes,
        sweep.small_products,
        sweep.fp32_streams,
        sweep.fp32_products,
        sweep.power,
    )
    with torch.no_grad():
        for part in parts:
            start = time.perf_counter()
            part()
            torch.cuda.empty_cache()
            print(part.__name__, round(time.perf_counter() - start, 1), "s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
