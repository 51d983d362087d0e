"""Processes of a job: how they are started, supervised and ended.

launch          their commands and variables, the same on a laptop and in a pod
supervision     which children to start, stop or give up on
sync_process    the process that exchanges a pod's run directory with the bucket
exitcode        the meaning of their exit codes
requirements    the packages of a job's requirements.txt
distribution    the installed distribution
limits          limits of processes, in the words of errors
process_age     the age of a process
processor_time  processor time of a process and of all its descendants
"""
