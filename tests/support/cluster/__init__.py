"""A real Kubernetes, and what tests run on it or beside it."""

import os

import pytest

from tests.support.cluster.machine.places import KUBECONFIG

ELSEWHERE = "on somebody's own cluster"
ON_OUR_OWN = pytest.mark.skipif(os.environ.get("KUBECONFIG", str(KUBECONFIG)) != str(KUBECONFIG), reason=ELSEWHERE)
"""For a test that takes a node away, or needs a setting of the cluster itself."""
