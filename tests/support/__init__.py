"""What tests share: no test module imports another, all of them import from here.

`waiting` waits, `processes` starts and finds processes, `ports` reserves ports, `manifests` builds jobs, `checkpoints`
commits checkpoints, `clock` moves time. A *world* is part of Tandem's surroundings, real or played, that a test drives:
`worlds/` holds those that live in memory or as files, `elastic`, `local_run`, `coordinator_process`, `evaluator_run`
and `ranks` start real processes, `faults/` disturbs a save at each of its steps, `cluster/` holds a real Kubernetes
with what belongs to it, and `slurm/` a real SLURM.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
EXAMPLES = ROOT / "examples"
SCRIPTS = Path(__file__).parent / "scripts"
"""Training scripts that tests start."""
