"""What `explain` says of a step."""

from vnode.report.report import Report

__all__ = ["Report"]
