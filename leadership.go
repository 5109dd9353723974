package coordination

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// A Leadership is the time during which one member holds one role, under one
// token. It ends once, for one reason, and never comes back; afterwards every call
// returns an error that is [ErrNotHeld], at once.
//
// It is safe for concurrent use.
type Leadership struct {
	elector     *Elector
	term        Term
	follower    Follower
	ownFollower bool // to be closed with the leadership: it comes from a Campaign
	token       FencingToken
	fence       int64 // offset of the first lease record
	abandoned   bool  // to be resigned at once; set before lead is called
	tenancy     *tenancy
	records     []*kgo.Record // of one transaction; lead's own, used again
	more        []*kgo.Record // likewise

	ctx    context.Context
	cancel context.CancelCauseFunc

	queue    *queue
	promises promises
	resigns  chan *resignation
	over     chan struct{} // closed when lead has returned

	deadline  atomic.Int64 // when it ends unless renewed, as time since the elector was born
	resigning atomic.Bool
	stopped   atomic.Bool // no more renewals
	expiry    *time.Timer
	sent      time.Time // when the last committed lease was sent; lead's own
}

// A resignation is asked of the goroutine that owns the term.
type resignation struct {
	ctx  context.Context
	done chan error // buffered
}

// newLeadership starts the clock of a leadership whose first lease was sent at an
// instant and is committed. The follower is closed with it if it is its own.
func newLeadership(e *Elector, term Term, follower Follower, own bool, token FencingToken, fence int64, sent time.Time) *Leadership {
	l := &Leadership{
		elector:     e,
		term:        term,
		follower:    follower,
		ownFollower: own,
		token:       token,
		fence:       fence,
		tenancy:     e.tenant(),
		queue:       newQueue(e.config.maxBuffered),
		resigns:     make(chan *resignation),
		over:        make(chan struct{}),
	}
	l.promises.queue = l.queue
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	l.renewedAt(sent)
	// The end of the lease does not wait for the goroutine that commits.
	l.expiry = time.AfterFunc(time.Hour, l.expire)
	l.expiry.Reset(time.Until(l.Deadline()))

	now := time.Now()
	e.update(func(s *Status) {
		s.Phase, s.Since = PhaseLeading, now
		s.Leader, s.Token, s.Rank = e.member, token, 0
		s.LastRenewal, s.LastError = now, nil
	})
	e.logger.Info("leading", "token", token.String(), "fencing_number", fence)
	return l
}

// neverHeld is the context of the zero value.
var neverHeld = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(fmt.Errorf("%w: the leadership is the zero value: get one from Campaign or Run", ErrNotHeld))
	return ctx
}()

// Role returns the role that is led.
func (l *Leadership) Role() Role {
	if l.elector == nil {
		return Role{}
	}
	return l.elector.role
}

// Member returns the member that leads.
func (l *Leadership) Member() MemberID {
	if l.elector == nil {
		return MemberID{}
	}
	return l.elector.member
}

// Token returns the fencing token: the producer id and epoch that every broker
// holds this leader's writes against. It does not change during a leadership.
func (l *Leadership) Token() FencingToken { return l.token }

// FencingNumber returns a number that grows strictly from leader to leader of a
// role, for systems outside Kafka that refuse writes under an older one. It is the
// offset of the term's first lease record, and good for one state topic: a topic
// that is created again starts over.
func (l *Leadership) FencingNumber() int64 { return l.fence }

// Deadline returns the instant at which the leadership ends unless it is renewed
// before: a stop margin before the lease does. It moves with every renewal, and
// carries a monotonic clock reading, so that [time.Until] is right whatever
// happens to the wall clock.
func (l *Leadership) Deadline() time.Time {
	if l.elector == nil {
		return time.Time{}
	}
	return l.elector.born.Add(time.Duration(l.deadline.Load()))
}

// Context returns a context that ends with the leadership. Its cause is Err.
func (l *Leadership) Context() context.Context {
	if l.elector == nil {
		return neverHeld
	}
	return l.ctx
}

// Done returns a channel that is closed when the leadership has ended.
func (l *Leadership) Done() <-chan struct{} { return l.Context().Done() }

// Err returns nil while the role is held, and afterwards why it no longer is:
// always [ErrNotHeld], and more precisely [ErrFenced], [ErrLeaseExpired],
// [ErrResigned], [ErrUnanswered], [ErrTopicChanged], [ErrInvalidConfig] or
// [ErrClosed].
func (l *Leadership) Err() error { return context.Cause(l.Context()) }

// held returns nil while the role is held. It looks at the clock itself: after a
// pause of the process the timer may not have fired yet.
func (l *Leadership) held() error {
	if l.elector != nil && !l.expired() {
		if l.resigning.Load() {
			return cmp.Or(l.Err(), l.because(ErrResigned))
		}
		select {
		case <-l.ctx.Done():
		default:
			return nil
		}
	}
	return l.Err()
}

// Check asks the transaction coordinator whether the token is still the newest
// one. It returns nil if it is; [ErrNotHeld], and ends the leadership, if it is
// not; and otherwise, the leadership going on, why the question got no answer. It
// costs one request and blocks until the answer or until ctx ends.
func (l *Leadership) Check(ctx context.Context) error {
	if err := l.held(); err != nil {
		return err
	}
	status, err := l.elector.transport.Describe(ctx, l.Role())
	if err != nil {
		return err
	}
	if !status.Authoritative(l.token) {
		l.end(fmt.Errorf("%w: %s", l.because(ErrFenced), classifyLoss(l.token, status)))
	}
	return l.held()
}

// Produce writes records in one transaction under the leadership's token and
// returns when it is committed: all of them are in the log, or none. Calls that are
// made at the same time share a transaction. Topic, partition and offset are filled
// in. It blocks until then, but not past the end of the leadership. The records must
// not be touched until it returns, and after an unknown outcome never again.
//
// nil: committed. [ErrNotHeld]: nothing was committed, the leadership is over.
// [*RejectedError]: a record was refused, or its partition took nothing for a quarter
// of a lease; nothing of this call was committed, the leadership goes on.
// [*OutcomeUnknownError]: the cluster never answered whether it
// committed; the leadership is over. ctx's cause: ctx ended while the call was
// queued, nothing was committed. After any other error nothing was committed and the
// leadership goes on. Order holds within a call, and between calls that are made one
// after the other.
func (l *Leadership) Produce(ctx context.Context, records ...*kgo.Record) error {
	c, err := l.enqueue(ctx, records, nil)
	if err != errQueued {
		return err
	}
	if ctx.Done() == nil {
		return l.queue.wait(c)
	}
	select {
	case <-c.done:
		return l.queue.end(c)
	case <-ctx.Done():
		if l.queue.withdraw(c) {
			return context.Cause(ctx)
		}
		return l.queue.wait(c)
	}
}

// ProduceAsync is [Leadership.Produce] without the wait: promise is called with its
// result, once, and may be nil. Promises run one after the other, in the order in
// which calls settle, on a goroutine of their own; they may take their time, but what
// they were called for counts as buffered until they return: one that waits for room
// in the buffer itself, in another call, may wait for ever. Records of calls made
// one after the other are committed in that order. ProduceAsync blocks while the
// buffer is full, see [WithMaxBuffered]. Where the call cannot be queued the promise
// is called before it returns.
func (l *Leadership) ProduceAsync(ctx context.Context, promise func([]*kgo.Record, error), records ...*kgo.Record) {
	if promise == nil {
		promise = func([]*kgo.Record, error) {}
	}
	if _, err := l.enqueue(ctx, records, promise); err != errQueued {
		promise(records, err)
	}
}

// errQueued says that the result of a call is yet to come.
var errQueued = errors.New("queued")

// enqueue checks a call and queues it. It returns errQueued, or the call's result
// where there is nothing to wait for.
func (l *Leadership) enqueue(ctx context.Context, records []*kgo.Record, promise func([]*kgo.Record, error)) (*call, error) {
	if err := checkRecords(records); err != nil {
		return nil, err
	}
	if err := l.refuseWithin(ctx); err != nil {
		return nil, err
	}
	if err := l.held(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(records) == 0 {
		return nil, nil
	}
	if err := l.term.Check(ctx, records); err != nil {
		return nil, err
	}
	c := l.queue.newCall(records)
	if c.promise = promise; promise != nil && ctx.Done() != nil {
		c.stop = context.AfterFunc(ctx, func() {
			if l.queue.withdraw(c) {
				c.err = context.Cause(ctx)
				l.promises.add(c)
			}
		})
	}
	switch err := l.queue.add(ctx, c); {
	case err == nil, errors.Is(err, errWithdrawn):
		return c, errQueued
	case c.stop != nil && !c.stop():
		// ctx ended, and its watch tells the result.
		return c, errQueued
	default:
		return nil, err
	}
}

// checkRecords refuses what is no record, and records that are there twice: they are
// filled in, which can happen once.
func checkRecords(records []*kgo.Record) error {
	var seen map[*kgo.Record]int
	if len(records) > 1 {
		seen = make(map[*kgo.Record]int, len(records))
	}
	for i, record := range records {
		if record == nil {
			return &RejectedError{Index: i, Err: invalidConfig("record %d is nil", i)}
		}
		if seen == nil {
			continue
		}
		if first, again := seen[record]; again {
			return &RejectedError{Index: i, Record: record, Err: invalidConfig("record %d is record %d once more: pass a copy", i, first)}
		}
		seen[record] = i
	}
	return nil
}

// Resign gives the role up: the open commit finishes, calls that are queued fail
// uncommitted, then the lease is cleared and the member leaves the roster, so that
// the next one leads within milliseconds. The work must have stopped before.
//
// The leadership is over when Resign returns, even where it fails or ctx ends first;
// then the lease runs out. Resigning twice or after a loss is harmless and returns
// nil.
func (l *Leadership) Resign(ctx context.Context) error {
	if err := l.refuseWithin(ctx); err != nil {
		return err
	}
	if l.elector == nil {
		return nil
	}
	if again := l.resigning.Swap(true); again || l.Err() != nil {
		select {
		case <-l.over:
		case <-ctx.Done():
		}
		return nil
	}
	l.refuse(l.because(ErrResigned))
	request := &resignation{ctx: ctx, done: make(chan error, 1)}
	select {
	case l.resigns <- request:
	case <-l.ctx.Done():
		return nil
	case <-ctx.Done():
		l.end(l.because(ErrResigned))
		return context.Cause(ctx)
	}
	select {
	case err := <-request.done:
		return err
	case <-l.over:
		select {
		case err := <-request.done:
			return err
		default:
			return nil
		}
	case <-ctx.Done():
		l.end(l.because(ErrResigned))
		return context.Cause(ctx)
	}
}

// because makes a reason out of a sentinel.
func (l *Leadership) because(sentinel error) error {
	return fmt.Errorf("role %s: token %s: %w", l.Role(), l.token, sentinel)
}

// end ends the leadership, once, and frees what waits in a commit.
func (l *Leadership) end(cause error) {
	if !errors.Is(cause, ErrNotHeld) {
		cause = fmt.Errorf("%w: %w", ErrNotHeld, cause)
	}
	if l.ownFollower {
		// Whoever sees the end may campaign again.
		l.elector.wind(l.tenancy)
	}
	l.cancel(cause)
	l.term.Close()
}

// expired ends the leadership if its deadline has passed, and reports whether it
// has.
func (l *Leadership) expired() bool {
	if time.Since(l.elector.born) < time.Duration(l.deadline.Load()) {
		return false
	}
	if l.Err() == nil {
		l.end(fmt.Errorf("%w: not renewed in time", l.because(ErrLeaseExpired)))
	}
	return true
}

// expire is expired for a timer: it looks again when the lease was renewed.
func (l *Leadership) expire() {
	if !l.expired() {
		l.expiry.Reset(time.Until(l.Deadline()))
	}
}

// abandon makes lead resign at once: the caller of Campaign has gone.
func (l *Leadership) abandon() {
	l.abandoned = true
	l.resigning.Store(true)
}

// stopRenewing lets the lease run out.
func (l *Leadership) stopRenewing() { l.stopped.Store(true) }

// lead owns the term until the leadership has ended: renewals, commits,
// resignation.
func (l *Leadership) lead() {
	defer l.finish()
	if l.abandoned {
		_ = l.resign()
		return
	}
	// The goroutine below may be in the middle of a commit when the transport is
	// closed.
	go func() {
		select {
		case <-l.elector.transport.Closed():
			l.end(l.because(ErrClosed))
		case <-l.ctx.Done():
		}
	}()
	renewal := time.NewTimer(l.untilRenewal())
	defer renewal.Stop()
	draining := l.elector.transport.Draining()
	if !l.ownFollower {
		// Run resigns by itself, after its function has returned.
		draining = nil
	}
	var (
		failures int
		batch    callBatch    // of one transaction; the memory is used again
		turn     *turn        // the Transact that has the committer, or nil
		leaving  *resignation // waits for that
	)
	for {
		// While a Transact runs only renewals and its own commit are served.
		ready := l.queue.ready
		var (
			commit <-chan *call
			ended  <-chan struct{}
		)
		if turn != nil {
			ready, commit, ended = nil, turn.commit, turn.over
		} else if leaving != nil {
			leaving.done <- l.resign()
			return
		}
		select {
		case <-l.ctx.Done():
			return
		case <-draining:
			draining = nil
			l.elector.enter(PhaseDraining)
			go func() {
				// The lease bounds how long it may take.
				if err := l.Resign(context.Background()); err != nil {
					l.elector.logger.Warn("the resignation failed; the lease runs out", "error", err)
				}
			}()
		case leaving = <-l.resigns:
		case <-ready:
			// Those who were woken together come back together: they are let
			// in first, so that they share a transaction.
			runtime.Gosched()
			batch.reset()
			l.queue.take(&batch)
			switch {
			case len(batch.calls) == 0:
			case batch.calls[0].turn != nil:
				turn = batch.calls[0].turn
				l.queue.free(batch.calls[0].bytes)
				close(turn.granted)
			default:
				l.commitQueue(&batch)
				l.queue.wake()
				renewal.Reset(l.untilRenewal())
			}
		case c := <-commit:
			l.commitCalls([]*call{c})
			turn = nil
			l.queue.wake()
			renewal.Reset(l.untilRenewal())
		case <-ended:
			turn = nil
			l.queue.wake()
		case <-renewal.C:
			if l.stopped.Load() {
				continue
			}
			if err := l.commit(Batch{}, true); err != nil {
				failures++
				renewal.Reset(saturatingDouble(20*time.Millisecond, failures-1, time.Second))
				continue
			}
			failures = 0
			renewal.Reset(l.untilRenewal())
		case view := <-l.follower.Views():
			l.observe(view)
		}
	}
}

// commitCalls commits calls in one transaction, and tells each what became of it. A
// call of which a record was refused fails alone: the others are committed again
// without it.
func (l *Leadership) commitCalls(calls []*call) {
	l.catchUp()
	err := l.commit(l.batch(calls), l.renewalNear())
	l.settleOrRetry(calls, err)
}

// commitQueue commits the calls that were taken from the queue, and those that come
// while their records are being written.
func (l *Leadership) commitQueue(taken *callBatch) {
	l.catchUp()
	batch := l.batch(taken.calls)
	batch.Ready = l.queue.ready
	batch.More = func() []*kgo.Record {
		runtime.Gosched()
		first := len(taken.calls)
		l.queue.take(taken)
		l.more = l.more[:0]
		for _, c := range taken.calls[first:] {
			l.more = append(l.more, c.records...)
		}
		return l.more
	}
	err := l.commit(batch, l.renewalNear())
	l.settleOrRetry(taken.calls, err)
}

// settleOrRetry tells calls what became of their transaction, or commits them again
// without those of which a record was refused.
func (l *Leadership) settleOrRetry(calls []*call, err error) {
	all := rejections(err)
	if len(all) == 0 {
		l.settle(calls, err)
		return
	}
	refused := refusals(calls, all)
	if len(calls) == 1 {
		l.settle(calls, refused[calls[0]])
		return
	}
	// A record that its partition did not take would hold up the others again.
	calls = slices.DeleteFunc(calls, func(c *call) bool {
		stalled := isStall(refused[c])
		if stalled {
			l.settle([]*call{c}, refused[c])
		}
		return stalled
	})
	// Which of the other records was at fault is not always told: each call
	// that is suspected is tried alone, in its place, so that their order stays.
	for start := 0; start < len(calls); {
		end := start + 1
		if refused[calls[start]] == nil {
			for end < len(calls) && refused[calls[end]] == nil {
				end++
			}
		}
		l.commitCalls(calls[start:end])
		start = end
	}
}

// rejections are the refused records in an error of a commit.
func rejections(err error) []*RejectedError {
	switch err := err.(type) {
	case *RejectedError:
		return []*RejectedError{err}
	case interface{ Unwrap() []error }:
		var all []*RejectedError
		for _, e := range err.Unwrap() {
			all = append(all, rejections(e)...)
		}
		return all
	}
	return nil
}

// refusals attributes refused records to their calls, one to each, with its position
// in the call. One that is certain goes before others.
func refusals(calls []*call, all []*RejectedError) map[*call]error {
	refused := make(map[*call]error)
	for _, r := range all {
		first := 0
		for _, c := range calls {
			if r.Index < first+len(c.records) || len(calls) == 1 {
				if refused[c] == nil || !isStall(refused[c]) && isStall(r) {
					refused[c] = &RejectedError{Index: r.Index - first, Record: r.Record, Err: r.Err}
				}
				break
			}
			first += len(c.records)
		}
	}
	return refused
}

// batch puts calls together.
func (l *Leadership) batch(calls []*call) Batch {
	if len(calls) == 1 {
		return Batch{Records: calls[0].records, Offsets: calls[0].offsets}
	}
	l.records = l.records[:0]
	var offsets []GroupOffsets
	for _, c := range calls {
		l.records = append(l.records, c.records...)
		offsets = append(offsets, c.offsets...)
	}
	return Batch{Records: l.records, Offsets: offsets}
}

// settle tells calls their common result.
func (l *Leadership) settle(calls []*call, err error) {
	bytes := 0
	for _, c := range calls {
		c.err = err
		if c.stop != nil {
			c.stop()
		}
		if c.promise != nil {
			l.promises.add(c)
			continue
		}
		bytes += c.bytes
		c.done <- struct{}{}
	}
	l.queue.free(bytes)
}

// refuse makes the queue fail what waits in it, and all that comes.
func (l *Leadership) refuse(why error) { l.settle(l.queue.close(why), why) }

// untilRenewal is how long the next renewal can wait.
func (l *Leadership) untilRenewal() time.Duration {
	return time.Until(l.sent.Add(l.elector.config.lease.RenewInterval()))
}

// renewalNear reports whether a commit should carry a renewal: one that comes up
// next would be late by what the commit takes.
func (l *Leadership) renewalNear() bool {
	return l.untilRenewal() <= l.elector.config.lease.RenewInterval()/16
}

// catchUp renews before calls are committed if that is overdue: those before them
// may have been refused, or held up, and carried no renewal.
func (l *Leadership) catchUp() {
	if l.untilRenewal() <= 0 && !l.stopped.Load() {
		_ = l.commit(Batch{}, true) // a failure is shown, and comes up again
	}
}

// commit runs one transaction, with a renewal if asked, and ends the leadership if
// that ended the term.
func (l *Leadership) commit(batch Batch, renew bool) error {
	if l.expired() || l.Err() != nil {
		return l.Err()
	}
	e := l.elector
	sent := time.Now()
	stopped := l.stopped.Load()
	if stopped && len(batch.Offsets) > 0 {
		return fmt.Errorf("role %s: offsets are not committed any more: the function of Run is past its drain timeout", l.Role())
	}
	// Offsets alone do not make kgo end the transaction; a lease record does.
	if (renew || len(batch.Offsets) > 0) && !stopped {
		batch.Lease = e.config.lease.Grant(e.member, l.token, e.config.clock.Now())
	}
	_, err := l.term.Commit(l.ctx, batch)
	if err == nil && batch.Lease != nil {
		l.renewed(sent)
	}
	if ended := l.term.Err(); ended != nil {
		l.end(ended)
		if err != nil && !errors.Is(err, ErrOutcomeUnknown) {
			// One reason, the same wherever it is asked for.
			return l.Err()
		}
		return err
	}
	switch {
	case err == nil, len(rejections(err)) > 0:
	case permanent(err):
		l.end(err)
		return l.Err()
	default:
		e.logger.Warn("a commit failed; retrying", "error", err)
		e.update(func(s *Status) { s.LastError = err })
	}
	return err
}

// renewed notes that a lease that was sent then is committed.
func (l *Leadership) renewed(sent time.Time) {
	l.renewedAt(sent)
	now := time.Now()
	l.elector.update(func(s *Status) { s.LastRenewal, s.LastError = now, nil })
}

// renewedAt moves the deadline to where a lease that was sent then ends.
func (l *Leadership) renewedAt(sent time.Time) {
	e := l.elector
	l.sent = sent
	l.deadline.Store(int64(sent.Sub(e.born) + e.config.lease.Duration() - e.config.stopMargin))
}

// observe looks at the role as others see it: a lease under another token that is
// newer than the own one means that this leadership is over, sooner than the next
// renewal would show.
func (l *Leadership) observe(view RoleView) {
	if view.Err != nil {
		l.end(view.Err)
		return
	}
	if view.LeaseStamp == nil || view.LeaseStamp.Offset < l.fence || view.Newest == l.token {
		return
	}
	ctx, cancel := context.WithTimeout(l.ctx, l.elector.config.lease.ChallengeStagger())
	defer cancel()
	_ = l.Check(ctx) // no answer: the next renewal tells
}

// resign clears the lease and leaves the roster, in one transaction.
func (l *Leadership) resign() error {
	if err := l.Err(); err != nil {
		return nil
	}
	_, err := l.term.Commit(l.ctx, Batch{Withdraw: []MemberID{l.Member()}, Lease: Tombstone{}})
	l.end(l.because(ErrResigned))
	return err
}

// finish settles what a leadership leaves behind when it has ended.
func (l *Leadership) finish() {
	cause := l.Err()
	e := l.elector
	l.expiry.Stop()
	e.remember(l.token, cause)
	if errors.Is(cause, ErrResigned) {
		e.logger.Info("resigned", "token", l.token.String())
	} else {
		e.logger.Info("leadership lost", "token", l.token.String(), "cause", cause)
		e.update(func(s *Status) { s.LastError = cause })
	}
	l.refuse(cause)
	if l.ownFollower {
		l.follower.Close()
	}
	close(l.over)
}

// remember notes a token that was lost while its lease may still be the newest.
func (e *Elector) remember(token FencingToken, cause error) {
	switch {
	case errors.Is(cause, ErrResigned), errors.Is(cause, ErrLeaseExpired), permanent(cause):
		return
	}
	e.memory.orphan = &orphan{token: token, lostAt: e.now(), atOnce: !errors.Is(cause, ErrFenced)}
}
