"""The problems that are timed: data and hyperparameters, the same for every library."""

from dataclasses import dataclass, field
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
class Classification:
    "A minibatch of labelled rows, the kernel's hyperparameters, inducing points and a whitened q; every array has `dtype`."

    X: np.ndarray  # (B, D)
    y: np.ndarray  # (B,), labels 0, ..., C - 1
    num_data: int  # rows of all data
    num_classes: int  # C
    lengthscale: np.ndarray  # (D,), or a number for all columns
    variance: float
    Z: np.ndarray  # (M, D)
    m: np.ndarray  # (M,), or (M, C) with more than two classes: mean of L⁻¹ u
    S_factor: np.ndarray  # (M, M), or (C, M, M): lower Cholesky factor of its covariance
    dtype: str


def random_q(inducing: int, outputs: int, random) -> tuple[np.ndarray, np.ndarray]:
    "Mean (M, P) and lower factors (P, M, M) of a q that is neither the prior nor close to a point."
    factor = np.tril(random.standard_normal((outputs, inducing, inducing)), -1) / inducing
    return 0.3 * random.standard_normal((inducing, outputs)), factor + np.eye(inducing) * random.uniform(0.3, 0.9, (outputs, 1, inducing))


def binary(batch: int, num_data: int, inducing: int, dimension: int, dtype: str) -> Classification:
    "`regression` with its observations cut at zero, an ARD kernel, and other inputs of the same kind as inducing points."
    random, problem = np.random.default_rng(1), regression(batch, dimension, dtype)
    m, S_factor = random_q(inducing, 1, random)
    arrays = [(problem.y > 0), random.standard_normal((inducing, dimension)), m[:, 0], S_factor[0]]
    y, Z, m, S_factor = (a.astype(dtype) for a in arrays)
    return Classification(problem.X, y, num_data, 2, problem.lengthscale, problem.variance, Z, m, S_factor, dtype)


def multiclass(batch: int, num_data: int, inducing: int, dimension: int, classes: int, dtype: str) -> Classification:
    "Inputs in the unit cube, as images are, with the largest of some linear functions as the label, and an isotropic kernel."
    random = np.random.default_rng(0)
    X, Z = random.uniform(size=(batch, dimension)), random.uniform(size=(inducing, dimension))
    y = np.argmax((X - 0.5) @ random.standard_normal((dimension, classes)), axis=1)
    X, y, Z, m, S_factor = (a.astype(dtype) for a in (X, y, Z, *random_q(inducing, classes, random)))
    return Classification(X, y, num_data, classes, np.asarray(8.0, dtype), 1.3, Z, m, S_factor, dtype)


@dataclass
class Benchmark:
    "What is timed, and what is asked of it."

    title: str
    problem: Callable[[str], object]  # dtype -> what each library's function of the benchmark's name receives
    tolerance: dict[str, tuple[float, float]]  # dtype -> largest relative difference of objective, of gradient
    repetitions: int = 5  # calls in each round, after the first
    wanted: dict[str, float] = field(default_factory=lambda: {"float64": 0.5, "float32": 0.5})  # dtype -> our median over the fastest peer's


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
    "svgp": Benchmark(
        title="stochastic bound and gradient in hyperparameters, inducing points and q: probit, batch 1000, M=200, D=8, ARD RBF",
        problem=lambda dtype: binary(1000, 10_000, 200, 8, dtype),
        tolerance={"float64": (2e-4, 1e-3), "float32": (1e-3, 1e-2)},  # GPyTorch's log Φ(x) is 5e-5 off below x = -1
        repetitions=50,
        wanted={"float32": 0.5},
    ),
    "multiclass": Benchmark(
        title="stochastic bound and gradient in hyperparameters, inducing points and q: ten classes, robust max, batch 1000, "
        "M=500, D=784, RBF",
        problem=lambda dtype: multiclass(1000, 60_000, 500, 784, 10, dtype),
        tolerance={"float64": (1e-6, 1e-5), "float32": (1e-3, 1e-2)},
    ),
}
