"""GPJax. Its objective under `jax.jit(jax.value_and_grad)`, with no jitter, so that the value can be compared."""

import gpjax
import jax
import jax.numpy as jnp

PACKAGES = ("gpjax", "jax", "jaxlib")


def exact(problem):
    model, data = model_and_data(problem)
    evaluate = jax.jit(jax.value_and_grad(gpjax.objectives.conjugate_mll))

    def step():
        return jax.block_until_ready(evaluate(model, data))

    def read(result):
        value, gradient = result
        return value, hyperparameter_gradient(gradient, model, problem)

    return step, read


def vfe(problem):
    model, data = model_and_data(problem)
    q = gpjax.variational_families.CollapsedVariationalGaussian(model=model, inducing_inputs=jnp.asarray(problem.Z))
    evaluate = jax.jit(jax.value_and_grad(gpjax.objectives.collapsed_elbo))

    def step():
        return jax.block_until_ready(evaluate(q, data))

    def read(result):
        value, gradient = result
        found = hyperparameter_gradient(gradient.model, model, problem)
        return value, found | {"inducing": gradient.inducing_inputs.value}

    return step, read


def model_and_data(problem):
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    kernel = gpjax.kernels.RBF(lengthscale=jnp.asarray(problem.lengthscale), variance=jnp.asarray(problem.variance))
    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=kernel, jitter=0.0)
    model = prior * gpjax.likelihoods.Gaussian(obs_stddev=jnp.sqrt(problem.noise))
    return model, gpjax.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y)[:, None])


def hyperparameter_gradient(gradient, model, problem):
    kernel, of_kernel = model.prior.kernel, gradient.prior.kernel
    stddev = constrained_gradient(gradient.likelihood.obs_stddev, model.likelihood.obs_stddev)
    return {
        "lengthscale": constrained_gradient(of_kernel.lengthscale, kernel.lengthscale),
        "variance": constrained_gradient(of_kernel.variance, kernel.variance),
        "noise": stddev / (2 * jnp.sqrt(problem.noise)),
    }


def constrained_gradient(gradient, parameter):
    slope = jax.grad(lambda p: jnp.sum(p.unwrap()))(parameter)
    return gradient._unconstrained / slope._unconstrained
