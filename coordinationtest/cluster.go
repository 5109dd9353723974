// Package coordinationtest helps to test what is built on package coordination:
// an embedded Kafka cluster, on the loopback interface or on a virtual network
// for testing/synctest, and the conformance suite for implementations of
// [coordination.Transport].
package coordinationtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"testing"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A Cluster is an embedded cluster of three brokers, kept in memory. It is
// franz-go's kfake, which is more lenient than Kafka: a test on it shows how a
// service behaves through elections, not that a broker fences.
//
// It is safe for concurrent use.
type Cluster struct {
	fake    *kfake.Cluster
	network *kfake.VirtualNetwork // nil on the loopback interface
}

// NewCluster starts a cluster on free ports of the loopback interface. Options are
// kfake's and are applied after the package's own. The caller closes it.
func NewCluster(opts ...kfake.Opt) (*Cluster, error) { return newCluster(nil, opts) }

// NewVirtualCluster starts a cluster on a network in memory, for use within a
// bubble of testing/synctest, where time is virtual: transports need
// [Cluster.Dial], see [Cluster.NewTransport]. Close it, and every transport, before
// the bubble ends.
func NewVirtualCluster(opts ...kfake.Opt) (*Cluster, error) {
	network := new(kfake.VirtualNetwork)
	return newCluster(network, append([]kfake.Opt{
		kfake.ListenFn(network.Listen),
		kfake.Ports(9092, 9093, 9094),
	}, opts...))
}

func newCluster(network *kfake.VirtualNetwork, opts []kfake.Opt) (*Cluster, error) {
	fake, err := kfake.NewCluster(append([]kfake.Opt{
		kfake.NumBrokers(3),
		// Like every real cluster it has an id of its own.
		kfake.ClusterID(rand.Text()),
	}, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("start an embedded cluster: %w", err)
	}
	return &Cluster{fake: fake, network: network}, nil
}

// StartCluster is [NewCluster] for a test, which closes the cluster when it ends.
func StartCluster(tb testing.TB, opts ...kfake.Opt) *Cluster {
	tb.Helper()
	cluster, err := NewCluster(opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(cluster.Close)
	return cluster
}

// Close stops the brokers.
func (c *Cluster) Close() { c.fake.Close() }

// Fake returns the kfake cluster, to inject faults and to move leaders.
func (c *Cluster) Fake() *kfake.Cluster { return c.fake }

// Brokers returns the addresses to connect to.
func (c *Cluster) Brokers() []string { return c.fake.ListenAddrs() }

// Dial connects to a broker over the cluster's network. Pass it to
// [kgo.Dialer].
func (c *Cluster) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if c.network == nil {
		var dialer net.Dialer
		return dialer.DialContext(ctx, network, address)
	}
	return c.network.DialContext(ctx, network, address)
}

// NewTransport connects a transport to the cluster. The caller closes it.
func (c *Cluster) NewTransport(ctx context.Context, opts ...coordination.BrokerOption) (*coordination.BrokerTransport, error) {
	opts = append([]coordination.BrokerOption{
		coordination.WithClientOptions(kgo.Dialer(c.Dial)),
	}, opts...)
	return coordination.NewBrokerTransport(ctx, c.Brokers(), opts...)
}

// StartTransport is [Cluster.NewTransport] for a test, which closes the transport
// when it ends.
func (c *Cluster) StartTransport(tb testing.TB, opts ...coordination.BrokerOption) *coordination.BrokerTransport {
	tb.Helper()
	transport, err := c.NewTransport(context.Background(), opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(transport.Close)
	return transport
}
