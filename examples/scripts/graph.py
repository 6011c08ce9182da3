"""A graph network: messages along edges, sums at their ends, attention by a softmax over neighbours."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=100_000)
parser.add_argument("--edges", type=int, default=1_000_000)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--gat", action="store_true")
args = parser.parse_args()


class Sage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, source, target, degree):
        summed = torch.zeros_like(x).index_add_(0, target, x[source])
        return self.own(x) + self.others(summed / degree)


class Gat(nn.Module):
    def __init__(self, inputs, outputs, heads=4):
        super().__init__()
        self.heads, self.map = heads, nn.Linear(inputs, outputs, bias=False)
        self.left = nn.Parameter(torch.randn(1, heads, outputs // heads) * 0.1)
        self.right = nn.Parameter(torch.randn(1, heads, outputs // heads) * 0.1)

    def forward(self, x, source, target, degree):
        h = self.map(x).view(x.size(0), self.heads, -1)
        score = (h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target]
        weight = nn.functional.leaky_relu(score, 0.2).exp()
        total = torch.zeros(x.size(0), self.heads, device=x.device).index_add(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        out = torch.zeros_like(h).index_add(0, target, h[source] * weight.unsqueeze(-1))
        return out.flatten(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        kind = Gat if args.gat else Sage
        self.layers = nn.ModuleList([kind(args.hidden, args.hidden) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(args.hidden) for _ in range(3)])
        self.last = nn.Linear(args.hidden, 47)

    def forward(self, x, source, target, degree):
        for layer, norm in zip(self.layers, self.norms):
            x = torch.relu(norm(layer(x, source, target, degree)))
            x = nn.functional.dropout(x, 0.5, self.training)
        return self.last(x).log_softmax(dim=-1)


device = "cuda"
x = torch.randn(args.nodes, args.hidden).to(device)
source = torch.randint(0, args.nodes, (args.edges,)).to(device)
target = torch.randint(0, args.nodes, (args.edges,)).to(device)
y = torch.randint(0, 47, (args.nodes,)).to(device)
degree = (
    torch.zeros(args.nodes, 1, device=device)
    .index_add_(0, target, torch.ones(args.edges, 1, device=device))
    .clamp(min=1)
)
model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(1, 31):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.nll_loss(model(x, source, target, degree), y)
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(f"Epoch: {epoch:02d}, Loss: {loss.item():.4f}")
