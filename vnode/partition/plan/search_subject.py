"""A step and its arguments -> what a search needs of them: schedule, names of inputs, donation, residuals of loops.

Knows steps, calls and how they are analysed. Must not know machines, layouts nor costs.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax

from vnode.analysis.fingerprint import Fingerprint, Writer
from vnode.analysis.forms import Slice
from vnode.analysis.passes import Schedule
from vnode.analysis.program import ResultIndex, origins
from vnode.errors import PartitionError
from vnode.placement.leaves import is_number, shape_of, shapes_of
from vnode.placement.patterns import full_name, name_of
from vnode.placement.placement import node_count
from vnode.remat.recompute import TurningPoint
from vnode.remat.residual_remat import Residual, loop_residuals
from vnode.step.call import OutputTree, wrap
from vnode.step.pipeline import analyse, check_types
from vnode.step.protocol import Step
from vnode.step.result_layouts import successors
from vnode.step.virtual import VirtualStep
from vnode.transform import virtualize


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A step for arguments of some shapes.

    Attributes:
      step: the step, a `VirtualStep`.
      args: its arguments, as shapes.
      schedule: its schedule of passes.
      fingerprint: the fingerprint of the user's function.
      names: the names of its program's inputs in patterns; None for inputs that no pattern can name.
      arguments: the argument of the step to which each input belongs, by number.
      batch: the inputs that are divided among nodes, by number.
      donated: the donated inputs, by number.
      carried: for outputs, by number, the input that they become in the next step.
      examples: the number of examples in the whole batch.
      kept: the residuals of its loops that could be recomputed.
    """

    step: Any
    args: tuple[Any, ...]
    schedule: Schedule
    fingerprint: Fingerprint
    names: tuple[str | None, ...]
    arguments: tuple[int, ...]
    batch: frozenset[int]
    donated: frozenset[int]
    carried: Mapping[int, int]
    examples: int
    kept: Mapping[ResultIndex, Residual] = dataclasses.field(default_factory=dict)

    @property
    def state(self) -> tuple[int, ...]:
        """The inputs that go from step to step, by number."""
        return tuple(sorted(set(self.carried.values())))

    @property
    def virtual_nodes(self) -> int:
        return self.step.options.virtual_nodes

    @functools.cached_property
    def leaves(self) -> tuple[str | None, ...]:
        """The names; with shapes where leaves of several shapes share a name, as in two networks."""
        named = [(name, tuple(var.aval.shape)) for name, var in zip(self.names, self.inputs, strict=False)]
        shapes: dict[str | None, set[tuple[int, ...]]] = {}
        for name, shape in named:
            shapes.setdefault(name, set()).add(shape)
        return tuple(
            name if name is None or len(shapes[name]) == 1 else full_name(name, shape) for name, shape in named
        )

    @functools.cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the state's leaves that passes read, or that values read by passes come from: no slots."""
        program = self.schedule.flow.program
        read = origins(program, {var for nodes in self.schedule.passes for var in nodes.whole_inputs})
        found = {self.leaves[i] for i in self.state if program.inputs[i] in read}
        return frozenset(name for name in found if name is not None)

    @property
    def indistinguishable_inputs(self) -> list[list[int]]:
        """Groups of inputs that no plan can tell apart: of one name and shape, as a network's and its average's."""
        found: dict[str, list[int]] = {}
        for i, name in enumerate(self.leaves):
            if name is not None:
                found.setdefault(name, []).append(i)
        return [several for several in found.values() if len(several) > 1]

    @functools.cached_property
    def late_reads(self) -> TurningPoint:
        """The late reads of its program without recomputation."""
        return TurningPoint.from_program(self.schedule.flow.program, self.batch)

    @functools.cached_property
    def loops_on_device(self) -> frozenset[int]:
        """Numbers of the loops whose residuals are not offloaded: they have passes of their own, or a reader has."""
        program = self.schedule.flow.program
        nested = {id(step.eqn) for step in self.schedule.flow.steps if step.nested}
        return frozenset(
            k
            for k, eqn in enumerate(program.equations)
            if any(id(each) in nested for each in (eqn, *(r for v in eqn.outvars for r in program.readers.get(v, ()))))
        )

    @property
    def inputs(self) -> Sequence[Any]:
        """The variables of the program's inputs."""
        return self.schedule.flow.program.inputs


def on_nodes(fun: Any, virtual_nodes: int | str, options: Mapping[str, Any]) -> Any:
    """A step on a number of virtual nodes.

    Args:
      fun: a function, or a virtualized step.
      virtual_nodes: V.
      options: options of `virtualize`.

    Raises:
      PartitionError: the step is virtualized already and options are given; or a plan decides about one of them.
      TypeError: one is no option of `virtualize`.
    """
    decided = options.keys() & {"partition", "placement", "memory"}
    if decided:
        raise PartitionError(f"a plan decides about {', '.join(sorted(decided))}: leave it out")
    if not callable(fun):
        raise PartitionError(f"a plan is for a function, or a step that vnode.virtualize made of one, not {fun!r}")
    if isinstance(fun, Step) and not isinstance(fun, VirtualStep):
        raise PartitionError(
            f"a plan is for a step with a fixed number of nodes, of pytrees, not for {fun!r}.",
            remedies=[
                "give the function itself: the search tries numbers of nodes, virtual_nodes='auto'",
                "for a step that changes objects, give a function of their state (nnx.split, nnx.merge)",
            ],
        )
    if isinstance(fun, VirtualStep):
        if options:
            raise PartitionError(f"the step is virtualized already: pass {', '.join(options)} to vnode.virtualize")
        return fun
    known = inspect.signature(virtualize).parameters
    if unknown := [name for name in options if name not in known]:
        close = difflib.get_close_matches(unknown[0], [*known])
        meant = f"; did you mean {close[0]}?" if close else ""
        raise TypeError(f"{unknown[0]} is no option of a plan's step, as those of vnode.virtualize are{meant}")
    return cast(Any, virtualize)(fun, virtual_nodes=node_count(virtual_nodes), **options)


def check_args(args: Any) -> None:
    """Checks that a step's arguments are a tuple.

    Raises:
      PartitionError: they are not a tuple.
    """
    if not isinstance(args, tuple | list):
        raise PartitionError(f"args must be a tuple of the step's arguments, not {type(args).__name__}")


def with_recomputation(step: Any, several: Collection[ResultIndex], away: Collection[ResultIndex] = ()) -> Any:
    """The `VirtualStep` with some residuals recomputed where they are read late, and others offloaded to the host."""
    choices = dataclasses.replace(step.spec.plan, recomputed=tuple(sorted(several)), offloaded=tuple(sorted(away)))
    return VirtualStep(dataclasses.replace(step.spec, plan=choices), None)


def subject_of(step: Any, args: Sequence[Any]) -> Subject:
    """Analyses a step.

    Args:
      step: the step, a `VirtualStep`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      VnodeError: as for calling the step; or some arguments can be passed by keyword only.
      PartitionError: the step has 64-bit values where x64 is off.
    """
    spec = step.spec
    spec.check_positional(args, {}, "a plan")
    shapes, _ = shapes_of((tuple(args), {}), sharding="drop")
    call, output = spec.call(shapes, {}), OutputTree()
    made = analyse(spec.flatten(call, output))
    check_types(made, "a step that is planned", PartitionError)
    program = made.program
    given, _ = spec.with_static(shapes, {})
    placed = jax.tree.map(
        lambda leaf: shape_of(leaf) if is_number(leaf) else leaf, tuple(wrap(arg, 0, i) for i, arg in enumerate(given))
    )
    wholes = set(spec.unsplit_positions(len(placed)))
    leaves = [(path[0].idx, path[1:]) for path, _ in jax.tree.leaves_with_path(placed)]
    named = [name_of(path) if i in wholes else None for i, path in leaves]
    kept = loop_residuals(program)
    results = output.unflatten([jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in program.outputs])
    before = successors(results, placed, [i in wholes for i, _ in leaves])
    forms = made.schedule.flow.output_forms  # an output that nodes return parts of replaces no input of all nodes
    more = len(program.inputs) - len(leaves)  # values being traced that the function closes over
    return Subject(
        step,
        shapes,
        made.schedule,
        Writer().write(program),
        (*named, *[None] * more),
        tuple(arg for arg, _ in leaves),
        frozenset(i for i, axis in enumerate(call.axes) if axis is not None and call.size > 1),
        frozenset(i for i, (arg, _) in enumerate(leaves) if arg in spec.donate_argnums),
        {j: i for j, i in enumerate(before) if i is not None and not isinstance(forms[j], Slice)},
        call.size,
        kept,
    )
