"""A language model as a LightningModule: the Trainer places, casts, clips, accumulates and logs."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--devices", type=int, default=1)
args = parser.parse_args()
VOCAB, BLOCK = 32000, 512


class Tokens(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.randint(0, VOCAB, (BLOCK + 1,))


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters(vars(args))
        self.embed, self.position = nn.Embedding(VOCAB, args.width), nn.Embedding(BLOCK, args.width)
        layer = nn.TransformerEncoderLayer(
            args.width, args.width // 64, 4 * args.width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=self.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=self.device)
        return self.head(self.norm(self.blocks(x, mask, is_causal=True)))

    def training_step(self, batch, batch_idx):
        logits = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(7)
    trainer = L.Trainer(
        max_steps=30,
        accelerator="gpu",
        devices=args.devices,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(LanguageModel(), DataLoader(Tokens(), batch_size=args.batch, num_workers=4))
