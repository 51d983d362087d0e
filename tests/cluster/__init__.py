"""Tests on a real Kubernetes: `make e2e` runs them on the cluster in KUBECONFIG, or on one that it starts itself."""
