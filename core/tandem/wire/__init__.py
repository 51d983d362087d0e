"""The wire: what processes of a job, the operator, commands and Prometheus say to each other.

protocol            messages between agents and the coordinator, and their versions
queue_view          the queue of a job: its place, the missing quota, and who has it
status              the status of a job: of the coordinator, of commands, of the resource
reasons             one word for each condition and Event
measures            the numbers that several views show
ledger              the use of resources by purpose, and its cost
wall_time           the wall time of a run by cause
trace               the time around each generation's start, divided into spans
save_interval       the interval of saves that costs least
metrics             every Prometheus metric
stacks              stacks of ranks, for `tandem debug`
coordinator_client  the client of a coordinator
http_server         the server of the operator and of coordinators
"""
