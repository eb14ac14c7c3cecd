"""What `explain` says of a step. `vnode.report.step_report.Report` is what it returns; no step needs it to run."""
