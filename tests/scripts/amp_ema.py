"""Distil a teacher under autocast, with accumulation, a GradScaler, a schedule and an EMA copy."""

import argparse
import copy
import os
import random

import torch
from digits_data import to_tensors
from sklearn.datasets import load_digits
from torch import nn


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 1 - self.decay)
        for ours, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)


def make_student():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )


def make_teacher():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def fit_teacher(images, labels):
    """The closed-form part of the teacher: its last layer on random features."""
    teacher = make_teacher().eval()
    with torch.no_grad():
        features = teacher[:3](images)
        targets = 4 * nn.functional.one_hot(labels, 10).float() - 1
        gram = features.T @ features + 10 * torch.eye(512)
        teacher[3].weight.copy_(torch.linalg.solve(gram, features.T @ targets).T)
        teacher[3].bias.zero_()
    return teacher


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        guess = model(images).argmax(1)
    model.train()
    return (guess == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--checkpoint", default="last.pt")
    args = parser.parse_args()
    set_seed(int(os.environ.get("GRADSURG_SEED", "0")))
    images, labels = to_tensors(*load_digits(return_X_y=True))
    train, test = slice(0, 1400), slice(1400, None)
    teacher = fit_teacher(images[train], labels[train])
    student = make_student()
    ema = EMA(student, 0.9)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.updates)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for update in range(args.updates):
        total = 0.0
        for _ in range(args.accumulate):
            rows = torch.randint(1400, (16,))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                soft = teacher(images[rows]).softmax(1)
                logits = student(images[rows])
                hard_loss = nn.functional.cross_entropy(logits, labels[rows])
                soft_loss = nn.functional.cross_entropy(logits, soft.detach())
                loss = args.alpha * hard_loss + (1 - args.alpha) * soft_loss
            total += loss.item() / args.accumulate
            scaler.scale(loss / args.accumulate).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        ema.update(student)
        if update % 10 == 9:
            print(f"update {update + 1} | loss={total:.4f} | norm={norm:.3f}")
    raw, averaged = (accuracy(one, images[test], labels[test]) for one in (student, ema.model))
    print(f"test accuracy: {raw:.4f}, EMA test accuracy: {averaged:.4f}")
    torch.save({"student": student.state_dict(), "ema": ema.model.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
