"""`tandem bench`: measures strategies and numbers of workers beside each other, for a job of the user.

    variants     the jobs that are compared, each of one strategy and number of workers
    trial        trains one of them for some steps, as `tandem run` does
    measurement  speed, memory and loss, from the log of such a run
    results      all measurements: rows, table, CSV and JSON
    picture      speed, memory and efficiency as a picture
    schedule     the recorded schedule of a pipeline: its bubble beside theory, and its picture

All figures are measured on this machine. `tandem plan` estimates what a job would need elsewhere.
"""
