module k8s.io/component-helpers

go 1.25.0

require (
	k8s.io/api v0.35.4
	k8s.io/klog/v2 v2.130.1
	upstream.invalid/component-helpers v0.35.4
)
