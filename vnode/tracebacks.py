"""An error -> the same error with vnode's own frames removed from its traceback, as jax removes its own.

Knows frames and where this package lies. Must not know who raises what.

    File "train.py", line 9, in <module>                        File "train.py", line 9, in <module>
      step(state, batch)                                          step(state, batch)
    File ".../vnode/step/virtual.py", line 239, in __call__  ->  File "train.py", line 5, in loss_fn
    File ".../vnode/step/executor.py", line 173, in _run           return jnp.mean(x @ w)
    File "train.py", line 5, in loss_fn
      return jnp.mean(x @ w)

It follows ``jax_traceback_filtering`` (environment: ``JAX_TRACEBACK_FILTERING``): ``"off"`` and ``"remove_frames"``
leave all frames, ``"tracebackhide"`` (in IPython the default) marks them for it to hide, else they are taken out.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax

from vnode.errors import VnodeError

P = ParamSpec("P")
R = TypeVar("R")

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
CONTEXTLIB_FILE = contextlib.__file__
"""The file of `contextlib`, whose frames are between vnode's where context managers are decorators."""

NOTE = (
    "--------------------\n"
    "For simplicity, vnode has removed its internal frames from this traceback. "
    "Set JAX_TRACEBACK_FILTERING=off to include these."
)


def api_boundary(fun: Callable[P, R]) -> Callable[P, R]:
    """Wraps a public function; errors raised in it lose vnode's frames."""

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            remove_frames(error)
            raise

    return call


def remove_frames(error: BaseException) -> None:
    """Removes vnode's frames from the tracebacks of an error and of its causes.

    Args:
      error: an error that is being handled, and is raised again.
    """
    mode = filtering_mode()
    for each in (error, *error_causes(error)) if mode else ():
        frames = list(traceback.walk_tb(each.__traceback__))
        hidden = [is_vnode_frame(frame) for frame, _ in frames]
        if not any(hidden):
            continue
        if mode == "tracebackhide":
            for (frame, _), own in zip(frames, hidden, strict=True):
                if own:
                    frame.f_locals["__tracebackhide__"] = True
            continue
        kept = None
        for (frame, line), own in zip(reversed(frames), reversed(hidden), strict=True):
            if not own and frame.f_code.co_filename != CONTEXTLIB_FILE:
                kept = types.TracebackType(kept, frame, frame.f_lasti, line)
        each.__traceback__ = kept
        noted = any("JAX_TRACEBACK_FILTERING" in note for note in getattr(each, "__notes__", ()))
        if each is error and not noted and not isinstance(error, VnodeError):  # whose message says all
            error.add_note(NOTE)


def filtering_mode() -> str:
    """The mode of jax's traceback filtering: ``"tracebackhide"``, ``"remove"``, or empty for none."""
    mode = jax.config.jax_traceback_filtering
    if mode == "auto" or mode is None:
        return "tracebackhide" if hasattr(builtins, "get_ipython") else "remove"
    return {"tracebackhide": "tracebackhide", "quiet_remove_frames": "remove"}.get(mode, "")


def error_causes(error: BaseException) -> Iterator[BaseException]:
    """The causes and contexts of an error, at any depth."""
    seen, left = {id(error)}, [error.__cause__, error.__context__]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            left += [found.__cause__, found.__context__]
            yield found


def level_of_caller() -> int:
    """The number of frames from this function's caller to the user's code: a ``stacklevel`` for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and (
        is_vnode_frame(frame) or frame.f_code.co_filename == CONTEXTLIB_FILE or is_jax_frame(frame)
    ):
        frame, level = frame.f_back, level + 1
    return level


def is_jax_frame(frame: types.FrameType) -> bool:
    """Whether a frame is of a function of JAX, which traces a step."""
    return frame.f_globals.get("__name__", "").startswith("jax.")


def is_vnode_frame(frame: types.FrameType) -> bool:
    """Whether a frame is of a function of vnode."""
    return frame.f_code.co_filename.startswith(PACKAGE)
