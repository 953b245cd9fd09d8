"""A loop with Accelerate: gradient accumulation, clipping, a warm-up."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, inputs, width, depth, outputs):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, x, labels=None):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits, labels), logits


def get_loaders(batch_size):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(800, 10, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > 0.3).long()
    train, test = TensorDataset(x[:640], y[:640]), TensorDataset(x[640:], y[640:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 80)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--save")
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    set_seed(args.seed)
    model = Model(10, 32, 2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader, test_loader = get_loaders(32)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(args.num_epochs):
        model.train()
        losses = []
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss, _ = model(x, labels=y)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = []
        for x, y in test_loader:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            correct.append(accelerator.gather_for_metrics((guess == y).float()))
        accuracy = torch.cat(correct).mean().item()
        row = {"epoch": epoch, "loss": sum(losses) / len(losses), "accuracy": accuracy}
        accelerator.print(json.dumps(row))
    if args.save:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save)


if __name__ == "__main__":
    main()
