"""Data of the digits as tensors, for the scripts beside."""

import torch


def to_tensors(images, labels):
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images, torch.tensor(labels)
