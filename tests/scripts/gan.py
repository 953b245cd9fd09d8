"""A GAN that learns a ring of Gaussians."""

import argparse
import math

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(latent, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.G, self.D = Generator(args.latent, args.width), Discriminator(args.width)
        betas = (0.5, 0.999)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=args.lr, betas=betas)
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=args.lr, betas=betas)
        self.criterion = nn.BCEWithLogitsLoss()

    def real_batch(self):
        angle = torch.randint(8, (self.args.batch,)) * (2 * math.pi / 8)
        centres = torch.stack([angle.cos(), angle.sin()], 1)
        return centres + 0.05 * torch.randn(self.args.batch, 2)

    def noise(self):
        return torch.randn(self.args.batch, self.args.latent)

    def step(self):
        real, fake = self.real_batch(), self.G(self.noise())
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.opt_d.zero_grad()
        loss_d = self.criterion(self.D(real), ones) + self.criterion(self.D(fake.detach()), zeros)
        loss_d.backward()
        self.opt_d.step()
        self.opt_g.zero_grad()
        loss_g = self.criterion(self.D(fake), ones)
        loss_g.backward()
        self.opt_g.step()
        return loss_d.item(), loss_g.item()

    @torch.no_grad()
    def distance(self):
        real, fake = self.real_batch(), self.G(self.noise())
        return torch.cdist(real, fake).min(1).values.mean().item()

    def run(self):
        for step in range(self.args.steps):
            loss_d, loss_g = self.step()
            if (step + 1) % 20 == 0:
                print(f"[{step + 1}/{self.args.steps}] Loss_D: {loss_d:.4f} Loss_G: {loss_g:.4f}")
        print(f"distance={self.distance():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--latent", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save")
    args = parser.parse_args()
    gan = Trainer(args)
    gan.run()
    if args.save:
        torch.save({"G": gan.G.state_dict(), "D": gan.D.state_dict()}, args.save)
