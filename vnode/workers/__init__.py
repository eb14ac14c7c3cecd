"""Workers that come and go: a supervisor without arrays starts processes, and decides which of them train together.

The environment variables by which a supervisor tells its workers who they are, and the version of their messages.
"""

SUPERVISOR = "VNODE_SUPERVISOR"
"""Where the supervisor is, ``host:port``; a process that has it is a worker."""

TOKEN_FILE = "VNODE_TOKEN_FILE"
"""The file with the token of the job."""

NUMBER = "VNODE_WORKER"
"""The number of the worker."""

JOB = "VNODE_JOB"
"""The folder of the job."""

DEVICE = "VNODE_DEVICE"
"""The device of the worker, if the job was given devices by name."""

RUN = "VNODE_RUN"
"""A mark of all processes that a worker with a device starts: the folder of the job, and the worker's number."""

CHECKPOINT = "VNODE_CHECKPOINT"
"""The folder of checkpoints that the job was given; not set if it was given none."""

INTERFACE = "VNODE_INTERFACE"
"""The address at which the worker listens for others; without it, that of the supervisor."""

PROTOCOL = 1
"""The version of the messages between a supervisor and its workers."""
