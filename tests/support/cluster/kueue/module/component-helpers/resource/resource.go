// Package resource is upstream's, as far as it is used.
package resource

import "upstream.invalid/component-helpers/resource"

// PodResourcesOptions says how a pod's requests are counted.
type PodResourcesOptions = resource.PodResourcesOptions

// PodRequests are a pod's.
var PodRequests = resource.PodRequests
