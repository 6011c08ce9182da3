"""Peak memory of eager training steps on this GPU, to check stepcast's memory model against.

    python benchmarks/eager_memory.py OUT.csv

GPT- and Llama-style decoders as plain PyTorch writes them: fused qkv and gate-up matmuls, rotary embedding by
slices, torch's own attention, logits raised to fp32 for the loss, fused AdamW. Needs torch and a GPU.
"""

import csv
import sys
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    kind: str
    layers: int
    hidden: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    tied: bool
    batch: int
    seq: int
    dtype: str = "bf16"
    attention: str = "flash"
    recompute: str = "none"
    compiled: bool = False
    experts: int = 0
    topk: int = 0
    steps: int = 1  # micro-batches per step


CASES = (
    Case("gpt", 36, 1280, 20, 20, 5120, 50257, True, 8, 1024),
    Case("gpt", 36, 1280, 20, 20, 5120, 50257, True, 8, 1024, compiled=True),
    Case("gpt", 24, 2048, 16, 16, 8192, 1024, True, 8, 2048),
    Case("gpt", 24, 2048, 16, 16, 8192, 1024, True, 8, 2048, compiled=True),
    Case("gpt", 24, 2048, 16, 16, 8192, 1024, True, 8, 2048, recompute="full"),
    Case("gpt", 24, 2048, 16, 16, 8192, 1024, True, 8, 2048, attention="unfused", recompute="full"),
    Case("gpt", 24, 2048, 16, 16, 8192, 1024, True, 4, 2048, steps=4),
    Case("llama", 16, 2048, 32, 8, 8192, 128256, True, 4, 4096),
    Case("llama", 16, 2048, 32, 8, 8192, 128256, True, 4, 4096, compiled=True),
    Case("llama", 16, 4096, 32, 8, 14336, 1024, False, 2, 4096),
    Case("llama", 16, 4096, 32, 8, 14336, 1024, False, 2, 4096, compiled=True),
    Case("llama", 16, 4096, 32, 8, 14336, 1024, False, 2, 4096, recompute="full"),
    Case("llama", 16, 2048, 32, 8, 8192, 128256, True, 1, 1024, dtype="fp32"),
    Case("llama", 16, 2048, 32, 8, 8192, 128256, False, 1, 1024, dtype="fp32"),
    Case("llama", 8, 2048, 32, 8, 8192, 1024, False, 4, 4096, experts=8, topk=2),
    Case("llama", 8, 2048, 32, 8, 8192, 1024, False, 4, 4096, experts=8, topk=2, recompute="full"),
)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.dim = case, case.hidden // case.heads
        bias = case.kind == "gpt"
        self.qkv = nn.Linear(case.hidden, (case.heads + 2 * case.kv) * self.dim, bias=bias)
        self.output = nn.Linear(case.hidden, case.hidden, bias=bias)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        case, (batch, seq, _) = self.case, x.shape
        q, k, v = self.qkv(x).split([case.heads * self.dim, case.kv * self.dim, case.kv * self.dim], dim=-1)
        q = q.view(batch, seq, case.heads, self.dim).transpose(1, 2)
        k = k.view(batch, seq, case.kv, self.dim).transpose(1, 2)
        v = v.view(batch, seq, case.kv, self.dim).transpose(1, 2)
        if case.kind == "llama":
            q, k = (each * cos + rotated(each) * sin for each in (q, k))
        if case.attention == "flash":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=case.kv != case.heads)
        else:
            mask = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1)) * self.dim**-0.5
            y = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v
        return self.output(y.transpose(1, 2).reshape(batch, seq, -1))


def rotated(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gated, bias = case.kind == "llama", case.kind == "gpt"
        self.up = nn.Linear(case.hidden, case.ffn * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(case.ffn, case.hidden, bias=bias)

    def forward(self, x: Any) -> Any:
        if not self.gated:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):  # type: ignore[misc]
    """A loop over the experts, as simple implementations write it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.topk = case.topk
        self.router = nn.Linear(case.hidden, case.experts, bias=False)
        self.experts = nn.ModuleList(Mlp(case) for _ in range(case.experts))

    def forward(self, x: Any) -> Any:
        flat = x.view(-1, x.shape[-1])
        weight, chosen = self.router(flat).float().softmax(-1).topk(self.topk, dim=-1)
        weight = weight.to(x.dtype)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, expert(flat[row]) * weight[row, place, None])
        return out.view_as(x)


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, case: Case) -> None:
        super().__init__()
        norm = nn.LayerNorm if case.kind == "gpt" else nn.RMSNorm
        self.norms = nn.ModuleList((norm(case.hidden), norm(case.hidden)))
        self.attention = Attention(case)
        self.mlp = Experts(case) if case.experts else Mlp(case)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        x = x + self.attention(self.norms[0](x), cos, sin)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.word = nn.Embedding(case.vocab, case.hidden)
        self.position = nn.Embedding(case.seq, case.hidden) if case.kind == "gpt" else None
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = (nn.LayerNorm if case.kind == "gpt" else nn.RMSNorm)(case.hidden)
        self.head = nn.Linear(case.hidden, case.vocab, bias=False)
        if case.tied:
            self.head.weight = self.word.weight
        angles = torch.outer(torch.arange(case.seq), 1e4 ** -(torch.arange(0, 1, 2 * case.heads / case.hidden)))
        both = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", both.cos())
        self.register_buffer("sin", both.sin())

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.word(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.case.recompute == "full":
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def measure(case: Case) -> dict[str, Any]:
    """Peaks of the second step, when the optimizer's moments exist."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    with torch.device("cuda"):
        model: Any = Model(case).to(dtype=dtype)
    run = torch.compile(model) if case.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, case.vocab, (case.batch, case.seq), device="cuda")
    peaks = {}
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(case.steps):
            loss = run(tokens, tokens)
            peaks["forward"] = torch.cuda.max_memory_allocated()
            loss.backward()
            del loss
        peaks["backward"] = torch.cuda.max_memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        peaks["peak_alloc"] = torch.cuda.max_memory_allocated()
        peaks["peak_reserved"] = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    row = {field.name: getattr(case, field.name) for field in fields(case)}
    return row | {"params": sum(p.numel() for p in model.parameters())} | peaks | {"used": total - free}


def main() -> None:
    with open(sys.argv[1], "w", newline="") as file:
        writer = None
        for case in CASES:
            row = measure(case)
            if writer is None:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(row, flush=True)
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main() if sys.argv[1:] else sys.exit(__doc__)
