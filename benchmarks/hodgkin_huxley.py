"""The neuron of chapter 63 by another simulator: `.venv-brian/bin/python benchmarks/hodgkin_huxley.py`

Writes `results/hodgkin_huxley.json`: V, m, h and n in every half millisecond, for half a second of steps and slopes of the
current, by Brian 2 from the equations as text. Its clock ticks twice as often as ours, and its current is ours: constant
within each tenth of a millisecond. `make brian` makes the environment."""

import json
from pathlib import Path

import brian2 as b2
import numpy as np

TICK, EVERY, DURATION = 0.005, 0.5, 500.0  # ms
PIECES = [(30, 60, 2, 2), (80, 110, 4, 4), (140, 170, 7, 7), (200, 240, 12, 12),
          (270, 310, 20, 20), (340, 390, 30, 30), (420, 480, 0, 18)]  # begin, end (ms), first, last (μA/cm²)

EQUATIONS = """
dv/dt = (I - 120 * m**3 * h * (v - 50) - 36 * n**4 * (v + 77) - 0.3 * (v + 54.387)) / ms : 1
dm/dt = (1 / exprel(-(v + 40) / 10) * (1 - m) - 4 * exp(-(v + 65) / 18) * m) / ms : 1
dh/dt = (0.07 * exp(-(v + 65) / 20) * (1 - h) - h / (1 + exp(-(v + 35) / 10))) / ms : 1
dn/dt = (0.1 / exprel(-(v + 55) / 10) * (1 - n) - 0.125 * exp(-(v + 65) / 80) * n) / ms : 1
I : 1
"""


def current():
    "In each tenth of a millisecond."
    t = np.arange(round(10 * DURATION)) / 10
    each = [np.where((begin <= t) & (t < end), first + (last - first) * (t - begin) / (end - begin), 0)
            for begin, end, first, last in PIECES]
    return np.sum(each, axis=0)


def steady():
    "At rest: V by bisection, the gates where they stay."
    def gates(v):
        up = [(v + 40) / 10 / -np.expm1(-(v + 40) / 10), 0.07 * np.exp(-(v + 65) / 20),
              (v + 55) / 100 / -np.expm1(-(v + 55) / 10)]
        down = [4 * np.exp(-(v + 65) / 18), 1 / (1 + np.exp(-(v + 35) / 10)), 0.125 * np.exp(-(v + 65) / 80)]
        return [a / (a + b) for a, b in zip(up, down)]

    def outward(v):
        m, h, n = gates(v)
        return 120 * m**3 * h * (v - 50) + 36 * n**4 * (v + 77) + 0.3 * (v + 54.387)

    low, high = -70.0, -60.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if outward(middle) > 0 else (middle, high)
    return [low, *gates(low)]


def main():
    b2.defaultclock.dt = TICK * b2.ms
    names = {"given": b2.TimedArray(current(), dt=0.1 * b2.ms)}
    neuron = b2.NeuronGroup(1, EQUATIONS, method="rk4", namespace=names)
    neuron.run_regularly("I = given(t + 0.05 * ms)", dt=0.1 * b2.ms)  # in the middle: no rounding moves it
    start = steady()
    neuron.v, neuron.m, neuron.h, neuron.n = start
    monitor = b2.StateMonitor(neuron, ["v", "m", "h", "n"], record=True, dt=EVERY * b2.ms)
    b2.run((DURATION + TICK) * b2.ms)
    states = np.array([monitor.v[0], monitor.m[0], monitor.h[0], monitor.n[0]]).T[1:]
    found = dict(simulator=f"Brian 2 {b2.__version__}, rk4, a step of {TICK} ms", duration=DURATION, every=EVERY,
                 pieces=PIECES, start=start, states=np.round(states, 7).tolist())
    path = Path(__file__).parent / "results" / "hodgkin_huxley.json"
    path.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")
    print(path.name, states.shape, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
