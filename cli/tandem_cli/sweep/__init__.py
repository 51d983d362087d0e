"""Sweeps: many trials of a job with different settings (docs/sweeps.md, docs/decisions/0060-sweeps.md).

    definition  what a sweep tries, checked against its job, and recorded in its folder
    study       the trials, in Optuna's journal in that folder; its sampler and pruner
    promotion   which paused trials continue
    scores      the scores of a running trial, as they come in
    driver      starts, prunes and finishes trials, until the budget is used
    background  a driver in a process of its own
    best        the best trial as files: its manifest and its weights
    table       all trials as a table, and as records
    figures     pictures of all trials
    page        all trials on a page, with these pictures

A trial is an ordinary job, which the client submits. A sweep has no other state than its definition, the journal, and
the runs of its trials: a driver that was killed reads these three and continues.
"""
