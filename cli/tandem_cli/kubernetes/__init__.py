"""Jobs on a cluster, through kubectl: the implementation of `tandem submit | status | logs | events`.

    kubectl     runs kubectl; Tandem's core has no client of Kubernetes of its own
    kubectl_errors  what kubectl complains of, and what to do about it
    pods        a pod as one line: where it is, how it is, and why
    events      Kubernetes Events as sentences, each said once
    job_view    all of it about one job at one moment, asked of the cluster
    tables      that view as lines of text
    records     the same as JSON
    lines       lines of logs: their time, and what of them may reach a terminal
    streams     the logs of many containers that are there already
    following   those that come, for as long as the job lives
    forwarding  the way to a job's coordinator, kept open

kubectl, job_view, streams, following and forwarding do I/O; the others compute.
"""
