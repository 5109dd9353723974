package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// payload is what every write carries.
var payload = make([]byte, 100)

// crowd is how many callers are many.
const crowd = 1024

// A guarded is a leader that is to write, and what is needed to watch it.
type guarded struct {
	topic   string
	leader  *coordination.Leadership
	counter *requestCounter
	late    func() []time.Duration // ends the watch: how late each renewal was
	closers []func()
}

// newGuarded elects a leader and creates a topic for it.
func newGuarded(ctx context.Context, s settings) (w *guarded, err error) {
	w = &guarded{topic: "bench-writes-" + rand.Text()[:8], counter: &requestCounter{counts: make(map[string]int)}}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	admin, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	if err != nil {
		return w, err
	}
	defer admin.Close()
	if _, err := kadm.NewClient(admin).CreateTopic(ctx, 1, int16(s.replication), nil, w.topic); err != nil {
		return w, err
	}
	transport, err := s.transport(ctx)
	if err != nil {
		return w, err
	}
	w.closers = append(w.closers, transport.Close)
	role := newRole("writes")
	elector, err := s.elector(transport, role, "writer", s.lease, coordination.WithProducerOptions(kgo.WithHooks(w.counter)))
	if err != nil {
		return w, err
	}
	watching, stop := context.WithCancel(ctx)
	w.closers = append(w.closers, stop)
	grants, err := watchLeases(watching, s, role)
	if err != nil {
		return w, err
	}
	if w.leader, err = elector.Campaign(ctx); err != nil {
		return w, err
	}
	w.closers = append(w.closers, func() { _ = w.leader.Resign(context.Background()) })
	late := make(chan []time.Duration, 1)
	go func() { late <- lateness(grants, s.lease/3) }()
	w.late = func() []time.Duration {
		stop()
		return <-late
	}
	return w, nil
}

func (w *guarded) close() {
	for _, f := range slices.Backward(w.closers) {
		f()
	}
}

func (w *guarded) record() *kgo.Record { return &kgo.Record{Topic: w.topic, Value: payload} }

func (w *guarded) write() error { return w.leader.Produce(context.Background(), w.record()) }

// load writes with a crowd for as long as asked, and prints how late renewals were.
func load(ctx context.Context, s settings) error {
	if err := touch(ctx, s); err != nil {
		return err
	}
	w, err := newGuarded(ctx, s)
	if err != nil {
		return err
	}
	defer w.close()
	turn, cancel := context.WithTimeout(ctx, s.extent)
	defer cancel()
	n, err := inParallel(turn, crowd, w.write)
	if err != nil {
		return err
	}
	if err := w.leader.Err(); err != nil {
		return fmt.Errorf("the lease was lost: %w", err)
	}
	fmt.Printf("%d callers, %s: %d records, %.0f a second, one leadership\n", crowd, s.extent, n, float64(n)/s.extent.Seconds())
	figures(fmt.Sprintf("lateness of renewals that are due each %s", s.lease/3), w.late())
	return nil
}

// A writer does something over and over until ctx ends, and says how often.
type writer struct {
	name string
	run  func(ctx context.Context) (int64, error)
}

// writes compares guarded writes with franz-go's own transactions, in turns.
func writes(ctx context.Context, s settings) error {
	if err := touch(ctx, s); err != nil {
		return err
	}
	w, err := newGuarded(ctx, s)
	if err != nil {
		return err
	}
	defer w.close()
	topic, leader, counter, record := w.topic, w.leader, w.counter, w.record

	stock, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.TransactionalID("stock-"+rand.Text()))
	if err != nil {
		return err
	}
	defer stock.Close()
	versions := kversion.Stable()
	versions.SetMaxKeyVersion(int16(kmsg.Produce), 11)
	versions.SetMaxKeyVersion(int16(kmsg.EndTxn), 4)
	tuned, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.TransactionalID("tuned-"+rand.Text()),
		kgo.MaxVersions(versions), kgo.ConcurrentTransactionsBackoff(time.Millisecond), kgo.ProducerLinger(0))
	if err != nil {
		return err
	}
	defer tuned.Close()

	var shared atomic.Int64 // records in a transaction of the crowd, on average
	byHand := func(client *kgo.Client, size func() int) func(ctx context.Context) (int64, error) {
		return func(ctx context.Context) (int64, error) {
			var n int64
			batch := size()
			for ctx.Err() == nil {
				if err := client.BeginTransaction(); err != nil {
					return n, err
				}
				records := make([]*kgo.Record, batch)
				for i := range records {
					records[i] = record()
				}
				if err := client.ProduceSync(context.Background(), records...).FirstErr(); err != nil {
					return n, err
				}
				if err := client.EndTransaction(context.Background(), kgo.TryCommit); err != nil {
					return n, err
				}
				n += int64(batch)
			}
			return n, nil
		}
	}
	produce := func(callers int) func(ctx context.Context) (int64, error) {
		return func(ctx context.Context) (int64, error) {
			counter.reset()
			n, err := inParallel(ctx, callers, w.write)
			if commits := counter.reset()["EndTxn"]; callers > 1 && commits > 0 {
				shared.Store(n / int64(commits))
			}
			return n, err
		}
	}
	one := func() int { return 1 }
	writers := []writer{
		{"stock franz-go, one caller", byHand(stock, one)},
		{"pinned and tuned by hand, one caller", byHand(tuned, one)},
		{"Leadership.Produce, one caller", produce(1)},
		{fmt.Sprintf("Leadership.Produce, %d callers", crowd), produce(crowd)},
		{"pinned and tuned by hand, batches of the same size", byHand(tuned, func() int { return int(shared.Load()) })},
		{fmt.Sprintf("pinned and tuned by hand, batches of %d", crowd), byHand(tuned, func() int { return crowd })},
	}
	rates := make([]float64, len(writers))
	const rounds = 3
	for range rounds {
		for i, w := range writers {
			turn, cancel := context.WithTimeout(ctx, s.extent/time.Duration(rounds*len(writers)))
			began := time.Now()
			n, err := w.run(turn)
			cancel()
			if err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			rates[i] += float64(n) / time.Since(began).Seconds() / rounds
		}
	}
	for i, w := range writers {
		fmt.Printf("%-52s %9.0f records/s\n", w.name, rates[i])
	}
	fmt.Printf("one caller: %.1f of stock, %.2f of by hand\n", rates[2]/rates[0], rates[2]/rates[1])
	fmt.Printf("%d callers, %d records in a transaction on average: %.0f of one stock caller, %.2f of by hand with the same batches, %.2f with batches of %d\n",
		crowd, shared.Load(), rates[3]/rates[0], rates[3]/rates[4], rates[3]/rates[5], crowd)
	if err := leader.Err(); err != nil {
		return fmt.Errorf("the lease was lost: %w", err)
	}
	if err := allocations(s, topic, leader, record); err != nil {
		return err
	}
	figures("lateness of renewals under this load", w.late())
	return nil
}

// inParallel calls f from many goroutines until ctx ends.
func inParallel(ctx context.Context, callers int, f func() error) (int64, error) {
	var (
		wg     sync.WaitGroup
		n      atomic.Int64
		failed atomic.Pointer[error]
	)
	for range callers {
		wg.Go(func() {
			for ctx.Err() == nil && failed.Load() == nil {
				if err := f(); err != nil {
					failed.Store(&err)
					return
				}
				n.Add(1)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return n.Load(), *err
	}
	return n.Load(), nil
}

// lateness is how much later than the interval each renewal was.
func lateness(grants <-chan grant, interval time.Duration) []time.Duration {
	var late []time.Duration
	var last time.Time
	for g := range grants {
		if !last.IsZero() && !g.first {
			late = append(late, max(g.at.Sub(last)-interval, 0))
		}
		last = g.at
	}
	return late
}

// allocations compares what a call costs in memory with a bare ProduceSync.
func allocations(s settings, topic string, leader *coordination.Leadership, record func() *kgo.Record) error {
	bare, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	if err != nil {
		return err
	}
	defer bare.Close()
	const callers, calls = 256, 50_000
	measure := func(f func() error) (allocs, bytes float64, err error) {
		var before, after runtime.MemStats
		var n atomic.Int64
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		runtime.GC()
		runtime.ReadMemStats(&before)
		done, err := inParallel(ctx, callers, func() error {
			if n.Add(1) >= calls {
				cancel()
			}
			return f()
		})
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs-before.Mallocs) / float64(done), float64(after.TotalAlloc-before.TotalAlloc) / float64(done), err
	}
	ctx := context.Background()
	bareAllocs, bareBytes, err := measure(func() error { return bare.ProduceSync(ctx, record()).FirstErr() })
	if err != nil {
		return err
	}
	allocs, bytes, err := measure(func() error { return leader.Produce(ctx, record()) })
	if err != nil {
		return err
	}
	fmt.Printf("%d callers: %.1f allocs/op and %.0f B/op; bare ProduceSync: %.1f and %.0f; ratios %.2f and %.2f\n",
		callers, allocs, bytes, bareAllocs, bareBytes, allocs/bareAllocs, bytes/bareBytes)
	return nil
}
