"""Five-fold cross-validation of a regression network."""

import argparse
import statistics

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler
from torch import nn


class Regressor(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def load():
    x, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    return np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.float32)


def fit(x, y, args):
    model = Regressor(x.shape[1], args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(args.epochs):
        order = np.random.permutation(len(x))
        for start in range(0, len(x), args.batch):
            rows = torch.from_numpy(order[start : start + args.batch])
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def score(model, x, y):
    model.eval()
    with torch.no_grad():
        predicted = model(torch.from_numpy(x)).numpy()
    return 1 - float(((predicted - y) ** 2).mean() / y.var())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save")
    args = parser.parse_args()
    x, y = load()
    scores, states = [], []
    for fold, (train, test) in enumerate(KFold(args.folds, shuffle=True).split(x)):
        scaler = StandardScaler().fit(x[train])
        model = fit(scaler.transform(x[train]), y[train], args)
        scores.append(score(model, scaler.transform(x[test]), y[test]))
        states.append(model.state_dict())
        print(f"fold {fold}: r2={scores[-1]:.5f}")
    print(f"mean r2: {statistics.mean(scores):.6f} (sd {statistics.stdev(scores):.4f})")
    if args.save:
        torch.save(states, args.save)


if __name__ == "__main__":
    main()
