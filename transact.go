package coordination

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// GroupOffsets are offsets of a consumer group that a transaction commits.
type GroupOffsets struct {
	Group   string
	Offsets kadm.Offsets

	// Member and Generation are those of the group's member that read up to the
	// offsets. Without a member Kafka does not check who commits.
	Member     string
	Generation int32
}

// A GroupOption says on whose behalf [Tx.CommitOffsets] commits.
type GroupOption func(*GroupOffsets)

// GroupMetadata makes Kafka refuse the offsets if the consumer group has moved on:
// member and generation are those of [kgo.Client.GroupMetadata]. Without it the
// offsets are unchecked, and only the leadership's own fence guards them.
func GroupMetadata(member string, generation int32) GroupOption {
	return func(o *GroupOffsets) { o.Member, o.Generation = member, generation }
}

// A Tx collects what one [Leadership.Transact] commits. It is safe for concurrent
// use while the function runs, and useless afterwards.
type Tx struct {
	limit int // bytes

	mu      sync.Mutex // guards what follows
	records []*kgo.Record
	bytes   int
	offsets map[string]*GroupOffsets
	open    bool
}

// errTxOver is what a Tx returns outside its function.
var errTxOver = invalidConfig("the transaction is over: use a Tx only within the function of Transact that got it")

// Produce adds records to the transaction. It does not block: they are written
// when the function has returned nil, and filled in with partition and offset then.
// They must not be touched in between.
func (tx *Tx) Produce(records ...*kgo.Record) error {
	if err := checkRecords(records); err != nil {
		return err
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if !tx.open {
		return errTxOver
	}
	bytes := tx.bytes
	for _, r := range records {
		bytes += recordSize(r)
	}
	if bytes > tx.limit {
		return invalidConfig("a transaction of %d bytes is more than WithMaxBuffered allows, %d", bytes, tx.limit)
	}
	tx.bytes = bytes
	tx.records = append(tx.records, records...)
	return nil
}

// CommitOffsets adds the offsets of a consumer group to the transaction: the next
// offset to read for each partition. For a partition that was added before, the
// later call counts.
func (tx *Tx) CommitOffsets(group string, offsets kadm.Offsets, opts ...GroupOption) error {
	if group == "" {
		return invalidConfig("CommitOffsets: the group is empty")
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if !tx.open {
		return errTxOver
	}
	if tx.offsets == nil {
		tx.offsets = make(map[string]*GroupOffsets)
	}
	of := tx.offsets[group]
	if of == nil {
		of = &GroupOffsets{Group: group, Offsets: make(kadm.Offsets), Generation: -1}
		tx.offsets[group] = of
	}
	for _, opt := range opts {
		if opt == nil {
			return invalidConfig("CommitOffsets: an option is nil")
		}
		opt(of)
	}
	offsets.Each(func(o kadm.Offset) { of.Offsets.Add(o) })
	return nil
}

// close ends the use of the transaction, and returns what it collected.
func (tx *Tx) close() (records []*kgo.Record, offsets []GroupOffsets) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	tx.open = false
	for _, of := range tx.offsets {
		if len(of.Offsets) > 0 {
			offsets = append(offsets, *of)
		}
	}
	return tx.records, offsets
}

// RecordToken returns the token of the leader that wrote a record through its
// leadership, as a consumer sees it, and false for a record that was written outside a
// transaction. Along a partition a follower that reads with read_committed sees the
// terms of a role one after the other.
func RecordToken(record *kgo.Record) (FencingToken, bool) {
	if !record.Attrs.IsTransactional() {
		return FencingToken{}, false
	}
	token, err := NewFencingToken(record.ProducerID, record.ProducerEpoch)
	return token, err == nil
}

// inTransact marks the context of a function of Transact.
type inTransact struct{ l *Leadership }

// errWithinTransact refuses what would wait for itself.
var errWithinTransact = invalidConfig("called with the context of a Transact, which it would have to wait for: use the Tx, or call it after the transaction")

func (l *Leadership) refuseWithin(ctx context.Context) error {
	if ctx.Value(inTransact{l}) != nil {
		return fmt.Errorf("role %s: %w", l.Role(), errWithinTransact)
	}
	return nil
}

// Transact calls fn and commits what it collected in its Tx, records and consumer
// offsets, in one transaction: all of it, or nothing. Nothing is committed if fn
// returns an error, which Transact returns, or panics, which goes on to the caller.
//
// From before fn until after the commit no other call of this leadership is
// committed: they wait. Renewals go on. fn's context ends with the leadership, with
// ctx, after a transaction timeout (see [WithTransactionTimeout]), and at the
// deadline the leadership had when fn began; nothing is committed after that. Calling
// Produce, ProduceAsync, Transact or Resign of the same leadership with fn's
// context is an error.
//
// The errors are those of [Leadership.Produce], besides fn's own.
func (l *Leadership) Transact(ctx context.Context, fn func(context.Context, *Tx) error) error {
	if fn == nil {
		return invalidConfig("Transact: the function is nil")
	}
	if err := l.refuseWithin(ctx); err != nil {
		return err
	}
	if err := l.held(); err != nil {
		return err
	}
	turn, err := l.takeTurn(ctx)
	if err != nil {
		return err
	}
	defer turn.end()

	limit := time.Now().Add(l.elector.config.transactionTimeout)
	if deadline := l.Deadline(); deadline.Before(limit) {
		limit = deadline
	}
	within, cancel := context.WithDeadlineCause(context.WithValue(ctx, inTransact{l}, true), limit,
		fmt.Errorf("role %s: the transaction ran out of time: %w", l.Role(), context.DeadlineExceeded))
	defer cancel()
	within, cancelCause := context.WithCancelCause(within)
	defer cancelCause(nil)
	defer context.AfterFunc(l.ctx, func() { cancelCause(l.Err()) })()
	// A function that stays when its time is over holds up nobody but itself.
	defer context.AfterFunc(within, turn.end)()

	tx := &Tx{limit: l.elector.config.maxBuffered, open: true}
	defer tx.close() // also when fn panics
	if err := fn(within, tx); err != nil {
		return err
	}
	if within.Err() != nil {
		return context.Cause(within)
	}
	records, offsets := tx.close()
	if len(records) == 0 && len(offsets) == 0 {
		return nil
	}
	if err := l.term.Check(within, records); err != nil {
		return err
	}
	c := l.queue.newCall(records)
	c.offsets, c.bytes = offsets, 0 // nothing of it is in the queue
	select {
	case turn.commit <- c:
		return l.queue.wait(c)
	case <-turn.over:
		return context.Cause(within)
	case <-l.over:
		return l.Err()
	}
}

// takeTurn waits until the committer is this caller's alone.
func (l *Leadership) takeTurn(ctx context.Context) (*turn, error) {
	c := l.queue.newCall(nil)
	c.turn = newTurn()
	if err := l.queue.add(ctx, c); err != nil {
		return nil, err
	}
	select {
	case <-c.turn.granted:
		return c.turn, nil
	case <-c.done:
		return nil, c.err
	case <-ctx.Done():
		if l.queue.withdraw(c) {
			return nil, context.Cause(ctx)
		}
		// It was taken: granted, or refused at the end of the leadership.
		c.turn.end()
		return nil, context.Cause(ctx)
	}
}

// CommittedOffsets returns the offsets that a consumer group has committed. It waits
// until those of this leadership's last transaction can be read; by the time a
// leadership has begun, those of its predecessor can. It blocks until the answer or
// until ctx ends.
func (l *Leadership) CommittedOffsets(ctx context.Context, group string) (kadm.OffsetResponses, error) {
	if group == "" {
		return nil, invalidConfig("CommittedOffsets: the group is empty")
	}
	if err := l.held(); err != nil {
		return nil, err
	}
	if err := l.awaitMarkers(ctx); err != nil {
		return nil, err
	}
	return l.elector.transport.CommittedOffsets(ctx, group)
}

// awaitMarkers waits until the markers of the newest transaction are written everywhere.
// A group's coordinator waits for those of offsets that replace others, but not for
// those of a partition's first ones: it lists what is there without them (measured on
// Kafka 4.3.1).
func (l *Leadership) awaitMarkers(ctx context.Context) error {
	var newest time.Time
	for {
		status, err := l.elector.transport.Describe(ctx, l.Role())
		if err != nil {
			return err
		}
		if newest.IsZero() {
			newest = status.StartedAt
		}
		// A newer transaction begins when the one before has ended.
		if status.State != TransactionPrepareCommit || !status.StartedAt.Equal(newest) {
			return nil
		}
		if err := sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}
