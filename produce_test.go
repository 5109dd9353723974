package coordination_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// ledger creates a topic of one partition and returns a maker of records for it.
func (w *world) ledger() func(value string) *kgo.Record {
	w.Helper()
	require.NoError(w, w.cluster.Fake().CreateTopic("ledger", 1, nil))
	return func(value string) *kgo.Record { return &kgo.Record{Topic: "ledger", Value: []byte(value)} }
}

// count lets every request of a kind pass, and counts them.
func (w *world) count(kind kmsg.Key) func() int {
	var (
		mu sync.Mutex
		n  int
	)
	w.cluster.Fake().ControlKey(int16(kind), func(kmsg.Request) (kmsg.Response, error, bool) {
		w.cluster.Fake().KeepControl()
		mu.Lock()
		defer mu.Unlock()
		n++
		return nil, nil, false
	})
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

func TestConcurrentCallsShareTransactions(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		commits := w.count(kmsg.EndTxn)
		const calls = 500
		var wg sync.WaitGroup
		for i := range calls {
			wg.Go(func() {
				r := entry(fmt.Sprint(i))
				if err := l.Produce(w.ctx, r); err != nil {
					w.Errorf("call %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		require.Less(w, commits(), calls/5)
		values := w.values("ledger", calls)
		require.Len(w, values, calls)
		seen := make(map[string]bool)
		for _, v := range values {
			require.False(w, seen[v], "%s twice", v)
			seen[v] = true
		}
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestRefusedCallFailsAlone(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		token := l.Token()
		type result struct {
			i   int
			err error
		}
		results := make(chan result, 100)
		for i := range 100 {
			records := []*kgo.Record{entry(fmt.Sprint(i))}
			switch i % 10 {
			case 3:
				records = append(records, &kgo.Record{Topic: "ledger", Value: make([]byte, 8<<20)})
			case 7:
				records = append(records, &kgo.Record{Topic: "no such topic"})
			}
			l.ProduceAsync(w.ctx, func(_ []*kgo.Record, err error) { results <- result{i, err} }, records...)
		}
		var want []string
		for range 100 {
			r := <-results
			if r.i%10 == 3 || r.i%10 == 7 {
				var rejected *coordination.RejectedError
				require.ErrorAs(w, r.err, &rejected, "call %d", r.i)
				require.NotErrorIs(w, r.err, coordination.ErrNotHeld)
				continue
			}
			require.NoError(w, r.err, "call %d", r.i)
		}
		for i := range 100 {
			if i%10 != 3 && i%10 != 7 {
				want = append(want, fmt.Sprint(i))
			}
		}
		require.Equal(w, want, w.values("ledger", 80), "the others are there, in the order of their calls")
		require.NoError(w, l.Check(w.ctx))
		require.Equal(w, token, l.Token())
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestCallIsWithdrawnWhileItIsQueued(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		m := w.machine()
		l := w.lead(m.elector("a"))
		require.NoError(w, l.Produce(w.ctx, entry("first")))

		m.network.cut()
		stuck := make(chan error, 1)
		go func() { stuck <- l.Produce(w.ctx, entry("stuck")) }()
		time.Sleep(30 * time.Millisecond) // nobody can join it any more
		ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(w, l.Produce(ctx, entry("withdrawn")), context.DeadlineExceeded)
		promised := make(chan error, 1)
		async, stop := context.WithCancel(w.ctx)
		l.ProduceAsync(async, func(_ []*kgo.Record, err error) { promised <- err }, entry("withdrawn too"))
		stop()
		require.ErrorIs(w, <-promised, context.Canceled)

		m.network.heal()
		require.NoError(w, <-stuck)
		require.NoError(w, l.Produce(w.ctx, entry("last")))
		require.NoError(w, l.Resign(w.ctx))
		require.Equal(w, []string{"first", "stuck", "last"}, w.values("ledger", 3))
	})
}

func TestBufferIsBounded(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		m := w.machine()
		l := w.lead(m.elector("a", coordination.WithMaxBuffered(1000)))
		require.NoError(w, l.Produce(w.ctx, entry(strings.Repeat("x", 5000))), "a call that is larger goes alone")

		release := make(chan struct{})
		l.ProduceAsync(w.ctx, func([]*kgo.Record, error) { <-release }, entry(strings.Repeat("y", 900)))
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		defer cancel()
		require.ErrorIs(w, l.Produce(ctx, entry(strings.Repeat("z", 900))), context.DeadlineExceeded,
			"what a promise was called for counts until it returns")
		require.NoError(w, l.Err(), "a promise that takes its time holds up no renewal")
		time.Sleep(2 * w.lease.Duration())
		require.NoError(w, l.Err())
		close(release)
		require.NoError(w, l.Produce(w.ctx, entry("w")))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestPromisesKeepTheOrderOfTheirCalls(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		var order []int
		done := make(chan struct{})
		const calls = 300
		for i := range calls {
			l.ProduceAsync(w.ctx, func(records []*kgo.Record, err error) {
				require.NoError(w, err)
				require.EqualValues(w, fmt.Sprint(i), records[0].Value)
				if order = append(order, i); len(order) == calls {
					close(done)
				}
			}, entry(fmt.Sprint(i)))
		}
		<-done
		values := w.values("ledger", calls)
		for i := range calls {
			require.Equal(w, i, order[i])
			require.Equal(w, fmt.Sprint(i), values[i])
		}
		require.NoError(w, l.Resign(w.ctx))

		called := make(chan error, 1)
		l.ProduceAsync(w.ctx, func(_ []*kgo.Record, err error) { called <- err }, entry("late"))
		require.ErrorIs(w, <-called, coordination.ErrResigned)
		l.ProduceAsync(w.ctx, nil, entry("late"))
	})
}

func TestTransactCommitsRecordsAndOffsetsTogether(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		require.NoError(w, w.cluster.Fake().CreateTopic("input", 2, nil))
		l := w.lead(w.machine().elector("a"))
		offsets := func(at int64) kadm.Offsets {
			o := make(kadm.Offsets)
			o.AddOffset("input", 1, at, -1)
			return o
		}
		err := l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
			require.NoError(w, tx.Produce(entry("a"), entry("b")))
			require.NoError(w, tx.CommitOffsets("group", offsets(3)))
			return tx.CommitOffsets("group", offsets(7))
		})
		require.NoError(w, err)
		require.Equal(w, []string{"a", "b"}, w.values("ledger", 2))
		committed, err := l.CommittedOffsets(w.ctx, "group")
		require.NoError(w, err)
		at, ok := committed.Lookup("input", 1)
		require.True(w, ok)
		require.EqualValues(w, 7, at.At)

		require.NoError(w, l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
			return tx.CommitOffsets("group", offsets(9))
		}), "offsets alone")
		committed, err = l.CommittedOffsets(w.ctx, "group")
		require.NoError(w, err)
		at, _ = committed.Lookup("input", 1)
		require.EqualValues(w, 9, at.At)
		require.NoError(w, l.Transact(w.ctx, func(context.Context, *coordination.Tx) error { return nil }), "nothing at all")
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestTransactRollsBack(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		failed := errors.New("no")
		var kept *coordination.Tx
		require.ErrorIs(w, l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
			kept = tx
			require.NoError(w, tx.Produce(entry("rolled back")))
			return failed
		}), failed)
		require.Error(w, kept.Produce(entry("late")))
		require.Error(w, kept.CommitOffsets("g", nil))
		require.PanicsWithValue(w, "boom", func() {
			_ = l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
				require.NoError(w, tx.Produce(entry("rolled back")))
				panic("boom")
			})
		})
		var rejected *coordination.RejectedError
		require.ErrorAs(w, l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
			return tx.Produce(entry("rolled back"), &kgo.Record{Topic: "ledger", Value: make([]byte, 8<<20)})
		}), &rejected)
		require.Equal(w, 1, rejected.Index)
		require.NoError(w, l.Produce(w.ctx, entry("kept")))
		require.Equal(w, []string{"kept"}, w.values("ledger", 1))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestTransactIsExclusiveAndRenewalsGoOn(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a", coordination.WithTransactionTimeout(2*time.Second)))
		produced := make(chan error, 1)
		before := l.Deadline()
		require.NoError(w, l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
			go func() { produced <- l.Produce(w.ctx, entry("second")) }()
			time.Sleep(1500 * time.Millisecond)
			require.Empty(w, produced)
			return tx.Produce(entry("first"))
		}))
		require.True(w, l.Deadline().After(before))
		require.NoError(w, <-produced)
		require.Equal(w, []string{"first", "second"}, w.values("ledger", 2))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestTransactRunsOutOfTime(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a", coordination.WithTransactionTimeout(w.lease.RenewInterval())))
		began := time.Now()
		require.ErrorIs(w, l.Transact(w.ctx, func(ctx context.Context, tx *coordination.Tx) error {
			<-ctx.Done()
			return tx.Produce(entry("too late"))
		}), context.DeadlineExceeded)
		require.Equal(w, w.lease.RenewInterval(), time.Since(began))

		// One that ignores its end holds up nobody else.
		stay := make(chan struct{})
		gone := make(chan error, 1)
		go func() {
			gone <- l.Transact(w.ctx, func(context.Context, *coordination.Tx) error {
				<-stay
				return nil
			})
		}()
		time.Sleep(10 * time.Millisecond)
		require.NoError(w, l.Produce(w.ctx, entry("kept")))
		require.NoError(w, l.Err())
		close(stay)
		require.ErrorIs(w, <-gone, context.DeadlineExceeded)
		require.Equal(w, []string{"kept"}, w.values("ledger", 1))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestMisuseOfTransactIsAnError(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		require.ErrorIs(w, l.Transact(w.ctx, nil), coordination.ErrInvalidConfig)
		require.NoError(w, l.Transact(w.ctx, func(ctx context.Context, tx *coordination.Tx) error {
			const phrase = "with the context of a Transact"
			require.ErrorContains(w, l.Produce(ctx, entry("x")), phrase)
			require.ErrorContains(w, l.Transact(ctx, func(context.Context, *coordination.Tx) error { return nil }), phrase)
			require.ErrorContains(w, l.Resign(ctx), phrase)
			l.ProduceAsync(ctx, func(_ []*kgo.Record, err error) { require.ErrorContains(w, err, phrase) }, entry("x"))
			require.Error(w, tx.Produce(nil))
			require.Error(w, tx.CommitOffsets("", nil))
			require.Error(w, tx.CommitOffsets("g", nil, nil))
			return nil
		}))
		require.NoError(w, l.Err())
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestResignFailsWhatIsQueuedAndWaitsForATransact(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		transacted, queued, resigned := make(chan error, 1), make(chan error, 1), make(chan error, 1)
		go func() {
			transacted <- l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
				go func() { queued <- l.Produce(w.ctx, entry("queued")) }()
				time.Sleep(100 * time.Millisecond)
				go func() { resigned <- l.Resign(w.ctx) }()
				time.Sleep(100 * time.Millisecond)
				require.ErrorIs(w, <-queued, coordination.ErrResigned)
				require.Empty(w, resigned)
				return tx.Produce(entry("transacted"))
			})
		}()
		require.NoError(w, <-transacted)
		require.NoError(w, <-resigned)
		require.ErrorIs(w, l.Err(), coordination.ErrResigned)
		require.Equal(w, []string{"transacted"}, w.values("ledger", 1))
		require.Nil(w, w.view().State.Lease)
	})
}

// unknown produces under a leader whose commit requests are dropped on their way,
// until its leadership ends.
func (w *world) unknown(entry *kgo.Record) *coordination.OutcomeUnknownError {
	w.Helper()
	l := w.lead(w.machine().elector("a"))
	require.NoError(w, l.Produce(w.ctx, &kgo.Record{Topic: "ledger", Value: []byte("before")}))
	w.cluster.Fake().ControlKey(int16(kmsg.EndTxn), func(kmsg.Request) (kmsg.Response, error, bool) {
		if l.Err() == nil {
			w.cluster.Fake().KeepControl()
			return nil, errors.New("the cable was pulled"), true
		}
		return nil, nil, false
	})
	err := l.Produce(w.ctx, entry)
	require.ErrorIs(w, err, coordination.ErrOutcomeUnknown)
	require.NotErrorIs(w, err, coordination.ErrNotHeld, "that would promise that nothing was committed")
	require.ErrorIs(w, l.Err(), coordination.ErrNotHeld)
	var unknown *coordination.OutcomeUnknownError
	require.ErrorAs(w, err, &unknown)
	require.Equal(w, l.Token(), unknown.Token)
	return unknown
}

func TestUnknownOutcomeIsResolvedAsCommitted(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		unknown := w.unknown(entry("unknown"))
		for range 2 {
			committed, err := unknown.Resolve(w.ctx)
			require.NoError(w, err)
			require.True(w, committed, "nobody else has the role: it is asked for again")
		}
		require.Equal(w, []string{"before", "unknown"}, w.values("ledger", 2))
	})
}

func TestUnknownOutcomeIsResolvedAsAborted(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		unknown := w.unknown(entry("unknown"))
		next := w.lead(w.machine().elector("b"))
		committed, err := unknown.Resolve(w.ctx)
		require.NoError(w, err)
		require.False(w, committed, "the successor's mint aborted it")
		require.NoError(w, next.Produce(w.ctx, entry("after")))
		require.Equal(w, []string{"before", "after"}, w.values("ledger", 2))
		require.NoError(w, next.Resign(w.ctx))

		canceled, cancel := context.WithCancel(w.ctx)
		cancel()
		_, err = unknown.Resolve(canceled)
		require.ErrorIs(w, err, context.Canceled)
	})
}

func TestDeletedTopicFailsItsRecordsAlone(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		require.NoError(w, w.cluster.Fake().CreateTopic("doomed", 1, nil))
		l := w.lead(w.machine().elector("a"))
		doomed := func() *kgo.Record { return &kgo.Record{Topic: "doomed", Value: []byte("x")} }
		require.NoError(w, l.Produce(w.ctx, doomed()))
		require.NoError(w, w.cluster.Fake().DeleteTopic("doomed"))
		kept := make(chan error, 1)
		lost := make(chan error, 1)
		l.ProduceAsync(w.ctx, func(_ []*kgo.Record, err error) { kept <- err }, entry("kept"))
		l.ProduceAsync(w.ctx, func(_ []*kgo.Record, err error) { lost <- err }, doomed())
		var rejected *coordination.RejectedError
		require.ErrorAs(w, <-lost, &rejected)
		require.NoError(w, <-kept)
		require.NoError(w, l.Err())
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestCallersSliceIsNotWrittenTo(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		require.NoError(w, l.Produce(w.ctx, entry("warm")))
		all := []*kgo.Record{entry("mine 0"), entry("mine 1")}
		// The first call is held up until the second one can join it.
		w.cluster.Fake().ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
			w.cluster.Fake().SleepControl(func() { time.Sleep(20 * time.Millisecond) })
			return nil, nil, false
		})
		var calls sync.WaitGroup
		calls.Go(func() { _ = l.Produce(w.ctx, all[:1]...) })
		time.Sleep(5 * time.Millisecond)
		calls.Go(func() { _ = l.Produce(w.ctx, entry("other")) })
		calls.Wait()
		require.NoError(w, l.Produce(w.ctx, all[1:]...))
		require.ElementsMatch(w, []string{"warm", "mine 0", "other", "mine 1"}, w.values("ledger", 4))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestResignReturnsWhenTheLeaseIsLostDuringATransact(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		l := w.lead(m.elector("a", coordination.WithTransactionTimeout(time.Minute)))
		within := make(chan struct{})
		transacted := make(chan error, 1)
		go func() {
			transacted <- l.Transact(w.ctx, func(ctx context.Context, _ *coordination.Tx) error {
				close(within)
				<-ctx.Done()
				return context.Cause(ctx)
			})
		}()
		<-within
		resigned := make(chan error, 1)
		go func() { resigned <- l.Resign(context.Background()) }()
		time.Sleep(10 * time.Millisecond)
		m.network.cut()
		<-l.Done()
		<-resigned
		require.Error(w, <-transacted)
	})
}

// answer makes the next request of a kind be answered so, instead of by the broker.
func (w *world) answer(kind kmsg.Key, with func(kmsg.Request) kmsg.Response) {
	w.cluster.Fake().ControlKey(int16(kind), func(r kmsg.Request) (kmsg.Response, error, bool) {
		return with(r), nil, true
	})
}

func TestRefusedGroupCostsItsCallAlone(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		transact := func(group string) error {
			return l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
				offsets := make(kadm.Offsets)
				offsets.AddOffset("ledger", 0, 7, -1)
				return tx.CommitOffsets(group, offsets)
			})
		}
		w.answer(kmsg.AddOffsetsToTxn, func(r kmsg.Request) kmsg.Response {
			response, _ := r.ResponseKind().(*kmsg.AddOffsetsToTxnResponse)
			response.ErrorCode = kerr.GroupAuthorizationFailed.Code
			return response
		})
		var rejected *coordination.RejectedError
		require.ErrorAs(w, transact("not mine"), &rejected)
		require.Equal(w, -1, rejected.Index)
		require.NoError(w, l.Err())

		// The offsets of a transaction that was refused later are not committed
		// by the next one.
		w.answer(kmsg.TxnOffsetCommit, func(r kmsg.Request) kmsg.Response {
			request, _ := r.(*kmsg.TxnOffsetCommitRequest)
			response, _ := r.ResponseKind().(*kmsg.TxnOffsetCommitResponse)
			topic := kmsg.NewTxnOffsetCommitResponseTopic()
			topic.Topic = request.Topics[0].Topic
			partition := kmsg.NewTxnOffsetCommitResponseTopicPartition()
			partition.ErrorCode = kerr.IllegalGeneration.Code
			topic.Partitions = append(topic.Partitions, partition)
			response.Topics = append(response.Topics, topic)
			return response
		})
		aborts := w.count(kmsg.EndTxn)
		require.ErrorIs(w, transact("moved on"), kerr.IllegalGeneration)
		require.Equal(w, 1, aborts(), "kgo would not have ended it")
		require.NoError(w, l.Err())
		require.NoError(w, l.Produce(w.ctx, entry("kept")))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestFenceAfterARetriedCommitIsNoProof(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		require.NoError(w, l.Produce(w.ctx, entry("one")))
		attempts := 0
		w.cluster.Fake().ControlKey(int16(kmsg.EndTxn), func(r kmsg.Request) (kmsg.Response, error, bool) {
			w.cluster.Fake().KeepControl()
			response, _ := r.ResponseKind().(*kmsg.EndTxnResponse)
			if attempts++; attempts == 1 {
				// So a coordinator answers that could not confirm its append.
				response.ErrorCode = kerr.CoordinatorNotAvailable.Code
			} else {
				response.ErrorCode = kerr.ProducerFenced.Code
			}
			return response, nil, attempts <= 2
		})
		err := l.Produce(w.ctx, entry("two"))
		require.ErrorIs(w, err, coordination.ErrOutcomeUnknown)
		require.NotErrorIs(w, err, coordination.ErrNotHeld)
		require.Error(w, l.Err())
	})
}

func TestCloseEndsACommitUnderWay(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		m := w.machine()
		l := w.lead(m.elector("a"))
		require.NoError(w, l.Produce(w.ctx, entry("one")))
		m.network.watch(func(key int16) bool { return key != int16(kmsg.EndTxn) })
		result := make(chan error, 1)
		go func() { result <- l.Produce(w.ctx, entry("two")) }()
		time.Sleep(5 * time.Millisecond)
		began := time.Now()
		m.transport.Close()
		<-l.Done()
		require.Less(w, time.Since(began), 100*time.Millisecond)
		require.ErrorIs(w, l.Err(), coordination.ErrClosed)
		require.ErrorIs(w, <-result, coordination.ErrOutcomeUnknown)
	})
}

func TestPassingMetadataFaultIsNoRejection(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		w.cluster.Fake().ControlKey(int16(kmsg.Metadata), func(r kmsg.Request) (kmsg.Response, error, bool) {
			request, _ := r.(*kmsg.MetadataRequest)
			if !request.IncludeTopicAuthorizedOperations {
				w.cluster.Fake().KeepControl()
				return nil, nil, false
			}
			response, _ := r.ResponseKind().(*kmsg.MetadataResponse)
			topic := kmsg.NewMetadataResponseTopic()
			topic.Topic = kmsg.StringPtr("ledger")
			topic.ErrorCode = kerr.LeaderNotAvailable.Code
			response.Topics = append(response.Topics, topic)
			return response, nil, true
		})
		require.NoError(w, l.Produce(w.ctx, entry("one")))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestCallsThatCannotBeCommittedAreRefusedAtOnce(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		l := w.lead(w.machine().elector("a"))
		twice := entry("twice")
		for name, c := range map[string]struct {
			records []*kgo.Record
			index   int
			says    string
		}{
			"nil":         {[]*kgo.Record{entry("x"), nil}, 1, "record 1 is nil"},
			"twice":       {[]*kgo.Record{twice, entry("x"), twice}, 2, "pass a copy"},
			"state topic": {[]*kgo.Record{entry("x"), {Topic: coordination.StateTopic}}, 1, "write to another one"},
			"no topic":    {[]*kgo.Record{{}}, 0, "topic"},
			"missing":     {[]*kgo.Record{{Topic: "missing"}}, 0, "create it"},
		} {
			calls := map[string]func() error{
				"Produce": func() error { return l.Produce(w.ctx, c.records...) },
				"ProduceAsync": func() error {
					result := make(chan error, 1)
					l.ProduceAsync(w.ctx, func(_ []*kgo.Record, err error) { result <- err }, c.records...)
					return <-result
				},
				"Transact": func() error {
					return l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error { return tx.Produce(c.records...) })
				},
			}
			for verb, call := range calls {
				err := call()
				var rejected *coordination.RejectedError
				require.ErrorAs(w, err, &rejected, "%s: %s", name, verb)
				require.Equal(w, c.index, rejected.Index, "%s: %s", name, verb)
				require.ErrorContains(w, err, c.says, "%s: %s", name, verb)
			}
		}
		require.NoError(w, l.Produce(w.ctx, entry("written")))
		require.NoError(w, l.Resign(w.ctx))
		require.Equal(w, []string{"written"}, w.values("ledger", 1))
	})
}

// What takes nothing on a real Kafka, and what that costs: TestKafkaDeletedTopic...
// and TestKafkaTopicShortOfReplicas....
func TestPartitionThatTakesNothingCostsItsCallsAlone(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		entry := w.ledger()
		require.NoError(w, w.cluster.Fake().CreateTopic("short of replicas", 1, nil))
		l := w.lead(w.machine().elector("a"))
		token := l.Token()
		// Partitions on brokers of their own are written to in requests of their own.
		require.NoError(w, w.cluster.Fake().MoveTopicPartition("ledger", 0, 0))
		require.NoError(w, w.cluster.Fake().MoveTopicPartition("short of replicas", 0, 1))
		w.cluster.Fake().ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
			w.cluster.Fake().KeepControl()
			produce := request.(*kmsg.ProduceRequest)
			if produce.Topics[0].Topic != "short of replicas" {
				return nil, nil, false
			}
			response := produce.ResponseKind().(*kmsg.ProduceResponse)
			topic := kmsg.NewProduceResponseTopic()
			topic.Topic = "short of replicas"
			topic.Partitions = []kmsg.ProduceResponseTopicPartition{kmsg.NewProduceResponseTopicPartition()}
			topic.Partitions[0].ErrorCode = kerr.NotEnoughReplicas.Code
			response.Topics = append(response.Topics, topic)
			return response, nil, true
		})
		// One after the other, for longer than a lease.
		var calls sync.WaitGroup
		calls.Go(func() {
			for range 5 {
				err := l.Produce(w.ctx, &kgo.Record{Topic: "short of replicas", Value: []byte("x")})
				var rejected *coordination.RejectedError
				require.ErrorAs(w, err, &rejected)
				require.ErrorIs(w, err, context.DeadlineExceeded)
				require.ErrorContains(w, err, "short of replicas/0 took no write for 850ms")
			}
		})
		for range 5 {
			calls.Go(func() {
				for range 5 {
					require.NoError(w, l.Produce(w.ctx, entry("x")))
				}
			})
		}
		calls.Wait()
		require.NoError(w, l.Check(w.ctx))
		require.Equal(w, token, l.Token())
		require.NoError(w, l.Resign(w.ctx))
		require.Len(w, w.values("ledger", 25), 25)
	})
}
