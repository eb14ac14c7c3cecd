"""Makes a random program from a seed.

Knows jax's public functions and what keeps a program well conditioned: every variable carries an interval of the
values that it can take, and what grows is scaled down. Shapes are not worked out here, `jax.eval_shape` gives them; a
statement that jax refuses is simply not taken. Must not know vnode.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tests.opaque import opaque
from tests.random_programs.outer import OUTER
from tests.random_programs.program import Argument, Function, Program, Statement, size

MAX_SIZE = 600
"""No array of a program is larger."""

MAX_VALUE = 30.0
"""Values beyond are scaled down, so that rounding errors stay rounding errors."""


@dataclasses.dataclass(frozen=True)
class Variable:
    """A name in scope, with its shape and dtype, and bounds on its values."""

    name: str
    aval: jax.ShapeDtypeStruct
    low: float
    high: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def rank(self) -> int:
        return len(self.aval.shape)

    @property
    def kind(self) -> str:
        return kind_of(self.aval.dtype)

    @property
    def bound(self) -> float:
        return max(abs(self.low), abs(self.high))


def kind_of(dtype: Any) -> str:
    """One of "float", "half", "int", "bool", "key"."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if dtype == jnp.bool_:
        return "bool"
    if jnp.issubdtype(dtype, jnp.integer):
        return "int"
    return "float" if dtype == jnp.float64 else "half"


@dataclasses.dataclass
class Scope:
    """The variables that a statement may use, and the statements so far."""

    variables: list[Variable]
    outer: list[Variable] = dataclasses.field(default_factory=list)
    statements: list[Statement] = dataclasses.field(default_factory=list)
    depth: int = 0
    axis_name: str = ""
    closed: bool = False

    def visible(self) -> list[Variable]:
        return self.outer + self.variables


class Unsuitable(Exception):
    """The chosen action does not apply to what is in scope."""


Action = Callable[["Generator", Scope], None]
ACTIONS: list[tuple[Action, float]] = []


def action(weight: float) -> Callable[[Action], Action]:
    """Registers a way to add statements to a scope."""

    def add(fun: Action) -> Action:
        ACTIONS.append((fun, weight))
        return fun

    return add


class Generator:
    """Holds the choices and the names of one program while it is made."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.count = itertools.count()
        self.arguments: list[Argument] = []
        self.inputs: dict[str, Variable] = {}
        self.batch = self.rng.choice([6, 6, 8, 8, 12, 4, 9])
        self.half = self.rng.random() < 0.06  # whether a type of 16 bits may occur
        self.half_type = "float16" if seed % 2 else "bfloat16"
        self.shapes: set[tuple[int, ...]] = set()

    # Choices.

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def choice(self, options: Sequence[Any]) -> Any:
        if not options:
            raise Unsuitable
        return self.rng.choice(options)

    def pick(self, scope: Scope, kinds: str = "float half", test: Callable[[Variable], bool] | None = None) -> Variable:
        """A variable in scope, rather a late one; of one of the `kinds`, for which `test` holds."""
        found = [v for v in scope.visible() if v.kind in kinds and (test is None or test(v))]
        if not found:
            raise Unsuitable
        return found[int(len(found) * self.rng.random() ** 0.6)]

    def axes(self, v: Variable, at_least: int = 0) -> tuple[int, ...]:
        """Some axes of a variable."""
        if v.rank < at_least:
            raise Unsuitable
        return tuple(sorted(self.rng.sample(range(v.rank), self.rng.randint(at_least, v.rank))))

    def axis(self, v: Variable) -> int:
        return self.choice(range(v.rank))

    def dimension(self) -> int:
        """A size for a dimension that is not the batch; now and then it looks like the batch."""
        return self.batch if self.chance(0.04) else self.choice([2, 3, 4, 5])

    # Names, arguments and statements.

    def name(self, prefix: str) -> str:
        return f"{prefix}{next(self.count)}"

    def argument(
        self, shape: tuple[int, ...], dtype: str = "float64", axis: int | None = None, low: float = -1, high: float = 1
    ) -> Variable:
        """A new argument of the program."""
        name = self.name("p" if axis is None else "x")
        self.arguments.append(Argument(name, shape, dtype, axis, low, high))
        if dtype == "key":
            aval = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0))
        else:
            aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        self.inputs[name] = Variable(name, aval, low, high)
        return self.inputs[name]

    def operand(self, scope: Scope, shape: tuple[int, ...], low: float = -1, high: float = 1) -> str:
        """An expression for a float operand of exactly `shape`: a variable there is, a new argument, or a constant."""
        fitting = [v for v in scope.visible() if v.shape == shape and v.kind == "float" and v.bound <= 4]
        if fitting and self.chance(0.5):
            return self.choice(fitting).name
        if scope.closed or (not shape and self.chance(0.5)):
            return f"jnp.full({shape}, {self.rng.uniform(low, high):.2f})"
        return self.new_argument(scope, shape, low, high).name

    def new_argument(self, scope: Scope, shape: tuple[int, ...], low: float = -1, high: float = 1) -> Variable:
        """Whole, or batched if one of its dimensions can be the batch."""
        axes = [d for d, n in enumerate(shape) if n == self.batch]
        axis = self.choice(axes) if axes and self.chance(0.8) else None
        if axis is not None and self.chance(0.1):
            axis -= len(shape)
        v = self.argument(shape, axis=axis, low=low, high=high)
        if scope.depth == 0:
            scope.variables.append(v)
        return v

    def add(
        self,
        scope: Scope,
        expression: str,
        low: float = 0,
        high: float = 1,
        functions: tuple[Function, ...] = (),
        targets: int = 1,
        avals: Sequence[jax.ShapeDtypeStruct] | None = None,
    ) -> list[Variable]:
        """Adds a statement, unless jax refuses it or an array gets too large."""
        bound = max(abs(low), abs(high))
        scale = 1.0
        if bound > MAX_VALUE and targets == 1:
            scale = 2.0 ** math.floor(math.log2(MAX_VALUE / 8 / bound)) if math.isfinite(bound) else 0.0
        names = tuple(self.name("v") for _ in range(targets))
        statement = Statement(names, expression, functions)
        if avals is None:
            avals = self.probe(scope, statement)
        if any(size(a.shape) > MAX_SIZE or 0 in a.shape or len(a.shape) > 5 for a in avals):
            raise Unsuitable
        if any(jnp.issubdtype(a.dtype, jnp.complexfloating) or a.dtype == jax.dtypes.float0 for a in avals):
            raise Unsuitable
        if not self.half and any(kind_of(a.dtype) == "half" for a in avals):
            raise Unsuitable
        if scale != 1.0 and avals[0].dtype != jnp.bool_:
            if not scale:
                raise Unsuitable
            if jnp.issubdtype(avals[0].dtype, jnp.integer):
                expression, low, high = f"({expression}) % 7", 0, 6
            else:
                expression, low, high = f"({expression}) * {scale}", low * scale, high * scale
        described = tuple((a.shape, str(a.dtype)) for a in avals)
        scope.statements.append(Statement(names, expression, functions, described))
        added = [Variable(n, a, low, high) for n, a in zip(names, avals, strict=True)]
        scope.variables += added
        return added

    def probe(self, scope: Scope, statement: Statement) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of a statement's targets."""
        uses = statement.uses()
        given = list({v.name: v for v in [*scope.visible(), *self.inputs.values()] if v.name in uses}.values())
        lines = [f"def probe({', '.join(v.name for v in given)}):"]
        lines += statement.lines("    ")
        lines.append(f"    return ({', '.join(statement.targets)},)")
        namespace: dict[str, Any] = {"jax": jax, "jnp": jnp, "opaque": opaque}
        exec("\n".join(lines), namespace)
        try:
            results = jax.eval_shape(namespace["probe"], *(v.aval for v in given))
        except (TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError) as error:
            raise Unsuitable from error
        return [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]

    def step(self, scope: Scope, tries: int = 30) -> None:
        """Adds one random action's statements."""
        actions, weights = zip(*ACTIONS, strict=True)
        for _ in range(tries):
            (act,) = self.rng.choices(actions, weights)
            before = len(scope.statements), len(scope.variables), len(self.arguments)
            try:
                act(self, scope)
                return
            except Unsuitable:
                del scope.statements[before[0] :], scope.variables[before[1] :], self.arguments[before[2] :]

    def fit(self, v: Variable, shape: tuple[int, ...]) -> str:
        """An expression of float64 `shape` made of `v`."""
        name = v.name if v.kind == "float" else f"{v.name}.astype(jnp.float64)"
        if v.shape == shape:
            return name
        if size(v.shape) == size(shape) and self.chance(0.8):
            return f"{name}.reshape({shape})"
        trailing = v.rank <= len(shape) and all(
            n in (1, m) for n, m in zip(reversed(v.shape), reversed(shape), strict=False)
        )
        if trailing:
            return f"jnp.broadcast_to({name}, {shape})"
        return f"jnp.broadcast_to({name}.mean(), {shape})"

    def body(
        self, scope: Scope, parameters: list[Variable], statements: int, *, closed: bool = False, axis_name: str = ""
    ) -> Scope:
        """A scope for a local function with random statements in it; it closes over the outer one unless `closed`."""
        if scope.depth >= 2:
            raise Unsuitable
        inner = Scope(
            variables=list(parameters),
            outer=[] if closed else [v for v in scope.visible() if v.kind != "key" and self.chance(0.5)],
            depth=scope.depth + 1,
            axis_name=axis_name,
            closed=closed or scope.closed,
        )
        for _ in range(statements):
            self.step(inner, tries=12)
        return inner

    def result(self, inner: Scope, kinds: str = "float") -> Variable:
        """A late variable of a body, if possible one that was computed there."""
        found = [v for v in inner.variables if v.kind in kinds]
        return found[-1 - int(len(found) * self.rng.random() ** 3)] if found else self.pick(inner, kinds)

    def inner_variable(self, prefix: str, aval: jax.ShapeDtypeStruct, like: Variable) -> Variable:
        """A parameter of a local function, with the bounds of the value that it stands for."""
        return Variable(self.name(prefix), aval, like.low, like.high)


def generate(seed: int) -> Program:
    """The program of a seed.

    Args:
      seed: any non-negative integer.

    Returns:
      The same program for the same seed, on every machine and version of jax that accepts the same statements.
    """
    g = Generator(seed)
    scope = Scope(variables=[])
    for _ in range(g.rng.randint(1, 3)):
        scope.variables.append(batched_argument(g))
    for _ in range(g.rng.randint(0, 2)):
        shape = tuple(g.dimension() for _ in range(g.rng.randint(0, 2)))
        scope.variables.append(g.argument(shape))
    if g.chance(0.35):
        scope.variables.append(g.argument((), "key"))
    if g.chance(0.05):
        scope.variables.append(g.argument((g.batch,), "key", axis=0))
    for _ in range(g.rng.randint(4, 12)):
        g.step(scope)
    outputs = [v for v in scope.variables if v.kind != "key"]
    late = outputs[len(outputs) // 3 :]
    read = set().union(*(s.uses() - set(s.targets) for s in scope.statements))
    unread = [v.name for v in outputs if v.name not in read and v.name not in g.inputs]
    chosen = dict.fromkeys([outputs[-1].name, *g.rng.sample(unread, min(len(unread), 3))])
    for v in g.rng.sample(late, min(len(late), g.rng.randint(0, 4))):
        chosen[v.name] = None
    if g.chance(0.1):
        chosen[g.choice(outputs).name] = None
    nodes = g.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, g.batch, g.batch + 1])
    devices = g.choice([1, 1, 2, 2, 3])
    counts = None
    if g.chance(0.15):
        cuts = sorted(g.rng.choices(range(nodes + 1), k=devices - 1))
        counts = tuple(b - a for a, b in itertools.pairwise([0, *cuts, nodes]))
    program = Program(
        seed=seed,
        arguments=tuple(g.arguments),
        statements=tuple(scope.statements),
        outputs=tuple(chosen),
        virtual_nodes=nodes,
        devices=devices,
        reduction=g.choice(["invariant", "fast"]),
        bundle=g.chance(0.25),
        counts=counts,
    )
    outer = g.choice(["same"] * 16 + ["jit", "vmap", "scan", "grad"])
    return dataclasses.replace(program, outer=outer) if accepts(program, outer) else program


def accepts(program: Program, outer: str) -> bool:
    """Whether jax can transform the program in this way at all (a while loop has no gradient)."""
    try:
        jax.eval_shape(OUTER[outer](program.step()), *program.values())
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def batched_argument(g: Generator) -> Variable:
    """An argument that carries examples: data of some kind, with the batch anywhere in its shape."""
    shape = [g.dimension() for _ in range(g.choice([0, 1, 1, 2]))]
    axis = g.choice([0, 0, *range(len(shape) + 1)])
    shape.insert(axis, g.batch)
    if g.chance(0.1):
        axis -= len(shape)
    kind = g.choice(["float"] * 6 + ["positive", "int", "bool"] + ["half"] * (2 * g.half))
    match kind:
        case "float":
            return g.argument(tuple(shape), axis=axis, low=-1, high=1)
        case "positive":
            return g.argument(tuple(shape), axis=axis, low=0.5, high=2)
        case "half":
            return g.argument(tuple(shape), g.half_type, axis=axis)
        case "int":
            return g.argument(tuple(shape), g.choice(["int32", "int64", "int8", "uint8"]), axis=axis, low=0, high=4)
    return g.argument(tuple(shape), "bool", axis=axis, low=0, high=1)


# Elementwise.


UNARY: list[tuple[str, Callable[[float, float], tuple[float, float]], Callable[[float, float], bool]]] = [
    ("jnp.tanh({})", lambda lo, hi: (-1, 1), lambda lo, hi: True),
    ("jnp.tanh({})", lambda lo, hi: (-1, 1), lambda lo, hi: True),
    ("jnp.sin({})", lambda lo, hi: (-1, 1), lambda lo, hi: True),
    ("jax.nn.sigmoid({})", lambda lo, hi: (1 / (1 + math.exp(-lo)), 1), lambda lo, hi: lo > -30),
    ("jax.nn.relu({})", lambda lo, hi: (0, max(hi, 0)), lambda lo, hi: True),
    ("jax.nn.gelu({})", lambda lo, hi: (-0.2, max(hi, 0)), lambda lo, hi: True),
    ("jax.nn.softplus({})", lambda lo, hi: (math.log1p(math.exp(lo)), max(hi, 0) + 1), lambda lo, hi: lo > -30),
    ("jnp.exp({})", lambda lo, hi: (math.exp(lo), math.exp(hi)), lambda lo, hi: lo >= -6 and hi <= 3),
    ("jnp.log({})", lambda lo, hi: (math.log(lo), math.log(hi)), lambda lo, hi: lo >= 0.05),
    ("jnp.log1p({})", lambda lo, hi: (math.log1p(lo), math.log1p(hi)), lambda lo, hi: lo >= 0),
    ("jnp.log(jnp.abs({}) + 0.1)", lambda lo, hi: (-2.4, math.log(1 + abs(lo) + abs(hi))), lambda lo, hi: True),
    ("jnp.sqrt({})", lambda lo, hi: (math.sqrt(lo), math.sqrt(hi)), lambda lo, hi: lo >= 0.01),
    ("jax.lax.rsqrt({})", lambda lo, hi: (hi**-0.5, lo**-0.5), lambda lo, hi: lo >= 0.05),
    ("1 / {}", lambda lo, hi: (1 / hi, 1 / lo), lambda lo, hi: lo >= 0.05),
    ("1 / (1 + {} ** 2)", lambda lo, hi: (0, 1), lambda lo, hi: True),
    ("-{}", lambda lo, hi: (-hi, -lo), lambda lo, hi: True),
    ("jnp.abs({})", lambda lo, hi: (0, max(-lo, hi)), lambda lo, hi: True),
    ("{} ** 2", lambda lo, hi: (0, max(lo * lo, hi * hi)), lambda lo, hi: True),
    ("{} ** 3", lambda lo, hi: (lo**3, hi**3), lambda lo, hi: True),
    ("jnp.sign({})", lambda lo, hi: (-1, 1), lambda lo, hi: True),
    ("jnp.floor({} * 3.7)", lambda lo, hi: (lo * 3.7 - 1, hi * 3.7), lambda lo, hi: True),
    ("jnp.clip({}, -0.5, 0.7)", lambda lo, hi: (-0.5, 0.7), lambda lo, hi: True),
    ("jax.lax.stop_gradient({})", lambda lo, hi: (lo, hi), lambda lo, hi: True),
    ("{} * 0.5", lambda lo, hi: (lo / 2, hi / 2), lambda lo, hi: True),
    ("{} + 1.5", lambda lo, hi: (lo + 1.5, hi + 1.5), lambda lo, hi: True),
    ("2.0 - {}", lambda lo, hi: (2 - hi, 2 - lo), lambda lo, hi: True),
    ("jnp.nan_to_num({})", lambda lo, hi: (lo, hi), lambda lo, hi: True),
    ("jax.lax.erf({})", lambda lo, hi: (-1, 1), lambda lo, hi: True),
]


@action(7)
def unary(g: Generator, scope: Scope) -> None:
    v = g.pick(scope)
    template, bounds, _ = g.choice([entry for entry in UNARY if entry[2](v.low, v.high)])
    g.add(scope, template.format(v.name), *bounds(v.low, v.high))


@action(1)
def guarded(g: Generator, scope: Scope) -> None:
    """Where the guard is false the guarded value may be infinite or not a number."""
    v = g.pick(scope, test=lambda v: v.low < 0 < v.high)
    n = v.name
    template = g.choice(
        [
            "jnp.where({0} > 0.1, jnp.log({0}), 0.0)",
            "jnp.where({0} > 0.1, jnp.log(jnp.where({0} > 0.1, {0}, 1.0)), 0.0)",
            "jnp.where({0} > 0.1, 1 / jnp.where({0} > 0.1, {0}, 1.0), {0})",
            "jnp.where({0} > 0.1, jnp.sqrt({0}), -{0})",
            "jnp.log(jnp.maximum({0}, 0.05))",
        ]
    )
    g.add(scope, template.format(n), -10, 10)


@action(0.3)
def not_a_number(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, test=lambda v: v.low < 0 < v.high)
    template = g.choice(["jnp.sqrt({0} + 0.5)", "jnp.log({0} + 0.6)", "jnp.log(jax.nn.relu({0}))"])
    g.add(scope, template.format(v.name), -3, 3)


def aligned(g: Generator, scope: Scope, v: Variable, kinds: str = "float half") -> tuple[str, Variable]:
    """An expression that broadcasts against `v`, and the variable that it is made of."""
    others = [w for w in scope.visible() if w.kind in kinds]
    for _ in range(6):
        w = g.choice(others)
        views = [w.name]
        if w.rank:
            views += [f"{w.name}[..., None]", f"{w.name}[None]"]
        if w.rank > 1:
            views.append(f"{w.name}.T")
            views.append(f"jnp.moveaxis({w.name}, {g.axis(w)}, {g.axis(w)})")
        view = views[int(len(views) * g.rng.random() ** 2)]
        shape = jax.eval_shape(lambda x, n=w.name, e=view: eval(e, {"jnp": jnp, n: x}), w.aval).shape
        try:
            result = jnp.broadcast_shapes(v.shape, shape)
        except ValueError:
            continue
        if size(result) <= MAX_SIZE // 2:
            return view, w
    raise Unsuitable


@action(8)
def binary(g: Generator, scope: Scope) -> None:
    v = g.pick(scope)
    if g.chance(0.25) and v.rank:
        keep = g.rng.randint(0, v.rank)
        shape = v.shape[v.rank - keep :]
        name = g.operand(scope, shape)
        w = Variable(name, jax.ShapeDtypeStruct(shape, jnp.float64), -4, 4)
        if name.startswith("p") or name.startswith("x"):
            w = Variable(name, w.aval, -1, 1)
        view = name
    else:
        view, w = aligned(g, scope, v)
    a, b, n = v.bound, w.bound, v.name
    options = [
        (f"{n} + {view}", v.low + w.low, v.high + w.high),
        (f"{n} - {view}", v.low - w.high, v.high - w.low),
        (f"{n} * {view}", -a * b, a * b),
        (f"{n} * {view}", -a * b, a * b),
        (f"jnp.maximum({n}, {view})", max(v.low, w.low), max(v.high, w.high)),
        (f"jnp.minimum({n}, {view})", min(v.low, w.low), min(v.high, w.high)),
        (f"{n} / (1 + {view} ** 2)", -a, a),
        (f"jnp.where({n} > {view}, {n}, {view} * 0.5)", -max(a, b), max(a, b)),
        (f"jnp.logaddexp({n}, {view})", -max(a, b), max(a, b) + 1),
        (f"jnp.arctan2({n}, {view} + 0.05)", -3.15, 3.15),
    ]
    if w.low >= 0.05:
        options += [(f"{n} / {view}", -a / w.low, a / w.low)] * 2
    g.add(scope, *g.choice(options))


@action(2)
def comparison(g: Generator, scope: Scope) -> None:
    v = g.pick(scope)
    if g.chance(0.5):
        g.add(scope, f"{v.name} > {g.rng.uniform(v.low, v.high):.3f}")
    else:
        view, _ = aligned(g, scope, v)
        g.add(scope, f"{v.name} {g.choice(['<', '>', '>=', '<='])} {view}")


@action(2)
def selection(g: Generator, scope: Scope) -> None:
    m = g.pick(scope, "bool")
    view, w = aligned(g, scope, m)
    if g.chance(0.5):
        other = g.choice(["0.0", "1.0", "-0.5"])
        g.add(scope, f"jnp.where({m.name}, {view}, {other})", min(w.low, -0.5), max(w.high, 1))
    else:
        v = g.pick(scope, test=lambda v: v.shape == w.shape)
        g.add(scope, f"jnp.where({m.name}, {view}, {v.name})", min(v.low, w.low), max(v.high, w.high))


@action(1)
def logical(g: Generator, scope: Scope) -> None:
    m = g.pick(scope, "bool")
    if g.chance(0.3):
        g.add(scope, f"~{m.name}")
    else:
        view, _ = aligned(g, scope, m, "bool")
        g.add(scope, f"{m.name} {g.choice('&|^')} {view}")


@action(1.5)
def integers(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "int")
    n, c = v.name, g.choice([2, 3, 5])
    options = [
        (f"{n} % {c}", 0, c - 1),
        (f"{n} // {c}", v.low / c - 1, v.high / c),
        (f"{n}.astype(jnp.int64) * {c} + 1", v.low * c + 1, v.high * c + 1),
        (f"{n} ^ {c}", -64, 64),
        (f"{n} == {c}", 0, 1),
        (f"({n} > {c - 1}).astype(jnp.int32)", 0, 1),
        (f"jax.lax.population_count({n})", 0, 64),
    ]
    if g.chance(0.4):
        view, w = aligned(g, scope, v, "int bool")
        product = v.bound * w.bound
        options = [(f"{n} + {view}", v.low + w.low, v.high + w.high), (f"{n} * {view}", -product, product)]
        if w.kind == "int":
            options += [(f"{n} < {view}", 0, 1), (f"{n} & {view}", -128, 127)]
    g.add(scope, *g.choice(options))


@action(1.5)
def conversion(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int bool")
    match v.kind:
        case "float":
            options = [(f"({v.name} * 2).astype(jnp.int32)", 2 * v.low, 2 * v.high), (f"{v.name}.astype(bool)", 0, 1)]
            options += [(f"{v.name}.astype(jnp.{g.half_type})", v.low, v.high)] * (6 * g.half)
        case "int":
            options = [(f"{v.name}.astype(jnp.float64)", v.low, v.high), (f"{v.name} > 1", 0, 1)]
        case _:
            options = [(f"{v.name}.astype(jnp.float64)", v.low, v.high)]
    g.add(scope, *g.choice(options))


@action(1)
def positions(g: Generator, scope: Scope) -> None:
    """Constants that depend on where they stand."""
    v = g.pick(scope, test=lambda v: v.rank >= 1)
    d = g.axis(v)
    n = v.shape[d]
    index = [None] * v.rank
    index[d] = slice(None)
    view = "" if v.rank == 1 else "[" + ", ".join(":" if i else "None" for i in index) + "]"
    options = [
        (f"{v.name} * (jnp.arange({n}) / {n}){view}", -v.bound, v.bound),
        (f"{v.name} + jnp.ones({n}){view}", v.low + 1, v.high + 1),
        (f"jnp.where(jnp.arange({n}){view} < {n // 2}, {v.name}, 0.5)", min(v.low, 0.5), max(v.high, 0.5)),
        (f"jnp.where(jnp.arange({n}){view} % 2 == 0, {v.name}, -{v.name})", -v.bound, v.bound),
        (f"{v.name} * jnp.linspace(0.0, 1.0, {n}){view}", -v.bound, v.bound),
    ]
    if v.rank >= 2:
        options += [(f"{part}({v.name})", min(v.low, 0), max(v.high, 0)) for part in ("jnp.tril", "jnp.triu")]
        if v.shape[-1] == v.shape[-2]:
            options += [
                (f"{v.name} - jnp.eye({v.shape[-1]})", v.low - 1, v.high),
                (f"jnp.diagonal({v.name}, axis1=-2, axis2=-1)", v.low, v.high),
            ] * 2
    g.add(scope, *g.choice(options))


@action(0.7)
def constant(g: Generator, scope: Scope) -> None:
    shape = g.choice([v.shape for v in scope.visible()])
    first = shape[0] if shape else 2
    options = [
        (f"jnp.arange({first})", 0, first),
        (f"jnp.zeros({shape})", 0, 0),
        (f"jnp.ones({shape}) / {first}", 0, 1),
    ]
    g.add(scope, *g.choice(options))


# Reductions.


@action(5)
def reduction(g: Generator, scope: Scope) -> None:
    v = g.pick(scope)
    axes = g.axes(v)
    n = size(tuple(v.shape[d] for d in axes))
    rest = f"axis={axes}, keepdims={g.chance(0.25)}"
    lo, hi = v.low, v.high
    options = [
        (f"{v.name}.sum({rest})", min(lo * n, 0), max(hi * n, 0)),
        (f"{v.name}.sum({rest})", min(lo * n, 0), max(hi * n, 0)),
        (f"{v.name}.mean({rest})", lo, hi),
        (f"{v.name}.mean({rest})", lo, hi),
        (f"{v.name}.max({rest})", lo, hi),
        (f"{v.name}.min({rest})", lo, hi),
        (f"jax.nn.logsumexp({v.name}, {rest})", lo, hi + math.log(n)),
        (f"{v.name}.var({rest})", 0, v.bound**2),
        (f"jnp.sqrt(({v.name} ** 2).sum({rest}) + 0.01)", 0.1, v.bound * n + 1),
        (f"({v.name} > 0.1).any({rest})", 0, 1),
        (f"({v.name} > -0.1).all({rest})", 0, 1),
        (f"({v.name} > 0.1).sum({rest})", 0, n),
    ]
    if n * math.log(max(v.bound, 1)) < 4:
        options.append((f"{v.name}.prod({rest})", -max(1, v.bound**n), max(1, v.bound**n)))
    g.add(scope, *g.choice(options))


@action(1)
def other_reduction(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "int bool")
    rest = f"axis={g.axes(v)}"
    if v.kind == "bool":
        g.add(scope, f"{v.name}.{g.choice(['any', 'all', 'sum'])}({rest})", 0, size(v.shape))
    else:
        how = g.choice(["sum", "max", "min", "sum"])
        n = size(v.shape) if how == "sum" else 1
        g.add(scope, f"{v.name}.{how}({rest})", min(0, v.low * n), max(0, v.high * n))


@action(1.2)
def positions_of_extremes(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float int", lambda v: v.rank >= 1)
    axis = g.choice([None, *range(v.rank)])
    n = size(v.shape) if axis is None else v.shape[axis]
    g.add(scope, f"jnp.{g.choice(['argmax', 'argmin'])}({v.name}, axis={axis})", 0, n - 1)


@action(2)
def normalisation(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, test=lambda v: v.rank >= 1)
    axes = g.axes(v, 1)
    rest = f"axis={axes}, keepdims=True"
    n = v.name
    options = [
        (f"({n} - {n}.mean({rest})) / jnp.sqrt({n}.var({rest}) + 0.1)", -10, 10),
        (f"{n} - {n}.mean({rest})", -2 * v.bound, 2 * v.bound),
        (f"{n} - {n}.max({rest})", -2 * v.bound, 0),
        (f"{n} / jnp.sqrt(({n} ** 2).sum({rest}) + 0.1)", -4, 4),
        (f"jax.nn.softmax({n}, axis={axes})", 0, 1),
        (f"jax.nn.log_softmax({n}, axis={axes})", -2 * v.bound - 7, 0),
        (f"{n} * jnp.minimum(1.0, 1 / jnp.sqrt(({n} ** 2).sum() + 0.1))", -v.bound, v.bound),
    ]
    g.add(scope, *g.choice(options))


@action(1.5)
def masked_mean(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, test=lambda v: v.rank >= 1)
    masks = [m for m in scope.visible() if m.kind == "bool" and m.shape == v.shape]
    mask = g.choice(masks).name if masks and g.chance(0.6) else f"({v.name} > {g.rng.uniform(v.low, v.high):.2f})"
    n = v.name
    options = [
        f"({n} * {mask}).sum() / ({mask}.sum() + 0.5)",
        f"jnp.where({mask}, {n}, 0).sum() / jnp.maximum({mask}.sum(), 1)",
        f"jnp.mean({n}, where={mask} | (jnp.arange({v.shape[-1]}) == 0))",
        f"({n} * {mask}).sum(0) / ({mask}.sum(0) + 0.5)",
    ]
    g.add(scope, g.choice(options), -v.bound, v.bound)


# Shapes.


@action(4)
def reshape(g: Generator, scope: Scope) -> None:
    """Merges and splits dimensions."""
    v = g.pick(scope, "float half int bool", lambda v: v.rank >= 1)
    shape = list(v.shape)
    for _ in range(g.rng.randint(1, 3)):
        if len(shape) > 1 and g.chance(0.55):
            d = g.choice(range(len(shape) - 1))
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        else:
            d = g.choice(range(len(shape)))
            divisors = [k for k in range(2, shape[d]) if shape[d] % k == 0]
            if divisors:
                k = g.choice(divisors)
                shape[d : d + 1] = [k, shape[d] // k]
    if g.chance(0.1):
        shape.insert(g.choice(range(len(shape) + 1)), 1)
    if tuple(shape) == v.shape:
        raise Unsuitable
    text = ", ".join(str(n) for n in shape)
    if shape and g.chance(0.3):
        d = g.choice(range(len(shape)))
        text = ", ".join("-1" if i == d else str(n) for i, n in enumerate(shape))
    g.add(scope, f"{v.name}.reshape({text})", v.low, v.high)


@action(3)
def transpose(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int bool", lambda v: v.rank >= 2)
    permutation = list(range(v.rank))
    g.rng.shuffle(permutation)
    g.add(scope, f"{v.name}.transpose({', '.join(map(str, permutation))})", v.low, v.high)


@action(1.5)
def concatenate(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int", lambda v: v.rank >= 1)
    w = g.pick(scope, v.kind, lambda w: w.rank == v.rank)
    d = g.axis(v)
    options = [
        f"jnp.concatenate([{v.name}, {w.name}], axis={d})",
        f"jnp.concatenate([{v.name}, {v.name} * 2], axis={d})",
        f"jnp.concatenate([{v.name}, {v.name}[::-1], {v.name}], axis={d})",
        f"jnp.concatenate([jnp.ones_like({v.name}), {v.name}], axis={d})",
        f"jnp.stack([{v.name}, -{v.name}], axis={d})",
        f"jnp.stack([{v.name}, {w.name}], axis={d})",
    ]
    bound = 2 * max(v.bound, w.bound, 1)
    g.add(scope, g.choice(options), -bound, bound)


@action(3)
def slicing(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int bool", lambda v: v.rank >= 1)
    d = g.axis(v)
    n = v.shape[d]
    start = g.rng.randint(0, n - 1)
    stop = g.rng.randint(start + 1, n)
    before = ":, " * d
    part = g.choice([f"{start}:{stop}", "::2", "::-1", "1:", ":-1", f"{start}", "None", f"{-1 - start}"])
    g.add(scope, f"{v.name}[{before}{part}]", v.low, v.high)


@action(2.5)
def moving(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int", lambda v: v.rank >= 1)
    d = g.axis(v)
    n, s = v.name, v.shape[d]
    widths = [(0, 0)] * v.rank
    widths[d] = (g.rng.randint(0, 2), g.rng.randint(0, 2))
    after = v.rank - 1 - d
    options = [
        f"jnp.flip({n}, {d})",
        f"jnp.roll({n}, {g.choice([1, -1, 2])}, axis={d})",
        f"jnp.repeat({n}, {g.choice([2, 3])}, axis={d})",
        f"jnp.tile({n}, {(g.choice([2, 3]),) + (1,) * after})",
        f"jnp.pad({n}, {widths})",
        f"jnp.pad({n}, {widths}, constant_values=1)",
        f"jnp.pad({n}, {widths}, mode='edge')",
        f"jnp.diff({n}, axis={d})",
        f"jnp.broadcast_to({n}[..., None], {(*v.shape, g.dimension())})",
        f"jnp.broadcast_to({n}, {(g.dimension(), *v.shape)})",
        f"jnp.split({n}, {2 if s % 2 == 0 else s}, axis={d})[{g.choice([0, 1])}]",
        f"jnp.squeeze({n}[{':, ' * d}:1], {d})",
        f"jnp.roll({n}, 1)",
        f"jnp.rot90({n})" if v.rank > 1 else f"jnp.outer({n}, {n})",
    ]
    bound = max(2 * v.bound, v.bound**2, 1)
    g.add(scope, g.choice(options), -bound, bound)


# Contractions.


@action(4)
def matmul(g: Generator, scope: Scope) -> None:
    """A layer: parameters on one of the dimensions."""
    v = g.pick(scope, test=lambda v: v.rank >= 1)
    k = v.shape[-1]
    m = g.dimension()
    w = g.operand(scope, (k, m), -0.7, 0.7)
    options = [f"{v.name} @ {w}", f"jnp.tanh({v.name} @ {w})", f"jax.nn.relu({v.name} @ {w} + 0.1)"]
    if v.rank == 2 and v.shape[0] <= 12:
        options += [f"{v.name} @ {v.name}.T", f"{v.name}.T @ {v.name}"]
        k = max(v.shape)
    bound = k * v.bound * max(4, v.bound)
    expression = g.choice(options)
    if "tanh" in expression:
        bound = 1
    g.add(scope, expression, -bound, bound)


@action(3)
def einsum(g: Generator, scope: Scope) -> None:
    """Any sharing of indices between two operands that their sizes allow."""
    v, w = g.pick(scope, "float", lambda v: v.rank <= 3), g.pick(scope, "float", lambda v: v.rank <= 3)
    letters = iter(string.ascii_lowercase)
    sizes: dict[str, int] = {}
    subscripts = []
    for shape in (v.shape, w.shape):
        used: list[str] = []
        for n in shape:
            shared = [c for c, m in sizes.items() if m == n and c not in used]
            c = g.choice(shared) if shared and g.chance(0.8) else next(letters)
            sizes[c] = n
            used.append(c)
        subscripts.append("".join(used))
    kept = [c for c in sizes if g.chance(0.55)]
    g.rng.shuffle(kept)
    n = size(tuple(m for c, m in sizes.items() if c not in kept))
    if size(tuple(sizes.values())) > 20 * MAX_SIZE:
        raise Unsuitable
    bound = n * v.bound * w.bound
    g.add(scope, f"jnp.einsum('{','.join(subscripts)}->{''.join(kept)}', {v.name}, {w.name})", -bound, bound)


@action(0.8)
def convolution(g: Generator, scope: Scope) -> None:
    """One spatial dimension, with the roles of the dimensions in any order."""
    v = g.pick(scope, "float", lambda v: v.rank == 3)
    dims = ["N", "C", "W"]
    g.rng.shuffle(dims)
    sizes = dict(zip(dims, v.shape, strict=True))
    features = g.choice([2, 3, 4])
    groups = sizes["C"] if g.chance(0.2) else 1
    kernel = {"O": features * groups if groups > 1 else features, "I": sizes["C"] // groups, "W": g.choice([1, 2, 3])}
    order = ["O", "I", "W"]
    g.rng.shuffle(order)
    result = ["N", "C", "W"]
    g.rng.shuffle(result)
    w = g.operand(scope, tuple(kernel[c] for c in order), -0.7, 0.7)
    bound = v.bound * 4 * kernel["I"] * kernel["W"]
    dimension_numbers = ("".join(dims), "".join(order), "".join(result))
    # XLA's CPU backend runs a grouped convolution as a full one, with zeros that spread NaN from group to group.
    x, w = (f"jnp.nan_to_num({operand})" if groups > 1 else operand for operand in (v.name, w))
    g.add(
        scope,
        f"jax.lax.conv_general_dilated({x}, {w}, ({g.choice([1, 1, 2])},), '{g.choice(['SAME', 'VALID'])}', "
        f"dimension_numbers={dimension_numbers}, feature_group_count={groups})",
        -bound,
        bound,
    )


@action(0.8)
def window(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float", lambda v: 1 <= v.rank <= 3)
    d = g.axis(v)
    shape, strides = [1] * v.rank, [1] * v.rank
    shape[d], strides[d] = g.choice([2, 3]), g.choice([1, 2])
    how = g.choice(["jax.lax.add", "jax.lax.max", "jax.lax.min"])
    start = {"jax.lax.add": "0.0", "jax.lax.max": "-jnp.inf", "jax.lax.min": "jnp.inf"}[how]
    padding = g.choice(["SAME", "VALID"])
    expression = f"jax.lax.reduce_window({v.name}, {start}, {how}, {tuple(shape)}, {tuple(strides)}, '{padding}')"
    g.add(scope, expression, -3 * v.bound, 3 * v.bound)


# Indexing.


def indices(g: Generator, scope: Scope, n: int, shape: tuple[int, ...] | None = None) -> tuple[str, tuple[int, ...]]:
    """An expression for integers below `n`, and its shape."""
    found = [v for v in scope.visible() if v.kind == "int" and (shape is None or v.shape == shape) and v.rank <= 2]
    if found and g.chance(0.75):
        v = g.choice(found)
        return (v.name if v.low >= 0 and v.high < n else f"({v.name} % {n})"), v.shape
    if scope.closed:
        raise Unsuitable
    if shape is None:
        shape = g.choice([(g.batch,), (g.batch, 2), (3,), ()])
    axes = [d for d, m in enumerate(shape) if m == g.batch]
    v = g.argument(shape, "int32", axes[0] if axes and g.chance(0.9) else None, 0, n - 1)
    if scope.depth == 0:
        scope.variables.append(v)
    return v.name, shape


@action(2)
def take(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int", lambda v: v.rank >= 1)
    d = g.axis(v)
    index, _ = indices(g, scope, v.shape[d])
    options = [f"jnp.take({v.name}, {index}, axis={d})", f"jnp.take({v.name}, {index}, axis={d}, mode='clip')"]
    options += [f"{v.name}[{':, ' * d}{index}]"]
    g.add(scope, g.choice(options), v.low, v.high)


@action(1.5)
def take_along(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float half int", lambda v: v.rank >= 1)
    d = g.axis(v)
    if g.chance(0.5) and v.rank >= 2:
        others = [e for e in range(v.rank) if e != d][:1]
        n = v.shape[others[0]]
        index, _ = indices(g, scope, v.shape[d], (n,))
        view = v.name if v.rank == 2 else f"jnp.moveaxis({v.name}, {(others[0], d)}, (0, 1))"
        if v.rank == 2 and others[0] > d:
            view = f"{v.name}.T"
        g.add(scope, f"{view}[jnp.arange({n}), {index}]", v.low, v.high)
    else:
        shape = (*v.shape[:d], g.choice([1, 2, v.shape[d]]), *v.shape[d + 1 :])
        index, _ = indices(g, scope, v.shape[d], shape)
        g.add(scope, f"jnp.take_along_axis({v.name}, {index}, axis={d})", v.low, v.high)


@action(1)
def one_hot(g: Generator, scope: Scope) -> None:
    index, _ = indices(g, scope, 5)
    kind = g.choice(["", ", dtype=jnp.int32", ""])
    g.add(scope, f"jax.nn.one_hot({index}, {g.choice([3, 5, g.batch])}{kind})", 0, 1)


@action(2)
def scatter(g: Generator, scope: Scope) -> None:
    u = g.pick(scope, "float int", lambda v: v.rank >= 1)
    k = g.choice([3, 4, g.batch])
    lead = g.rng.randint(1, min(2, u.rank))
    index, _ = indices(g, scope, k, u.shape[:lead])
    rest = u.shape[lead:]
    n = size(u.shape[:lead])
    dtype = "" if u.kind == "float" else f", {u.name}.dtype"
    target = f"jnp.zeros({(k, *rest)}{dtype})"
    if u.kind == "float" and g.chance(0.4):
        target = g.operand(scope, (k, *rest))
    how = g.choice(["add", "add", "add", "max", "min", "mul"])
    bound = n * u.bound + 4
    if how == "mul":
        u_name, bound = f"(1 + 0.1 * jnp.tanh({u.name}))" if u.kind == "float" else u.name, 4 * 1.1**n
        if u.kind == "int":
            raise Unsuitable
    else:
        u_name = u.name
    options = [f"{target}.at[{index}].{how}({u_name})"]
    if how == "add" and u.kind == "float":
        options.append(f"jax.ops.segment_sum({u.name}, {index}, {k})" if lead == 1 else options[0])
    g.add(scope, g.choice(options), -bound, bound)


@action(0.7)
def write(g: Generator, scope: Scope) -> None:
    """Overwrites a part."""
    v = g.pick(scope, "float", lambda v: v.rank >= 1)
    d = g.axis(v)
    s = g.rng.randint(0, v.shape[d] - 1)
    before = ":, " * d
    other = g.choice(["0.25", f"{v.name}[{before}0:1] * 2" if g.chance(0.5) else "0.5"])
    options = [f"{v.name}.at[{before}{s}:{s + 1}].set({other})", f"{v.name}.at[{before}{s}].add(0.5)"]
    options.append(f"{v.name}.at[{before}{s}:].multiply(0.5)")
    g.add(scope, g.choice(options), -2 * v.bound - 1, 2 * v.bound + 1)


@action(1)
def dynamic(g: Generator, scope: Scope) -> None:
    """Slices that start at a computed place."""
    v = g.pick(scope, "float half int", lambda v: v.rank >= 1)
    d = g.axis(v)
    starts = [w.name for w in scope.visible() if w.kind == "int" and w.shape == ()]
    start = g.choice([*starts, *starts, "1"])
    n = g.rng.randint(1, v.shape[d])
    options = [
        f"jax.lax.dynamic_slice_in_dim({v.name}, {start}, {n}, axis={d})",
        f"jax.lax.dynamic_index_in_dim({v.name}, {start}, axis={d}, keepdims=False)",
        f"jax.lax.dynamic_update_slice_in_dim({v.name}, jnp.ones_like({v.name}[{':, ' * d}:{n}]), {start}, axis={d})",
        f"{v.name}[{':, ' * d}{start}]",
    ]
    g.add(scope, g.choice(options), min(v.low, 1), max(v.high, 1))


@action(1)
def beyond(g: Generator, scope: Scope) -> None:
    """One computed place, which there may not be: updates are dropped there, slices moved, and what is read filled."""
    v = g.pick(scope, "float", lambda v: v.rank >= 1)
    d = g.axis(v)
    index, _ = indices(g, scope, v.shape[d] + 2, ())
    place, before = g.choice([f"({index} - 1)", f"({index} + 1)", index]), ":, " * d
    how = g.choice(["add", "set", "multiply", "min", "max"])
    options = [
        f"{v.name}.at[{before}{place}].{how}(0.5, mode='drop')",
        f"{v.name}.at[{before}{place}].{how}(0.5)",
        f"jax.lax.dynamic_slice_in_dim({v.name}, {place}, {g.rng.randint(1, v.shape[d])}, axis={d})",
        f"jax.lax.dynamic_index_in_dim({v.name}, {place}, {d}, keepdims=False)",
        f"jnp.take({v.name}, {place}, axis={d}, mode='fill', fill_value=0.25)",
    ]
    g.add(scope, g.choice(options), -v.bound - 1, v.bound + 1)


@action(0.6)
def stretch(g: Generator, scope: Scope) -> None:
    """A part of a table, from a place on that there may not be, as long as an array and beside it."""
    v = g.pick(scope, "float", lambda v: v.rank >= 1)
    table = g.pick(scope, "float", lambda t: t.rank >= 1)
    d = g.axis(v)
    n, more = v.shape[d], g.rng.randint(1, 3)
    index, _ = indices(g, scope, more + 3, ())
    shape = tuple(n if e == d else 1 for e in range(v.rank))
    cut = f"jax.lax.dynamic_slice_in_dim(jnp.resize({table.name}, ({n + more},)), {index} - 1, {n})"
    bound = v.bound * table.bound
    g.add(scope, f"{v.name} * {cut}.reshape{shape}", -bound, bound)


@action(0.7)
def cropping(g: Generator, scope: Scope) -> None:
    """Every example sliced at a place of its own, as in image augmentation."""
    v = g.pick(scope, "float int", lambda v: v.rank >= 2)
    d = g.axis(v)
    rest = row(v, d).shape
    e = g.choice(range(len(rest)))
    index, _ = indices(g, scope, rest[e], (v.shape[d],))
    n = g.rng.randint(1, rest[e])
    slicer = f"jax.lax.dynamic_slice_in_dim(a, i, {n}, axis={e})"
    if g.chance(0.4):
        shape = (*rest[:e], n, *rest[e + 1 :])
        slicer = f"jax.lax.dynamic_update_slice_in_dim(a, jnp.ones({shape}, a.dtype), i, axis={e})"
    expression = f"jax.vmap(lambda a, i: {slicer}, in_axes=({d}, 0), out_axes={g.choice([0, d])})({v.name}, {index})"
    g.add(scope, expression, min(v.low, 1), max(v.high, 1))


@action(0.4)
def compaction(g: Generator, scope: Scope) -> None:
    """Where the flags are set, and the values there."""
    m = g.pick(scope, "bool float", lambda m: m.rank == 1)
    n = m.shape[0]
    flags = m.name if m.kind == "bool" else f"{m.name} > {(m.low + m.high) / 2:.2f}"
    values = [v for v in scope.visible() if v.kind == "float" and v.rank and v.shape[0] == n]
    expression = f"jnp.nonzero({flags}, size={g.choice([n, 2])}, fill_value=0)[0]"
    if values and g.chance(0.6):
        v = g.choice(values)
        g.add(scope, f"{v.name}[{expression}]", v.low, v.high)
    else:
        g.add(scope, expression, 0, n - 1)


@action(0.5)
def counting(g: Generator, scope: Scope) -> None:
    if g.chance(0.5):
        index, shape = indices(g, scope, 4)
        if len(shape) != 1:
            raise Unsuitable
        g.add(scope, f"jnp.bincount({index}, length=4)", 0, size(shape))
    else:
        v = g.pick(scope, "float")
        how = g.choice(["jnp.searchsorted(jnp.linspace(-1.0, 1.0, 5), {})", "jnp.digitize({}, jnp.array([-0.3, 0.4]))"])
        g.add(scope, how.format(v.name), 0, 5)


# Along an axis.


@action(2)
def cumulative(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float int", lambda v: v.rank >= 1)
    d = g.axis(v)
    n = v.shape[d]
    options = [(f"jnp.cumsum({v.name}, axis={d})", n * v.bound)] * 2
    if v.kind == "float":
        reverse = g.chance(0.3)
        how = g.choice(["jnp.add", "jnp.maximum"])
        options.append((f"jax.lax.associative_scan({how}, {v.name}, reverse={reverse}, axis={d})", n * v.bound))
        options += [
            (f"jax.lax.cummax({v.name}, axis={d}, reverse={reverse})", v.bound),
            (f"jax.lax.cumlogsumexp({v.name}, axis={d}, reverse={reverse})", v.bound + 5),
        ]
        if v.bound <= 1.2:
            options.append((f"jnp.cumprod({v.name}, axis={d})", max(1, v.bound**n)))
    expression, bound = g.choice(options)
    g.add(scope, expression, -bound, bound)


@action(1.3)
def sorting(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float int", lambda v: v.rank >= 1)
    d = g.axis(v)
    n = v.shape[d]
    which = g.rng.randint(0, 6)
    if which == 0:
        g.add(scope, f"jnp.argsort({v.name}, axis={d})", 0, n - 1)
    elif which == 5:
        g.add(scope, f"jax.lax.top_k({v.name}, {g.rng.randint(1, v.shape[-1])})[1]", 0, v.shape[-1] - 1)
    elif which == 6:
        w = g.pick(scope, "float int", lambda w: w.shape == v.shape)
        part = g.choice([0, 1])
        expression = (
            f"jax.lax.sort(({v.name} > {(v.low + v.high) / 2:.2f}, {w.name}), dimension={d}, num_keys=2)[{part}]"
        )
        g.add(scope, expression, w.low, w.high)
    elif which == 1:
        k = g.rng.randint(1, v.shape[-1])
        g.add(scope, f"jax.lax.top_k({v.name}, {k})[0]", v.low, v.high)
    elif which == 2:
        g.add(scope, f"jnp.median({v.name}, axis={d})", v.low, v.high)
    else:
        g.add(scope, f"jnp.sort({v.name}, axis={d}, descending={g.chance(0.3)})", v.low, v.high)


@action(0.5)
def undescribed(g: Generator, scope: Scope) -> None:
    """A primitive that vnode knows nothing of."""
    v = g.pick(scope, "float", lambda v: v.rank >= 1)
    d, part = g.axis(v), g.choice([0, 1])
    bound = v.bound * (2 if part == 0 else v.shape[d])
    g.add(scope, f"opaque({v.name}, {d})[{part}]", -bound, bound)


@action(0.5)
def linear_algebra(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float", lambda v: v.rank >= 2 and v.shape[-1] <= 5 and v.shape[-2] <= 5 and v.bound <= 8)
    n, m = v.name, v.shape[-2]
    gram = f"({n} @ jnp.swapaxes({n}, -1, -2) + 2 * jnp.eye({m}))"
    options = [f"jnp.linalg.cholesky({gram})", f"jnp.linalg.solve({gram}, {n})", f"jnp.linalg.inv({gram})"]
    options += [f"jnp.linalg.slogdet({gram})[1]", f"jnp.fft.fft({n}).real", f"jnp.fft.rfft({n}, axis=-2).imag"]
    g.add(scope, g.choice(options), -30, 30)


# Random draws.


def key(g: Generator, scope: Scope) -> str:
    keys = [v for v in scope.visible() if v.kind == "key" and v.shape == ()]
    if keys and g.chance(0.8):
        name = g.choice(keys).name
        return f"jax.random.fold_in({name}, {g.rng.randint(0, 3)})" if g.chance(0.3) else name
    impl = ", impl='rbg'" if g.chance(0.08) else ""
    return f"jax.random.key({g.rng.randint(0, 9)}{impl})"


@action(2)
def draw(g: Generator, scope: Scope) -> None:
    shape = g.choice([v.shape for v in scope.visible() if v.rank])
    k = key(g, scope)
    options = [
        (f"jax.random.uniform({k}, {shape})", 0, 1),
        (f"jax.random.normal({k}, {shape})", -6, 6),
        (f"jax.random.bernoulli({k}, 0.6, {shape})", 0, 1),
        (f"jax.random.randint({k}, {shape}, 0, 5)", 0, 4),
        (f"jax.random.gumbel({k}, {shape})", -4, 30),
        (f"jax.random.permutation({k}, {shape[0]})", 0, shape[0] - 1),
        (f"jax.random.uniform({k}, {shape}, jnp.float32).astype(jnp.float64)", 0, 1),
    ]
    if g.chance(0.35):
        v = g.pick(scope, "float", lambda v: v.rank >= 1)
        options = [
            (f"jax.random.permutation({k}, {v.name})", v.low, v.high),
            (f"jax.random.categorical({k}, {v.name}, axis={g.axis(v)})", 0, 3),
            (f"{v.name} * jax.random.bernoulli({k}, 0.8, {v.shape}) / 0.8", -1.25 * v.bound, 1.25 * v.bound),
        ]
    g.add(scope, *g.choice(options))


@action(1)
def draw_per_key(g: Generator, scope: Scope) -> None:
    keys = [v for v in scope.visible() if v.kind == "key" and v.rank == 1]
    if keys and g.chance(0.6):
        many = g.choice(keys).name
    elif g.chance(0.7):
        many = f"jax.random.split({key(g, scope)}, {g.choice([g.batch, g.batch, 3])})"
    else:
        many = f"jax.vmap(lambda i: jax.random.fold_in({key(g, scope)}, i))(jnp.arange({g.batch}))"
    options = [
        ("jax.random.uniform(k, (3,))", 0, 1),
        ("jax.random.normal(k)", -6, 6),
        ("jax.random.randint(k, (2,), 0, 4)", 0, 3),
        ("jax.random.permutation(k, 4)", 0, 3),
        ("jax.random.bernoulli(k, 0.4)", 0, 1),
    ]
    expression, low, high = g.choice(options)
    g.add(scope, f"jax.vmap(lambda k: {expression})({many})", low, high)


@action(0.5)
def split_key(g: Generator, scope: Scope) -> None:
    if scope.closed:
        raise Unsuitable
    g.add(scope, g.choice([f"jax.random.fold_in({key(g, scope)}, 1)", f"jax.random.split({key(g, scope)}, {g.batch})"]))


# Control flow and local functions.


def row(v: Variable, d: int = 0) -> jax.ShapeDtypeStruct:
    """What is left of a variable when dimension `d` is mapped over."""
    return jax.ShapeDtypeStruct(v.shape[:d] + v.shape[d + 1 :], v.aval.dtype)


@action(2)
def scan(g: Generator, scope: Scope) -> None:
    """Over time, examples or layers: whichever dimension comes."""
    x = g.pick(scope, "float", lambda v: v.rank >= 1 and v.shape[0] <= 12)
    axis = 0 if g.chance(0.6) else g.axis(x)
    if x.shape[axis] > 12:
        raise Unsuitable
    xs = x.name if axis == 0 else f"jnp.moveaxis({x.name}, {axis}, 0)"
    inner_x = g.inner_variable("e", row(x, axis), x)
    if g.chance(0.2):
        init = g.pick(scope, "float")
        init_text = init.name
    else:
        shape = g.choice([inner_x.aval.shape, inner_x.aval.shape, (), g.pick(scope, "float").shape])
        init = Variable("", jax.ShapeDtypeStruct(shape, jnp.float64), -1, 1)
        init_text = f"jnp.zeros({shape})"
    bound = max(init.bound, 1.0)
    carry = Variable(g.name("c"), init.aval, -bound, bound)
    inner = g.body(scope, [carry, inner_x], g.rng.randint(1, 3))
    update = g.fit(g.result(inner), carry.shape)
    steps = x.shape[axis]
    late = g.result(inner)
    how = g.choice(["tanh", "sum", "mix", "select"])
    new = {
        "tanh": f"jnp.tanh({carry.name} + {update})",
        "sum": f"{carry.name} + {update}",
        "mix": f"0.5 * {carry.name} + 0.5 * {update}",
        "select": f"jnp.where({inner_x.name}.sum() > 0, {carry.name}, jnp.tanh({update}))",
    }[how]
    bound = max(bound, 1) if how in ("tanh", "select") else bound + steps * MAX_VALUE / (1 if how == "sum" else steps)
    ys = g.choice([late.name, carry.name, "None", late.name])
    name = g.name("f")
    function = Function(name, f"{carry.name}, {inner_x.name}", tuple(inner.statements), f"{new}, {ys}")
    if g.chance(0.15):
        function = dataclasses.replace(function, decorator="@jax.checkpoint")
    rest = f"jax.lax.scan({name}, {init_text}, {xs}, reverse={g.chance(0.2)})"
    if ys == "None":
        g.add(scope, f"{rest}[0]", -bound, bound, (function,))
    else:
        (c, y) = g.add(scope, rest, 0, 0, (function,), targets=2)
        scope.variables[-2:] = [dataclasses.replace(v, low=-bound, high=bound) for v in (c, y)]


@action(0.7)
def scan_with_key(g: Generator, scope: Scope) -> None:
    """A key in the carry, split in every iteration."""
    x = g.pick(scope, "float", lambda v: v.rank >= 1 and v.shape[0] <= 12)
    carry, key_name, part, sub, name = g.name("c"), g.name("k"), g.name("e"), g.name("k"), g.name("f")
    shape = row(x).shape
    noise = g.choice(
        [
            f"jax.random.uniform({sub}, {shape})",
            f"jax.random.bernoulli({sub}, 0.7, {shape})",
            f"jax.random.normal({sub})",
        ]
    )
    update = g.choice(
        [f"0.5 * {carry} + {part} * {noise}", f"jnp.tanh({carry} + {noise})", f"{carry} + {part} * {noise}"]
    )
    function = Function(
        name,
        "s, " + part,
        (),
        f"({update}, {key_name}), {carry}.sum()",
        unpack=(f"{carry}, {key_name} = s", f"{key_name}, {sub} = jax.random.split({key_name})"),
    )
    start = f"jnp.zeros({shape})"
    bound = 7 * 12 * max(1, x.bound)
    picked = "[0][0]" if g.chance(0.7) else "[1]"
    g.add(scope, f"jax.lax.scan({name}, ({start}, {key(g, scope)}), {x.name}){picked}", -bound, bound, (function,))


@action(1)
def minibatches(g: Generator, scope: Scope) -> None:
    """Training inside the step: epochs over minibatches of the batch, with an update after each."""
    if scope.depth:
        raise Unsuitable
    x = g.pick(scope, "float", lambda v: v.rank == 2 and v.shape[0] == g.batch and v.bound <= 8)
    n = g.choice([k for k in range(2, g.batch) if g.batch % k == 0])
    p = g.operand(scope, x.shape[1:], -0.7, 0.7)
    carry, part, name, loss = g.name("c"), g.name("e"), g.name("f"), g.name("f")
    target = g.choice(["0.3", f"{part}[:, 0]"])
    inner = Function(loss, "a", (), f"((jnp.tanh({part} @ a) - {target}) ** 2).mean()")
    gradient = g.choice([f"jax.grad({loss})({carry})", f"jax.value_and_grad({loss})({carry})[1]"])
    body = Statement((g.name("v"),), gradient, (inner,), ((x.shape[1:], "float64"),))
    step = g.choice([f"{carry} - 0.1 * {body.targets[0]}", f"{carry} - 0.1 * jnp.tanh({body.targets[0]})"])
    function = Function(name, f"{carry}, {part}", (body,), f"{step}, ({part} @ {carry}).mean()")
    parts = f"{x.name}.reshape({n}, {g.batch // n}, {x.shape[1]})"
    if g.chance(0.4):
        parts = f"{x.name}.reshape({g.batch // n}, {n}, {x.shape[1]}).swapaxes(0, 1)"
    if g.chance(0.4):
        parts = f"jax.random.permutation({key(g, scope)}, {parts.replace(x.name, x.name, 1)}, axis={g.choice([0, 1])})"
    expression = f"jax.lax.scan({name}, {p}, {parts})"
    if g.chance(0.4):
        epoch = g.name("f")
        outer = Function(epoch, "i, a", (), f"jax.lax.scan({name}, a, {parts})[0]")
        g.add(scope, f"jax.lax.fori_loop(0, 2, {epoch}, {p})", -4, 4, (function, outer))
    else:
        g.add(scope, f"{expression}[{g.choice([0, 0, 1])}]", -4, 4, (function,))


@action(0.8)
def scan_layers(g: Generator, scope: Scope) -> None:
    """Activations in the carry, the layers' parameters scanned over."""
    v = g.pick(scope, "float", lambda v: v.rank >= 1 and v.shape[-1] <= 6)
    n = v.shape[-1]
    w = g.operand(scope, (g.choice([2, 3]), n, n), -0.7, 0.7)
    carry, layer, name = g.name("c"), g.name("e"), g.name("f")
    body = g.choice(["jnp.tanh({0} @ {1})", "{0} + 0.1 * jnp.tanh({0} @ {1})", "0.3 * {0} @ {1}"]).format(carry, layer)
    y = g.choice(["None", f"({carry} ** 2).mean()", f"{carry}.sum(-1)"])
    decorator = "@jax.checkpoint" if g.chance(0.4) else ""
    function = Function(name, f"{carry}, {layer}", (), f"{body}, {y}", decorator)
    part = 0 if y == "None" or g.chance(0.6) else 1
    g.add(scope, f"jax.lax.scan({name}, {v.name}, {w})[{part}]", -v.bound * 6 - 2, v.bound * 6 + 2, (function,))


@action(2)
def vmap(g: Generator, scope: Scope) -> None:
    x = g.pick(scope, "float int bool", lambda v: v.rank >= 1)
    d = g.axis(x)
    mapped = [(x, d)]
    if g.chance(0.4):
        y = g.pick(scope, g.choice(["float", "int"]), lambda v: x.shape[d] in v.shape)
        mapped.append((y, y.shape.index(x.shape[d])))
    parameters = [g.inner_variable("e", row(v, d), v) for v, d in mapped]
    axis_name = g.name("n") if g.chance(0.15) else ""
    inner = g.body(scope, parameters, g.rng.randint(1, 4), axis_name=axis_name)
    result = g.result(inner, "float int bool")
    name = g.name("f")
    function = Function(name, ", ".join(p.name for p in parameters), tuple(inner.statements), result.name)
    axes = tuple(d for _, d in mapped)
    out = g.choice([0, 0, 0, -1])
    if g.chance(0.15) and not axis_name and axes == (0,) * len(axes):
        names = mapped[0][0].name if len(mapped) == 1 else f"({mapped[0][0].name}, {mapped[1][0].name})"
        call = f"{name}(a)" if len(mapped) == 1 else f"{name}(*a)"
        batch = f", batch_size={g.choice([2, 4])}" if g.chance(0.2) else ""
        g.add(scope, f"jax.lax.map(lambda a: {call}, {names}{batch})", result.low, result.high, (function,))
        return
    named = f", axis_name={axis_name!r}" if axis_name else ""
    names = ", ".join(v.name for v, _ in mapped)
    expression = f"jax.vmap({name}, in_axes={axes}, out_axes={out}{named})({names})"
    g.add(scope, expression, result.low, result.high, (function,))


@action(1)
def collective(g: Generator, scope: Scope) -> None:
    """Inside a `vmap` with a named axis, as in a step written for `pmap`."""
    if not scope.axis_name:
        raise Unsuitable
    v = g.pick(scope, "float")
    how = g.choice(["pmean", "pmax", "pmean", "psum"])
    bound = v.bound * (12 if how == "psum" else 1)
    expression = f"jax.lax.{how}({v.name}, {scope.axis_name!r})"
    if how == "psum":
        expression, bound = f"{expression} * 0.1", bound * 0.1
    g.add(scope, expression, -bound, bound, avals=[v.aval])


@action(1)
def loop(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float", lambda v: v.bound <= 8)
    carry, name, cond = g.name("c"), g.name("f"), g.name("f")
    inner_carry = Variable(carry, v.aval, -max(v.bound, 1), max(v.bound, 1))
    inner = g.body(scope, [inner_carry], g.rng.randint(1, 2))
    update = g.fit(g.result(inner), v.shape)
    new = g.choice([f"0.5 * {carry} + 0.5 * jnp.tanh({update})", f"jnp.tanh({update})", f"{carry} * 0.7"])
    bound = max(v.bound, 1)
    counts = [w for w in scope.visible() if w.kind == "int" and w.shape == ()]
    if g.chance(0.4):
        end = f"{g.choice(counts).name} % 4" if counts and g.chance(0.6) else "3"
        function = Function(name, f"i, {carry}", tuple(inner.statements), new)
        g.add(scope, f"jax.lax.fori_loop(0, {end}, {name}, {v.name})", -bound, bound, (function,))
        return
    stop = g.choice(
        ["jnp.abs(s[1]).max() > 0.2", "jnp.any(s[1] > 0.3)", "s[1].sum() > 0.5", "jnp.sqrt((s[1] ** 2).sum()) > 0.4"]
    )
    body = Function(name, "s", tuple(inner.statements), f"i + 1, {new}", unpack=(f"i, {carry} = s",))
    condition = Function(cond, "s", (), f"(s[0] < 4) & ({stop})")
    expression = f"jax.lax.while_loop({cond}, {name}, (0, {v.name}))[{1 if g.chance(0.8) else 0}]"
    g.add(scope, expression, -bound, max(bound, 4), (condition, body))


@action(0.5)
def loop_per_example(g: Generator, scope: Scope) -> None:
    """Every example goes on until it has converged."""
    v = g.pick(scope, "float", lambda v: v.rank >= 1 and v.bound <= 8)
    d = g.axis(v)
    cond, body = g.name("f"), g.name("f")
    expression = f"jax.vmap(lambda a: jax.lax.while_loop({cond}, {body}, a), in_axes={d}, out_axes={d})({v.name})"
    functions = (
        Function(cond, "a", (), f"jnp.abs(a).max() > {g.choice([0.2, 0.5])}"),
        Function(body, "a", (), g.choice(["a * 0.6", "jnp.sin(a) * 0.7", "a * 0.5 * jnp.tanh(a).mean()"])),
    )
    g.add(scope, expression, -v.bound, v.bound, functions)


@action(1.2)
def conditional(g: Generator, scope: Scope) -> None:
    v = g.pick(scope, "float")
    scalars = [w for w in scope.visible() if w.shape == () and w.kind == "bool"]
    numbers = [w for w in scope.visible() if w.shape == () and w.kind == "float"]
    if scalars and g.chance(0.6):
        predicate = g.choice(scalars).name
    elif numbers and g.chance(0.8):
        predicate = f"{g.choice(numbers).name} > 0.1"
    else:
        w = g.pick(scope, "float")
        predicate = f"{w.name}.sum() > 0.0"
    parameters = [Variable(g.name("e"), v.aval, v.low, v.high) for _ in range(2)]
    branches = []
    for parameter in parameters:
        inner = g.body(scope, [parameter], g.rng.randint(0, 2))
        fitted = g.fit(g.result(inner), v.shape)
        branches.append(Function(g.name("f"), parameter.name, tuple(inner.statements), fitted))
    names = ", ".join(b.name for b in branches)
    counts = [w for w in scope.visible() if w.kind == "int" and w.shape == ()]
    if counts and g.chance(0.3):
        expression = f"jax.lax.switch({g.choice(counts).name} % 2, [{names}], {v.name})"
    else:
        expression = f"jax.lax.cond({predicate}, {names}, {v.name})"
    g.add(scope, expression, -MAX_VALUE, MAX_VALUE, tuple(branches))


def scalar(g: Generator, v: Variable) -> str:
    """A scalar loss made of `v`."""
    n = v.name if v.kind == "float" else f"{v.name}.astype(jnp.float64)"
    return g.choice(
        [
            f"{n}.mean()",
            f"({n} ** 2).mean()",
            f"{n}.sum() * 0.1",
            f"jnp.tanh({n}).sum()",
            f"jax.nn.logsumexp({n})",
            f"{n}.max()",
            f"({n} * ({n} > 0)).sum() / (({n} > 0).sum() + 1)",
            f"jnp.sqrt(({n} ** 2).sum() + 0.1)",
            f"jnp.log(jnp.exp(jnp.tanh({n})).mean())",
        ]
    )


@action(3)
def gradient(g: Generator, scope: Scope) -> None:
    """Of a scalar with respect to parameters, to batched values, or to both."""
    picks = {v.name: v for v in (g.pick(scope, "float") for _ in range(g.rng.randint(1, 2)))}
    whole = [v for v in scope.visible() if v.name.startswith("p") and v.kind == "float"]
    if whole and g.chance(0.7):
        v = g.choice(whole)
        picks = {v.name: v, **dict(list(picks.items())[:1])}
    parameters = [g.inner_variable("e", v.aval, v) for v in picks.values()]
    inner = g.body(scope, parameters, g.rng.randint(2, 5))
    name = g.name("f")
    decorator = g.choice(["", "", "", "@jax.checkpoint", "@jax.jit"])
    loss = scalar(g, g.result(inner, "float half"))
    function = Function(name, ", ".join(p.name for p in parameters), tuple(inner.statements), loss, decorator)
    names = ", ".join(picks)
    how = g.rng.random()
    if how < 0.6:
        argnums = tuple(range(len(picks))) if len(picks) > 1 else 0
        g.add(scope, f"jax.grad({name}, argnums={argnums})({names})", -8, 8, (function,), targets=len(picks))
    elif how < 0.8:
        g.add(scope, f"jax.value_and_grad({name})({names})", -8, 8, (function,), targets=2)
    elif how < 0.9:
        v, *rest = picks.values()
        others = "".join(f", {w.name}" for w in rest)
        expression = f"jax.jvp(jax.grad(lambda a: {name}(a{others})), ({v.name},), (jnp.ones({v.shape}),))[1]"
        g.add(scope, expression, -8, 8, (function,))
    else:
        v, *rest = picks.values()
        others = "".join(f", {w.name}" for w in rest)
        expression = f"jax.jvp(lambda a: {name}(a{others}), ({v.name},), (jnp.cos({v.name}),))[1]"
        g.add(scope, expression, -8, 8, (function,))


@action(1)
def per_example_gradient(g: Generator, scope: Scope) -> None:
    x = g.pick(scope, "float", lambda v: v.rank >= 1)
    p = g.pick(scope, "float", lambda v: v.rank <= 2)
    d = g.axis(x)
    a, b = g.inner_variable("e", p.aval, p), g.inner_variable("e", row(x, d), x)
    inner = g.body(scope, [a, b], g.rng.randint(1, 3))
    name = g.name("f")
    function = Function(name, f"{a.name}, {b.name}", tuple(inner.statements), scalar(g, g.result(inner)))
    g.add(scope, f"jax.vmap(jax.grad({name}), in_axes=(None, {d}))({p.name}, {x.name})", -8, 8, (function,))


@action(1)
def call(g: Generator, scope: Scope) -> None:
    """`jit`, `checkpoint`: the same value through a call."""
    v = g.pick(scope, "float")
    a = g.inner_variable("e", v.aval, v)
    inner = g.body(scope, [a], g.rng.randint(1, 3))
    result = g.result(inner, "float int bool")
    decorator = g.choice(["@jax.checkpoint", "@jax.jit"])
    function = Function(g.name("f"), a.name, tuple(inner.statements), result.name, decorator)
    expression = f"{function.name}({v.name})"
    if g.chance(0.3) and result.kind == "float":
        w = g.pick(scope, "float", lambda w: w.shape == v.shape)
        expression = f"{expression} + {function.name}({w.name})"
    g.add(scope, expression, 2 * min(result.low, 0), 2 * max(result.high, 0), (function,))


@action(0.8)
def own_derivative(g: Generator, scope: Scope) -> None:
    """A function whose derivative is not that of its code; sometimes differentiated."""
    v = g.pick(scope, "float")
    a, name = g.name("e"), g.name("f")
    body = g.choice([f"jnp.sign({a})", f"jnp.round({a} * 2) / 2", f"jnp.tanh({a})"])
    if g.chance(0.5):
        function = Function(
            name,
            a,
            (),
            body,
            "@jax.custom_jvp",
            trailer=(
                f"{name}.defjvp(lambda primals, tangents: ({name}(*primals), tangents[0] * jnp.cos(primals[0])))",
            ),
        )
    else:
        function = Function(
            name,
            a,
            (),
            body,
            "@jax.custom_vjp",
            trailer=(f"{name}.defvjp(lambda a: ({name}(a), a), lambda a, t: (t * (1 + jnp.cos(a)),))",),
        )
    expressions = [f"{name}({v.name})", f"jax.grad(lambda a: ({name}(a) * a).mean())({v.name})"]
    g.add(scope, g.choice(expressions), -max(1, v.bound), max(1, v.bound), (function,))
