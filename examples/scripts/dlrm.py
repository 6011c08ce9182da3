"""Click prediction: embedding bags, interactions of their sums, two perceptrons, SGD."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--mini-batch-size", type=int, default=8192)
parser.add_argument("--tables", type=int, default=26)
parser.add_argument("--rows", type=int, default=200_000)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--adam", action="store_true")
args = parser.parse_args()


def mlp(sizes, last=False):
    layers = []
    for i in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
        layers.append(nn.Sigmoid() if last and i == len(sizes) - 2 else nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = mlp([13, 512, 256, args.dim])
        self.bags = nn.ModuleList(nn.EmbeddingBag(args.rows, args.dim, mode="sum") for _ in range(args.tables))
        pairs = (args.tables + 1) * args.tables // 2
        self.top = mlp([args.dim + pairs, 1024, 1024, 512, 256, 1], last=True)
        rows, columns = torch.tril_indices(args.tables + 1, args.tables + 1, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        sums = [bag(indices[i], offsets[i]) for i, bag in enumerate(self.bags)]
        features = torch.stack([x, *sums], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.rows, self.columns]], dim=1))


device = torch.device("cuda", torch.cuda.current_device())
model = DLRM().to(device)
loss_fn = nn.BCELoss()
optimizer = (torch.optim.Adam if args.adam else torch.optim.SGD)(model.parameters(), lr=0.01)
n = args.mini_batch_size
for j in range(30):
    X = torch.rand(n, 13).to(device)
    lS_i = torch.randint(0, args.rows, (args.tables, 4 * n)).to(device)
    lS_o = (torch.arange(n) * 4).expand(args.tables, n).contiguous().to(device)
    T = torch.randint(0, 2, (n, 1)).float().to(device)
    E = loss_fn(model(X, lS_i, lS_o), T)
    optimizer.zero_grad()
    E.backward()
    optimizer.step()
    if j % 10 == 0:
        print(f"iteration {j} loss {E.detach().cpu().numpy():.6f}")
