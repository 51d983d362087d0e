// Package corev1 is upstream's, as far as it is used, with the signature that it had until v0.34.
package corev1

import (
	"slices"

	"k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// FindMatchingUntoleratedTaint is the first taint that the filter lets through and nothing tolerates, if there is one.
// Taints are not compared by number: nobody did in v0.34.
func FindMatchingUntoleratedTaint(
	taints []v1.Taint, tolerations []v1.Toleration, filter func(*v1.Taint) bool,
) (v1.Taint, bool) {
	for _, taint := range taints {
		tolerates := func(one v1.Toleration) bool { return one.ToleratesTaint(klog.Background(), &taint, false) }
		if (filter == nil || filter(&taint)) && !slices.ContainsFunc(tolerations, tolerates) {
			return taint, true
		}
	}
	return v1.Taint{}, false
}
