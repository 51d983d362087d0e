"""The coordinator: one small process per job that alone decides the membership of the training group.

coordinator          the shell: passes events to membership, carries out its actions
membership           who is in the group: the state machine `(state, event, now) -> (state, actions)`
group_state          its state, events and actions
forming              when a generation is formed, and from which agents
closing              when a generation ends: the group shrinks, grows, is preempted, or has finished
failures             the cause of a failure, the replica at fault, exclusions, backoff
hang                 when a group counts as hung
preflight            tests of members before their ranks start
straggler            ranks that are slower than the others
state_store          `coordinator.json`
server               the HTTP interface
snapshots            the status, built from all of these
prometheus           values of the metrics (names: tandem.wire.metrics)
progress             progress from the reports of ranks
history              recent generations and events
goodput              the wall time of a job by cause
ledger               seconds of workers and evaluators by purpose
run_watcher          the run directory: checkpoints, evaluations, the end
log_followers        its logs
foreign_checkpoints  checkpoints that scripts write themselves
base_watch           the best checkpoint compared with the base model
optimizer_watch      checkpoints whose optimizer is of another step
weights_watch        checkpoints whose weights did not change
provenance_log       the provenance of a run
code_intake          the job's code from `tandem submit --code`
run_sender           processes that send the run elsewhere
tracking             the one for MLflow
tracing              the one for an OTLP collector
prerequisites        what a job needs, checked before it starts
page                 the live page
charts               charts of the page and of `tandem report`
"""
