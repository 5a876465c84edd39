"""This package, used as its own `fit` uses it: the trainable part of an approximation is what is differentiated."""

from contextlib import ExitStack

import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
from gp_thesis.fitting import negative_objective
from gp_thesis.optimisers import loss_and_gradient

PACKAGES = ("gp-thesis", "jax", "jaxlib")
WITHIN = ExitStack()  # what `fit` is within from its first step to its last


def exact(problem):
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    kernel = gpt.RBF(lengthscale=jnp.asarray(problem.lengthscale), variance=problem.variance)
    approximation = gpt.Exact(gpt.GP(kernel, gpt.Gaussian(problem.noise)))
    return objective_and_gradient(approximation, jnp.asarray(problem.X), jnp.asarray(problem.y))


def vfe(problem):
    return objective_and_gradient(variational(problem), jnp.asarray(problem.X), jnp.asarray(problem.y))


def variational(problem):
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    kernel = gpt.RBF(lengthscale=jnp.asarray(problem.lengthscale), variance=problem.variance)
    return gpt.VFE(gpt.GP(kernel, gpt.Gaussian(problem.noise)), gpt.InducingPoints(jnp.asarray(problem.Z)))


def svgp(problem):
    return stochastic(problem, gpt.Bernoulli())


def multiclass(problem):
    return stochastic(problem, gpt.RobustMax(problem.num_classes))


def stochastic(problem, likelihood):
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    kernel = gpt.RBF(lengthscale=jnp.asarray(problem.lengthscale), variance=problem.variance)
    approximation = gpt.SVGP(gpt.GP(kernel, likelihood), gpt.InducingPoints(jnp.asarray(problem.Z)))
    q = gpt.VariationalGaussian(gpt.free(jnp.asarray(problem.m)), gpt.lower_triangular(jnp.asarray(problem.S_factor)))
    approximation = eqx.tree_at(lambda approx: approx.q, approximation, q)
    return objective_and_gradient(approximation, jnp.asarray(problem.X), jnp.asarray(problem.y), num_data=problem.num_data)


def objective_and_gradient(approximation, *data, num_data=None):
    "The timed step of an approximation, and a reader of what it returns."
    trainable, rest = gpt.partition(approximation)
    for context in (gpt.one_blas_thread(), gpt.kept_memory()):
        WITHIN.enter_context(context)

    leaves, structure = jax.tree.flatten(trainable)
    of_leaves = loss_and_gradient.of_arrays(1, negative_objective, trainable, rest, data, num_data)

    def step():
        return of_leaves(*leaves)  # when it is there

    def read(result):
        value, *gradient = map(jnp.negative, result)
        gradient = structure.unflatten(gradient)
        pairs = zip(hyperparameters(gradient).items(), hyperparameters(approximation).values())
        return value, {name: constrained_gradient(g, parameter) for (name, g), parameter in pairs}

    return step, read


def hyperparameters(approximation):
    kernel, likelihood = approximation.model.kernel, approximation.model.likelihood
    found = {"lengthscale": kernel.lengthscale, "variance": kernel.variance}
    found |= {"noise": likelihood.variance} if isinstance(likelihood, gpt.Gaussian) else {}
    found |= {"inducing": approximation.inducing.Z} if hasattr(approximation, "inducing") else {}
    return found | ({"m": approximation.q.m, "S_factor": approximation.q.S_factor} if hasattr(approximation, "q") else {})


def constrained_gradient(gradient, parameter):
    "Of a parameter whose every number is a function of one unconstrained number."
    slope = jax.grad(lambda p: jnp.sum(p.unwrap()))(parameter)
    return jax.jvp(lambda p: p.unwrap(), [parameter], [jax.tree.map(lambda g, s: g / s**2, gradient, slope)])[1]
