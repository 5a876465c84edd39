"""GPJax. Its objective under `jax.jit(jax.value_and_grad)`, with no jitter, so that the value can be compared."""

import gpjax
import jax
import jax.numpy as jnp

PACKAGES = ("gpjax", "jax", "jaxlib")


def exact(problem):
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    kernel = gpjax.kernels.RBF(lengthscale=jnp.asarray(problem.lengthscale), variance=jnp.asarray(problem.variance))
    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=kernel, jitter=0.0)
    model = prior * gpjax.likelihoods.Gaussian(obs_stddev=jnp.sqrt(problem.noise))
    data = gpjax.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y)[:, None])
    evaluate = jax.jit(jax.value_and_grad(gpjax.objectives.conjugate_mll))

    def step():
        return jax.block_until_ready(evaluate(model, data))

    def read(result):
        value, gradient = result
        stddev = constrained_gradient(gradient.likelihood.obs_stddev, model.likelihood.obs_stddev)
        return value, {
            "lengthscale": constrained_gradient(gradient.prior.kernel.lengthscale, kernel.lengthscale),
            "variance": constrained_gradient(gradient.prior.kernel.variance, kernel.variance),
            "noise": stddev / (2 * jnp.sqrt(problem.noise)),
        }

    return step, read


def constrained_gradient(gradient, parameter):
    slope = jax.grad(lambda p: jnp.sum(p.unwrap()))(parameter)
    return gradient._unconstrained / slope._unconstrained
