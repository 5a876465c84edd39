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


def loss_and_gradient(model):
    "The timed step of a model with a kernel and Gaussian noise, and a reader of what it returns."
    parameters = {
        "lengthscale": model.kernel.lengthscales,
        "variance": model.kernel.variance,
        "noise": model.likelihood.variance,
    }
    if hasattr(model, "inducing_variable"):
        parameters["inducing"] = model.inducing_variable.Z
    variables = [parameter.unconstrained_variable for parameter in parameters.values()]

    @tf.function
    def evaluate():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss = model.training_loss()
        return loss, tape.gradient(loss, variables)

    def step():
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), evaluate())

    def read(result):
        loss, gradients = result
        slopes = [slope(parameter) for parameter in parameters.values()]
        return -loss, {name: -g / s for name, g, s in zip(parameters, gradients, slopes)}

    return step, read


def slope(parameter):
    "d value / d unconstrained, elementwise."
    with tf.GradientTape() as tape:
        value = parameter.transform.forward(parameter.unconstrained_variable)
    return tape.gradient(value, parameter.unconstrained_variable).numpy()
