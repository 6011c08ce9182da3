# mypy: ignore-errors
"""How the values of gradients decide what AdamW and a backward take on the GPU at hand.

    python tools/measure_updates.py FOLDER

Writes ``updates.json``. ``updates``: milliseconds of one AdamW step over 16 weights of 2048 x 8192, fused and
by lists, for gradients that are random, zero (never anything else), zero in half of the rows, or no number.
``toys``: phases of a small plain Llama on one batch, its targets the input itself or other tokens, head and
embedding tied or not; with the loss, the share of gradients that are zero, power and clock.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from gpu_watch import Watch
from torch import nn
from torch.nn import functional

LAYERS, HIDDEN, FFN, HEADS, KEYS, VOCAB = 8, 2048, 8192, 32, 8, 128256


def updates() -> list[dict]:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for how in ("fused", "foreach"):
            for values in ("random", "zero", "half", "nan"):
                weights = [nn.Parameter(torch.randn(2048, 8192, device="cuda", dtype=dtype) * 0.02) for _ in range(16)]
                for weight in weights:
                    weight.grad = torch.randn_like(weight) * 1e-3
                    if values == "zero":
                        weight.grad.zero_()
                    elif values == "half":
                        weight.grad[::2] = 0
                    elif values == "nan":
                        weight.grad.fill_(float("nan"))
                optimizer = torch.optim.AdamW(weights, lr=1e-4, **{how: True})
                spans = []
                for _ in range(25):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    optimizer.step()
                    end.record()
                    end.synchronize()
                    spans.append(begin.elapsed_time(end))
                ms = median(spans[5:])
                elements = sum(weight.numel() for weight in weights)
                row = {"dtype": str(dtype), "how": how, "values": values, "ms": ms}
                found.append(row | {"ps_per_element": ms * 1e9 / elements})
                print(found[-1], flush=True)
                del weights, optimizer
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key, self.value = (nn.Linear(HIDDEN, KEYS * width, bias=False) for _ in range(2))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        normed = self.norms[0](hidden)
        heads = [
            part(normed).view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        normed = self.norms[1](hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Toy(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, targets):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def toy(tied: bool, copied: bool, watch: Watch) -> dict:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Toy(tied).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCAB, (4, 4096), device="cuda")
    targets = ids if copied else torch.randint(0, VOCAB, (4, 4096), device="cuda")
    spans, zeros, loss, losses = [], 0.0, None, []
    began_s = time.time()
    while time.time() - began_s < 3.0 or len(spans) < 8:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        loss = model(ids, targets)
        marks[1].record()
        loss.backward()
        marks[2].record()
        optimizer.step()
        marks[3].record()
        if len(spans) % 8 == 5:
            grads = [weight.grad for weight in model.parameters()]
            zeros = sum(float((g == 0).sum()) for g in grads) / sum(g.numel() for g in grads)
            losses.append(float(loss))
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        spans.append([marks[at].elapsed_time(marks[at + 1]) for at in range(3)])
    phases = [round(median(span[at] for span in spans[4:]), 3) for at in range(3)]
    params = sum(weight.numel() for weight in model.parameters())
    found = {"tied": tied, "targets": "input" if copied else "other", "losses": losses[:3] + losses[-1:]}
    found |= dict(zip(("forward_ms", "backward_ms", "optimizer_ms"), phases, strict=True))
    found |= {"zero_gradients": zeros, "update_ps": phases[2] * 1e9 / params}
    found |= watch.over(began_s, time.time())
    print(found, flush=True)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    watch = Watch()
    try:
        found = {"torch": torch.__version__, "updates": updates()}
        found["toys"] = []
        for tied, copied in ((True, True), (True, False), (False, True), (False, False)):
            found["toys"].append(toy(tied, copied, watch))
            torch.cuda.empty_cache()
    finally:
        watch.close()
    (folder / "updates.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
