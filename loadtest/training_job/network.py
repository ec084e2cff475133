"""A network of two layers learns to imitate a fixed random one: cheap, deterministic, and with a loss that falls.

    x ~ N(0, I), batch by batch from the job's own generator
    y = argmax(x · teacher)
    p = softmax(tanh(x · w1 + b1) · w2 + b2),   loss = -mean ln p[y]
    Adam: Kingma and Ba, arXiv:1412.6980, algorithm 1

All that the next step depends on is in `TrainingState`. In double precision and one thread the same state gives the
same next state, bit for bit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INPUTS, HIDDEN, CLASSES, BATCH = 16, 32, 8, 64
LEARNING_RATE, BETA1, BETA2, EPSILON = 3e-3, 0.9, 0.999, 1e-8
SHAPES = {"w1": (INPUTS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}


@dataclass(slots=True)
class TrainingState:
    """A training under way. `train_step` changes it in place."""

    seed: int
    step: int
    parameters: dict[str, Floats]
    first_moments: dict[str, Floats]
    second_moments: dict[str, Floats]
    rng: np.random.Generator


def new_training(seed: int) -> TrainingState:
    """An untrained network; everything follows from the seed."""
    rng = np.random.Generator(np.random.PCG64(seed))
    parameters = {name: rng.standard_normal(shape) / np.sqrt(shape[0]) if len(shape) == 2 else np.zeros(shape)
                  for name, shape in SHAPES.items()}
    return TrainingState(seed, 0, parameters, _zeros(), _zeros(), rng)


def train_step(state: TrainingState) -> float:
    """One batch; returns its loss before the update."""
    x = state.rng.standard_normal((BATCH, INPUTS))
    y = np.argmax(x @ _teacher(state.seed), axis=1)
    loss, gradients = _loss_and_gradients(state.parameters, x, y)
    state.step += 1
    for name, gradient in gradients.items():
        first = state.first_moments[name] = BETA1 * state.first_moments[name] + (1 - BETA1) * gradient
        second = state.second_moments[name] = BETA2 * state.second_moments[name] + (1 - BETA2) * gradient**2
        unbiased_first, unbiased_second = first / (1 - BETA1**state.step), second / (1 - BETA2**state.step)
        state.parameters[name] = (
            state.parameters[name] - LEARNING_RATE * unbiased_first / (np.sqrt(unbiased_second) + EPSILON))
    return loss


def _loss_and_gradients(
    parameters: dict[str, Floats], x: Floats, y: NDArray[np.int64]
) -> tuple[float, dict[str, Floats]]:
    rows = np.arange(len(y))
    hidden = np.tanh(x @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    d_logits = np.exp(log_p)
    d_logits[rows, y] -= 1
    d_logits /= len(y)
    d_hidden = (d_logits @ parameters["w2"].T) * (1 - hidden**2)
    return float(-log_p[rows, y].mean()), {
        "w1": x.T @ d_hidden, "b1": d_hidden.sum(axis=0), "w2": hidden.T @ d_logits, "b2": d_logits.sum(axis=0)}


def _teacher(seed: int) -> Floats:
    return np.random.Generator(np.random.PCG64([seed, 1])).standard_normal((INPUTS, CLASSES))


def _zeros() -> dict[str, Floats]:
    return {name: np.zeros(shape) for name, shape in SHAPES.items()}
