// Package nodeaffinity is upstream's, as far as it is used.
package nodeaffinity

import "upstream.invalid/component-helpers/scheduling/corev1/nodeaffinity"

// RequiredNodeAffinity is what a pod asks of its node.
type RequiredNodeAffinity = nodeaffinity.RequiredNodeAffinity

// GetRequiredNodeAffinity is a pod's.
var GetRequiredNodeAffinity = nodeaffinity.GetRequiredNodeAffinity
