"""Fits of one shape at the same time, for a GPU, of which one small fit alone uses little.

`python -m tools.together NOTEBOOK SECONDS CELL ...` is `tools.long_run`, but fits all splits of a problem together. Each has an L-BFGS
of its own, in a thread; when all that are still under way have asked for a loss and its gradient, one program computes them all.
A row's seconds are those since the row before it, so that they add up to what all of them took."""

import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from unittest.mock import patch

import equinox as eqx
import jax
import numpy as np

from gp_thesis import data, fitting, optimisers
from gp_thesis.linalg import nan_on_failure
from gp_thesis.optimisers import lbfgs
from tools import long_run


@eqx.filter_jit
def _losses_and_gradients(loss, trees, arrays, alike):
    "Of a stack of trees and of the arrays in a stack of arguments, whose other parts are alike."
    def of_one(tree, arrays):
        return jax.value_and_grad(loss)(tree, *eqx.combine(arrays, alike))

    with nan_on_failure():
        return jax.vmap(of_one)(trees, arrays)


def _stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _on_the_host(template, v):
    "`optimisers.cut_like`, but the arrays stay here until those of all members are there."
    leaves, structure = jax.tree.flatten(template)
    parts = np.split(v, np.cumsum([leaf.size for leaf in leaves]))
    return structure.unflatten(np.array(part, leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves))


class SharedError(Exception):
    "What members wait for could not be computed, memory may be short: no fit has failed."


class Together:
    "Members that are to fit, and those of them who wait for a loss and its gradient."

    def __init__(self, members):
        self.turn, self.fitting, self.asked, self.answers = threading.Condition(), set(members), {}, {}
        self.last, self.stack = {}, None  # what each member asked last; the arguments of all, on the device
        self.here, self.calls = threading.local(), 0  # who a thread works for; programs run

    def run(self, member, function):
        "function(), in a thread of the member's own."
        self.here.member = member
        try:
            return function()
        finally:
            self._leave()

    def lbfgs(self, *arguments):
        "`optimisers.lbfgs`, after which nobody waits for this member."
        try:
            return lbfgs(*arguments)
        finally:
            self._leave()

    def of_arrays(self, _, loss, start, *arguments):
        "That of `optimisers.loss_and_gradient`, whose function waits for the other members."
        unflatten = jax.tree.structure(start).unflatten
        return lambda *leaves: jax.tree.leaves(self._ask(loss, unflatten(leaves), arguments))

    def _ask(self, loss, tree, arguments):
        me = self.here.member
        with self.turn:
            self.fitting.add(me)
            self.asked[me] = loss, tree, arguments
            self._answer()
            self.turn.wait_for(lambda: me in self.answers)
            answer = self.answers.pop(me)
        if isinstance(answer, Exception):  # not a member's own, so not one of those that make a row NaN
            raise SharedError(f"the program of all members failed: {answer}") from answer
        return answer

    def _leave(self):
        with self.turn:
            self.fitting.discard(self.here.member)
            self._answer()

    def _answer(self):
        "What was asked, once all who fit have asked."
        if not self.asked or self.fitting - set(self.asked):
            return
        asked, self.asked = self.asked, {}
        self.last |= asked  # who has ended is computed again, so that shapes stay
        try:
            answers = self._compute()
        except Exception as error:
            answers = dict.fromkeys(asked, error)
        self.answers |= {member: answers[member] for member in asked}
        self.turn.notify_all()

    def _compute(self):
        losses, trees, arguments = zip(*self.last.values())
        places = [tuple(map(id, each)) for each in arguments]
        if self.stack is None or self.stack[0] != places:
            arrays, alike = zip(*(eqx.partition(each, eqx.is_array) for each in arguments))
            if len(alike) > 1 and not eqx.tree_equal(*alike):
                raise ValueError("fits that run together must differ in arrays only")
            self.stack = places, jax.device_put(_stacked(arrays)), alike[0]
        _, arrays, alike = self.stack
        values, gradients = jax.device_get(_losses_and_gradients(losses[0], _stacked(trees), arrays, alike))
        self.calls += 1
        return {member: (values[k], jax.tree.map(lambda g: g[k], gradients)) for k, member in enumerate(self.last)}


def run_together(run, keys, together=None):
    "run(*key) of each key, in threads whose fits share programs: keys and futures, those first that end first."
    together = together or Together(keys)
    shared = patch.multiple(optimisers, loss_and_gradient=together, cut_like=_on_the_host)
    with shared, patch.object(fitting, "lbfgs", together.lbfgs), ThreadPoolExecutor(len(keys)) as threads:
        futures = {threads.submit(together.run, key, partial(run, *key)): key for key in keys}
        for future in as_completed(futures):
            yield futures[future], future


def groups(left, names):
    "The keys that are left, those together that differ in nothing but the split."
    found = {}
    for key in left:
        shape = tuple(part for part, name in zip(key, names) if name != "split")
        found.setdefault(shape, []).append(key)
    return list(found.values())


def add_together(entry, run, keys, names, columns):
    "Rows of a file of `go_on`, each when its fit has ended; FloatingPointError and RuntimeError give NaN, as there; raises SharedError."
    clock = time.perf_counter()
    for key, future in run_together(run, keys):
        try:
            values = future.result()
        except (FloatingPointError, RuntimeError):
            values = [math.nan] * len(columns)
        seconds, clock = time.perf_counter() - clock, time.perf_counter()
        data._add_line(entry, [*names, *columns, "seconds"], data._as_text((*key, *values, seconds)))


def go_on_together(go_on, seconds):
    "A `go_on` that gets so many seconds, and fits the splits of a problem at the same time."
    def going_on(entry, run, order, names, columns, _):
        began, done = time.perf_counter(), go_on(entry, run, order, names, columns, 0.0)
        for keys in groups([key for key in order if key not in done], names):
            if time.perf_counter() - began < seconds:
                add_together(entry, run, keys, names, columns)
        return go_on(entry, run, order, names, columns, 0.0)

    return going_on


if __name__ == "__main__":
    long_run.main(*sys.argv[1:], goes_on=go_on_together)
