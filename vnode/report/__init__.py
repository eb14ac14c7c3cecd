"""The report of a step, `vnode.report.step_report.Report`, which `explain` returns; no step needs it to run."""
