"""Slices of TPUs as their compiler describes them; arguments are their names."""

import json
import sys

from jax.experimental import topologies

for name in sys.argv[1:]:
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    found = topologies.get_topology_desc(name, platform="tpu", **options).devices
    rows = [[list(d.coords), d.process_index, d.core_on_chip, d.device_kind] for d in found]
    print(json.dumps([name, rows]))
