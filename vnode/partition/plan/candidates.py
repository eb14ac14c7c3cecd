"""A step and a mesh -> candidates: ways to divide the step over that mesh, each with its predicted figures.

Knows replicas, searches, and predictions. Must not know which candidates there are, nor files.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from vnode.analysis.parallel_branches import Branches
from vnode.errors import MemoryLimitError
from vnode.partition.cost.time_sources import Roofline, Times
from vnode.partition.cost.timed_pieces import timed_op_of
from vnode.partition.machine import Device, Machine
from vnode.partition.plan.branch_plans import branch_stages, groups_along
from vnode.partition.plan.carry_sharding import shard_carries
from vnode.partition.plan.divisions import DividedOperation, divisions_of
from vnode.partition.plan.meshes import NODES, mesh_text
from vnode.partition.plan.predict import Figures, Prediction, ReplicaCost, dividing_axes, far_sums, predict
from vnode.partition.plan.replica import NodeFlow, ReplicaProgram, replica_program
from vnode.partition.plan.replica_reduction import ReplicaReduction
from vnode.partition.plan.replica_shares import of_one_kind, replica_shares
from vnode.partition.plan.search_subject import Subject
from vnode.partition.plan.state_offload import StateOffload
from vnode.partition.plan.step_layouts import record_of, shard_over_replicas, specs_of
from vnode.partition.searches.experts import CONTEXT, EXPERT, SEQUENCE, experts
from vnode.partition.searches.ilp_formulation import Search, as_problem
from vnode.partition.searches.integer_program import least_memory
from vnode.partition.searches.methods import METHODS, Method
from vnode.partition.searches.problem import Array
from vnode.partition.searches.solution import Solution
from vnode.partition.uneven_shares.state_blocks import block_numbers, divided_state, specs_in_blocks, tied_inputs
from vnode.partition.uneven_shares.uneven_plans import UnevenCandidate, UnevenSearch
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.spmd.branch_groups import Group
from vnode.spmd.flow_record import RecordedFlow
from vnode.spmd.layout import replicated_atom
from vnode.spmd.sharded_program import as_spec_layout, spec_of
from vnode.spmd.sharding_flow import Flow, follow
from vnode.step.collector import collector_paused

UNEQUAL = "unequal shares"
"""Suffix of a candidate's name: its faster devices have larger parts of the divided dimensions."""

BESIDE = "searched + branches"
"""Name of a candidate whose independent branches run on different devices, side by side."""

MEGATRON, SEARCHED = "Megatron-style", "searched"
"""Names of candidates: tensor parallelism as in Megatron-LM, and the search's own solution."""

FSDP_OVER_ALL = "FSDP over all axes"
"""Name of a candidate that divides the examples and the state over all axes of the mesh."""

EXPERTS = ("data parallel", "FSDP", MEGATRON, SEQUENCE, CONTEXT, EXPERT, FSDP_OVER_ALL)
"""Names of the candidates that experts write by hand."""

EXPERT_SPLITS = {MEGATRON: "Megatron over", SEQUENCE: SEQUENCE, CONTEXT: CONTEXT, EXPERT: EXPERT}
"""The splits of each kind begin with this name among `experts`; the last one divides over all axes."""

HOPELESS = 2.0
"""Candidates with unequal shares are dropped beyond this factor on the best time without them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that could be chosen.

    Attributes:
      on: the step on a mesh.
      name: its name in the literature, or "searched".
      flow: layouts through the program of a replica.
      counts: number of nodes of each replica.
      specs: shardings of the state's leaves, by name.
      replica: the program of a replica.
      prediction: the predicted figures.
      slots: the parts of the state that may be offloaded to the host.
      gap: largest possible excess of its cost over the best on this mesh, as a share; None if nothing was searched.
      host: names of the leaves in the host's memory.
      shard_state: whether the state is also sharded over the replicas.
      host_sums: number of waiting partial sums in the host's memory.
      most_host_sums: the largest such number.
      estimate: seconds of a step by the search's cost model; infinite if they were not computed.
      account: bytes of a device by the search's cost model; infinite if they were not computed.
      prediction_seconds: seconds that its prediction took.
    """

    on: MeshSearch
    name: str
    flow: Flow
    counts: tuple[int, ...]
    specs: Mapping[str, PartitionSpec | UnevenSpec]
    replica: ReplicaProgram
    prediction: Prediction
    slots: StateOffload
    gap: float | None = None
    host: tuple[str, ...] = ()
    shard_state: bool = False
    host_sums: int = 0
    most_host_sums: int = 0
    estimate: float = math.inf
    account: float = math.inf
    prediction_seconds: float = 0.0

    @property
    def mesh(self) -> Mapping[str, int]:
        """Sizes of the mesh axes, the nodes' axis first."""
        return self.on.sizes

    @property
    def title(self) -> str:
        """Its name and mesh."""
        return f"{self.name} on {mesh_text(self.mesh)}"

    @functools.cached_property
    def flows(self) -> list[NodeFlow]:
        """The layouts through each pass's node; empty where replicas are single devices."""
        return self.replica.flows(self.flow) if self.on.axes else []

    @functools.cached_property
    def records(self) -> dict[str, RecordedFlow]:
        """The divisions of the passes, by digest; empty for unequal shares."""
        if any(isinstance(spec, UnevenSpec) for spec in self.specs.values()):
            return {}
        return {record.digest: record for record in (record_of(each, self.on.axes) for each in self.flows)}

    @functools.cached_property
    def divisions(self) -> tuple[DividedOperation, ...]:
        """The divisions of the most expensive operations."""
        return divisions_of(self.flows)

    @property
    def uses_host(self) -> bool:
        """Whether parts of the state, or pending sums, are in the host's memory."""
        return bool(self.host or self.host_sums)

    def with_host_sums(self, count: int) -> Candidate:
        """The same candidate with a number of waiting partial sums on the host."""
        if count == self.host_sums:
            return self
        return self.on.candidate(self.name, self.flow, self.shard_state, self.gap, count)

    @functools.cached_property
    def with_all_host_sums(self) -> Candidate:
        """The same candidate with as many waiting partial sums on the host as possible."""
        return self.with_host_sums(self.most_host_sums)

    def with_host(self, memory: float) -> Candidate | None:
        """The fastest variant that fits with parts of the state or pending sums on the host; None if none fits."""
        found: list[Candidate] = []
        most = self.most_host_sums
        for far in (0, *range(most, 0, -1)):  # the fewer are there, the more is on the device
            each = self.with_all_host_sums if far == most else self.with_host_sums(far)
            slots = each.slots.fewest(each.figures, self.on.machine, memory)
            if slots is not None:
                prediction = dataclasses.replace(each.prediction, figures=slots[1])
                found.append(dataclasses.replace(each, host=slots[0], prediction=prediction))
            elif far:
                break
        return min(found, key=lambda each: (each.figures.seconds, each.host_sums), default=None)

    @property
    def all_on_host(self) -> Figures:
        """The figures with everything on the host that can be offloaded."""
        each = self.with_all_host_sums
        return each.slots.figures(each.figures, self.on.machine, len(each.slots.inputs_by_name))

    @property
    def figures(self) -> Figures:
        """The predicted figures."""
        return self.prediction.figures


@dataclasses.dataclass(eq=False)
class MeshSearch:
    """A step on one mesh of a machine.

    Attributes:
      subject: the step.
      machine: the machine.
      sizes: sizes of the mesh's axes, the nodes' axis first.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      times: source of the times of fused operations; by default `Times()`.
      pace: seconds of a node on a device of each kind, if there are several kinds (`pace_of`).
      even: whether replicas have equal numbers of nodes although their kinds differ.
      method: the search method; by default the exact one.
      groups: the equations of a node that are evaluated side by side, as for `replica_program`.
      solutions: the solutions, by memory limit.
      took: seconds of the last search for a solution.
    """

    subject: Subject
    machine: Machine
    sizes: Mapping[str, int]
    platform: str
    times: Times | None
    pace: Mapping[str, float] = dataclasses.field(default_factory=dict)
    even: bool = False
    method: Method = METHODS["exact"]
    groups: Sequence[Sequence[Group]] = ()
    solutions: dict[float, Solution | None] = dataclasses.field(default_factory=dict, init=False)
    took: float = dataclasses.field(default=0.0, init=False)

    @collector_paused()
    def __post_init__(self) -> None:
        machine, options = self.machine, self.subject.step.options
        self.replicas = self.sizes[NODES]
        self.axes = dividing_axes(self.sizes)
        self.mesh = machine.mesh(self.sizes)
        self.spread, kind = replica_shares(
            machine, self.mesh, options.virtual_nodes, options.lane, self.pace, self.even
        )
        self.alike = of_one_kind(machine, kind)
        self.across = ReplicaReduction(self.spread.counts, options.lane, options.reduction == "invariant")
        self.replica: ReplicaProgram = replica_program(
            self.subject.schedule, self.spread, self.axes, self.platform, self.across.invariant, self.groups
        )

    def seconds(self, eqn: JaxprEqn) -> float:
        """Seconds of an undivided equation on one device, by the roofline; they weigh branches."""
        piece = timed_op_of([eqn], eqn.outvars)
        return max(Roofline().time(piece, kind).seconds for kind in self.alike.kinds)

    @functools.cached_property
    def stages(self) -> list[tuple[int, Branches]]:
        """Stages of independent branches within a node's computation: each with the number of its pass."""
        return [
            (k, each) for k, node in enumerate(self.replica.nodes) for each in branch_stages(node.written, self.seconds)
        ]

    def idle_seconds(self, axis: str, stage: tuple[int, Branches]) -> float:
        """Seconds of a step that a device waits on average if a stage's branches are side by side along an axis."""
        k, branches = stage
        program, size = self.replica.nodes[k].written, self.axes[axis]
        (group,) = groups_along(program, [branches], self.seconds, axis, size)
        takes = [sum(self.seconds(program.equations[n]) for n in branch) for branch in group.branches]
        return self.spread.iterations * (size * max(takes) - sum(takes)) / math.prod(self.axes.values())

    def stages_within(self, axis: str, spare: float) -> list[tuple[int, Branches]]:
        """The stages, the best balanced first, for which devices wait less than `spare` seconds of a step in all."""
        within: list[tuple[int, Branches]] = []
        for idle, stage in sorted(((self.idle_seconds(axis, each), each) for each in self.stages), key=lambda x: x[0]):
            spare -= idle
            if spare <= 0:
                break
            within.append(stage)
        return [stage for stage in self.stages if stage in within]

    def side_by_side(self, axis: str, stages: Sequence[tuple[int, Branches]]) -> MeshSearch:
        """The search with branches side by side: the devices of one index along an axis evaluate one branch.

        Args:
          axis: the axis of the mesh.
          stages: those of `stages` whose branches are placed so.
        """
        several = [[each for k, each in stages if k == number] for number in range(len(self.replica.nodes))]
        groups = [
            groups_along(node.written, each, self.seconds, axis, self.axes[axis])
            for node, each in zip(self.replica.nodes, several, strict=True)
        ]
        return dataclasses.replace(self, groups=groups)

    @property
    def undivided(self) -> Flow:
        """The flow that divides nothing."""
        return follow(self.replica.program, list(map(replicated_atom, self.replica.program.inputs)), self.axes)

    @functools.cached_property
    @collector_paused()
    def search(self) -> Search:
        """The search problem of the replica's program, without a memory limit."""
        inputs = self.replica.program.inputs
        fixed = {
            i: replicated_atom(var)
            for i, var in enumerate(inputs)
            if i in self.subject.batch or i >= len(self.subject.names) or self.subject.names[i] is None
        }
        model = ReplicaCost(self.alike, self.mesh, self.times, self.platform)
        return as_problem(
            self.replica.program,
            self.axes,
            model,
            carried=self.subject.carried,
            fixed=fixed,
            together=self.subject.indistinguishable_inputs,
            donated=self.subject.donated,
        )

    @functools.cached_property
    @collector_paused()
    def by_experts(self) -> dict[str, Array]:
        """The experts' assignments, by name."""
        return experts(self.search, sorted(self.subject.batch), self.examples)

    @property
    def examples(self) -> list[Hashable]:
        """The named dimensions that count examples in the nodes' programs, in the program's order."""
        at = {node.path: node for node in self.search.flat.nodes}
        found: dict[Hashable, None] = {}
        for each in self.replica.flows(self.undivided):
            dims = dict(zip(each.node.program.inputs[1:], each.node.examples, strict=False))
            for var, k, i in each.readers():
                reader = at.get((*each.path, each.start + k))
                atom = reader.eqn.invars[i] if reader is not None else None
                if var in dims and isinstance(atom, Var):
                    found[self.search.flat.named(atom, dims[var])] = None
        return [*found]

    @collector_paused()
    def candidate(
        self, name: str, flow: Flow, shard_state: bool = False, gap: float | None = None, far: int = 0
    ) -> Candidate:
        """The candidate of a flow through the replica's program.

        Args:
          name: its name.
          flow: layouts through the replica's program.
          shard_state: whether the state is also sharded over the replicas.
          gap: as in `Candidate`.
          far: number of pending sums on the host.
        """
        began, across = time.monotonic(), dataclasses.replace(self.across, sums_on_host=far)
        flow = shard_carries(flow, self.axes)
        subject, sharded = self.subject, self.sharded(flow) if shard_state else {}
        prediction = predict(
            subject,
            flow,
            self.alike,
            self.mesh,
            across,
            platform=self.platform,
            sharded=sharded,
            times=self.times,
            iterations=self.spread.iterations,
        )
        specs = specs_of(subject, flow, self.axes, sharded)
        apart = self.platform != "cpu"  # there what is on the host is on the device all the same
        names = subject.leaves if apart else [None] * len(subject.names)
        slots = StateOffload.from_names(subject, flow, names, self.axes, dict.fromkeys(sharded, self.replicas))
        can_be_far = apart and far_sums(flow, self.axes) > 0
        return Candidate(
            self,
            name,
            flow,
            self.spread.counts,
            specs,
            self.replica,
            prediction,
            slots,
            gap,
            shard_state=shard_state,
            host_sums=far,
            most_host_sums=across.farthest if can_be_far else 0,
            prediction_seconds=time.monotonic() - began,
        )

    def with_sharded_state(self, candidate: Candidate) -> Candidate:
        """A candidate with its state sharded over the replicas as well."""
        made = self.candidate(f"{candidate.name} + ZeRO", candidate.flow, shard_state=True, gap=candidate.gap)
        return dataclasses.replace(made, estimate=candidate.estimate)

    def sharded(self, flow: Flow) -> dict[int, PartitionSpec]:
        """The layouts of the state's leaves that can be sharded over the replicas.

        Leaves whose names occur in another argument too stay as they are: a plan could not tell them apart.
        """
        found: dict[int, PartitionSpec] = {}
        leaves, state = self.subject.leaves, self.subject.state
        others = {name for i, name in enumerate(leaves) if i not in state}
        for i in state if self.replicas > 1 else ():
            if leaves[i] in others:
                continue
            spec = spec_of(as_spec_layout(flow.inputs[i], self.axes))
            shape = tuple(self.subject.inputs[i].aval.shape)
            further = shard_over_replicas(spec, shape, self.replicas, self.axes)
            if math.prod(shape) > 1 and further is not None:
                found[i] = further
        return found

    @functools.cached_property
    def expert_splits(self) -> dict[str, Array]:
        """The experts' assignments that divide over all axes, by the candidate's name; equal ones once."""
        found: dict[str, Array] = {}
        for name, prefix in EXPERT_SPLITS.items():
            several = [self.by_experts[each] for each in self.by_experts if each.startswith(prefix)][-1:]
            if several and not any(np.array_equal(several[0], each) for each in found.values()):
                found[name] = several[0]
        if self.replicas > 1:
            found[FSDP_OVER_ALL] = self.by_experts["FSDP"]
        return found

    def expert(self, name: str) -> Candidate:
        """The candidate of one of `expert_splits`."""
        if name == FSDP_OVER_ALL:
            return self.candidate(name, self.search.flow(self.expert_splits[name]), shard_state=True)
        return self.assigned(name, self.expert_splits[name])

    def assigned(self, name: str, strategies: Array, gap: float | None = None) -> Candidate:
        """The candidate of an assignment, with its cost by the search's cost model."""
        made = self.candidate(name, self.search.flow(strategies), gap=gap)
        return dataclasses.replace(made, estimate=self.search.problem.cost(strategies))

    @collector_paused()
    def unequal(self, evens: Sequence[Candidate], memory: float, until: float) -> list[Candidate]:
        """Even candidates of this mesh with more blocks of what they divide for devices that are faster.

        Args:
          evens: candidates of this mesh.
          memory: bytes that one device may hold.
          until: when time is over, by `time.monotonic`.
        """
        (axis,) = self.axes
        shares = UnevenSearch(self.subject, self.machine, self.sizes, self.platform, self.times, self.pace)
        found: list[Candidate] = []
        if len({*shares.rates}) == 1:
            return found
        best = min((each.figures.seconds for each in evens), default=math.inf)
        seen: list[Mapping[int, int]] = []
        for even in evens:
            seeds = divided_state(even.flow, self.subject, axis)
            if not seeds or seeds in seen:
                continue
            seen.append(seeds)
            several: list[UnevenCandidate] = []
            for blocks in block_numbers([self.subject.inputs[i].aval.shape[dim] for i, dim in seeds.items()]):
                if time.monotonic() > until:
                    break
                dims = tied_inputs(self.subject, seeds, blocks)
                one = shares.best(dims, blocks, memory, HOPELESS * best) if dims else None
                several += [one] if one is not None else []
            if several:  # the fastest that fits, or what takes least
                figures = [each.prediction.figures for each in several]
                order = [(max(each.memory - memory, 0), each.seconds) for each in figures]
                chosen = several[order.index(min(order))]
                found.append(self.shared(f"{even.name} + {UNEQUAL}", chosen, shares.across.counts))
        return found

    def shared(self, name: str, shared: UnevenCandidate, counts: tuple[int, ...]) -> Candidate:
        """The candidate that a step with unequal shares is."""
        specs = {name: PartitionSpec() for name in self.subject.names if name is not None}
        specs |= specs_in_blocks(self.subject, shared.dims, shared.share)
        nothing = [None] * len(self.subject.names)  # what is in blocks is not on the host
        slots = StateOffload.from_names(self.subject, shared.flow, nothing, self.axes, {})
        return Candidate(self, name, shared.flow, counts, specs, shared.replica, shared.prediction, slots)

    @collector_paused()
    def solution(self, memory: float, budget: float, gap: float) -> Solution | None:
        """The solution within a memory limit in bytes, searched for once; None if nothing fits."""
        if memory not in self.solutions:
            began = time.monotonic()
            problem = dataclasses.replace(self.search.problem, limit=memory)
            known = [] if any(self.groups) else list(self.by_experts.values())
            try:
                found = self.method(self.search, problem, budget, gap, known)
            except MemoryLimitError:
                found = None
            self.solutions[memory], self.took = found, time.monotonic() - began
        return self.solutions[memory]

    @property
    def cost(self) -> float:
        """Seconds of a step of the first solution, by the search's cost model; infinite without one."""
        first = next(iter(self.solutions.values()), None)
        return math.inf if first is None else first.cost

    @collector_paused()
    def searched(self, solution: Solution) -> Candidate:
        """The candidate of a solution."""
        if any(self.groups):  # the search has added up what branches take: that is no bound
            made = self.candidate(BESIDE, self.search.flow(solution.strategies))
        else:
            proven = solution.gap if solution.lower_bound > 0 else None
            made = self.assigned(SEARCHED, solution.strategies, proven)
        return dataclasses.replace(made, account=self.search.problem.footprint(solution.strategies))

    def least(self, budget: float) -> float:
        """The fewest bytes of a device by the search's cost model; infinite if they are not found in time."""
        problem = self.search.problem
        problem = dataclasses.replace(problem, limit=float(problem.most.max(initial=0)))
        found = least_memory(problem, budget, lambda: None).strategies
        return math.inf if found is None else problem.footprint(found)


def pace_of(subject: Subject, machine: Machine, platform: str, times: Times | None) -> dict[str, float]:
    """Seconds of a node on one device of each kind, by the kind's name; empty for a single kind."""
    if len(machine.kinds) == 1:
        return {}
    found = {}
    for kind in machine.kinds:
        alone = Machine(kind.name, (Device(kind),), ())
        on = MeshSearch(subject, alone, {NODES: 1}, platform, times)
        found[kind.name] = on.candidate(kind.name, on.undivided).figures.compute / subject.virtual_nodes
    return found


def fitting_first(candidates: Collection[Candidate], memory: float) -> list[Candidate]:
    """The candidates that fit, the fastest first."""
    return sorted((c for c in candidates if c.figures.memory <= memory), key=lambda c: c.figures.seconds)


def kind_of(name: str) -> str:
    """A candidate's kind: its name, without the sharding of the state over replicas.

    >>> kind_of("Megatron-style + ZeRO")
    'Megatron-style'
    """
    return name.split(" + ")[0]
