"""Speech recognition with an encoder and a decoder: convolutions over mel frames, cross attention."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--batch", type=int, default=16)
args = parser.parse_args()
heads = args.width // 64


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(args.width, args.width), nn.Linear(args.width, args.width, bias=False)
        self.v, self.o = nn.Linear(args.width, args.width), nn.Linear(args.width, args.width)

    def forward(self, x, other=None, causal=False):
        other = x if other is None else other
        q, k, v = (
            m(y).view(*y.shape[:2], heads, 64).transpose(1, 2)
            for m, y in ((self.q, x), (self.k, other), (self.v, other))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.attn, self.ln = MultiHead(), nn.LayerNorm(args.width)
        self.cross, self.cross_ln = (MultiHead(), nn.LayerNorm(args.width)) if cross else (None, None)
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        )
        self.mlp_ln = nn.LayerNorm(args.width)

    def forward(self, x, audio=None):
        x = x + self.attn(self.ln(x), causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.cross_ln(x), audio)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(80, args.width, 3, padding=1), nn.Conv1d(args.width, args.width, 3, 2, 1)
        self.register_buffer("positions", torch.randn(1500, args.width))
        self.encoder = nn.ModuleList(Block(False) for _ in range(args.layers))
        self.decoder = nn.ModuleList(Block(True) for _ in range(args.layers))
        self.tokens, self.where = nn.Embedding(51865, args.width), nn.Parameter(torch.zeros(448, args.width))
        self.ln, self.ln_post = nn.LayerNorm(args.width), nn.LayerNorm(args.width)

    def forward(self, mel, tokens):
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).permute(0, 2, 1)
        x = (x + self.positions).to(x.dtype)
        for block in self.encoder:
            x = block(x)
        audio, y = self.ln_post(x), self.tokens(tokens) + self.where[: tokens.shape[-1]]
        for block in self.decoder:
            y = block(y, audio)
        return (self.ln(y) @ self.tokens.weight.t()).float()


model = Whisper().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler()
for step in range(30):
    mel = torch.randn(args.batch, 80, 3000, device="cuda")
    text = torch.randint(0, 51865, (args.batch, 129), device="cuda")
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        logits = model(mel, text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 51865), text[:, 1:].reshape(-1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 15 == 0:
        print("loss", loss.item(), "scale", scaler.get_scale())
