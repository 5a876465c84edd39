"""GPyTorch on its Cholesky path: no conjugate gradients, no Lanczos, at any size. Its low-rank covariances never leave that path."""

from contextlib import ExitStack

import gpytorch
import torch

PACKAGES = ("gpytorch", "linear_operator", "torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    return regress(problem, likelihood, kernel, hyperparameters(kernel, likelihood), dense)


def vfe(problem):
    torch.set_default_dtype(getattr(torch, problem.dtype))
    likelihood, kernel = gaussian(problem), rbf(problem)
    inducing = gpytorch.kernels.InducingPointKernel(kernel, torch.from_numpy(problem.Z), likelihood)
    parameters = hyperparameters(kernel, likelihood) | {"inducing": (inducing.inducing_points, None)}
    return regress(problem, likelihood, inducing, parameters)


class Classifier(gpytorch.models.ApproximateGP):
    def __init__(self, problem):
        Z, m = torch.from_numpy(problem.Z), torch.from_numpy(problem.m.T.copy())
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z), batch_shape=m.shape[:-1])
        jitter = 1e-12 if problem.dtype == "float64" else 1e-6  # so that the value can be compared
        strategy = gpytorch.variational.VariationalStrategy(self, Z, q, jitter_val=jitter)
        strategy.variational_params_initialized.fill_(1)  # to what follows
        q.variational_mean.data, q.chol_variational_covar.data = m, torch.from_numpy(problem.S_factor)
        if m.ndim == 2:
            strategy = gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=len(m))
        super().__init__(strategy)
        self.mean, self.kernel = gpytorch.means.ZeroMean(), rbf(problem)

    forward = Regression.forward


def svgp(problem):
    torch.set_default_dtype(getattr(torch, problem.dtype))
    return stochastic(problem, gpytorch.likelihoods.BernoulliLikelihood())


def multiclass(problem):
    "It has no robust max: softmax with its ten samples, another objective, so that only times can be compared."
    torch.set_default_dtype(getattr(torch, problem.dtype))
    torch.manual_seed(0)
    softmax = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=problem.num_classes, mixing_weights=False)
    step, _ = stochastic(problem, softmax)
    return step, lambda value: (value, {})


def stochastic(problem, likelihood):
    model = Classifier(problem)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, problem.num_data)
    found = dict(model.variational_strategy.named_parameters())
    of_q = {name.rsplit(".", 1)[-1]: parameter for name, parameter in found.items()}
    names = {"inducing": "inducing_points", "m": "variational_mean", "S_factor": "chol_variational_covar"}
    parameters = hyperparameters(model.kernel) | {ours: (of_q[theirs], None) for ours, theirs in names.items()}
    return objective_and_gradient(problem, model, objective, problem.num_data, parameters)


def regress(problem, likelihood, kernel, parameters, settings=()):
    model = Regression(torch.from_numpy(problem.X), torch.from_numpy(problem.y), likelihood, kernel)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return objective_and_gradient(problem, model, objective, len(problem.X), parameters, settings)


def objective_and_gradient(problem, model, objective, num_data, parameters, settings=()):
    "The timed step of this objective of a model, and a reader of what it returns."
    X, y = (torch.from_numpy(a).to(DEVICE) for a in (problem.X, problem.y))
    objective.to(DEVICE)  # with its model and likelihood

    def step():
        model.zero_grad()
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            value = objective(model(X), y) * num_data  # undo the division by N
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
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=problem.lengthscale.size if problem.lengthscale.ndim else None))
    kernel.outputscale = problem.variance
    kernel.base_kernel.lengthscale = torch.from_numpy(problem.lengthscale)
    return kernel


def hyperparameters(kernel, likelihood=None):
    "Each raw parameter with its constraint."
    base = kernel.base_kernel
    found = {
        "lengthscale": (base.raw_lengthscale, base.raw_lengthscale_constraint),
        "variance": (kernel.raw_outputscale, kernel.raw_outputscale_constraint),
    }
    if likelihood is not None:
        found["noise"] = (likelihood.noise_covar.raw_noise, likelihood.noise_covar.raw_noise_constraint)
    return found


def constrained_gradient(raw, constraint):
    if constraint is None:
        return raw.grad.cpu().numpy()
    slope = torch.autograd.functional.jvp(constraint.transform, raw.detach(), torch.ones_like(raw))[1]
    return (raw.grad / slope).cpu().numpy().squeeze()
