"""Published rates of a step on devices of two kinds: VirtualFlow's ResNet-50 on V100 and P100 GPUs (MLSys 2022).

A global batch of 8192 examples; images per second. A ratio such as 3072:512 says how many examples of every batch each
V100 and each P100 gets: 2 * 3072 + 4 * 512 = 8192. All published ratios are multiples of 512, which is the node here.

This file knows numbers. It must not measure anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.report import Sheet
from vnode import Measurement, Profile, Profiles, balance

BATCH = 8192
NODES = 16
V100 = {2: 1969}
P100 = {2: 533, 4: 1013, 8: 1839}


@dataclass(frozen=True)
class Published:
    """A measured rate of both kinds together.

    Attributes:
        name: As published.
        counts: Nodes of 512 examples on each device.
        rate: Images per second.
    """

    name: str
    counts: Mapping[str, tuple[int, ...]]
    rate: float


PUBLISHED = (
    Published("2 V100 + 2 P100, even", {"V100": (4, 4), "P100": (4, 4)}, 978),
    Published("2 V100 + 2 P100, 3072:1024", {"V100": (6, 6), "P100": (2, 2)}, 1745),
    Published("2 V100 + 4 P100, 3072:512", {"V100": (6, 6), "P100": (1,) * 4}, 2174),
    Published("2 V100 + 8 P100, 2048:512", {"V100": (4, 4), "P100": (1,) * 8}, 2803),
)


def published_profiles(v100: int, p100: int, nodes: int = NODES) -> Profiles:
    """Profiles of so many devices from the rates of either kind alone, the batch cut into so many nodes."""

    def of(kind: str, devices: int, rates: Mapping[int, float]) -> Profile:
        return Profile(kind, devices, tuple(Measurement(d, nodes // d, BATCH / rate) for d, rate in rates.items()))

    return Profiles((of("V100", v100, V100), of("P100", p100, P100)))


def sheets() -> list[Sheet]:
    """Predicted rates beside published ones, and what is chosen."""
    profiles = published_profiles(2, 8)
    rows, errors = [], []
    for published in PUBLISHED:
        rate = BATCH / profiles.seconds(published.counts)
        errors.append(abs(rate / published.rate - 1))
        rows.append([published.name, f"{published.rate:.0f}", f"{rate:.0f}", f"{rate / published.rate - 1:+.1%}"])
    fitted = ", ".join(
        f"{p.kind} {p.node:.3f} s a node, {p.fixed:.3f} s a step, {p.peer:.4f} s a further device"
        for p in profiles.kinds
    )
    predicted = Sheet(
        "Published rates, predicted from those of one kind alone",
        ["devices", "measured", "predicted", "error"],
        rows,
        f"Images per second. Mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}. {fitted}.",
    )
    chosen = []
    for p100 in (2, 4, 8):
        for nodes in (16, 32, 64):
            found = balance(published_profiles(2, p100, nodes), nodes)
            size = BATCH // nodes
            split = [sorted({n * size for n in found.counts.get(kind, ())}, reverse=True) for kind in ("V100", "P100")]
            named = ":".join(" or ".join(map(str, part)) or "0" for part in split)
            rate = found.rate(BATCH)
            chosen.append([f"2 V100 + {p100} P100", str(size), named, f"{rate:.0f}", f"{rate / V100[2] - 1:+.1%}"])
    choice = Sheet(
        "Placements chosen",
        ["devices", "examples of a node", "split", "predicted", "gain over 2 V100"],
        chosen,
        "Examples on each V100 and each P100.",
    )
    return [predicted, choice]
