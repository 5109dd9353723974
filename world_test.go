package coordination_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if beMember() {
		return
	}
	goleak.VerifyTestMain(m)
}

// A world is a cluster and the machines around it.
type world struct {
	*testing.T
	ctx         context.Context
	cluster     *coordinationtest.Cluster // nil on a real Kafka
	brokers     []string
	dial        func(ctx context.Context, network, address string) (net.Conn, error)
	replication int16
	role        coordination.Role
	lease       coordination.LeaseConfig
}

// inVirtualTime runs a test in a bubble, around a cluster of three brokers. The
// lease is 3 s, renewed each second, with a stagger of 500 ms.
func inVirtualTime(t *testing.T, test func(w *world), opts ...kfake.Opt) {
	synctest.Test(t, func(t *testing.T) {
		cluster, err := coordinationtest.NewVirtualCluster(opts...)
		require.NoError(t, err)
		t.Cleanup(cluster.Close)
		lease, err := coordination.LeaseConfigFor(3 * time.Second)
		require.NoError(t, err)
		test(&world{
			T: t, ctx: t.Context(),
			cluster: cluster, brokers: cluster.Brokers(), dial: cluster.Dial, replication: 3,
			role: coordination.MustRole("payments"), lease: lease,
		})
	})
}

// A machine is a process with its own network and its own transport.
type machine struct {
	w         *world
	transport *coordination.BrokerTransport
	network   *network
}

func (w *world) machine(opts ...coordination.BrokerOption) *machine {
	w.Helper()
	n := &network{dial: w.dial}
	opts = append([]coordination.BrokerOption{
		coordination.WithClientOptions(kgo.Dialer(n.DialContext)),
		coordination.WithReplication(w.replication),
		coordination.WithLogger(slog.New(slog.NewTextHandler(w.Output(), nil))),
	}, opts...)
	transport, err := coordination.NewBrokerTransport(w.ctx, w.brokers, opts...)
	require.NoError(w, err)
	w.Cleanup(func() {
		n.heal()
		transport.Close()
	})
	return &machine{w, transport, n}
}

// elector makes a member on the machine.
func (m *machine) elector(id string, opts ...coordination.ElectorOption) *coordination.Elector {
	m.w.Helper()
	opts = append([]coordination.ElectorOption{
		coordination.WithLease(m.w.lease),
		coordination.WithLogger(slog.New(slog.NewTextHandler(m.w.Output(), nil)).With("member", id)),
	}, opts...)
	elector, err := coordination.NewElector(m.transport, m.w.role, coordination.MustMemberID(id), opts...)
	require.NoError(m.w, err)
	return elector
}

// lead campaigns to the end.
func (w *world) lead(e *coordination.Elector) *coordination.Leadership {
	w.Helper()
	l, err := e.Campaign(w.ctx)
	require.NoError(w, err)
	return l
}

// term mints an epoch of the role without a campaign.
func (m *machine) term(id string) (coordination.Term, coordination.FencingToken) {
	m.w.Helper()
	follower, err := m.transport.Follow(m.w.ctx, m.w.role, coordination.MustMemberID(id))
	require.NoError(m.w, err)
	m.w.Cleanup(follower.Close)
	term, err := m.transport.NewTerm(m.w.role, coordination.TermConfig{TransactionTimeout: time.Second, AttemptTimeout: time.Second})
	require.NoError(m.w, err)
	m.w.Cleanup(term.Close)
	token, err := term.Mint(m.w.ctx)
	require.NoError(m.w, err)
	return term, token
}

// A campaign is one under way.
type campaign struct {
	w    *world
	done chan struct{}
	l    *coordination.Leadership
	err  error
	at   time.Time
}

// standBy starts a campaign and returns once the member is in the roster.
func (w *world) standBy(e *coordination.Elector) *campaign {
	w.Helper()
	c := &campaign{w: w, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.l, c.err = e.Campaign(w.ctx)
		c.at = time.Now()
	}()
	w.await("standby", func() bool { return e.Status().Phase == coordination.PhaseStandby })
	return c
}

func (c *campaign) won() *coordination.Leadership {
	c.w.Helper()
	<-c.done
	require.NoError(c.w, c.err)
	return c.l
}

func (c *campaign) over() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// await looks every millisecond of virtual time.
func (w *world) await(what string, ok func() bool) {
	w.Helper()
	for range 600_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	require.FailNow(w, "it never came to this", what)
}

// view reads the role, from a machine of its own.
func (w *world) view() coordination.RoleView {
	w.Helper()
	transport, err := coordination.NewBrokerTransport(w.ctx, w.brokers, coordination.WithClientOptions(kgo.Dialer(w.dial)))
	require.NoError(w, err)
	defer transport.Close()
	view, err := transport.Read(w.ctx, w.role)
	require.NoError(w, err)
	return view
}

// client makes a plain client, which the test closes.
func (w *world) client(opts ...kgo.Opt) *kgo.Client {
	w.Helper()
	client, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(w.brokers...), kgo.Dialer(w.dial), kgo.DisableClientMetrics(),
	}, opts...)...)
	require.NoError(w, err)
	w.Cleanup(client.Close)
	return client
}

// raw appends a record to the state topic as anybody might.
func (w *world) raw(partition int32, key, value []byte) {
	w.Helper()
	client := w.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	record := &kgo.Record{Topic: coordination.StateTopic, Partition: partition, Key: key, Value: value}
	require.NoError(w, client.ProduceSync(w.ctx, record).FirstErr())
}

// forge encodes a record for raw.
func (w *world) forge(key coordination.Key, value coordination.Record) (int32, []byte, []byte) {
	w.Helper()
	partition, err := coordination.RolePartition(key.Role, 16)
	require.NoError(w, err)
	k, err := coordination.EncodeKey(key)
	require.NoError(w, err)
	v, err := coordination.EncodeValue(value)
	require.NoError(w, err)
	return partition, k, v
}

// A network is the cable between a machine and the cluster. Cut, it delivers
// nothing and refuses nothing: both ends wait, as they do when a packet is lost.
type network struct {
	dial func(ctx context.Context, network, address string) (net.Conn, error)

	mu      sync.Mutex           // guards what follows
	cutUp   chan struct{}        // nil while the cable is whole
	request func(key int16) bool // called for each request; false: it is lost
}

func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cutUp == nil {
		n.cutUp = make(chan struct{})
	}
}

func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cutUp != nil {
		close(n.cutUp)
		n.cutUp = nil
	}
}

// pass waits until the cable is whole.
func (n *network) pass(done <-chan struct{}) error {
	for {
		n.mu.Lock()
		wait := n.cutUp
		n.mu.Unlock()
		if wait == nil {
			return nil
		}
		select {
		case <-wait:
		case <-done:
			return errors.New("the network is cut")
		}
	}
}

func (n *network) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if err := n.pass(ctx.Done()); err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	conn, err := n.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &cable{Conn: conn, network: n, closed: make(chan struct{})}, nil
}

type cable struct {
	net.Conn
	network *network
	once    sync.Once
	closed  chan struct{}
}

func (c *cable) Write(b []byte) (int, error) {
	if err := c.network.pass(c.closed); err != nil {
		return 0, err
	}
	c.network.mu.Lock()
	request := c.network.request
	c.network.mu.Unlock()
	// A request begins with its length and its kind.
	if request != nil && len(b) >= 6 && !request(int16(binary.BigEndian.Uint16(b[4:]))) {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// watch has each request looked at before it is sent, and lost if it says so.
func (n *network) watch(request func(key int16) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.request = request
}

func (c *cable) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if cut := c.network.pass(c.closed); cut != nil {
		return 0, cut
	}
	return n, err
}

func (c *cable) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}
