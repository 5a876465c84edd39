"Checkpoints that were cut off or damaged, and a fit that is killed while it writes them."

import os
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import gp_thesis as gpt
from gp_thesis.checkpoints import Checkpoints, fingerprint, identity, last_whole, named, revived

ABOUT = {"run": "one"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    "A folder that was told of five states and kept two."
    folder = tmp_path_factory.mktemp("checkpoints") / "five"
    with Checkpoints(folder, ABOUT) as checkpoints:
        for step in range(1, 6):
            checkpoints.write(step, {"a": jnp.arange(500.0) + step, "n": jnp.array(step)}, values=list(range(step)))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def read(folder, about=ABOUT):
    with Checkpoints(folder, about) as checkpoints:
        return last_whole(checkpoints)


def test_the_last_two_are_kept_and_the_last_comes_back_bit_by_bit(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["4", "5"]
    arrays = read(folder)
    assert np.array_equal(arrays["['a']"], np.arange(500.0) + 5) and arrays["['n']"] == 5
    assert arrays["values"].tolist() == [0, 1, 2, 3, 4]
    assert read(folder.parent / "empty") is None


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    "One bit in the middle."
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


def holds_numbers(folder):
    "The largest file: it holds the 500 numbers."
    return max(files(folder / "5" / "arrays"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("harm", [
    lambda f: cut(holds_numbers(f)), lambda f: flip(holds_numbers(f)), lambda f: holds_numbers(f).unlink(),
    lambda f: shutil.rmtree(f / "5" / "arrays"), lambda f: shutil.rmtree(f / "5" / "about"),
    lambda f: [cut(path) for path in files(f / "5")], lambda f: [path.unlink() for path in files(f / "5")],
], ids=["cut", "flipped", "missing", "no arrays", "no words", "all cut", "empty"])
def test_a_damaged_last_one_falls_back_to_the_one_before_with_a_warning(folder, harm):
    harm(folder)
    with pytest.warns(UserWarning, match="checkpoint 5 in .* is damaged .* the one before it, 4, takes its place"):
        arrays = read(folder)
    assert arrays["['n']"] == 4 and np.array_equal(arrays["['a']"], np.arange(500.0) + 4)
    assert sorted(path.name for path in folder.iterdir()) == ["4"]                # the way is free for another 5
    with Checkpoints(folder, ABOUT) as checkpoints:
        checkpoints.write(5, {"a": jnp.zeros(3)})
    assert np.array_equal(read(folder)["['a']"], np.zeros(3))


def test_if_all_are_damaged_nothing_is_thrown_away(folder):
    for path in files(folder):
        cut(path)
    with pytest.raises(ValueError, match="all checkpoints in .* are damaged .* remove the folder to begin again"):
        read(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "5"]


def test_what_belongs_to_something_else_is_refused(folder):
    with pytest.raises(ValueError, match=r"belong to something else, which differs in run \(one there, two here\)"):
        read(folder, {"run": "two"})
    assert read(folder)["['n']"] == 5


def test_trees_come_back_with_their_keys_and_dtypes():
    tree = {"key": jax.random.key(3), "half": jnp.ones(2, jnp.float32), "n": (jnp.array(7),)}
    zero = {"key": jax.random.key(0), "half": jnp.zeros(2, jnp.float32), "n": (jnp.array(0),)}
    back = revived(zero, named(tree))
    assert back["key"] == tree["key"] and back["half"].dtype == jnp.float32 and back["n"][0] == 7
    assert fingerprint(back) == fingerprint(tree) != fingerprint(zero)
    for other in ({"half": zero["half"]}, zero | {"half": jnp.zeros(3, jnp.float32)}, zero | {"half": jnp.zeros(2)}):
        with pytest.raises(ValueError, match="arrays differ"):
            revived(other, named(tree))


KILLED = """
import jax; jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", {folder!r} + "/compiled")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
import os, random, signal, time, warnings
import equinox as eqx, numpy as np, optax, orbax.checkpoint
from gp_thesis.fitting import fit
from gp_thesis.parameters import Parameter, free, unwrap

warnings.simplefilter("ignore")                                    # forking before XLA has started is fine
class Bowl(eqx.Module):
    v: Parameter
    def objective(self, x, *, num_data=None):
        return -jax.numpy.mean((unwrap(self.v) - x) ** 2)

adam, steps = optax.adam(0.1), 60
def run(checkpoint, tell=lambda *_: None):
    result = fit(Bowl(free(np.zeros(2))), (np.arange(20.0).reshape(10, 2),), optimiser=adam, steps=steps, batch_size=2,
                 key=jax.random.key(0), checkpoint=checkpoint, every=1, callback=tell)
    leaves = jax.tree.leaves((result.approx, result.state._replace(reason=0)))
    return {{str(k): np.asarray(leaf) for k, leaf in enumerate(leaves)}} | {{"objective": result.history.objective}}

def child(task):
    "A process that does this; its number, and what to read from."
    here, there = os.pipe()
    number = os.fork()
    if number == 0:
        os.close(here)
        task(lambda *_: os.write(there, b"."))
        os._exit(0)
    os.close(there)
    return number, here

folder, chance, writing, kills = {folder!r}, random.Random({seed}), 0, 0
save = lambda name, checkpoint, tell: np.savez(folder + "/" + name, **run(checkpoint, tell))
while kills < 20:
    number, pipe = child(lambda tell: save("unexpected", folder + "/run", tell))
    for _ in range(chance.randint(1, 2)):
        os.read(pipe, 1)                                           # a step was taken, and is written now
        now = time.monotonic()
    os.read(pipe, 1)
    time.sleep(chance.random() * (time.monotonic() - now))         # anywhere in the next time that this takes
    os.kill(number, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(number, 0)[1])
    kills, writing = kills + 1, writing + any("tmp" in name for name in os.listdir(folder + "/run"))
for name, checkpoint in (("cut", folder + "/run"), ("whole", None)):
    number, pipe = child(lambda tell: save(name, checkpoint, tell))
    while os.read(pipe, 64):
        pass
    assert os.waitpid(number, 0)[1] == 0
print(kills, "kills,", writing, "in a write,", time.process_time() + sum(os.times()[2:4]), "s")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
def test_a_run_that_is_killed_twenty_times_while_it_writes_ends_bit_identical(tmp_path):
    seed = int.from_bytes(os.urandom(2), "big")
    code = KILLED.format(folder=str(tmp_path), seed=seed)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    kills, writing = (int(word) for word in done.stdout.split() if word.isdigit())
    assert kills == 20 and writing >= 1, done.stdout                              # some had begun to write a folder aside
    cut, whole = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("cut", "whole"))
    assert cut.keys() == whole.keys() and len(whole["objective"]) == 61
    assert all(np.array_equal(cut[name], whole[name]) for name in whole)


ORDER = """
import jax.numpy as jnp, numpyro.distributions as dist
from gp_thesis.checkpoints import identity
priors = [dist.Normal(1.0, 2.0), dist.Gamma(3.0, 4.0), dist.StudentT(5.0, 6.0, 7.0), dist.LogNormal(8.0, 9.0)]
print(identity([priors, {"function": jnp.exp, "word": "a", "array": jnp.arange(3.0)}]))
"""


def test_a_digest_of_priors_is_that_of_another_process():
    "numpyro flattens a distribution in the order of a set, which differs from process to process."
    run = lambda seed: subprocess.run([sys.executable, "-c", ORDER], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
    first, *others = (run(seed) for seed in "123")
    assert "; " in first.stdout, first.stderr
    assert [other.stdout for other in others] == [first.stdout] * 2


def test_identity_sees_classes_words_and_numbers():
    def local(x):
        return x

    class Local(eqx.Module):
        inside: object

    things = [gpt.Matern32(1.0, 1.0), gpt.Matern52(1.0, 1.0), gpt.Matern32(2.0, 1.0), gpt.Matern32(np.ones(1), 1.0),
              gpt.Matern32(gpt.freeze(gpt.positive(1.0)), 1.0), gpt.Matern32(gpt.positive(1.0, dist.Gamma(1.0, 1.0)), 1.0),
              gpt.Matern32(gpt.positive(1.0, dist.LogNormal(1.0, 1.0)), 1.0), Local(local), Local(len), Local("word"), Local(1), Local(1.0)]
    assert len({identity(thing) for thing in things}) == len(things)
    assert identity(gpt.Matern32(1.0, 1.0)) == identity(things[0])
