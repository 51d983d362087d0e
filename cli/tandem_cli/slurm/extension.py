"""`tandem_launcher.slurm.extension` by the name that sbatch scripts of the version before know."""

import sys

from tandem_launcher.slurm.extension import main

if __name__ == "__main__":
    sys.exit(main())
