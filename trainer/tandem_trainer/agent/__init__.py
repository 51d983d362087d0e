"""The agent of one replica: a process that talks to the coordinator, and starts and watches the replica's ranks.

torchrun     the process: torchrun with Tandem's rendezvous and warm starts
rendezvous   torchrun's rendezvous, decided by the coordinator
heartbeat    the connection to the coordinator
local_ranks  the ranks of the replica: pulses, processes, exits
finished     the end of an agent whose ranks have ended with 0
warm         ranks that are forked from a process that has imported torch
preflight    tests of a member and its network before its ranks start
gpu_watch    GPU use of ranks that do not report it
rank_output  the output of several ranks
log          the agent's own lines
"""
