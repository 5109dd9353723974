package coordination_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The tests in this file hold the error table of docs/guarantees.md: each way to
// write, under each fault, has to tell the truth about what is in the log and about
// the leadership.

// A result is a row of the table.
type result string

const (
	committed result = "nil"
	rejected  result = "RejectedError"
	notHeld   result = "ErrNotHeld"
	unknown   result = "OutcomeUnknownError"
	withdrawn result = "the context's cause"
	other     result = "any other"
)

// resultOf finds the row of an error. It must be in one only.
func resultOf(err error) result {
	if err == nil {
		return committed
	}
	var is []result
	if rejection := new(coordination.RejectedError); errors.As(err, &rejection) {
		is = append(is, rejected)
	}
	if errors.Is(err, coordination.ErrNotHeld) {
		is = append(is, notHeld)
	}
	if errors.Is(err, coordination.ErrOutcomeUnknown) {
		is = append(is, unknown)
	}
	if errors.Is(err, errEndedByTest) {
		is = append(is, withdrawn)
	}
	switch len(is) {
	case 0:
		return other
	case 1:
		return is[0]
	}
	return result("several rows at once: " + err.Error())
}

var errEndedByTest = errors.New("ended by the test")

// A way is one to write records.
type way func(ctx context.Context, l *coordination.Leadership, records []*kgo.Record) error

var ways = map[string]way{
	"Produce": func(ctx context.Context, l *coordination.Leadership, records []*kgo.Record) error {
		return l.Produce(ctx, records...)
	},
	"ProduceAsync": func(ctx context.Context, l *coordination.Leadership, records []*kgo.Record) error {
		promised := make(chan error, 1)
		l.ProduceAsync(ctx, func(_ []*kgo.Record, err error) { promised <- err }, records...)
		return <-promised
	},
	"Transact": func(ctx context.Context, l *coordination.Leadership, records []*kgo.Record) error {
		return l.Transact(ctx, func(_ context.Context, tx *coordination.Tx) error { return tx.Produce(records...) })
	},
	"Transact with offsets": func(ctx context.Context, l *coordination.Leadership, records []*kgo.Record) error {
		return l.Transact(ctx, func(_ context.Context, tx *coordination.Tx) error {
			read := make(kadm.Offsets)
			read.AddOffset(records[0].Topic, 0, 7, -1)
			return errors.Join(tx.Produce(records...), tx.CommitOffsets(l.Role().String(), read))
		})
	},
}

// A trial is one call under one fault.
type trial struct {
	*world
	machine *machine
	leader  *coordination.Leadership
	minter  *kgo.Client
	topic   string
	records []*kgo.Record // to be written; a fault may add some

	ctx     context.Context // of the call
	cancel  context.CancelCauseFunc
	calling chan struct{} // closed when the call is about to be made
	over    func()        // called when the call has returned
}

// on calls f once, for the first request of a kind; what it returns says whether
// that is delivered.
func (t *trial) on(kind kmsg.Key, f func() bool) {
	var once sync.Once
	t.machine.network.watch(func(key int16) bool {
		pass := true
		if key == int16(kind) {
			once.Do(func() { pass = f() })
		}
		return pass
	})
}

// lose loses the first request of a kind, or, silently, all from there on.
func (t *trial) lose(kind kmsg.Key, rest bool) {
	t.on(kind, func() bool {
		if rest {
			t.machine.network.cut()
		}
		return false
	})
}

// mint makes a newer epoch, as a successor does.
func (t *trial) mint() {
	if _, _, err := t.minter.ProducerID(t.world.ctx); err != nil {
		t.Errorf("mint: %v", err)
	}
}

// busy has another call keep the committer for as long as the network is cut.
func (t *trial) busy() {
	t.machine.network.cut()
	stuck := make(chan error, 1)
	go func() {
		stuck <- t.leader.Produce(t.world.ctx, &kgo.Record{Topic: t.topic, Value: []byte("stuck")})
	}()
	time.Sleep(100 * time.Millisecond) // nobody can join it any more
	t.over = func() {
		t.machine.network.heal()
		<-stuck
	}
}

// after does something once the call waits.
func (t *trial) after(f func()) {
	go func() {
		<-t.calling
		time.Sleep(50 * time.Millisecond)
		f()
	}()
}

// faults are the ways to fail, each with the rows that it may end in, and whether the
// member must still lead then.
var faults = []struct {
	name    string
	strike  func(t *trial)
	results []result
	leading bool
}{
	{"nothing", func(*trial) {}, []result{committed}, true},
	{"a record is too large", func(t *trial) {
		t.records = append(t.records, &kgo.Record{Topic: t.topic, Value: make([]byte, 8<<20)})
	}, []result{rejected}, true},
	{"a topic does not exist", func(t *trial) {
		t.records = append(t.records, &kgo.Record{Topic: "missing", Value: []byte("x")})
	}, []result{rejected}, true},
	{"a topic is deleted", func(t *trial) {
		doomed := t.world.topic()
		require.NoError(t, t.leader.Produce(t.world.ctx, &kgo.Record{Topic: doomed, Value: []byte("x")}))
		_, err := t.admin().DeleteTopic(t.world.ctx, doomed)
		require.NoError(t, err)
		t.await("the brokers to know", func() bool {
			topics, err := t.admin().ListTopics(t.world.ctx, doomed)
			require.NoError(t, err)
			return topics[doomed].Err != nil
		})
		t.records = append(t.records, &kgo.Record{Topic: doomed, Value: []byte("x")})
	}, []result{rejected}, true},
	{"the context ends while the call is queued", func(t *trial) {
		t.busy()
		t.after(func() { t.cancel(errEndedByTest) })
	}, []result{withdrawn}, true},
	{"the leader resigns while the call is queued", func(t *trial) {
		t.busy()
		t.after(func() { _ = t.leader.Resign(t.world.ctx) })
	}, []result{notHeld}, false},
	{"another has minted", func(t *trial) { t.mint() }, []result{notHeld}, false},
	{"another mints when the records are written", func(t *trial) {
		t.on(kmsg.EndTxn, func() bool { t.mint(); return true })
	}, []result{notHeld}, false},
	{"the network is cut", func(t *trial) { t.machine.network.cut() }, []result{notHeld}, false},
	{"AddPartitionsToTxn is lost", func(t *trial) { t.lose(kmsg.AddPartitionsToTxn, false) }, []result{committed, notHeld}, false},
	{"Produce is lost", func(t *trial) { t.lose(kmsg.Produce, false) }, []result{committed, notHeld}, false},
	{"the network is cut at Produce", func(t *trial) { t.lose(kmsg.Produce, true) }, []result{notHeld}, false},
	{"EndTxn is lost", func(t *trial) { t.lose(kmsg.EndTxn, false) }, []result{committed, unknown}, false},
	{"EndTxn is lost, and all that follows", func(t *trial) { t.lose(kmsg.EndTxn, true) }, []result{unknown}, false},
	{"the answer to EndTxn is lost", func(t *trial) {
		t.on(kmsg.EndTxn, func() bool { t.machine.network.cut(); return true })
	}, []result{unknown}, false},
	{"EndTxn is lost, and another leads", func(t *trial) {
		t.lose(kmsg.EndTxn, true)
		t.over = t.mint
	}, []result{unknown}, false},
	{"the transport is closed at Produce", func(t *trial) {
		t.on(kmsg.Produce, func() bool { go t.machine.transport.Close(); return false })
	}, []result{notHeld}, false},
}

// offsetFaults are those that only offsets can have.
var offsetFaults = map[string]kmsg.Key{
	"AddOffsetsToTxn is lost": kmsg.AddOffsetsToTxn,
	"TxnOffsetCommit is lost": kmsg.TxnOffsetCommit,
}

// hold makes the call, and holds what it returned against the log.
func (t *trial) hold(write way, strike func(t *trial), results []result, leading bool) {
	t.calling, t.over = make(chan struct{}), func() {}
	t.ctx, t.cancel = context.WithCancelCause(t.world.ctx)
	defer t.cancel(nil)
	// No renewal comes between the calls.
	lease, err := coordination.NewLeaseConfig(4*time.Second, 2*time.Second, 250*time.Millisecond)
	require.NoError(t, err)
	t.lease = lease
	t.topic = t.world.topic()
	t.minter = t.client(kgo.TransactionalID(t.role.String()))
	t.machine = t.world.machine()
	t.leader = t.lead(t.machine.elector("a"))
	require.NoError(t, t.leader.Produce(t.world.ctx, &kgo.Record{Topic: t.topic, Value: []byte("before")}))
	t.records = []*kgo.Record{{Topic: t.topic, Value: []byte("call")}, {Topic: t.topic, Value: []byte("call")}}
	strike(t)

	close(t.calling)
	got := write(t.ctx, t.leader, t.records)
	told := resultOf(got)
	require.Contains(t, results, told, "%v", got)
	if leading {
		require.NoError(t, t.leader.Err())
	}
	t.over()
	t.machine.network.watch(nil)
	t.machine.network.heal()
	if !leading {
		t.await("the end of the leadership", func() bool { return errors.Is(t.leader.Err(), coordination.ErrNotHeld) })
	}
	there := told == committed
	if outcome := new(coordination.OutcomeUnknownError); errors.As(got, &outcome) {
		there, err = outcome.Resolve(t.world.ctx)
		require.NoError(t, err)
	}
	// Whatever is still open is settled when a successor leads.
	_ = t.leader.Resign(t.world.ctx)
	next := t.lead(t.world.machine().elector("b"))
	require.NoError(t, next.Produce(t.world.ctx, &kgo.Record{Topic: t.topic, Value: []byte("after")}))
	group, err := next.CommittedOffsets(t.world.ctx, t.role.String())
	require.NoError(t, err)
	require.NoError(t, next.Resign(t.world.ctx))

	var values []string
	for _, r := range t.log(t.topic, 0) {
		values = append(values, string(r.Value))
	}
	values = slices.DeleteFunc(values, func(v string) bool { return v == "stuck" })
	want := []string{"before", "after"}
	if there {
		want = []string{"before", "call", "call", "after"}
	}
	require.Equal(t, want, values, "the call returned %v", got)
	if offset, ok := group.Lookup(t.topic, 0); ok && offset.At >= 0 {
		require.True(t, there, "offsets are committed with the records")
		require.EqualValues(t, 7, offset.At)
	}
}

func eachFault(t *testing.T, in func(t *testing.T, test func(w *world))) {
	for _, fault := range faults {
		for name, write := range ways {
			t.Run(fault.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				in(t, func(w *world) { (&trial{world: w}).hold(write, fault.strike, fault.results, fault.leading) })
			})
		}
	}
	for name, kind := range offsetFaults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in(t, func(w *world) {
				strike := func(t *trial) { t.lose(kind, false) }
				(&trial{world: w}).hold(ways["Transact with offsets"], strike, []result{committed, notHeld}, false)
			})
		})
	}
}

func TestErrorTable(t *testing.T) {
	eachFault(t, func(t *testing.T, test func(w *world)) { inVirtualTime(t, test) })
}

func TestKafkaErrorTable(t *testing.T) {
	eachFault(t, onKafka)
}
