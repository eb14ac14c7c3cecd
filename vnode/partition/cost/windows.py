"""How long a kernel takes on a TPU by the way in which its compiler counts: arrays pass through the chip in windows.

Knows pieces, descriptions, rates of kinds, and what was seen of each kind. Must not know programs, nor how anything is
compiled.

What small programs, compiled ahead of time, showed of the compiler's estimates (`hlo.cycles`); figures are those of
v5e, and `COUNTS` has those of the other kinds:

- Vector operations take nothing, dear ones neither: a kernel takes its passes over elements. A kernel that is no
  product takes 9.3 cycles for each 1,024 elements that it reads or writes in memory, as many in bfloat16 as in float32;
  that is 80 % of the bandwidth, in float32. If they lie on the chip it is 6.8 cycles.
- A kernel that only reduces counts as if it wrote as much as it reduces, and nothing as on the chip.
- A copy to another order of the last two dimensions takes 27 cycles for 1,024 elements.
- An instruction that is by itself, not one of a fusion, takes 12 cycles more for each 1,024 elements.
- Where the last dimension but one has two or four elements, registers are filled to a quarter or a half: a pass takes
  2.6 or 1.3 times as long. Copies within a program are in an order in which two longer dimensions, if there are, fill
  them (of what a program is given, and gives, the order is not free).
- A kernel has 16 MiB on the chip for its windows, two of each array. A product whose operands do not fit reads them
  once for each tile of its result: tiles are as large as windows can be, so that little is read. What lies on the chip
  already is not fetched. Element-wise operations that are computed inside take no time, but the arrays that they read
  do; where these are read before the product, they are for each tile.
- A product takes longer than its multiplications, and than its bytes, if these take similarly long: windows and
  multiplications follow each other in part. The root of the sum of squares is within 15 % of what was seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.operators import Algebra, OperatorDescription, describe
from vnode.operators.control import region_of
from vnode.operators.remembered import Remembered
from vnode.operators.splits import Windowed
from vnode.partition.cost.pieces import Piece, cost_of
from vnode.partition.cost.target import AT_WORK
from vnode.partition.cost.time import Time
from vnode.partition.machine import Kind
from vnode.partition.machine.table import KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What was seen of a kind of chip.

    Attributes:
      reached: the part of the bandwidth of memory that passes over arrays of float32 reach.
      near: what a pass over elements on the chip takes of what it takes in memory.
      copy: passes that take as long as a copy of an array to another order of its last two dimensions.
      alone: passes that an instruction takes more if it is not one of a fusion.
      start: seconds until a kernel's first windows are there: what kernels of a few thousand elements take.
      room: bytes on the chip for the windows of a kernel.
    """

    reached: float
    near: float
    copy: float
    alone: float
    start: float
    room: int = AT_WORK


COUNTS = {
    "TPU v4": Counts(reached=0.78, near=1.0, copy=2.34, alone=0.42, start=0.6e-6),
    "TPU v5e": Counts(reached=0.8, near=0.73, copy=27.1 / 9.3, alone=12 / 9.3, start=1.2e-6),
    "TPU v5p": Counts(reached=0.71, near=0.58, copy=3.3, alone=1.93, start=1.2e-6),
    "TPU v6e": Counts(reached=0.81, near=0.22, copy=3.8, alone=2.66, start=1.2e-6, room=32 << 20),
}
"""By the name of a kind, with the bandwidth of its data sheet and the clock of `vnode.partition.cost.compiler`.

From a pass, a copy and a `tanh` over 4,096 x 8,192 elements of float32, one over 1,024, a chain of passes over 2,048 x
4,096, and the windows of a product of 8,192 rows, columns and terms; libtpu 0.0.42. v4 with both cores of a chip as one
device. Those of v5e are of many more programs. (``xla_tpu_scoped_vmem_limit_kib`` is 16,384 on v5e.)
"""

SUBLANES, SPREAD = 8, 0.65
"""Rows of a register; of arrays that fill s of them a pass takes 0.65 x 8 / s times as long (seen for 2 and 4)."""

ELEMENT = 4
"""Bytes as which an element of a pass counts, whatever its type."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """The time of kernels of TPUs; a `Source` that says nothing of loops, nor of kinds that are not in `COUNTS`.

    Nor does it of kinds with other figures than their data sheet's: a bandwidth that was measured is what passes reach.

    Example:
      >>> import jax.numpy as jnp
      >>> from vnode.partition.cost.pieces import traced_piece
      >>> from vnode.partition.machine.table import kind_named
      >>> x = jnp.ones((2048, 8192))
      >>> round(Windows().time(traced_piece(lambda x: x * 2 + 1, x), kind_named("v5e")).seconds * 1e3, 2)
      0.21
    """

    @staticmethod
    def knows(kind: Kind) -> bool:
        """Whether it says anything of a kind."""
        return counts_of(kind) is not None

    def time(self, piece: Piece, kind: Kind) -> Time | None:
        """See `Source`."""
        counts = counts_of(kind)
        if counts is None or any(region_of(eqn) is not None for eqn in piece.equations):
            return None
        if piece.alike is None:
            return counted(piece, kind, counts)
        return KNOWN.found((piece.alike, kind), lambda: counted(piece, kind, counts))


KNOWN = Remembered[Time](20_000)
"""Times of pieces: layers, and the candidates of a search, have many that are alike."""


def counts_of(kind: Kind) -> Counts | None:
    """What was seen of a kind, if it has the figures of its data sheet, to which that relates."""
    sheet = KINDS.get(kind.name)
    same = sheet is not None and (kind.bandwidth, kind.peak) == (sheet.bandwidth, sheet.peak)
    return COUNTS.get(kind.name) if same else None


def counted(piece: Piece, kind: Kind, counts: Counts) -> Time:
    """The time of a kernel."""
    products = [eqn for eqn in piece.equations if contracts(eqn)]
    seconds = product_seconds(piece, products, kind, counts) if products else pass_seconds(piece, kind, counts)
    return Time(seconds + counts.start if seconds else 0.0, "windows")


def largest_reduced(piece: Piece) -> float:
    """Elements of the largest array that a kernel reduces."""
    found = 0
    for eqn in piece.equations:
        of = describe(eqn)
        if of is not None and of.reduced:
            found = max(found, math.prod(eqn.invars[0].aval.shape))
    return float(found)


def turned(piece: Piece, copy: float) -> float:
    """Passes over copies that a kernel needs because it writes one array, and reads one of that size in another order.

    Either that one is copied to the order of the others, or these are, and the result back.

    Args:
      piece: the kernel.
      copy: passes that one takes.
    """
    sizes = [math.prod(var.aval.shape) for var in piece.writes]
    found = 0.0
    for eqn in piece.equations:
        of, last = describe(eqn), eqn.outvars[0].aval
        if of is None or "permutation" not in eqn.params or not of.has(Algebra.MOVES):
            continue
        moves_last = eqn.params["permutation"][-1] != len(last.shape) - 1
        long = min(eqn.invars[0].aval.shape[-1], last.shape[-1]) >= SUBLANES
        if moves_last and long and sizes == [math.prod(last.shape)]:
            copies = 1 if len(piece.equations) == 1 else 2
            filled = sum(n >= SUBLANES for n in last.shape) > 1  # these two can be those that lie in registers
            fill = 1.0 if filled else spread(last.shape)
            found = max(found, copies * copy * sizes[0] * fill - (2 * sizes[0] if copies == 1 else 0))
    return found


def spread(shape: Sequence[int]) -> float:
    """By how much a pass takes longer over an array in which rows of 128 elements lie in fewer than eight sublanes.

    >>> spread((512, 1024)), spread((64, 4, 1024))
    (1.0, 1.3)
    """
    long = [n for n in shape if n > 1]
    return SPREAD * SUBLANES / long[-2] if len(long) > 2 and long[-2] < SUBLANES else 1.0


def spread_by_slice(eqn: JaxprEqn) -> float:
    """The same of a slice, which stays in the order of dimensions of what it is cut out of, even if one row is left."""
    of, after = describe(eqn), eqn.outvars[0].aval.shape
    if of is None or not of.has(Algebra.MOVES) or not eqn.invars or not isinstance(eqn.invars[0], Var):
        return 1.0
    before = eqn.invars[0].aval.shape
    long = [d for d, n in enumerate(before) if n > 1]
    if len(before) != len(after) or len(long) < 3 or any(m > n for n, m in zip(before, after, strict=True)):
        return 1.0
    rows = after[long[-2]]
    return SPREAD * SUBLANES / rows if 0 < rows < min(SUBLANES, before[long[-2]]) else 1.0


def contracts(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product."""
    of = describe(eqn)
    return of is not None and of.has(Algebra.CONTRACTS)


def pass_seconds(piece: Piece, kind: Kind, counts: Counts) -> float:
    """The time of a kernel that passes over its elements."""
    passes = 0.0
    reads, writes = piece.border
    reduced = largest_reduced(piece)
    whole = reduced and max((math.prod(var.aval.shape) for var in writes), default=0) < reduced
    sliced: dict[object, float] = {}
    for eqn in piece.equations:  # what is cut out stays in that order to the end
        (out, *_), read = eqn.outvars, [a for a in eqn.invars if isinstance(a, Var)]
        kept = [sliced.get(a, 1.0) for a in read if math.prod(a.aval.shape) == math.prod(out.aval.shape)]
        sliced[out] = max([spread_by_slice(eqn), *kept])
        if sliced[out] == SPREAD * SUBLANES and not kept:  # single rows: registers are filled with others, too
            sliced.update((var, sliced[out]) for var in before(eqn.invars[0], piece, reads))
    for several in (reads, writes):
        for var, need in several.items():
            elements = need / max(var.aval.dtype.itemsize, 1) * max(spread(var.aval.shape), sliced.get(var, 1.0))
            passes += elements * (counts.near if var in piece.near and not whole else 1.0)
    passes += reduced if whole else 0.0
    copies = turned(piece, counts.copy)
    if len(piece.equations) == 1 and not copies and not any(isinstance(a, Literal) for a in piece.equations[0].invars):
        each = cost_of(piece.equations[0])
        passes += counts.alone * max(each.read, each.written) / ELEMENT
    passes += copies
    return passes * ELEMENT / (kind.bandwidth * counts.reached)


def product_seconds(piece: Piece, products: Sequence[JaxprEqn], kind: Kind, counts: Counts) -> float:
    """The time of a kernel with products in it."""
    reads, writes = piece.border
    near = piece.near
    far = {var: n // (2 if var in piece.narrow else 1) for var, n in reads.items() if var not in near}
    matrix = sum(n / kind.rate(t) for eqn in products for t, n in cost_of(eqn).matrix.items())
    read = set[Var]()
    moved = 0.0
    for eqn in products:
        sides = [frozenset(before(atom, piece, reads)) for atom in eqn.invars[:2]]
        read |= sides[0] | sides[1]
        moved += fetched(eqn, [sum(far.get(var, 0) for var in side) for side in sides], counts.room)
    moved += sum(n for var, n in far.items() if var not in read)
    moved += sum(n // (2 if var in piece.narrow else 1) for var, n in writes.items() if var not in near)
    return math.hypot(matrix, moved / (kind.bandwidth * counts.reached))


def before(atom: object, piece: Piece, reads: Mapping[Var, int]) -> Iterator[Var]:
    """What a kernel reads to have an operand."""
    makers = {var: eqn for eqn in piece.equations for var in eqn.outvars}
    pending, seen = [atom], set[Var]()
    while pending:
        each = pending.pop()
        if not isinstance(each, Var) or each in seen:
            continue
        seen.add(each)
        if each in reads:
            yield each
        elif each in makers:
            pending += makers[each].invars


def fetched(eqn: JaxprEqn, sides: Sequence[float], room: int) -> float:
    """Bytes that a product fetches of its two operands, with the best tiles.

    Args:
      eqn: the product.
      sides: bytes of each operand that are in memory.
      room: bytes on the chip for its windows.
    """
    of = describe(eqn)
    if of is None or any(isinstance(factor.split, Windowed) for factor in of.factors):
        return sum(sides)
    m, n, k, batch = extents(of)
    if not m * n * k * batch:
        return sum(sides)
    # bytes of an element: what is fetched comes in two windows; what is on the chip is rounded to bfloat16 there
    width = [2 * side / (batch * k * each) if side else 2.0 for side, each in zip(sides, (m, n), strict=True)]
    best = math.inf
    for rows in halved(m, 8):
        for columns in halved(n, 128):
            tile, ups, downs = rows * columns, -(-m // rows), -(-n // columns)
            result = 2 * ELEMENT * tile
            whole = result + k * (rows * width[0] + columns * width[1])
            if whole <= room:
                read = min(sides[0] * downs + sides[1], sides[0] + sides[1] * ups)
            elif result + ELEMENT * tile + min(k, 128) * (rows * width[0] + columns * width[1]) <= room:
                read = sides[0] * downs + sides[1] * ups
            else:
                continue
            best = min(best, read)
    return best if best < math.inf else sum(sides)


def halved(size: int, least: int) -> Iterator[int]:
    """A size, half of it, and so on."""
    while True:
        yield size
        if size <= least:
            return
        size = -(-size // 2)


def extents(of: OperatorDescription) -> tuple[int, int, int, int]:
    """Rows, columns, terms of each sum, and how many products there are side by side."""
    left, right, out = ({f for dim in dims for f in dim} for dims in (of.operands[0], of.operands[1], of.results[0]))

    def size(factors: set[int]) -> int:
        return math.prod(of.sizes[f] for f in factors)

    return size(left & out - right), size(right & out - left), size(left & right - out), size(left & right & out)
