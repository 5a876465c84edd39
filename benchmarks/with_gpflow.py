"""GPflow. `training_loss` under `tf.function`, differentiated by a gradient tape, as its own optimisers do it."""

import gpflow
import numpy as np
import tensorflow as tf

PACKAGES = ("gpflow", "tensorflow", "tensorflow-probability")


def exact(problem):
    gpflow.config.set_default_float(np.dtype(problem.dtype).type)
    kernel = gpflow.kernels.SquaredExponential(problem.variance, problem.lengthscale)
    data = (problem.X, problem.y[:, None])
    return loss_and_gradient(gpflow.models.GPR(data, kernel, noise_variance=problem.noise))


def vfe(problem):
    gpflow.config.set_default_float(np.dtype(problem.dtype).type)
    gpflow.config.set_default_jitter(1e-12 if problem.dtype == "float64" else 1e-6)  # so that the value can be compared
    kernel = gpflow.kernels.SquaredExponential(problem.variance, problem.lengthscale)
    data = (problem.X, problem.y[:, None])
    return loss_and_gradient(gpflow.models.SGPR(data, kernel, problem.Z, noise_variance=problem.noise))


def svgp(problem):
    tiny = 1e-9 if problem.dtype == "float64" else 1e-6  # its own probit is up to a thousandth off; without any it overflows
    link = lambda f: 0.5 * (1 + tf.math.erf(f / np.sqrt(2.0))) * (1 - 2 * tiny) + tiny
    return stochastic(problem, lambda: gpflow.likelihoods.Bernoulli(invlink=link))


def multiclass(problem):
    def likelihood():
        link = gpflow.likelihoods.RobustMax(problem.num_classes)
        link._squash = 0.0  # so that the value can be compared
        return gpflow.likelihoods.MultiClass(problem.num_classes, link)

    return stochastic(problem, likelihood)


def stochastic(problem, likelihood):
    gpflow.config.set_default_float(np.dtype(problem.dtype).type)
    gpflow.config.set_default_jitter(1e-12 if problem.dtype == "float64" else 1e-6)
    kernel = gpflow.kernels.SquaredExponential(problem.variance, problem.lengthscale)
    m, S_factor = problem.m.reshape(len(problem.Z), -1), problem.S_factor.reshape(-1, *problem.S_factor.shape[-2:])
    model = gpflow.models.SVGP(kernel, likelihood(), problem.Z, num_latent_gps=m.shape[1], q_mu=m, q_sqrt=S_factor,
                               num_data=problem.num_data)
    return loss_and_gradient(model, (tf.constant(problem.X), tf.constant(problem.y[:, None])))


def loss_and_gradient(model, *data):
    "The timed step of a model, whose loss is of `data` if it does not hold them, and a reader of what it returns."
    parameters = {"lengthscale": model.kernel.lengthscales, "variance": model.kernel.variance}
    if isinstance(model.likelihood, gpflow.likelihoods.Gaussian):
        parameters["noise"] = model.likelihood.variance
    if hasattr(model, "inducing_variable"):
        parameters["inducing"] = model.inducing_variable.Z
    if hasattr(model, "q_mu"):
        parameters |= {"m": model.q_mu, "S_factor": model.q_sqrt}
    variables = [parameter.unconstrained_variable for parameter in parameters.values()]

    @tf.function
    def evaluate():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss = model.training_loss(*data)
        return loss, tape.gradient(loss, variables)

    def step():
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), evaluate())

    def read(result):
        loss, gradients = result
        return -loss, {name: constrained_gradient(-g, parameters[name]) for name, g in zip(parameters, gradients)}

    return step, read


def constrained_gradient(gradient, parameter):
    if len(gradient.shape) < len(parameter.shape):  # a triangle, whose entries are stored as they are
        return parameter.transform.forward(gradient).numpy()
    with tf.GradientTape() as tape:
        value = parameter.transform.forward(parameter.unconstrained_variable)
    return gradient / tape.gradient(value, parameter.unconstrained_variable).numpy()
