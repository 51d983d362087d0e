"""Tracking: the run as a tracking server sees it (docs/tracking.md, docs/decisions/0043-tracking.md).

    tracker      in the coordinator: starts the process that sends, and hears how it gets on
    __main__     that process: `python -m tandem_coordinator.tracking`
    curves       follows the run directory: which points of which curve are final
    mlflow_run   one run of MLflow, and what it has already

Only `mlflow_run` imports mlflow, and only the process that sends imports `mlflow_run`.
"""
