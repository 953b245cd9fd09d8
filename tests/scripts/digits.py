"""Classify the digits of scikit-learn with a small convolutional network."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as the documentation of PyTorch has it
from digits_data import to_tensors
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(self.drop(x.flatten(1)))


def train(args, model, loader, optimizer, epoch):
    model.train()
    total = 0.0
    for batch, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if batch % args.log_interval == 0:
            done = 100.0 * batch / len(loader)
            print(f"Train Epoch: {epoch} ({done:.0f}%)\tLoss: {loss.item():.6f}")
    return total / len(loader)


@torch.no_grad()
def test(model, loader):
    model.eval()
    loss = correct = count = 0
    for data, target in loader:
        output = model(data)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        correct += (output.argmax(1) == target).sum().item()
        count += len(target)
    return loss / count, correct / count


def main():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
        np.random.seed(args.seed)
    images, labels = to_tensors(*load_digits(return_X_y=True))
    parts = train_test_split(images, labels, test_size=0.25, random_state=0)
    train_set, test_set = TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size, shuffle=True, num_workers=args.workers
    )
    test_loader = DataLoader(test_set, batch_size=256)
    model = Net(args.width, args.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    began = time.time()
    for epoch in range(1, args.epochs + 1):
        loss = train(args, model, train_loader, optimizer, epoch)
        test_loss, accuracy = test(model, test_loader)
        scheduler.step()
        print(
            f"epoch {epoch} done in {time.time() - began:.1f} s, train loss: {loss:.4f}, "
            f"test loss: {test_loss:.4f}, test accuracy: {100 * accuracy:.2f}%"
        )
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
