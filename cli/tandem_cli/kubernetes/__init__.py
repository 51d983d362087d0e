"""Jobs on a cluster, through kubectl: the implementation of `tandem submit | status | logs | events | debug | shell |
copy`.

    platform    a job, for the commands that work on every platform
    submission  gives jobs to the cluster
    kubectl     runs kubectl, and explains its errors
    references  the objects that a job refers to by name
    job_view    one job at one moment, with its pods and events, fetched from the cluster
    pod_spans   queueing and image pulls of pods, for traces
    following   the logs of all containers, until the job ends
    execution   commands in pods: the stacks of ranks, a shell
    copying     the run directory of a job, on this machine
    forwarding  a connection to a job's coordinator
    upload      the job's packed code, over that connection

All of them run kubectl.
"""
