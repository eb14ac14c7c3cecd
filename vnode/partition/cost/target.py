"""What XLA does when it compiles for a platform, and what it has on the chip.

Knows names of platforms and of kinds of devices. Must not know programs, kernels, nor machines.
"""

from __future__ import annotations

import dataclasses

ON_CHIP = {"TPU v4": (16 + 128) << 20, "TPU v5e": 128 << 20, "TPU v5p": 64 << 20, "TPU v6e": 128 << 20}
"""Bytes of vector memory of a core (``jax.experimental.pallas.tpu.get_tpu_info``): the compiler moves arrays there.

A v4 chip has 128 MiB of another memory besides, to which its compiler moves them.
"""


AT_WORK = 16 << 20
"""Bytes of it that the compiler leaves to the kernel that runs (``xla_tpu_scoped_vmem_limit_kib`` is 16,384)."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What XLA does when it compiles for a platform, as far as time and memory depend on it.

    Attributes:
      contractions: whether element-wise producers and consumers are taken into contractions.
      combines: kinds of collectives that are sent together where none waits for another.
      together: bytes of operands up to which they are.
      breadth: whether kernels run as soon as their operands are there, first come first served, for the sake of
        threads that run them at the same time; otherwise in an order in which little is held.
      siblings: whether element-wise kernels and reductions that read the same become one with several results.
      aligned: bytes of which everything in memory takes a multiple.
      pointer: bytes of a pointer, where results, if they are several, have a table of those to them, in memory.
      hoists: whether what is the same at every turn of a loop is computed before it.
      hoists_growing: whether that is so also of what has larger results than operands.
      adds_after: whether sums over devices that a loop, or the program, adds up are done once, after it.
      ordered: whether convolutions read and write arrays in one order of dimensions only.
      on_chip: bytes of temporary arrays that are held on the chip, rather than in the device's memory.
      sinks: whether what is made of constants is made where loops, and others that compute, read it, and not before.
      weighs: whether what several read is computed in each of them, however dear, unless it has several large operands
        and these then read more bytes than are moved if it is written once; otherwise unless it is dear.
      copies_gathered: whether arguments whose place gathered results take are copied, and these results too.
      turns: whether what is exchanged in pieces of another dimension than the first is copied to that order, and back.
      turns_updates: whether an update in the order of a transposed gradient has a copy of what it updates.
      adds_in_place: whether sums over devices are written over what is summed.
      hides_gathers: whether what is gathered is gathered while devices compute, begun as early as it takes.
      tiles: whether arrays take whole tiles.
      packs: whether a comparison that is read later is kept in bits, or bytes, rather than what is compared.
      lodges: whether other arrays may be where an argument was, until a result is written there.
      repeats: whether what reads one array is computed again where it can be, though others read it from memory.
      apart: whether programs have the host's memory beside the device's.
      library: whether a library computes reductions, and products that sum over the last dimension of their first
        operand: of products that could run as soon, others come later.
    """

    contractions: bool = True
    combines: frozenset[str] = frozenset({"all-reduce"})
    together: int = 1 << 62
    breadth: bool = False
    siblings: bool = True
    aligned: int = 1
    pointer: int = 0
    hoists: bool = False
    hoists_growing: bool = True
    adds_after: bool = False
    ordered: bool = False
    on_chip: int = 0
    sinks: bool = False
    weighs: bool = False
    copies_gathered: bool = False
    library: bool = False
    turns: bool = False
    turns_updates: bool = False
    adds_in_place: bool = False
    hides_gathers: bool = False
    tiles: bool = False
    packs: bool = False
    lodges: bool = False
    repeats: bool = False
    apart: bool = True

    @staticmethod
    def on(platform: str, kind: str = "") -> Target:
        """That of a platform, ``"tpu"``, ``"gpu"`` or ``"cpu"``, and of a kind of device by its name.

        The limit on GPUs is that of ``xla_gpu_all_reduce_combine_threshold_bytes`` and its like; on TPUs it is that of
        programs with more and more sums; the orders are those of what jaxlib 0.10 schedules.

        >>> Target.on("cpu").breadth, Target.on("tpu").contractions
        (True, True)
        """
        match platform:
            case "cpu":
                cpu = Target(contractions=False, breadth=True, siblings=False, aligned=64, hoists=True)
                cpu = dataclasses.replace(cpu, ordered=True, library=True, apart=False, pointer=8)
                return dataclasses.replace(cpu, lodges=True, repeats=True)
            case "gpu":
                kinds = frozenset({"all-reduce", "all-gather", "reduce-scatter"})
                return Target(contractions=False, combines=kinds, together=30 << 20)
        on_chip = max(ON_CHIP.get(kind, 0) - AT_WORK, 0)
        tpu = Target(adds_after=True, together=120 << 20, on_chip=on_chip, sinks=True, weighs=True, turns=True)
        tpu = dataclasses.replace(tpu, hoists=True, hoists_growing=False, copies_gathered=True, tiles=True, packs=True)
        return dataclasses.replace(tpu, adds_in_place=True, hides_gathers=True, turns_updates=True)
