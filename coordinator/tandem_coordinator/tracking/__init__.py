"""Tracking: the run as a tracking server sees it (docs/tracking.md, docs/decisions/0043-tracking.md).

    tracker      in the coordinator: starts the process that sends (`__main__`), and hears how it gets on
    sender       what that process does, again and again
    curves       follows the run directory: which points of which curve are final
    mlflow_run   one run of MLflow, and what it has already

Only `mlflow_run` imports mlflow, and only the process that sends imports that.
"""
