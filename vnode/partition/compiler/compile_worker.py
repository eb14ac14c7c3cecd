"""A folder with a compile request -> ``result.json`` in it: one program, compiled in a process of its own.

    python -m vnode.partition.compiler.compile_worker FOLDER

A separate process can be ended at the deadline, and contains a crash of the compiler. It ends when its standard input
closes, so that it never outlives its parent.

Knows requests and jax. Must not know who asks, nor what for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


def end_with_parent() -> None:
    """Ends this process when its parent ends."""
    while os.read(0, 1):
        pass
    os._exit(1)


class LoadedProgram:
    """XLA's executable in the form of a `jax.stages.Compiled`."""

    def __init__(self, executable: Any, tpu: bool) -> None:
        self.executable, self.tpu = executable, tpu

    def memory_analysis(self) -> Any:
        """Bytes of one device, by use."""
        return self.executable.get_compiled_memory_stats()

    def as_text(self) -> str:
        """The compiled program."""
        return "\n\n".join(module.to_string() for module in self.executable.hlo_modules())

    def runtime_executable(self) -> Any:
        """The executable."""
        return self.executable


def compile_folder(folder: Path) -> dict[str, Any]:
    """Compiles the request of a folder.

    Args:
      folder: with ``module.mlir``, ``options.pb`` and ``request.json``.

    Returns:
      As `vnode.partition.compiler.pool.compile_answer`.
    """
    import jax

    from vnode.compat import compile_requested
    from vnode.partition.compiler.pool import compile_answer
    from vnode.partition.compiler.target import Topology

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    topology = request["topology"]
    known = jax.devices("cpu") if topology is None else Topology(**topology).devices()
    by_id = {device.id: device for device in known}
    devices = [by_id[n] for n in request["devices"]]
    module, options = (folder / "module.mlir").read_bytes(), (folder / "options.pb").read_bytes()

    def make() -> LoadedProgram:
        return LoadedProgram(compile_requested(module, options, devices, request["draft"]), topology is not None)

    return compile_answer(make, request["over_nodes"])


def main() -> None:
    """Compiles the request of the folder that is named on the command line."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    folder = Path(sys.argv[1])
    try:
        result = compile_folder(folder)
        beside = folder / "result.json.part"
        beside.write_text(json.dumps(result), encoding="utf-8")
        os.replace(beside, folder / "result.json")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # nothing of a compiler needs to be taken down


if __name__ == "__main__":
    main()
