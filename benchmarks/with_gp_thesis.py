"""This package, used as its own `fit` uses it: the trainable part of an approximation is what is differentiated."""

import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp

PACKAGES = ("gp-thesis", "jax", "jaxlib")


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


def objective_and_gradient(approximation, *data):
    "The timed step of an approximation whose model has a kernel and Gaussian noise, and a reader of what it returns."
    trainable, rest = gpt.partition(approximation)

    @jax.jit
    def evaluate(trainable, *data):
        return jax.value_and_grad(lambda part: eqx.combine(part, rest).objective(*data))(trainable)

    def step():
        return jax.block_until_ready(evaluate(trainable, *data))

    def read(result):
        value, gradient = result
        pairs = zip(hyperparameters(gradient).items(), hyperparameters(approximation).values())
        return value, {name: constrained_gradient(g, parameter) for (name, g), parameter in pairs}

    return step, read


def hyperparameters(approximation):
    kernel, likelihood = approximation.model.kernel, approximation.model.likelihood
    found = {"lengthscale": kernel.lengthscale, "variance": kernel.variance, "noise": likelihood.variance}
    return found | ({"inducing": approximation.inducing.Z} if hasattr(approximation, "inducing") else {})


def constrained_gradient(gradient, parameter):
    slope = jax.grad(lambda p: jnp.sum(p.unwrap()))(parameter)
    return gradient.unconstrained / slope.unconstrained
