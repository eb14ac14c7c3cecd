"""What a model to be partitioned is: a train step as its user wrote it, the shapes it is called with, known figures.

Knows pytrees of arrays, their shapes, and names of leaves. Must not know any architecture, how a step is split, nor on
what it runs.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

Tree = Any
Size = Literal["paper", "small"]
Sizes = TypeVar("Sizes")


@dataclass(frozen=True)
class Published:
    """Figures of a model that somebody else has printed.

    Attributes:
        parameters: How many numbers are trained.
        source: Who says so, and where.
        within: By how much the count may differ, relatively: what the printed digits leave open. 0: not at all.
        sizes: Arguments of the model's function for which the figures hold, beside those of "paper".
        macs: Multiplications with addition in matrix products and convolutions of one example's forward pass.
    """

    parameters: float
    source: str
    within: float = 0.0
    sizes: Mapping[str, Any] = field(default_factory=dict)
    macs: float | None = None


@dataclass(frozen=True)
class Model:
    """A train step for the whole batch on one device, with the shapes that it is called with.

    Nothing of full size is allocated until `initial` or `examples` is called outside of a trace.

    Attributes:
        name: How the tables call it.
        step: `step(state, batch) -> (state, metrics)`; `metrics` has a scalar `loss`.
        initial: `initial(key) -> state`, a dictionary whose entry `params` is what is trained.
        examples: `examples(key) -> batch`, random examples; the first dimension of each array counts them.
        placements: What experts do on a mesh with the axes `data` and `model`, beside splitting the batch over `data`:
            regular expressions, searched in names of leaves, to how that leaf is split. See `specs`.
        published: Figures to check it against, if there are any.
    """

    name: str
    step: Callable[[Tree, Tree], tuple[Tree, Tree]]
    initial: Callable[[jax.Array], Tree]
    examples: Callable[[jax.Array], Tree]
    placements: Mapping[str, PartitionSpec] = field(default_factory=dict)
    published: Published | None = None

    @cached_property
    def state(self) -> Tree:
        """Shapes and types of the state."""
        return jax.eval_shape(self.initial, jax.eval_shape(jax.random.key, 0))

    @cached_property
    def batch(self) -> Tree:
        """Shapes and types of the batch."""
        return jax.eval_shape(self.examples, jax.eval_shape(jax.random.key, 0))

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(int(np.prod(leaf.shape, dtype=object)) for leaf in jax.tree.leaves(self.state["params"]))


def sized(sizes: Mapping[str, Sizes], size: str, changed: Mapping[str, Any]) -> Sizes:
    """The sizes of a name, with some of them changed.

    Raises:
        ValueError: There is no such name, or nothing that is so called to change.
    """
    if size not in sizes:
        raise ValueError(f"size must be one of {', '.join(sizes)}, not {size!r}")
    known = [f.name for f in dataclasses.fields(sizes[size])]
    for name in changed:
        if name not in known:
            raise ValueError(f"there is no size {name!r}, only {', '.join(known)}")
    return dataclasses.replace(sizes[size], **changed)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a leaf: `params/block_3/mlp_up/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def specs(tree: Tree, placements: Mapping[str, PartitionSpec]) -> Tree:
    """How each leaf of a state is split: as the first pattern says that is found in its name, else not at all.

    An optimizer's slots have names that end like those of their parameters, so that patterns mean both.
    """

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        name = name_of(path)
        return next((s for pattern, s in placements.items() if re.search(pattern, name)), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, tree)


def cast(params: Tree, dtype: Any) -> Tree:
    """Parameters in the type that is computed in; they are kept in float32."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def token_loss(logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in float32 over tokens, or over those of weight 1.

    Args:
        logits: float[batch, time, vocabulary].
        labels: int32[batch, time].
        weights: float32[batch, time], 0 for padding.

    Returns:
        float32[], in nats.
    """
    logits = logits.astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
