"""Training that goes on when devices come and go."""

from vnode.elastic.restore import restore
from vnode.elastic.run import DeviceLost, Devices, Resize, Result, responds, run

__all__ = ["DeviceLost", "Devices", "Resize", "Result", "responds", "restore", "run"]
