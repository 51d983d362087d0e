"""`tandem_launcher.slurm.head` by the name that sbatch scripts of the version before know."""

import sys

from tandem_launcher.slurm.head import main

if __name__ == "__main__":
    sys.exit(main())
