"""Interfaces between rooms: a method is meant to be overridden, or it is not.

Knows the classes of the runtime, and who subclasses them. Nothing is run. Python refuses to construct an interpreter
that lacks an abstract method. Nothing would tell if a method that overrides a concrete one were renamed.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import vnode.partition
import vnode.runtime
from vnode.partition.plan.replica import ReplicaEmission
from vnode.runtime.emit import Emission
from vnode.runtime.schedule_interpreter import ScheduleInterpreter


def classes_of(package: Any) -> Iterator[type]:
    """The classes that a package's modules define."""
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == info.name:
                yield found


def overridden(cls: type, room: str) -> list[str]:
    """The concrete methods of a room's classes that a class overrides."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith(f"{room}.")]
    return [
        f"{cls.__name__}.{name} overrides {base.__name__}.{name}"
        for name in vars(cls)
        for base in bases
        if not name.startswith("__") and is_concrete(vars(base).get(name))
    ]


def is_concrete(member: Any) -> bool:
    """Whether a member of a class is a method or property with an implementation."""
    return (callable(member) or hasattr(member, "__get__")) and not getattr(member, "__isabstractmethod__", False)


def test_the_planner_overrides_nothing_of_the_runtime() -> None:
    found = [each for cls in classes_of(vnode.partition) for each in overridden(cls, "vnode.runtime")]
    assert not found, found


def test_interpreters_override_nothing() -> None:
    """Those of the runtime neither; there are two."""
    several = [
        cls
        for package in (vnode.runtime, vnode.partition)
        for cls in classes_of(package)
        if issubclass(cls, ScheduleInterpreter)
    ]
    found = [each for cls in several for each in overridden(cls, "vnode.runtime")]
    assert not found, found
    assert {cls for cls in several if not inspect.isabstract(cls)} == {Emission, ReplicaEmission}


def test_a_missing_method_is_an_error() -> None:
    methods = {name: vars(ReplicaEmission)[name] for name in ScheduleInterpreter.__abstractmethods__ - {"run_region"}}
    lacking: Any = type("Lacking", (ScheduleInterpreter,), methods)
    with pytest.raises(TypeError, match="run_region"):
        lacking()


@pytest.mark.parametrize("name", ["read", "known", "serializes_independent"])
def test_an_override_is_found(name: str) -> None:
    assert overridden(type("Other", (ScheduleInterpreter,), {name: None}), "vnode.runtime")
    assert not overridden(type("Other", (ScheduleInterpreter,), {"run_region": None, "other": None}), "vnode.runtime")
