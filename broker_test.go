package coordination_test

import (
	"testing"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
)

func TestBrokerTransportConforms(t *testing.T) {
	cluster := coordinationtest.StartCluster(t)
	coordinationtest.TestTransport(t, func(t *testing.T) coordination.Transport {
		return cluster.StartTransport(t)
	})
}
