"""A loop over layers that stacks products -> a loop that stacks their operands, and one batched product after it.

Knows batch flow's steps, loops and descriptions. Must not know passes or devices, nor which products are wanted so.

The derivative of a scan over layers stacks the gradients of the layers' parameters. Before and after::

    dw = scan(layer: ...; x^T g)                                      dw: [layers, in, out]

    g = scan(layer: ...; g)                                           g: [layers, examples, out]
    dw = x^T g of all layers, a product with the layer as a batch dimension

A node's piece of the sum can then be computed for some layers at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.forms import WHOLE, Form, Partial, Slice, locate, project
from vnode.analysis.meshless import NO_MESH
from vnode.analysis.program import bind, inline
from vnode.analysis.scan_rewriting import rebuild_scan, stacked_variable
from vnode.analysis.states import ZERO, Flow, State, Step
from vnode.operators import Algebra, Monoid
from vnode.operators.control_flow import Loop, region_of


class CannotMoveProduct(Exception):
    """A result of a loop cannot be computed after the loop."""


def products_after_loops(flow: Flow, wanted: set[Var]) -> Flow:
    """Moves sums that loops stack behind the loops, where that is possible.

    Args:
      flow: batch flow of the program.
      wanted: the sums to move; no equation reads their pieces.

    Returns:
      Batch flow of the rewritten program; `flow` itself if nothing was moved.
    """
    steps: list[Step] = []
    states = dict(flow.states)
    for step in flow.steps:
        if step.per_node and isinstance(step.region, Loop) and not (step.over_batch or step.nested or step.eqn.effects):
            split = SplitLoop(flow, step)
            for var in (var for var in step.eqn.outvars if var in wanted):
                split.move_product(var)
            if split.products:
                steps += [split.loop_step(), *split.products]
                states.update(split.states)
                continue
        steps.append(step)
    if len(steps) == len(flow.steps):
        return flow
    program = flow.program.with_equations([step.eqn for step in steps])
    return dataclasses.replace(flow, program=program, states=states, steps=steps)


class SplitLoop:
    """A loop, and the products that are computed after it.

    Attributes:
      products: the steps after the loop, in order.
      states: of the products' results, and of the operands that the loop stacks for them.
    """

    def __init__(self, flow: Flow, step: Step) -> None:
        assert isinstance(step.region, Loop)
        self.flow = flow
        self.step = step
        self.loop = step.region
        (self.body,) = step.bodies
        self.makers = {var: own for own in self.body.steps for var in own.eqn.outvars}
        self.places = dict(zip(self.body.program.inputs, self.loop.inputs[0], strict=True))
        self.products: list[Step] = []
        self.states: dict[Var, State] = {}
        self.removed_results: set[Var] = set()
        self.dead_steps: set[Step] = set()  # of the body
        self.stacked_operands: dict[Var, Var] = {}  # values of the body, with their stacked variables

    def move_product(self, var: Var) -> None:
        """Moves a stacked sum behind the loop, if that is possible."""
        more = dict(self.stacked_operands)
        try:
            chain, leaves = self.sum_chain(self.body.program.outputs[self.step.eqn.outvars.index(var)])
            operands = [self.stacked_operand(leaf, more) for leaf in leaves]
            made = self.product_steps(var, chain, leaves, operands)
        except CannotMoveProduct:
            return
        self.stacked_operands = more
        self.removed_results.add(var)
        self.dead_steps |= {*chain}
        self.products += made

    def sum_chain(self, output: Any) -> tuple[list[Step], list[Var]]:
        """The steps of the body that compute a sum from batched values, in order, and these values.

        Raises:
          CannotMoveProduct: it is computed otherwise, or read in the body.
        """
        chain: dict[Step, None] = {}
        leaves: dict[Var, None] = {}

        def visit(var: Any) -> None:
            step = self.makers.get(var)
            if step is None or step.description is None or len(step.eqn.outvars) > 1 or step.eqn.effects:
                raise CannotMoveProduct
            for atom, form in zip(step.eqn.invars, step.operands, strict=True):
                if isinstance(form, Partial):
                    visit(atom)
                elif isinstance(form, Slice) and isinstance(atom, Var) and self.body.states[atom].form == form:
                    leaves[atom] = None
                elif not self.body.state(atom).zero:
                    raise CannotMoveProduct
            chain[step] = None

        visit(output)
        own = {id(step.eqn) for step in chain}
        for (var,) in (step.eqn.outvars for step in chain):
            read = [eqn for eqn in self.body.program.readers.get(var, ()) if id(eqn) not in own]
            if read or sum(atom is var for atom in self.body.program.outputs) != (var is output):
                raise CannotMoveProduct
        return list(chain), list(leaves)

    def stacked_operand(self, leaf: Var, more: dict[Var, Var]) -> Var:
        """The variable for all iterations of a body's value: an array that the loop scans, or one that it stacks.

        Args:
          leaf: the body's value.
          more: the stacked variables so far, by the body's values; extended.
        """
        place = self.places.get(leaf)
        if place is not None and place in self.loop.scanned:
            atom = self.step.eqn.invars[place]
            if isinstance(atom, Var) and self.flow.states[atom].form == self.stacked_form(leaf):
                return atom
        if leaf not in more:
            more[leaf] = stacked_variable(leaf.aval, self.loop.length)
        return more[leaf]

    def stacked_form(self, leaf: Var) -> Slice:
        """The form of a batched value of the body, stacked over all iterations."""
        form = self.body.states[leaf].form
        assert isinstance(form, Slice)
        return form.move(form.dim + 1)

    def product_steps(
        self, var: Var, chain: Sequence[Step], leaves: Sequence[Var], operands: Sequence[Var]
    ) -> list[Step]:
        """The steps that compute a stacked sum after the loop: the chain under `jax.vmap`.

        Args:
          var: the stacked sum.
          chain: the body's steps that compute it.
          leaves: the batched values that the chain reads.
          operands: the stacked variables of the leaves.

        Raises:
          CannotMoveProduct: batch flow cannot follow one of these steps.
        """

        def chain_result(*values: Any) -> Any:
            held = dict(zip(leaves, values, strict=True))
            for eqn in (step.eqn for step in chain):
                given = [
                    atom.val
                    if isinstance(atom, Literal)
                    else held.get(atom, jnp.zeros(atom.aval.shape, atom.aval.dtype))
                    for atom in eqn.invars
                ]
                (held[eqn.outvars[0]],) = bind(eqn, given)
            return held[chain[-1].eqn.outvars[0]]

        with jax.sharding.use_abstract_mesh(NO_MESH):
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
            traced = jax.make_jaxpr(jax.vmap(chain_result))(*shapes)
        program = inline(traced.jaxpr, traced.consts, chain[-1].eqn)
        if program.constants:
            raise CannotMoveProduct
        names: dict[Any, Var] = {**dict(zip(program.inputs, operands, strict=True)), program.outputs[0]: var}
        states = {
            **{
                v: self.flow.states.get(v) or State(self.stacked_form(leaf), self.step.level)
                for leaf, v in zip(leaves, operands, strict=True)
            },
            **self.states,
        }
        steps = []
        for eqn in program.equations:
            invars = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in eqn.invars]
            eqn = eqn.replace(invars=invars, outvars=[names.get(v, v) for v in eqn.outvars])
            steps.append(self.follow_equation(eqn, states))
        states[var] = self.flow.states[var]
        self.states = states
        return steps

    def follow_equation(self, eqn: JaxprEqn, states: dict[Var, State]) -> Step:
        """The step of an equation after the loop. Records the state of its result.

        Raises:
          CannotMoveProduct: batch flow cannot follow it.
        """
        description, level = self.flow.program.describe(eqn), self.step.level
        if description is None or len(eqn.outvars) > 1:
            raise CannotMoveProduct
        operands = [self.flow.state(atom) if isinstance(atom, Literal) else states[atom] for atom in eqn.invars]
        forms = tuple(state.form for state in operands)
        sliced = [i for i, form in enumerate(forms) if isinstance(form, Slice)]
        partial = {i for i, form in enumerate(forms) if isinstance(form, Partial)}
        others = [state for state in operands if state.form == WHOLE]
        if not all(state.zero for state in others):
            raise CannotMoveProduct
        location = None
        result: Form | None = None
        if sliced and not partial:
            found = {locate(forms[i], description.operands[i], description.sizes) for i in sliced}  # type: ignore
            (location,) = found if len(found) == 1 else (None,)
            if location is not None and description.reduced.get(location.factor) is Monoid.SUM:
                result = Partial(Monoid.SUM)
            elif location is not None and location.factor not in {*description.whole, *description.reduced}:
                result = project(location, description.results[0], description.sizes)
        elif partial and not sliced and any(partial <= group for group in description.linear):
            result = Partial(Monoid.SUM)
        elif others and description.has(Algebra.MOVES):
            result = WHOLE
        if result is None:
            raise CannotMoveProduct
        states[eqn.outvars[0]] = ZERO if result == WHOLE else State(result, level)
        return Step(eqn, result != WHOLE, level, forms, (result,), description, location)

    def loop_step(self) -> Step:
        """The loop without the moved products, and with their operands stacked."""
        eqn, body = self.step.eqn, self.body
        left = [j for j, var in enumerate(eqn.outvars) if var not in self.removed_results]
        outputs = [*(body.program.outputs[j] for j in left), *self.stacked_operands]
        results = [*(eqn.outvars[j] for j in left), *self.stacked_operands.values()]
        steps = [step for step in body.steps if step not in self.dead_steps]
        program = body.program.derive(body.program.inputs, [step.eqn for step in steps], outputs)
        made = rebuild_scan(eqn, program, eqn.invars, len(self.loop.fixed), results)
        forms = [*(body.output_forms[j] for j in left), *(body.states[leaf].form for leaf in self.stacked_operands)]
        return dataclasses.replace(
            self.step,
            eqn=made,
            results=(*(self.step.results[j] for j in left), *map(self.stacked_form, self.stacked_operands)),
            region=region_of(made),
            bodies=(dataclasses.replace(body, program=program, steps=steps, output_forms=forms),),
        )
