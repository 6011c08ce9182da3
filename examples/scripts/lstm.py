"""A word language model with an LSTM whose state goes from batch to batch."""

import argparse
import math

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="LSTM")
parser.add_argument("--nhid", type=int, default=1024)
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--bptt", type=int, default=128)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ntokens = 33278


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntokens, args.nhid)
        self.rnn = getattr(nn, args.model)(args.nhid, args.nhid, args.nlayers, dropout=0.2)
        self.decoder = nn.Linear(args.nhid, ntokens)

    def forward(self, ids, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, ntokens), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        zeros = weight.new_zeros(args.nlayers, bsz, args.nhid)
        return (zeros, zeros.clone()) if args.model == "LSTM" else zeros


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


train_data = batchify(torch.randint(0, ntokens, (args.batch_size * (args.bptt * 30 + 1),)), args.batch_size)
model = RNNModel().to(device)
if args.bf16:
    model = model.bfloat16()
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=20)
model.train()
hidden, total_loss = model.init_hidden(args.batch_size), 0.0
for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
    data, targets = train_data[i : i + args.bptt], train_data[i + 1 : i + 1 + args.bptt].view(-1)
    model.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    total_loss += loss.item()
    if batch % 10 == 0 and batch > 0:
        print("| {:5d} | loss {:5.2f} | ppl {:8.2f}".format(batch, total_loss / 10, math.exp(min(20, total_loss / 10))))
        total_loss = 0
