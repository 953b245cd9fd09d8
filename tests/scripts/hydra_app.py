"""A Hydra app that fits a linear map of noisy inputs."""

import logging
import os
from dataclasses import dataclass

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn

log = logging.getLogger(__name__)


@dataclass
class Problem:
    """Targets are a fixed map of the inputs, with noise."""

    inputs: int = 10
    outputs: int = 3
    noise: float = 0.1

    def __post_init__(self):
        generator = torch.Generator().manual_seed(11)
        self.map = torch.randn(self.inputs, self.outputs, generator=generator)

    def batch(self, count):
        x = torch.randn(count, self.inputs)
        return x, torch.tanh(x @ self.map) + self.noise * torch.randn(count, self.outputs)


def build_model(cfg, problem):
    return nn.Sequential(
        nn.Linear(problem.inputs, cfg.hidden),
        nn.Tanh(),
        nn.Linear(cfg.hidden, cfg.hidden),
        nn.Tanh(),
        nn.Linear(cfg.hidden, problem.outputs),
    )


@torch.no_grad()
def validate(model, problem, batches=5):
    model.eval()
    losses = []
    for _ in range(batches):
        x, y = problem.batch(256)
        losses.append(nn.functional.mse_loss(model(x), y))
    model.train()
    return torch.stack(losses).mean().item()


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    log.info("config:\n%s", OmegaConf.to_yaml(cfg))
    problem = Problem()
    model = build_model(cfg.model, problem)
    optimizer = torch.optim.SGD(model.parameters(), **cfg.optimizer)
    for step in range(1, cfg.steps + 1):
        x, y = problem.batch(cfg.batch)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            log.info("step %d: train_mse=%.6f", step, loss.item())
    final = validate(model, problem)
    log.info("val_mse=%.6f", final)
    folder = HydraConfig.get().runtime.output_dir
    torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
    if cfg.save:
        torch.save(model.state_dict(), cfg.save)
    return final


if __name__ == "__main__":
    main()
