package coordination

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// maxBatchRecords and maxBatchBytes bound one transaction of many calls,
	// so that a full queue does not hold up a renewal.
	maxBatchRecords = 16384
	maxBatchBytes   = 16 << 20

	// recordOverhead is what a buffered record costs besides its bytes.
	recordOverhead = 64
)

// A call is one Produce, ProduceAsync or Transact on its way through the committer.
type call struct {
	records []*kgo.Record
	offsets []GroupOffsets
	bytes   int

	promise func([]*kgo.Record, error) // of a ProduceAsync
	turn    *turn                      // of a Transact

	taken bool        // or withdrawn; guarded by the queue
	stop  func() bool // ends the watch over the context of a ProduceAsync
	err   error
	done  chan struct{} // receives once err is set, unless there is a promise
}

// newCall returns a call for records, which must not be nil.
func (q *queue) newCall(records []*kgo.Record) *call {
	c, ok := q.ended.Get().(*call)
	if !ok {
		c = &call{done: make(chan struct{}, 1)}
	}
	c.records = records
	for _, r := range records {
		c.bytes += recordSize(r)
	}
	return c
}

func recordSize(r *kgo.Record) int {
	n := recordOverhead + len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// A turn is the exclusive use of the committer by a Transact: from when it is
// granted until it is over, no other call is committed.
type turn struct {
	granted chan struct{}
	commit  chan *call // what to commit, if anything
	once    sync.Once
	over    chan struct{}
}

func newTurn() *turn {
	return &turn{granted: make(chan struct{}), commit: make(chan *call), over: make(chan struct{})}
}

func (t *turn) end() { t.once.Do(func() { close(t.over) }) }

// A queue holds the calls of a leadership that are not committed yet, in their
// order, up to a number of bytes.
type queue struct {
	ready chan struct{} // a token while there may be something to take
	ended sync.Pool     // of calls: a thousand callers make a lot of them

	mu    sync.Mutex // guards what follows
	calls []*call
	bytes int // of all calls that are not settled
	limit int
	room  chan struct{} // closed when bytes shrink, if somebody waits for that
	err   error         // why no more calls are taken
}

func newQueue(limit int) *queue {
	return &queue{ready: make(chan struct{}, 1), limit: limit}
}

// add appends a call. It waits while the queue is full; a call that is larger than
// the limit is taken when nothing else is there.
func (q *queue) add(ctx context.Context, c *call) error {
	for {
		q.mu.Lock()
		if c.taken {
			q.mu.Unlock()
			return errWithdrawn
		}
		if q.err != nil {
			defer q.mu.Unlock()
			return q.err
		}
		if q.bytes == 0 || q.bytes+c.bytes <= q.limit {
			q.bytes += c.bytes
			q.calls = append(q.calls, c)
			q.mu.Unlock()
			q.wake()
			return nil
		}
		if q.room == nil {
			q.room = make(chan struct{})
		}
		room := q.room
		q.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (q *queue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// A callBatch is the calls of one transaction.
type callBatch struct {
	calls   []*call
	records int
	bytes   int
}

// takes reports whether a call has room in it.
func (b *callBatch) takes(c *call) bool {
	if len(b.calls) == 0 {
		return true
	}
	return c.turn == nil && b.records+len(c.records) <= maxBatchRecords && b.bytes+c.bytes <= maxBatchBytes
}

func (b *callBatch) add(c *call) {
	b.calls = append(b.calls, c)
	b.records += len(c.records)
	b.bytes += c.bytes
}

// reset empties it and keeps its memory.
func (b *callBatch) reset() {
	clear(b.calls)
	*b = callBatch{calls: b.calls[:0]}
}

// take adds the calls of the next transaction to what it has already, or one that
// asks for a turn where it has nothing. Who takes has to wake the queue when it can
// take again.
func (q *queue) take(into *callBatch) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for _, c := range q.calls {
		if !into.takes(c) {
			break
		}
		c.taken = true
		into.add(c)
		n++
		if c.turn != nil {
			break
		}
	}
	rest := copy(q.calls, q.calls[n:])
	clear(q.calls[rest:])
	q.calls = q.calls[:rest]
}

// errWithdrawn is what add returns for a call that was withdrawn before.
var errWithdrawn = errors.New("withdrawn")

// withdraw takes a call back, and reports whether it could: not once it was taken.
func (q *queue) withdraw(c *call) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if c.taken {
		return false
	}
	c.taken = true
	if i := slices.Index(q.calls, c); i >= 0 {
		q.calls = slices.Delete(q.calls, i, i+1)
		q.release(c.bytes)
	}
	c.bytes = 0
	return true
}

// release frees what a call took. mu is held.
func (q *queue) release(bytes int) {
	q.bytes -= bytes
	if q.room != nil {
		close(q.room)
		q.room = nil
	}
}

// wait waits for the result of a call, and ends it.
func (q *queue) wait(c *call) error {
	<-c.done
	return q.end(c)
}

// end returns the result of a call that is settled. The committer has let go of it,
// and so must the caller.
func (q *queue) end(c *call) error {
	err := c.err
	*c = call{done: c.done}
	q.ended.Put(c)
	return err
}

func (q *queue) free(bytes int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.release(bytes)
}

// close refuses further calls, and returns those that are waiting.
func (q *queue) close(err error) []*call {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
	}
	waiting := q.calls
	for _, c := range waiting {
		c.taken = true
	}
	q.calls = nil
	if q.room != nil {
		close(q.room)
		q.room = nil
	}
	return waiting
}

// promises runs the callbacks of ProduceAsync, one after the other, apart from the
// goroutine that renews the lease.
type promises struct {
	queue *queue

	mu      sync.Mutex // guards what follows
	settled []*call
	running bool
}

// add hands over a settled call.
func (p *promises) add(c *call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settled = append(p.settled, c)
	if !p.running {
		p.running = true
		go p.run()
	}
}

// run ends when there is nothing left to call.
func (p *promises) run() {
	for {
		p.mu.Lock()
		if len(p.settled) == 0 {
			p.running = false
			p.mu.Unlock()
			return
		}
		settled := p.settled
		p.settled = nil
		p.mu.Unlock()
		for _, c := range settled {
			c.promise(c.records, c.err)
			p.queue.free(c.bytes)
		}
	}
}
