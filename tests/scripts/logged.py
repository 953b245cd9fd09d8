"""Regression of a noisy function, logged to W&B and TensorBoard."""

import argparse
import os

import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter

CONFIG = {"lr": 3e-3, "width": 64, "depth": 2, "batch_size": 32, "weight_decay": 1e-4}


def make_data(count, generator):
    x = torch.rand(count, 4, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2 - 0.5 * x[:, 3]
    return x, y + 0.05 * torch.randn(count, generator=generator)


def make_model(width, depth):
    layers = [nn.Linear(4, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Averages:
    """Running means of the logged numbers of an epoch."""

    def __init__(self):
        self.sums, self.count = {}, 0

    def add(self, **values):
        self.count += 1
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + float(value)

    def means(self):
        return {key: total / self.count for key, total in self.sums.items()}


def evaluate(model, x, y):
    model.eval()
    with torch.inference_mode():
        error = model(x).squeeze(1) - y
    model.train()
    return {"val/mse": error.square().mean().item(), "val/mae": error.abs().mean().item()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=CONFIG["lr"])
    parser.add_argument("--folder", default="logs")
    parser.add_argument("--save")
    args = parser.parse_args()
    os.environ.setdefault("WANDB_SILENT", "true")
    config = {**CONFIG, "lr": args.lr, "epochs": args.epochs}
    os.makedirs(args.folder, exist_ok=True)
    wandb.init(project="functions", mode="offline", dir=args.folder, config=config)
    writer = SummaryWriter(os.path.join(args.folder, "tensorboard"))

    generator = torch.Generator().manual_seed(1234)
    x_train, y_train = make_data(640, generator)
    x_val, y_val = make_data(200, generator)
    model = make_model(config["width"], config["depth"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )
    best, step = float("inf"), 0
    for epoch in range(config["epochs"]):
        averages = Averages()
        for rows in torch.randperm(len(x_train)).split(config["batch_size"]):
            loss = nn.functional.mse_loss(model(x_train[rows]).squeeze(1), y_train[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            averages.add(loss=loss.detach(), grad_norm=norm)
            wandb.log({"train/loss": loss.item(), "train/grad_norm": norm})
            writer.add_scalar("train/step_loss", loss.item(), step)
            step += 1
        metrics = evaluate(model, x_val, y_val)
        best = min(best, metrics["val/mse"])
        means = {f"mean/{key}": value for key, value in averages.means().items()}
        wandb.log({**metrics, **means, "epoch": epoch})
        writer.add_scalar("val/epoch_mse", metrics["val/mse"], epoch)
    wandb.summary["best_mse"] = best
    writer.close()
    wandb.finish()
    if args.save:
        torch.save(model.state_dict(), args.save)
