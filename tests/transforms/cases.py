"""Rows of transforms: a gradient and the expected result, computed by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

import gradsurg as gs
from gradsurg.plugins.registry import HYDRAS
from gradsurg.testing.transforms import SHAPES
from gradsurg.transforms.base import Transform, TransformContext

CONFIGS = Path(__file__).parents[2] / "conf" / "transform"

Nested = float | Sequence["Nested"]

SHAPES_OF = {"route": tuple(shape for shape in SHAPES if len(shape) > 1)}
"""The shapes of a transform that does not take all of them."""

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Row:
    """One case of the transform of `conf/transform/<name>.yaml`, with some fields replaced."""

    name: str
    grad: Nested
    expected: Nested
    fields: Mapping[str, Any] = field(default_factory=dict)  # Any: fields have many types
    value: Nested | None = None
    other: Nested | None = None  # the gradient of the node's output and of the model's output
    step: int = 0
    tolerance: float = 1e-6


def _random_feedback(error: float, inputs: int, scale: float) -> list[list[float]]:
    """Return e B, with B drawn for the site of the rows' context."""
    generator = TransformContext("a.weight").generator(torch.device("cpu"), per_call=False)
    weights = torch.rand(inputs, generator=generator)
    return [[error * scale * (2 * weight - 1) / inputs**0.5 for weight in weights.tolist()]]


ROWS = (
    # |w| = 5, bound 0.1 * 5 = 0.5, |g| = 10; second unit: |w| = 0 -> 1e-3, bound 1e-4, |g| = 1e-4.
    Row(
        "agc",
        [[6.0, 8.0], [0.0, 1e-4]],
        [[0.3, 0.4], [0.0, 1e-4]],
        {"clipping": 0.1},
        value=[[3.0, 4.0], [0.0, 0.0]],
    ),
    # A vector is one unit: |w| = 2, bound 0.02, |g| = 2.
    Row("agc", [0.0, 2.0], [0.0, 0.02], value=[2.0, 0.0]),
    Row("add_decayed", [1.0, 0.0, NAN], [1.03, -0.02, NAN], value=[3.0, -2.0, 1.0]),
    Row("add_decayed", [1.0, 0.0], [1.1, -0.1], {"strength": 0.1, "penalty": "l1"}, [3.0, -2.0]),
    Row("add_decayed", [1.0, 1.0], [NAN, 1.01], {"penalty": "l1"}, [NAN, INF]),
    # Noise is compared within 10 standard deviations.
    # In the warm-up the bound is max_norm: |g| = 5.
    Row("adaptive_clip", [3.0, -4.0], [0.6, -0.8]),
    Row("zclip", [3.0, -4.0], [1.2, -1.6], {"max_norm": 2.0}),
    Row("zclip", [3.0, -4.0], [3.0, -4.0], {"max_norm": None}),
    # The weight of one example is 1.
    Row("ghm", [3.0, -4.0, NAN], [3.0, -4.0, NAN]),
    # The only norm is every quantile.
    Row("autoclip", [3.0, -4.0], [3.0, -4.0]),
    Row("adagc", [3.0, -4.0], [0.6, -0.8]),
    Row("add_noise", [1.0, -2.0], [1.0, -2.0], {"sigma": 1e-3}, tolerance=1e-2),
    # 1e-4 / 10^2 = 1e-6, the variance: a standard deviation of 1e-3.
    Row("add_noise", [1.0], [1.0], {"eta": 1e-4, "gamma": 2.0}, step=9, tolerance=1e-2),
    Row("noise", [1.0, -2.0], [1.0, -2.0], tolerance=0.1),
    # One entry has one dimension, of which every subspace is the whole.
    Row("project_subspace", [[3.0]], [[0.0]]),
    Row("project_subspace", [3.0, -4.0], [3.0, -4.0], {"onto": True, "rank": 2}),
    Row("gpm", [[3.0], [-2.0], [NAN]], [[0.0], [0.0], [NAN]]),
    Row("gpm", [[3.0], [-2.0]], [[3.0], [-2.0]], {"onto": True}),
    Row("ogd", [3.0, -4.0, 5.0], [0.0, 0.0, 0.0], {"rank": 3}, tolerance=1e-5),
    # The gradient itself stays as it is: the optimizer does not step.
    Row("skip_update", [3.0, NAN, -INF], [3.0, NAN, -INF]),
    Row("skip_update", [3.0, -4.0], [3.0, -4.0], {"max_norm": 1.0}),
    # The means are 2 and -1.
    # Three of four descend: 4/3, and with the paper's scale 4/4.
    Row(
        "cautious",
        [1.0, -2.0, 3.0, -4.0],
        [4 / 3, 0.0, 4.0, -16 / 3],
        other=[-1.0, -1.0, -5.0, 2.0],
    ),
    Row("cautious", [1.0, 2.0, NAN], [1.0, 0.0, NAN], {"scale": "none"}, other=[-1.0, 0.0, -1.0]),
    Row("cautious", [1.0, -2.0, 3.0], [-1.0, -2.0, 0.0], {"mode": "sign"}, other=[2.0, 9.0, 0.0]),
    Row("centralize", [[1.0, 3.0], [-1.0, -1.0]], [[-1.0, 1.0], [0.0, 0.0]]),
    Row("centralize", [1.0, 3.0], [1.0, 3.0]),
    # Clipped to [0.01, -0.002], then halved.
    Row("chain", [5.0, -0.002], [0.005, -0.001]),
    Row("clamp", [-3.0, -0.001, 0.0, 2.0, NAN, INF], [-0.01, -0.001, 0.0, 0.01, NAN, 0.01]),
    Row("clamp", [-3.0, 0.5], [0.0, 0.5], {"low": 0.0, "high": None}),
    Row("clip", [-3.0, -0.001, 0.0, 2.0, NAN, INF], [-0.01, -0.001, 0.0, 0.01, NAN, 0.01]),
    # N = 5; 1 / (5 + 1e-6) is 0.2 to seven digits.
    Row("clip_global_norm", [3.0, 4.0], [0.6, 0.8]),
    Row("clip_global_norm", [3.0, -6.0], [1.0, -2.0], {"p": INF, "max_norm": 2.0}),
    Row("clip_norm", [3.0, 4.0], [0.6, 0.8]),
    Row("clip_norm", [[3.0, 4.0], [0.3, 0.4]], [[0.6, 0.8], [0.3, 0.4]], {"per": "unit"}),
    # |g|_1 = 4, so a quarter.
    Row("clip_norm", [1.0, -3.0], [0.25, -0.75], {"p": 1.0}),
    # The root mean square of [3, 4, 0, 0] is 2.5; |g|_1 / 4 is 1.75.
    Row("clip_rms", [3.0, 4.0, 0.0, 0.0], [1.2, 1.6, 0.0, 0.0]),
    Row("clip_rms", [3.0, 4.0, 0.0, 0.0], [12 / 7, 16 / 7, 0.0, 0.0], {"p": 1.0}),
    # After one gradient v is g^2, so r is 1.
    Row("update_clip", [1.0, -2.0], [1.0, -2.0], other=[3.0, -5.0]),
    Row(
        "update_clip", [1.0, -2.0, NAN], [0.5, -1.0, NAN], {"max_rms": 0.5}, other=[3.0, -5.0, 1.0]
    ),
    # The first value is the one that the later ones are compared with.
    Row("feature_distance", [1.0, -2.0, NAN], [1.0, -2.0, NAN], value=[3.0, 0.0, -1.0]),
    Row(
        "tap", [[1.0, -2.0], [0.0, INF]], [[1.0, -2.0], [0.0, INF]], value=[[3.0, 0.0], [1.0, 2.0]]
    ),
    # A tanh of 1/2 log 3 is a half.
    Row("curve", [0.54930614, -0.54930614, 0.0, NAN, INF], [0.5, -0.5, 0.0, NAN, 1.0]),
    Row("tanh", [1.09861229], [1.0], {"amount": 2.0}),
    Row("curve", [3.0, -1.0, NAN, -INF], [0.75, -0.5, NAN, -1.0], {"by": "softsign"}),
    Row("curve", [0.0, 3e38], [0.0, 1e-5], {"by": "softsign", "amount": 1e-5}),
    # 2 log(1 + (e - 1)) = 2.
    Row("curve", [3.43656366, 0.0, -INF], [2.0, 0.0, -INF], {"by": "log", "amount": 2.0}),
    Row("grad_power", [4.0, -9.0, 0.0, NAN], [8.0, -27.0, 0.0, NAN], {"amount": 1.5}),
    Row("grad_power", [32.0, -1.0], [64.0, -1.0]),
    Row("soft_threshold", [0.02, -0.5, 0.005, NAN, INF], [0.01, -0.49, 0.0, NAN, INF]),
    # Tokens are rows: the extremes of the columns are 3 and -4, 2 and -6.
    Row("tgr", [[3.0, 1.0], [-4.0, -6.0], [2.0, 2.0]], [[0.0, 0.5], [0.0, 0.0], [1.0, 0.0]]),
    Row("tgr", [1.0, 3.0, 3.0, NAN, -1.0], [2.0, 6.0, 6.0, NAN, -2.0], {"factor": 2.0}),
    Row("tgr", [1.0, 3.0, 3.0, -1.0], [2.0, 0.0, 6.0, 0.0], {"factor": 2.0}),
    Row("straight_through", [5.0, 5.0, 0.0], [2.0, -2.0, 3.0], other=[2.0, -2.0, 3.0]),
    # The norms of the examples are 5 and 10, the norms of the entering gradients 13 and 0.
    Row(
        "straight_through",
        [[3.0, 4.0], [6.0, 8.0]],
        [[25 / 13, -60 / 13], [0.0, 0.0]],
        {"rescale": True},
        other=[[5.0, -12.0], [0.0, 0.0]],
    ),
    Row("deconvolve", [5.0, 5.0, 0.0], [2.0, 0.0, 3.0], other=[2.0, -2.0, 3.0]),
    # At the first gradient the correction undoes the factor 1 - decay.
    Row("ema", [1.0, -2.0], [1.0, -2.0]),
    Row("ema", [1.0, -2.0], [0.1, -0.2], {"debias": False}),
    # The first gradient arrives with the next one.
    Row("delay", [1.0, -2.0], [0.0, 0.0]),
    # u = v = g; the largest of 3.
    Row("dgc", [1.0, -5.0, 2.0], [0.0, -5.0, 0.0]),
    Row("dgc", [1.0, -5.0, 2.0], [0.0, -5.0, 2.0], {"amount": 0.6}),
    # B has entries in ±1 / sqrt(4); the result does not depend on the gradient.
    Row("direct_feedback", [[5.0] * 4], _random_feedback(2.0, 4, 1.0), other=[[2.0]]),
    Row(
        "direct_feedback",
        [[7.0] * 9],
        _random_feedback(-3.0, 9, 6.0),
        {"scale": 6.0},
        other=[[-3.0]],
    ),
    Row("direct_feedback", [[5.0] * 4], [[0.0] * 4], {"scale": 9.0}, other=[[0.0]]),
    Row("feedback_weights", [[5.0] * 4], _random_feedback(2.0, 4, 1.0), other=[[2.0]]),
    Row(
        "feedback_weights",
        [[7.0] * 9],
        _random_feedback(-3.0, 9, 6.0),
        {"scale": 6.0},
        other=[[-3.0]],
    ),
    Row("feedback_weights", [[5.0] * 4], [[0.0] * 4], {"scale": 9.0}, other=[[0.0]]),
    # The error is zero at first; the mean magnitude is 2.
    Row("error_feedback", [1.0, -5.0, 0.0], [2.0, -2.0, 0.0]),
    Row("identity", [1.0, NAN, -INF], [1.0, NAN, -INF]),
    # The signs have the norm sqrt(2), and g has 5.
    Row("graft", [3.0, -4.0], [3.53553391, -3.53553391]),
    Row("graft", [0.0, 0.0], [0.0, 0.0]),
    Row("grokfast_ma", [1.0, -2.0], [1.0, -2.0]),
    Row("grokfast_ma", [1.0, -2.0], [6.0, -12.0], {"window": 1}),
    Row("grokfast_ma", [1.0, -2.0], [3.0, -6.0], {"warmup": False, "strength": 2.0}),
    # Of rank 1, so nothing is lost.
    Row("low_rank", [[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]], [[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]),
    Row("low_rank", [1.0, 2.0], [1.0, 2.0], {"rank": 1}),
    # [3, 4] + 0.0005 * [6, 8] = [3.003, 4.004] has the norm 5.005; 0.001 * 10 / 5.005 of it.
    Row("lars", [3.0, 4.0], [0.006, 0.008], value=[6.0, 8.0]),
    # At the first step m = g, so 3 g.
    Row("grokfast_ema", [1.0, -2.0], [3.0, -6.0]),
    # A tenth of 10 entries is one.
    Row("mask", [*range(-6, 4)], [-6.0, *[0.0] * 9]),
    # Half of two, in each row; of three equal ones exactly two (2/3 of 3), times 3/2.
    Row(
        "mask", [[1.0, -2.0], [4.0, 3.0]], [[0.0, -2.0], [4.0, 0.0]], {"amount": 0.5, "per": "unit"}
    ),
    Row("mask", [0.0, 2.0, -4.0], [0.0, 3.0, -6.0], {"amount": 0.667, "rescale": True}),
    Row("mask", [0.1, -0.2, 0.3, NAN], [0.0, 0.0, 0.3, NAN], {"amount": 0.25, "by": "threshold"}),
    Row("random_mask", [1.0, -2.0], [1.0, -2.0], {"amount": 1.0}),
    Row("momentum", [1.0, -2.0], [1.0, -2.0]),
    # 0.9 m + g at m = g.
    Row("momentum", [1.0, -2.0], [1.9, -3.8], {"nesterov": True}),
    # m = 0.05 g, a direction; a multiple of a row has the singular value sqrt(25) = 5.
    Row("muon", [[3.0, 4.0]], [[0.4173, 0.5564]], tolerance=1e-3),
    # 3 and 4 of four; a group of two keeps both; of equal ones the first.
    Row("n_of_m", [1.0, 4.0, -3.0, 2.0, 5.0, 6.0], [0.0, 4.0, -3.0, 0.0, 5.0, 6.0]),
    Row("n_of_m", [1.0, -1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], {"n": 1}),
    Row("n_of_m", [[1.0, 9.0], [2.0, 3.0]], [[0.0, 9.0], [2.0, 0.0]], {"n": 1, "m": 2, "axis": 0}),
    # Clipped to [0.01, 0.01], norm 0.01 sqrt 2; |g| = 5: times 0.002 sqrt 2 = 0.0028284271.
    Row("norm_matched", [3.0, 4.0], [0.0084852814, 0.0113137085]),
    # Two entries have one direction orthogonal to g, (0.8, 0.6), and the draw chose -2.4 times it;
    # the part of (3, 0) along g is 1.8 (0.6, -0.8).
    Row("placebo", [3.0, -4.0], [-0.84, -2.88]),
    Row("placebo", [3.0, 4.0], [3.0, 4.0]),
    Row("placebo", [-3.0], [0.0]),
    Row("norm_rescale", [3.0, 4.0], [0.6, 0.8]),
    Row("norm_rescale", [0.0, 0.0], [0.0, 0.0]),
    Row(
        "norm_rescale",
        [[3.0, 4.0], [0.0, 0.0]],
        [[1.2, 1.6], [0.0, 0.0]],
        {"norm": 2.0, "per": "unit"},
    ),
    # |g|_1 = 4, + 1 = 5.
    Row("norm_rescale", [1.0, -3.0], [0.2, -0.6], {"p": 1.0, "eps": 1.0}),
    # Two orthogonal rows of norms 5 and 10, so X = diag(s) R with s = 5 and 10 over sqrt(125), that
    # is 0.44721 and 0.89443; s <- s (1.5 - 0.5 s^2) gives 0.62610 and 0.98387.
    Row(
        "orthogonalize",
        [[3.0, 4.0], [-8.0, 6.0]],
        [[0.375660, 0.500880], [-0.787096, 0.590322]],
        {"steps": 1, "coefficients": [1.5, -0.5, 0.0]},
    ),
    # Two rows, one column: the scale is sqrt(2); a = 1 alone normalizes.
    Row(
        "orthogonalize",
        [[3.0], [4.0]],
        [[0.84852814], [1.13137085]],
        {"steps": 1, "coefficients": [1.0, 0.0, 0.0]},
    ),
    Row("orthogonalize", [3.0, 4.0], [3.0, 4.0]),
    # w.g / w.w = 50 / 25 = 2.
    Row("perpendicular", [10.0, 5.0], [4.0, -3.0], value=[3.0, 4.0]),
    Row("perpendicular", [10.0, 5.0], [10.0, 5.0], value=[0.0, 0.0]),
    # The cosine is 50 / (5 sqrt(125)) = 0.89: below 1.3 / sqrt(2) = 0.92, not below 1.2 / sqrt(2).
    Row("perpendicular", [10.0, 5.0], [4.0, -3.0], {"below": 1.3}, value=[3.0, 4.0]),
    Row("perpendicular", [10.0, 5.0], [10.0, 5.0], {"below": 1.2}, value=[3.0, 4.0]),
    # [4, -3] has norm 5, g sqrt(125).
    Row("perp_grad", [10.0, 5.0], [8.94427191, -6.70820393], value=[3.0, 4.0]),
    Row("perp_grad", [6.0, 8.0], [0.0, 0.0], value=[3.0, 4.0]),
    Row("gradient_reversal", [1.0, -2.0], [-0.5, 1.0], {"strength": 0.5}),
    Row("sanitize", [1.0, NAN, INF, -INF], [1.0, 0.0, 0.0, 0.0]),
    Row("sanitize", [1.0, NAN, -3.0, INF], [1.0, 0.0, -3.0, 3.0], {"on_nonfinite": "clamp"}),
    Row("sanitize", [1.0, -INF, 2.0], [1.0, -2.0, 2.0], {"on_nonfinite": "clamp"}),
    Row("sanitize", [1.0, NAN, -3.0], [0.0, 0.0, 0.0], {"on_nonfinite": "drop"}),
    Row("scale", [1.0, -2.0], [10.0, -20.0], {"factor": 10.0}),
    Row("scale_by_sign", [1.0, -2.0, 0.0, NAN, INF, -INF], [1.0, 0.0, 0.0, NAN, INF, 0.0]),
    Row("scale_by_sign", [1.0, -2.0], [2.0, -6.0], {"positive": 2.0, "negative": 3.0}),
    # A factor of 0 removes all; a value of NaN has no sign.
    Row("scale_by_sign", [NAN, INF, 1.0], [0.0, 0.0, 1.0], {"of": "value"}, [-1.0, -1.0, NAN]),
    # The value's signs are +, -, 0.
    Row(
        "scale_by_sign",
        [5.0, 5.0, 5.0],
        [10.0, 0.0, 5.0],
        {"positive": 2.0, "of": "value"},
        value=[0.1, -0.1, 0.0],
    ),
    # The rows agree on +, on -, and not at all.
    Row(
        "scale_by_sign",
        [[0.0, 1.0], [-1.0, -2.0], [-1.0, 1.0]],
        [[0.0, 2.0], [-3.0, -6.0], [-1.0, 1.0]],
        {"positive": 2.0, "negative": 3.0, "per": "unit"},
    ),
    # The border belongs to the window; x = -0.5 is 1.5 from the center.
    Row("surrogate_gradient", [2.0, 3.0, 4.0], [2.0, 3.0, 0.0], value=[0.5, -1.0, 1.5]),
    Row("surrogate_gradient", [2.0, 3.0], [2.0, 0.0], {"center": 1.0}, value=[1.5, -0.5]),
    Row("triangle_surrogate", [2.0, -4.0, 4.0], [1.5, -2.0, 0.0], value=[0.25, -0.5, 1.5]),
    Row("triangle_surrogate", [2.0], [1.0], {"slope": 2.0}, value=[0.25]),
    # sigmoid(log 3) = 3/4: 4 * 3/4 * 1/4 at 4 x = log 3; at x = 0 it is 4 / 4.
    Row("sigmoid_surrogate", [2.0, 4.0], [2.0, 3.0], value=[0.0, 0.27465307]),
    # 10 * 0.1 = 1: a quarter.
    Row("fast_sigmoid_surrogate", [2.0, 4.0], [2.0, 1.0], value=[0.0, -0.1]),
    # (pi / 2 * 2 / pi)^2 = 1: a half.
    # sigmoid(log 3) = 3/4.
    Row("softplus_surrogate", [2.0, 4.0], [1.0, 3.0], value=[0.0, 0.109861229]),
    Row("arctan_surrogate", [2.0, 4.0], [2.0, 2.0], value=[0.0, 0.31830989]),
    # s = 250 / 1000 and T(g) = 0: three quarters of g.
    Row("scheduled", [4.0, NAN], [3.0, NAN], step=250),
    Row("scheduled", [4.0, INF], [4.0, INF]),
    Row("sign", [3.0, -0.1, 0.0, NAN, -INF], [1.0, -1.0, 0.0, NAN, -1.0]),
    # The mean magnitude is 2.
    Row("scaled_sign", [1.0, -5.0, 0.0], [2.0, -2.0, 0.0]),
    Row("sign", [1.0, -5.0, 0.0], [2.0, -2.0, 0.0], {"scale": "mean"}),
    # A gradient without a batch is that of one example: |g| = 5.
    Row("per_sample_clip", [3.0, -4.0], [0.6, -0.8]),
    Row("per_sample_clip", [3.0, -4.0], [3.0, -4.0], {"of": {"_target_": "gradsurg.Identity"}}),
    Row("per_sample", [3.0, NAN], [3.0, NAN]),
    Row("per_sample_and_mask", [3.0, -4.0], [3.0, -4.0]),
    Row("per_sample_median", [3.0, -4.0], [3.0, -4.0]),
    Row("dp_sgd", [3.0, -4.0], [0.6, -0.8], {"noise": 0.0}),
    Row("power_sgd", [[1.0, 2.0], [2.0, 4.0]], [[1.0, 2.0], [2.0, 4.0]]),
    # Of the largest magnitude and zero every level is exact; 63.5 of 127 is not.
    Row("quantize", [2.0, -2.0, 0.0], [2.0, -2.0, 0.0]),
    Row("quantize", [2.0, 1.2, -0.4], [2.0, 1.0, 0.0], {"levels": 2, "stochastic": False}),
    # |g| = 5: levels at multiples of 1.25, 3 is 2.4 and 4 is 3.2 of them.
    Row("qsgd", [3.0, -4.0], [2.5, -3.75], {"stochastic": False}),
    Row("qsgd", [5.0, 0.0], [5.0, 0.0]),
    Row("terngrad", [1.0, -1.0, 0.0], [1.0, -1.0, 0.0]),
    # The mean is 2 and the deviation sqrt(3): clamped at 1.3 sqrt(3); 1 is less than half of it.
    Row(
        "terngrad",
        [3.0, 3.0, 3.0, -1.0],
        [2.25166605, 2.25166605, 2.25166605, 0.0],
        {"clip": 1.3, "stochastic": False},
    ),
    # Labels 0 and 3: the first part, two of three units.
    Row(
        "route",
        [[1.0, 2.0, 3.0], [-4.0, 5.0, NAN]],
        [[1.0, 2.0, 0.0], [-4.0, 5.0, NAN]],
        other=[0.0, 0.0],
    ),
    Row(
        "route",
        [[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]],
        [[1.0, 1.0, 2.0], [1.0, 2.0, 4.0], [0.5, 1.0, 4.0]],
        {"groups": [[0], [1, 2], [6]], "outside": 0.5},
        other=[0.0] * 3,
    ),
    # N = 5.
    Row("rescale_global_norm", [3.0, -4.0], [0.6, -0.8]),
    Row("rescale_global_norm", [3.0, -4.0], [1.0, -4 / 3], {"norm": 2.0, "eps": 1.0}),
    Row("rescale_global_norm", [0.0, 0.0], [0.0, 0.0]),
    # One gradient agrees with itself, and a zero has no sign.
    Row("sign_agreement", [1.0, -2.0, NAN], [1.0, -2.0, NAN]),
    Row("sign_agreement", [1.0, -2.0, 0.0, 3.0], [4 / 3, -8 / 3, 0.0, 4.0], {"rescale": True}),
    # v = (1 - decay) g^2 after one gradient; with the correction g^2.
    Row("scale_by_rms", [0.3, -2.0, 0.0], [2.0, -2.0, 0.0], {"decay": 0.75}),
    Row("scale_by_rms", [0.3, -2.0, 0.0, NAN], [1.0, -1.0, 0.0, NAN], {"debias": True}),
    # The first gradients are not changed.
    Row("growth_clip", [3.0, -4.0], [3.0, -4.0]),
    Row("moving_median", [3.0, -4.0, NAN, INF], [3.0, -4.0, NAN, INF]),
    Row("spike_clip", [1.0, -2.0, NAN, INF], [1.0, -2.0, NAN, INF]),
    # |w| = 10, |g| = 5.
    Row("trust_ratio", [3.0, 4.0], [0.006, 0.008], value=[6.0, 8.0]),
    Row("trust_ratio", [3.0, 4.0], [3.0, 4.0], value=[0.0, 0.0]),
    Row("unit_norm", [[3.0, -4.0], [0.0, 0.0]], [[0.6, -0.8], [0.0, 0.0]]),
    # The layer of the rows returns its input x, and its gradient is x: R / x of R = x x.
    Row("lrp", [9.0, 9.0, 9.0], [1.6, -1.6, 0.0], {"epsilon": 0.5}, other=[2.0, -2.0, 0.0]),
    Row(
        "lrp",
        [9.0, 9.0, NAN],
        [1.6, -1.6, 0.0],
        {"epsilon": 0.5, "rule": "identity"},
        other=[2.0, -2.0, 0.0],
    ),
    Row("zero", [1.0, NAN, INF], [0.0, 0.0, 0.0]),
)


def names() -> list[str]:
    """Return the names of the configs of a transform; `none` has no class to test."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if config(path.stem))


@cache  # parsed several times for each test, it takes seconds
def config(name: str) -> Mapping[str, Any]:
    """Return the fields of a config."""
    whole = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")) or {}
    return whole.get(name) or {}


def build(name: str, fields: Mapping[str, Any] | None = None) -> Transform:
    """Return the transform of a config, with some fields replaced."""
    return made({**config(name), **(fields or {})})


def made(node: Any) -> Any:  # Any: a node of a config is of any type
    """Return what a node of a config describes, made without Hydra: errors are the class's own."""
    if isinstance(node, list):
        return [made(part) for part in node]
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    fields = {key: made(part) for key, part in node.items() if key not in HYDRAS}
    return getattr(gs, node["_target_"].removeprefix("gradsurg."))(**fields)
