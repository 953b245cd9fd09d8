"""A LightningModule that classifies noisy sequences."""

import argparse

import lightning as L  # noqa: N812  # as Lightning's documentation has it
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SequenceData(L.LightningDataModule):
    def __init__(self, length=12, batch_size=32):
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(480, self.length, 3, generator=generator)
        y = x.mean(1).argmax(1)
        self.train_set = TensorDataset(x[:320], y[:320])
        self.val_set = TensorDataset(x[320:], y[320:])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 160)


class Classifier(L.LightningModule):
    def __init__(self, width=24, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.GRU(3, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        _, state = self.encoder(x)
        return self.head(state[-1])

    def _loss(self, batch, accuracy):
        x, y = batch
        logits = self(x)
        accuracy(logits, y)
        return nn.functional.cross_entropy(logits, y)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch, self.train_acc)
        self.log("train_loss", loss)
        self.log("train_acc", self.train_acc, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch, self.val_acc))
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [scheduler]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save")
    args = parser.parse_args()
    L.seed_everything(args.seed, verbose=False)
    module = Classifier(lr=args.lr)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=5.0,
    )
    trainer.fit(module, datamodule=SequenceData())
    if args.save:
        torch.save(module.state_dict(), args.save)


if __name__ == "__main__":
    main()
