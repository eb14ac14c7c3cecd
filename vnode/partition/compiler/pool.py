"""Lowered programs -> the compiler's figures of each: several at a time, cached on disk, ended at a deadline.

    with CompilePool(target) as pool:
        job = pool.submit(step.lower(state, batch))
        pool.wait([job], until=time.monotonic() + 30)
    job.stats            # CompiledStats; None where time was over, or the program was refused
    job.outcome          # "compiled", "refused: needs 18.5 GiB", "not compiled: time was over"

Knows processes, files and targets. Must not know plans, or why a program is compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from vnode.compat import DRAFT_OPTIONS, CompileRequest, compile_request
from vnode.errors import ProfileError
from vnode.partition.compiler.stats import CompiledStats, compiled_stats
from vnode.partition.compiler.target import CompileTarget
from vnode.partition.cost.cache import Cache
from vnode.plan.nodes.device_memory import memory_refusal
from vnode.show.units import size

AT_ONCE = 2
"""Most compilations at a time: a compiler needs gigabytes for a large program."""

CORES = 2
"""Cores per compilation: with fewer, one finished compilation is worth more than two unfinished ones."""

POLL = 0.05
"""Seconds between two looks at processes."""


def usable_cores() -> int:
    """Cores on which this process may run: a container or a batch system may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(eq=False)
class CompileJob:
    """The compilation of a program.

    Attributes:
      stats: the compiler's figures; None until it has finished, or if it refuses the program.
      refused: whether the program does not fit in the devices' memory.
      needed: bytes that a refused program needs, if the compiler reports them.
      failure: the compiler's message, if it failed for another reason.
    """

    stats: CompiledStats | None = None
    refused: bool = False
    needed: int | None = None
    failure: str = ""

    @property
    def done(self) -> bool:
        """Whether the compiler has finished."""
        return self.stats is not None or self.refused or bool(self.failure)

    @property
    def outcome(self) -> str:
        """The result in words."""
        if self.stats is not None:
            return "compiled"
        if self.refused:
            return "refused" + (f": needs {size(self.needed)}" if self.needed else "")
        return f"failed: {self.failure}" if self.failure else "not compiled: time was over"

    def answer(self, content: Any) -> None:
        """Takes in the answer of `compile_answer`.

        Raises:
          ValueError, KeyError or TypeError: it is nothing of the kind.
        """
        if "stats" in content:
            self.stats = CompiledStats.from_json(content["stats"])
        elif content.get("refused"):
            self.refused, self.needed = True, None if content["needed"] is None else int(content["needed"])
        else:
            self.failure = str(content["failed"])


def compile_answer(make: Callable[[], Any], over_nodes: int | None) -> dict[str, Any]:
    """Compiles a program.

    Args:
      make: compiles it; returns what `compiled_stats` takes.
      over_nodes: total trip count of loops over a device's nodes, where the compiled text lacks it.

    Returns:
      ``{"stats": ...}``; or ``{"refused": True, "needed": bytes or None}`` where it does not fit; or ``{"failed":
      message}``.
    """
    try:
        return {"stats": dataclasses.asdict(compiled_stats(make(), over_nodes))}
    except jax.errors.JaxRuntimeError as error:
        refused, needed = memory_refusal(error)
        return {"refused": True, "needed": needed} if refused else {"failed": str(error).splitlines()[0][:500]}


@dataclasses.dataclass(eq=False)
class _Queued:
    """A job with what its compilation needs."""

    job: CompileJob
    lowered: jax.stages.Lowered
    request: CompileRequest
    key: dict[str, str]
    over_nodes: int | None
    draft: bool
    process: subprocess.Popen[bytes] | None = None
    folder: Path | None = None


class CompilePool:
    """Compiles lowered programs for one target.

    Programs for TPU topologies and for CPU devices are compiled in processes of their own, which are ended when time is
    over. Those for accelerators of this process are compiled in it, one at a time, and cannot be ended.

    Args:
      target: the devices that programs were lowered for.
      cache: where answers are kept; by default in the user's cache folder.
    """

    def __init__(self, target: CompileTarget, cache: Cache | None = None) -> None:
        self.target, self.cache = target, Cache() if cache is None else cache
        self.separate = target.separate and bool(sys.executable)
        self.queue: list[_Queued] = []

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._end(self.queue)

    def submit(self, lowered: jax.stages.Lowered, over_nodes: int | None = None, *, draft: bool = False) -> CompileJob:
        """Begins to compile a program, unless the answer is on disk or others are compiled.

        Args:
          lowered: the program.
          over_nodes: how often loops over a device's nodes run whose length the compiled text does not tell.
          draft: whether to compile with few optimizations. That is several times as fast. The program is slower and
            mostly larger, but programs compare with each other almost as they do fully optimized.
        """
        request, job = compile_request(lowered), CompileJob()
        digest = hashlib.sha256(request.text.encode()).hexdigest()
        key = {
            **self.target.key,
            "program": digest,
            "over_nodes": str(over_nodes),
            **({"draft": "O1"} if draft else {}),
        }
        known = self.cache.get(key)
        if known is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                job.answer(known)
        if not job.done:
            self.queue.append(_Queued(job, lowered, request, key, over_nodes, draft))
            self._advance()
        return job

    def wait(self, jobs: Sequence[CompileJob], until: float) -> None:
        """Waits until jobs are done, or time is over: then those that are not are ended.

        Args:
          jobs: of this pool.
          until: by `time.monotonic`.
        """
        self._advance()
        while not all(job.done for job in jobs) and time.monotonic() < until:
            if self.separate:
                time.sleep(POLL)
                self._advance()
            else:
                self._compile_here(next(each for each in self.queue if each.job in jobs))
        self._end([each for each in self.queue if each.job in jobs])

    def _advance(self) -> None:
        """Takes in the answers of processes, and starts the next ones."""
        if not self.separate:
            return
        for each in [each for each in self.queue if each.process is not None and each.process.poll() is not None]:
            self._take(each, self._answer_of_process(each))
        cores = usable_cores()
        for each in self.queue:
            most = max(min(AT_ONCE, cores if each.draft else cores // CORES), 1)
            if sum(other.process is not None for other in self.queue) >= most:
                break
            if each.process is None:
                self._begin(each)

    def _take(self, each: _Queued, content: dict[str, Any]) -> None:
        """Takes an answer; failures are not cached."""
        each.job.answer(content)
        self._end([each])
        if not each.job.failure:
            with contextlib.suppress(ProfileError):  # the folder cannot be written to: asked again next time
                self.cache.put(each.key, content)

    def _begin(self, each: _Queued) -> None:
        each.folder = Path(tempfile.mkdtemp(prefix="vnode-compile-"))
        (each.folder / "module.mlir").write_bytes(each.request.module)
        (each.folder / "options.pb").write_bytes(each.request.options)
        topology = self.target.topology
        content = {
            "topology": None if topology is None else dataclasses.asdict(topology),
            "devices": [device.id for device in self.target.devices],
            "over_nodes": each.over_nodes,
            "draft": each.draft,
        }
        (each.folder / "request.json").write_text(json.dumps(content), encoding="utf-8")
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        with (each.folder / "stderr").open("wb") as errors:
            each.process = subprocess.Popen(
                [sys.executable, "-m", "vnode.partition.compiler.compile_worker", str(each.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **self.target.environment(), "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for whoever searches
            )

    def _answer_of_process(self, each: _Queued) -> dict[str, Any]:
        """The answer of a process that has ended."""
        assert each.process is not None and each.folder is not None
        try:
            content = json.loads((each.folder / "result.json").read_text(encoding="utf-8"))
            CompileJob().answer(content)
        except (OSError, ValueError, KeyError, TypeError):
            said = (each.folder / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            code = each.process.returncode
            return {"failed": f"the compiler's process ended with {code}: {(said or [''])[-1][:300]}"}
        return content

    def _compile_here(self, each: _Queued) -> None:
        options = DRAFT_OPTIONS if each.draft else None
        answer = compile_answer(lambda: each.lowered.compile(compiler_options=options), each.over_nodes)
        self._take(each, answer)

    def _end(self, several: Sequence[_Queued]) -> None:
        """Takes jobs out of the queue, and ends their processes."""
        for each in [*several]:
            self.queue.remove(each)
            if each.process is not None:
                if each.process.poll() is None:
                    each.process.kill()
                    each.process.wait()
                if each.process.stdin is not None:
                    each.process.stdin.close()
            if each.folder is not None:
                shutil.rmtree(each.folder, ignore_errors=True)
