# ruff: noqa: N812 -- F is PyTorch's own custom
# mypy: ignore-errors
"""How much slower computation runs beside a collective: seconds of it lost per second of communication.

A stand-in for a collective's kernel keeps thread blocks of its own on some multiprocessors (as many threads
and as much shared memory as NCCL's: 640 and 96 KB, so that no large matrix kernel shares the multiprocessor),
either waiting, as a block does whose data is on the network, or copying memory. It is started again and again
on a second stream while transformer layers run forward and backward on the first.

Needs one CUDA GPU, PyTorch and CuPy; prints one csv row per layer, kind, number of blocks and
length of the stand-in. The rows of an H200 in ``src/stepcast/data/h200/overlap.csv`` came from this script.
"""

import sys
import time

import cupy
import torch
from torch import nn
from torch.nn import functional as F

SOURCE = r"""
extern "C" __global__ void occupy(unsigned long long nanoseconds, float4* from, float4* to, long long count) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  long long at = blockIdx.x * 65536LL + threadIdx.x;
  do {
    if (count) {
      for (int i = 0; i < 16; i++) {
        to[at] = from[at];
        at += blockDim.x;
      }
      if (at >= count) at = blockIdx.x * 65536LL + threadIdx.x;
    } else {
      __nanosleep(200);
    }
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""
THREADS, SHARED_BYTES = 640, 96 * 1024
STEPS = 12  # few enough that the queue of the second stream holds all launches
LAYERS = {  # tokens, hidden, feed-forward, heads, key heads, head size
    "8B 8192 tokens": (8192, 4096, 14336, 32, 8, 128),
    "70B tp 4 8192 tokens": (8192, 8192, 28672 // 4, 16, 2, 128),
    "1B 16384 tokens": (16384, 2048, 8192, 16, 16, 128),
}


class Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int, head: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head, bias=False)
        self.out = nn.Linear(heads * head, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        sizes = [self.heads * self.head, self.kv_heads * self.head, self.kv_heads * self.head]
        q, k, v = (
            part.view(batch, seq, -1, self.head).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(sizes, dim=-1)
        )
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(core.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def main() -> None:
    occupy = cupy.RawModule(code=SOURCE, options=("--std=c++14",)).get_function("occupy")
    occupy.max_dynamic_shared_size_bytes = SHARED_BYTES
    buffer = cupy.zeros(1 << 28, dtype=cupy.uint8)
    target = cupy.zeros(1 << 28, dtype=cupy.uint8)
    side = torch.cuda.Stream(priority=-1)
    beside = cupy.cuda.Stream.from_external(side)
    print("layer,kind,blocks,duration_us,alone_ms,beside_ms,occupied_ms,lost_per_second", flush=True)
    for name, (tokens, hidden, ffn, heads, kv_heads, head) in LAYERS.items():
        torch.manual_seed(0)
        layer = Layer(hidden, ffn, heads, kv_heads, head).cuda().bfloat16()
        x = torch.randn(tokens // 4096, 4096, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn_like(x)

        def steps(count: int, layer: Layer = layer, x: torch.Tensor = x, g: torch.Tensor = gradient) -> None:
            for _ in range(count):
                layer(x).backward(g)

        def timed(blocks: int, duration_us: int, copies: bool, alone_s: float) -> tuple[float, float]:
            """Seconds of STEPS steps, and seconds in which the stand-in ran: half of the time."""
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            launches = int(STEPS * alone_s / (2e-6 * duration_us)) if blocks else 0
            start.record()
            side.wait_stream(torch.cuda.current_stream())
            for _ in range(launches):
                args = (duration_us * 1000, buffer, target, (1 << 24) if copies else 0)
                occupy((blocks,), (THREADS,), args, shared_mem=SHARED_BYTES, stream=beside)
                occupy((1,), (32,), (duration_us * 1000, buffer, target, 0), stream=beside)
            steps(STEPS)
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3, launches * duration_us * 1e-6

        steps(20)
        alone_s = min(timed(0, 1, False, 0.0)[0] for _ in range(3)) / STEPS
        for copies in (False, True):
            for blocks in (4, 8, 16, 24, 32):
                for duration_us in (500, 1000, 2000):
                    time.sleep(0.2)
                    steps(5)
                    total_s, occupied_s = timed(blocks, duration_us, copies, alone_s)
                    lost = (total_s - STEPS * alone_s) / occupied_s
                    kind = "copying" if copies else "waiting"
                    print(
                        f"{name},{kind},{blocks},{duration_us},{alone_s * 1e3:.3f},"
                        f"{total_s / STEPS * 1e3:.3f},{occupied_s / STEPS * 1e3:.3f},{lost:.3f}",
                        flush=True,
                    )
        del layer, x, gradient


if __name__ == "__main__":
    sys.exit(main())
