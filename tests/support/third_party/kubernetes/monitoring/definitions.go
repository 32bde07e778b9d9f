// Package definitions names what controller-gen makes the CustomResourceDefinitions of the Prometheus operator from.
package definitions

import _ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
