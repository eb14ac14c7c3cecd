"""What the leaves of a pytree are: arrays, or anything else.

Knows kinds of arrays. Must not know where they live, nor what they are used for.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from vnode.placement.sharded import ShardedBatch


def is_array(leaf: Any) -> bool:
    """Whether a leaf is something that `jax.jit` takes as an array, or as one in shares."""
    kinds = jax.Array | np.ndarray | np.generic | bool | int | float | complex | jax.ShapeDtypeStruct | ShardedBatch
    return isinstance(leaf, kinds)
