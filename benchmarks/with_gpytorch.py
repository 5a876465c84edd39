"""GPyTorch on its Cholesky path: no conjugate gradients, no Lanczos, at any size. Its low-rank covariances never leave that path."""

from contextlib import ExitStack

import gpytorch
import torch

PACKAGES = ("gpytorch", "linear_operator", "torch")


class Regression(gpytorch.models.ExactGP):
    def __init__(self, X, y, likelihood, kernel):
        super().__init__(X, y, likelihood)
        self.mean = gpytorch.means.ZeroMean()
        self.kernel = kernel

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean(X), self.kernel(X))


def exact(problem):
    torch.set_default_dtype(getattr(torch, problem.dtype))
    likelihood, kernel = gaussian(problem), rbf(problem)
    dense = [gpytorch.settings.fast_computations(False, False, False), gpytorch.settings.max_cholesky_size(len(problem.X) + 1)]
    return objective_and_gradient(problem, likelihood, kernel, hyperparameters(likelihood, kernel), dense)


def vfe(problem):
    torch.set_default_dtype(getattr(torch, problem.dtype))
    likelihood, kernel = gaussian(problem), rbf(problem)
    inducing = gpytorch.kernels.InducingPointKernel(kernel, torch.from_numpy(problem.Z), likelihood)
    parameters = hyperparameters(likelihood, kernel) | {"inducing": (inducing.inducing_points, None)}
    return objective_and_gradient(problem, likelihood, inducing, parameters)


def objective_and_gradient(problem, likelihood, kernel, parameters, settings=()):
    "The timed step of a regression with this kernel, and a reader of what it returns."
    X, y = torch.from_numpy(problem.X), torch.from_numpy(problem.y)
    model = Regression(X, y, likelihood, kernel)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def step():
        model.zero_grad()
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            value = objective(model(X), y) * len(X)  # undo the division by N
        value.backward()
        return value.item()

    def read(value):
        return value, {name: constrained_gradient(*parameter) for name, parameter in parameters.items()}

    return step, read


def gaussian(problem):
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = problem.noise
    return likelihood


def rbf(problem):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=len(problem.lengthscale)))
    kernel.outputscale = problem.variance
    kernel.base_kernel.lengthscale = torch.from_numpy(problem.lengthscale)
    return kernel


def hyperparameters(likelihood, kernel):
    "Each raw parameter with its constraint."
    base, noise = kernel.base_kernel, likelihood.noise_covar
    return {
        "lengthscale": (base.raw_lengthscale, base.raw_lengthscale_constraint),
        "variance": (kernel.raw_outputscale, kernel.raw_outputscale_constraint),
        "noise": (noise.raw_noise, noise.raw_noise_constraint),
    }


def constrained_gradient(raw, constraint):
    if constraint is None:
        return raw.grad.numpy()
    slope = torch.autograd.functional.jvp(constraint.transform, raw.detach(), torch.ones_like(raw))[1]
    return (raw.grad / slope).numpy().squeeze()
