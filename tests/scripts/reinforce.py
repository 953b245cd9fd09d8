"""REINFORCE with a baseline on a walk along a line, without an environment library."""

import argparse
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import gradsurg


class Walk:
    """Reach the end of a line; the wind pushes back now and then."""

    def __init__(self, length=8, wind=0.2):
        self.length, self.wind = length, wind
        self.position, self.time = 0, 0

    def reset(self):
        self.position, self.time = self.length // 2, 0
        return self.observe()

    def observe(self):
        row = np.zeros(self.length + 1, dtype=np.float32)
        row[self.position] = 1
        return torch.from_numpy(row)

    def step(self, action):
        move = 1 if action == 1 else -1
        if np.random.rand() < self.wind:
            move = -1
        self.position = min(max(self.position + move, 0), self.length)
        self.time += 1
        reward = 1.0 if self.position == self.length else -0.02
        done = self.position == self.length or self.time >= 4 * self.length
        return self.observe(), reward, done


class ActorCritic(nn.Module):
    def __init__(self, inputs, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.policy, self.value = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def act(self, state):
        hidden = self.body(state)
        distribution = Categorical(logits=self.policy(hidden))
        action = distribution.sample()
        return action.item(), distribution.log_prob(action), self.value(hidden).squeeze(-1)


def play(env, agent):
    state, done = env.reset(), False
    log_probs, values, rewards = [], [], []
    while not done:
        action, log_prob, value = agent.act(state)
        state, reward, done = env.step(action)
        log_probs.append(log_prob)
        values.append(value)
        rewards.append(reward)
    return torch.stack(log_probs), torch.stack(values), rewards


def discounted(rewards, gamma):
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return torch.tensor(returns[::-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--save")
    args = parser.parse_args()
    env = Walk()
    agent = ActorCritic(env.length + 1)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.lr)
    recent = deque(maxlen=20)
    for episode in range(1, args.episodes + 1):
        log_probs, values, rewards = play(env, agent)
        returns = discounted(rewards, args.gamma)
        advantages = (returns - values).detach()
        loss = -(log_probs * advantages).mean() + nn.functional.mse_loss(values, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent.append(sum(rewards))
        if episode % 20 == 0:
            print(f"episode {episode}: mean return={np.mean(recent):.4f}")
    gradsurg.outcome(mean_return=np.mean(recent))
    if args.save:
        torch.save(agent.state_dict(), args.save)


if __name__ == "__main__":
    main()
