"""The problems that are timed: data and hyperparameters, the same for every library."""

from dataclasses import dataclass
from typing import Callable

import numpy as np


@dataclass
class Regression:
    "Data and hyperparameters of a regression with an ARD RBF kernel and Gaussian noise; every array has `dtype`."

    X: np.ndarray  # (N, D)
    y: np.ndarray  # (N,)
    lengthscale: np.ndarray  # (D,)
    variance: float
    noise: float  # a variance
    dtype: str


def regression(size: int, dimension: int, dtype: str) -> Regression:
    "A smooth function of standard normal inputs, plus noise; the lengthscales grow with the dimension."
    random = np.random.default_rng(0)
    X = random.standard_normal((size, dimension))
    y = np.sin(X @ np.linspace(1.0, 0.2, dimension)) + 0.3 * random.standard_normal(size)
    return Regression(X.astype(dtype), y.astype(dtype), np.linspace(1.0, 3.0, dimension).astype(dtype), 1.3, 0.1, dtype)


@dataclass
class SparseRegression(Regression):
    "A regression, and where its inducing points are."

    Z: np.ndarray  # (M, D)


def sparse_regression(size: int, inducing: int, dimension: int, dtype: str) -> SparseRegression:
    "`regression`, with some of its rows as inducing points."
    problem = regression(size, dimension, dtype)
    return SparseRegression(**vars(problem), Z=problem.X[:inducing].copy())


@dataclass
class Benchmark:
    "What is timed, and what is asked of it."

    title: str
    problem: Callable[[str], object]  # dtype -> what each library's function of the benchmark's name receives
    tolerance: dict[str, tuple[float, float]]  # dtype -> largest relative difference of objective, of gradient
    repetitions: int = 5  # calls in each round, after the first
    wanted: float = 0.5  # our median over the fastest peer's, in float64


BENCHMARKS = {
    "exact": Benchmark(
        title="exact regression, log marginal likelihood and gradient, N=2000, D=8, ARD RBF",
        problem=lambda dtype: regression(2000, 8, dtype),
        tolerance={"float64": (1e-6, 1e-6), "float32": (1e-3, 1e-2)},
    ),
    "vfe": Benchmark(
        title="variational free energy and gradient in hyperparameters and inducing points, N=20000, M=200, D=8, ARD RBF",
        problem=lambda dtype: sparse_regression(20_000, 200, 8, dtype),
        tolerance={"float64": (1e-6, 1e-5), "float32": (1e-3, 1e-2)},
    ),
}
