"""A long profiler trace: steps of made-up events laid out as PyTorch writes them, on one rank."""

from pathlib import Path

HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "numSms": 132}],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8, "pg_config":
    [{"pg_name": "1", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1, 2, 3, 4, 5, 6, 7]}]},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1790857026000000000,
  "traceEvents": [
"""
TAIL = """  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": 1.000
  }
  ],
  "traceName": "grown.json"
}
"""
OP = """  {{
    "ph": "X", "cat": "cpu_op", "name": "aten::{name}", "pid": 397, "tid": 438,
    "ts": {start:.3f}, "dur": {duration:.3f},
    "args": {{
      "External id": {index},"Record function id": 0, "Concrete Inputs": ["", "0"], \
"Input type": ["float", "Scalar"], "Input Strides": [[128256, 1], []], "Input Dims": [[16384, 128256], []], \
"Ev Idx": {index}
    }}
  }},
"""
LAUNCH = """  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 397, "tid": 438,
    "ts": {start:.3f}, "dur": {duration:.3f},
    "args": {{
      "External id": {index}, "cbid": 211, "correlation": {index}
    }}
  }},
  {{
    "ph": "s", "id": {index}, "pid": 397, "tid": 438, "ts": {start:.3f},
    "cat": "ac2g", "name": "ac2g"
  }},
"""
KERNEL = """  {{
    "ph": "X", "cat": "kernel", "name": "void at::native::{name}_kernel<4, Functor<float, 4> >", \
"pid": 0, "tid": 7,
    "ts": {start:.3f}, "dur": {duration:.3f},
    "args": {{
      "External id": {index},
      "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": {index},
      "registers per thread": 16, "shared memory": 0,
      "blocks per SM": 3886.545410, "warps per SM": 15546.181641,
      "grid": [513024, 1, 1], "block": [128, 1, 1]
    }}
  }},
"""
COLLECTIVE = """  {{
    "ph": "X", "cat": "kernel", \
"name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "pid": 0, "tid": 20,
    "ts": {start:.3f}, "dur": {duration:.3f},
    "args": {{
      "External id": {index}, "device": 0, "stream": 20, "correlation": {index},
      "Collective name": "allreduce", "In msg nelems": 16777216, "Out msg nelems": 16777216, \
"Group size": 8, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", \
"Process Group Name": "1", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", \
"Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"
    }}
  }},
"""
NAMES = ("mm", "add", "mul", "gelu", "layer_norm", "softmax", "copy_", "fill_")


def layer(index: int, start_us: float) -> str:
    """One layer's worth: nested ops, launches, kernels, and one collective."""
    parts = []
    for offset in range(40):
        name, number = NAMES[offset % len(NAMES)], index * 41 + offset
        start = start_us + 25 * offset
        parts.append(OP.format(name=name, index=number, start=start, duration=20.5))
        parts.append(OP.format(name=name + "_inner", index=number, start=start + 2, duration=15.25))
        parts.append(LAUNCH.format(index=number, start=start + 5, duration=6.125))
        parts.append(KERNEL.format(name=name, index=number, start=start + 60, duration=22.75))
    parts.append(COLLECTIVE.format(index=index * 41 + 40, start=start_us + 500, duration=300.5))
    return "".join(parts)


def grow(target_bytes: int, path: Path) -> None:
    """Write a trace of about *target_bytes* at *path*."""
    written, index = 0, 0
    with path.open("w") as trace:
        written += trace.write(HEAD)
        while written < target_bytes:
            written += trace.write(layer(index, 3_850_162_329_480.0 + 1000 * index))
            index += 1
        trace.write(TAIL)
