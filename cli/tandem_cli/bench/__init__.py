"""Strategies and numbers of workers beside each other, for a job of the user's own: `tandem bench`.

    variants     the jobs that are compared, each of one strategy and number of workers
    trial        trains one of them for some steps, as `tandem run` does
    measurement  what the log of such a run says
    results      all that was measured: rows, table, CSV and JSON
    picture      speed, memory and efficiency as a picture
    schedule     the recorded schedule of a pipeline: its bubble beside theory, and its picture

What is shown was measured on this machine. What a job would take elsewhere is the question of `tandem plan`.
"""
