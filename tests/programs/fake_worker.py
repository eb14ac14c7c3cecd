"""A worker that trains nothing: it speaks the protocol of `vnode.workers`, and counts steps by the clock.

Knows `vnode.workers.wire`. Must not know jax. Its argument is JSON: `steps` to do, `nodes`, `rate` of steps per second,
and by worker number (as text) what is odd about it in `odd`:

    never       it does not arrive
    quiet       it ends with exit code 0 and says nothing
    unprepared  it cannot prepare generations from the second on
    deaf        it does not answer `leave`
    other       its script has another checksum
    error       it raises at that step
    code        its exit code after the run
"""

import json
import os
import sys
import threading
import time

from vnode.workers.wire import Channel, WireError

OPTIONS = json.loads(sys.argv[1])
NUMBER = int(os.environ["VNODE_WORKER"])
ODD = OPTIONS.get("odd", {}).get(str(NUMBER), {})
RATE, STEPS = OPTIONS.get("rate", 100), OPTIONS.get("steps", 10**9)
STATE = {"step": -1, "generation": 0, "finished": False}


def signs_of_life(channel: Channel) -> None:
    while True:
        channel.send(
            {
                "kind": "progress",
                "generation": STATE["generation"],
                "step": max(STATE["step"], 0),
                "doing": "counts" if STATE["generation"] else "waits",
                "nodes": 2 if STATE["generation"] else 0,
                "metrics": {"loss": 0.5},
                "waits": False,
            }
        )
        time.sleep(0.05)


def main() -> None:
    if ODD.get("quiet"):
        return
    with open(os.environ["VNODE_TOKEN_FILE"]) as file:
        token = file.read()
    print(f"I am {NUMBER}")
    print(f"worker {NUMBER} complains", file=sys.stderr)
    channel = Channel.connect(os.environ["VNODE_SUPERVISOR"])
    hello = {"kind": "hello", "protocol": 1, "worker": NUMBER, "pid": os.getpid(), "host": "here", "token": token}
    channel.send(hello)
    if ODD.get("never"):
        time.sleep(1000)
    arrived = {
        "kind": "arrived",
        "call": 0,
        "facts": {"script": "changed" if ODD.get("other") else "the same"},
        "handover": f"127.0.0.1:{NUMBER}",
        "virtual_nodes": OPTIONS.get("nodes", 8),
        "checkpoint": OPTIONS.get("checkpoint"),
        "steps": STEPS,
    }
    channel.send(arrived)
    threading.Thread(target=signs_of_life, args=(channel,), daemon=True).start()
    before = time.monotonic()
    while True:
        if STATE["generation"] and not STATE["finished"]:
            now = time.monotonic()
            STATE["step"] += int((now - before) * RATE)
            before += int((now - before) * RATE) / RATE
            if "error" in ODD and STATE["step"] >= ODD["error"]:
                channel.send({"kind": "error", "text": f"ValueError: worker {NUMBER} is odd", "step": STATE["step"]})
                sys.exit(1)
            if STATE["step"] >= STEPS:
                said = {"kind": "finished", "generation": STATE["generation"], "step": STEPS, "reason": ""}
                channel.send(said)
                time.sleep(0.1)
                sys.exit(ODD.get("code", 0))
        try:
            message = channel.receive(0.01)
        except TimeoutError:
            continue
        kind = message["kind"]
        if kind == "prepare":
            number = message["generation"]
            if ODD.get("unprepared") and number > 1:
                channel.send({"kind": "unprepared", "generation": number, "error": "MemoryError: too small"})
            else:
                channel.send({"kind": "prepared", "generation": number, "seconds": 0.01})
        elif kind == "go":
            STATE["generation"], before = message["generation"], time.monotonic()
            if message["step"] is not None:
                STATE["step"] = max(message["step"], 0)
            channel.send({"kind": "switched", "generation": message["generation"], "step": max(STATE["step"], 0)})
        elif kind == "leave" and not ODD.get("deaf"):
            STATE["generation"] = 0
            channel.send({"kind": "left", "generation": message["generation"], "step": STATE["step"]})
        elif kind == "release":
            STATE["generation"] = 0
            channel.send(arrived)
        elif kind == "end":
            sys.exit(message["code"])
        elif kind == "stop":
            said = {"kind": "finished", "generation": STATE["generation"], "step": STATE["step"], "reason": "stopped"}
            channel.send(said)
            sys.exit(0)


try:
    main()
except WireError:
    print(f"worker {NUMBER}: the supervisor is gone", file=sys.stderr)
    os._exit(75)
