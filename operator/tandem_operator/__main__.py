"""Run the operator until SIGTERM: `python -m tandem_operator`.

--operator-image, --trainer-image, --evaluator-image   images of jobs' pods
--pull-secret NAME                                     Secret to pull these images with (may be repeated)
--pull-policy POLICY, --tolerations JSON               pull policy of these images, and tolerations of all pods of jobs
--cluster-user                                         pods of jobs run as the user that the cluster assigns (OpenShift)
--package-index URL                                    package index for the requirements.txt of a job's code
--mlflow-uri URL                                       MLflow server of tracked jobs that name none
--storage-class NAME, --access-mode MODE, --volume-size SIZE    defaults of jobs' claims
--namespace NAME                                       namespace to reconcile (may be repeated); default: all
--key-secret NAMESPACE/NAME                            Secret with the key of the jobs' tokens; created if missing
--identity NAME, --lease-namespace NAME, --no-lease    leader election among operators (leader.py)
--template-field PATH[=VALUE]                          field that templates may set (may be repeated); default: all
--operator-from JSON, --metrics-from JSON              create a NetworkPolicy for each job: who else reaches its pods
--patience SECONDS                                     time until a job that cannot start backs off for another one
--port PORT                                            port of /metrics, /healthz and /readyz
"""

import asyncio
import logging
import sys

import kopf

from tandem.processes.exitcode import ExitCode
from tandem_operator import bounded, handlers
from tandem_operator.options import parse


def main() -> int:
    """Run the operator until SIGTERM. Returns the exit code."""
    options = parse()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    # kopf logs each watch a hundred times a minute.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    bounded.prepare()
    try:
        memo, namespaces = kopf.Memo(options=options), options.namespaces
        asyncio.run(handlers.run(memo, clusterwide=not namespaces, namespaces=namespaces))
    except Exception as error:
        # kopf wraps what a handler raises.
        if not isinstance(error.__cause__, kopf.PermanentError):
            raise
        print(f"tandem_operator: {error.__cause__}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
