"""GPJax. Its objective under `jax.jit(jax.value_and_grad)`, with no jitter, so that the value can be compared."""

import gpjax
import jax
import jax.numpy as jnp
from numpyro.distributions import BernoulliProbs

PACKAGES = ("gpjax", "jax", "jaxlib")


class Probit(gpjax.likelihoods.Bernoulli):
    "Without the thousandth that its own link adds, so that the value can be compared."

    def link_function(self, f):
        return BernoulliProbs(jax.scipy.special.ndtr(f))


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


def svgp(problem):
    model = prior(problem) * Probit()
    data = gpjax.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y)[:, None], n_total=problem.num_data)
    q = gpjax.variational_families.WhitenedVariationalGaussian(
        model, jnp.asarray(problem.Z), jnp.asarray(problem.m)[:, None], jnp.asarray(problem.S_factor)
    )
    evaluate = jax.jit(jax.value_and_grad(gpjax.objectives.elbo))

    def step():
        return jax.block_until_ready(evaluate(q, data))

    def read(result):
        value, gradient = result
        factor = constrained_gradient(gradient.variational_root_covariance, q.variational_root_covariance)
        found = kernel_gradient(gradient.model, model) | {"inducing": gradient.inducing_inputs.value}
        return value, found | {"m": gradient.variational_mean.value, "S_factor": factor}

    return step, read


def model_and_data(problem):
    model = prior(problem) * gpjax.likelihoods.Gaussian(obs_stddev=jnp.sqrt(problem.noise))
    return model, gpjax.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y)[:, None])


def prior(problem):
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    kernel = gpjax.kernels.RBF(lengthscale=jnp.asarray(problem.lengthscale), variance=jnp.asarray(problem.variance))
    return gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=kernel, jitter=0.0)


def hyperparameter_gradient(gradient, model, problem):
    stddev = constrained_gradient(gradient.likelihood.obs_stddev, model.likelihood.obs_stddev)
    return kernel_gradient(gradient, model) | {"noise": stddev / (2 * jnp.sqrt(problem.noise))}


def kernel_gradient(gradient, model):
    kernel, of_kernel = model.prior.kernel, gradient.prior.kernel
    return {
        "lengthscale": constrained_gradient(of_kernel.lengthscale, kernel.lengthscale),
        "variance": constrained_gradient(of_kernel.variance, kernel.variance),
    }


def constrained_gradient(gradient, parameter):
    "Of a parameter whose every number is a function of one unconstrained number."
    slope = jax.grad(lambda p: jnp.sum(p.unwrap()))(parameter)
    return jax.jvp(lambda p: p.unwrap(), [parameter], [jax.tree.map(lambda g, s: g / s**2, gradient, slope)])[1]
