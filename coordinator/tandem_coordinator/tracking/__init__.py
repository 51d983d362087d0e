"""Tracking: the run as a tracking server sees it (docs/tracking.md, docs/decisions/0043-tracking.md).

    __main__     the process that sends; the coordinator starts it (tandem_coordinator.run_sender)
    sender       the work of that process: sends what is new
    curves       follows the run directory: which points of which curve are final
    mlflow_run   one run of MLflow, and the points that it has

Only `mlflow_run` imports mlflow, and only the process that sends imports that.
"""
