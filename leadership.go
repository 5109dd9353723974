package coordination

import (
	"context"
	"errors"
	"fmt"
	"sync"
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

	ctx    context.Context
	cancel context.CancelCauseFunc

	requests chan *commitRequest
	resigns  chan *resignation
	over     chan struct{} // closed when lead has returned

	mu        sync.Mutex // guards what follows
	deadline  time.Time  // with its monotonic reading
	sent      time.Time  // when the last committed lease was sent
	expiry    *time.Timer
	resigning bool
	stopped   bool // no more renewals
}

// A commitRequest is a call that waits for the goroutine that owns the term.
type commitRequest struct {
	records []*kgo.Record
	done    chan error // buffered
}

type resignation struct{ done chan error } // buffered

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
		requests:    make(chan *commitRequest),
		resigns:     make(chan *resignation),
		over:        make(chan struct{}),
	}
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	l.mu.Lock()
	l.sent = sent
	l.deadline = sent.Add(e.config.lease.Duration() - e.config.stopMargin)
	// The end of the lease does not wait for the goroutine that commits.
	l.expiry = time.AfterFunc(time.Until(l.deadline), l.expire)
	l.mu.Unlock()

	now := time.Now()
	e.update(func(s *Status) {
		s.Phase, s.Since = PhaseLeading, now
		s.Leader, s.Token, s.Rank = e.member, token, 0
		s.LastRenewal, s.LastError = now, nil
	})
	e.logger.Info("leading", "token", token.String(), "fencing_number", fence)
	return l
}

// Role returns the role that is led.
func (l *Leadership) Role() Role { return l.elector.role }

// Member returns the member that leads.
func (l *Leadership) Member() MemberID { return l.elector.member }

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
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.deadline
}

// Context returns a context that ends with the leadership. Its cause is Err.
func (l *Leadership) Context() context.Context { return l.ctx }

// Done returns a channel that is closed when the leadership has ended.
func (l *Leadership) Done() <-chan struct{} { return l.ctx.Done() }

// Err returns nil while the role is held, and afterwards why it no longer is:
// always [ErrNotHeld], and more precisely [ErrFenced], [ErrLeaseExpired],
// [ErrResigned], [ErrUnanswered], [ErrTopicChanged], [ErrInvalidConfig] or
// [ErrClosed].
func (l *Leadership) Err() error { return context.Cause(l.ctx) }

// held returns nil while the role is held. It looks at the clock itself: after a
// pause of the process the timer may not have fired yet.
func (l *Leadership) held() error {
	if err := l.Err(); err != nil {
		return err
	}
	l.expire()
	if err := l.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.resigning {
		return l.because(ErrResigned)
	}
	return nil
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
// returns when it is committed: all of them are in the log, or none. Topic,
// partition and offset are filled in. It blocks until then, but not past the end of
// the leadership. The records must not be touched until it returns.
//
// nil: committed. [ErrNotHeld]: nothing was committed, the leadership is over.
// [*RejectedError]: a record was refused, nothing was committed, the leadership
// goes on. [*OutcomeUnknownError]: the cluster never answered whether it committed;
// the leadership is over. ctx's cause: ctx ended while the call was queued, nothing
// was committed. Order holds between calls that are made one after the other.
func (l *Leadership) Produce(ctx context.Context, records ...*kgo.Record) error {
	for i, record := range records {
		if record == nil {
			return &RejectedError{Index: i, Err: invalidConfig("record %d is nil", i)}
		}
	}
	if err := l.held(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if len(records) == 0 {
		return nil
	}
	request := &commitRequest{records: records, done: make(chan error, 1)}
	select {
	case l.requests <- request:
		return <-request.done
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-l.ctx.Done():
		return l.Err()
	}
}

// Resign gives the role up: the open commit finishes, calls that are queued fail
// uncommitted, then the lease is cleared and the member leaves the roster, so that
// the next one leads within milliseconds. The work must have stopped before.
//
// The leadership is over when Resign returns, even where it fails or ctx ends first;
// then the lease runs out. Resigning twice or after a loss is harmless and returns
// nil.
func (l *Leadership) Resign(ctx context.Context) error {
	l.mu.Lock()
	again := l.resigning
	l.resigning = true
	l.mu.Unlock()
	if again || l.Err() != nil {
		select {
		case <-l.over:
		case <-ctx.Done():
		}
		return nil
	}
	request := &resignation{done: make(chan error, 1)}
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

// expire ends the leadership if its deadline has passed, and otherwise waits on.
func (l *Leadership) expire() {
	l.mu.Lock()
	left := time.Until(l.deadline)
	if left > 0 {
		l.expiry.Reset(left)
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	if l.Err() == nil {
		l.end(fmt.Errorf("%w: not renewed in time", l.because(ErrLeaseExpired)))
	}
}

// abandon makes lead resign at once: the caller of Campaign has gone.
func (l *Leadership) abandon() {
	l.abandoned = true
	l.mu.Lock()
	defer l.mu.Unlock()
	l.resigning = true
}

// stopRenewing lets the lease run out.
func (l *Leadership) stopRenewing() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
}

func (l *Leadership) isStopped() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stopped
}

// lead owns the term until the leadership has ended: renewals, commits,
// resignation.
func (l *Leadership) lead() {
	defer l.finish()
	if l.abandoned {
		_ = l.resign()
		return
	}
	renewal := time.NewTimer(l.untilRenewal())
	defer renewal.Stop()
	draining := l.elector.transport.Draining()
	if !l.ownFollower {
		// Run resigns by itself, after its function has returned.
		draining = nil
	}
	var failures int
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.elector.transport.Closed():
			l.end(l.because(ErrClosed))
			return
		case <-draining:
			l.elector.enter(PhaseDraining)
			if err := l.resign(); err != nil {
				l.elector.logger.Warn("the resignation failed; the lease runs out", "error", err)
			}
			return
		case request := <-l.resigns:
			request.done <- l.resign()
			return
		case request := <-l.requests:
			request.done <- l.commit(request.records, l.untilRenewal() <= 0)
			renewal.Reset(l.untilRenewal())
		case <-renewal.C:
			if l.isStopped() {
				continue
			}
			if err := l.commit(nil, true); err != nil {
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

// untilRenewal is how long the next renewal can wait.
func (l *Leadership) untilRenewal() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.sent.Add(l.elector.config.lease.RenewInterval()))
}

// commit runs one transaction, with a renewal if asked, and ends the leadership if
// that ended the term.
func (l *Leadership) commit(records []*kgo.Record, renew bool) error {
	if err := l.held(); err != nil {
		return err
	}
	batch := Batch{Records: records}
	e := l.elector
	sent := time.Now()
	if renew && !l.isStopped() {
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
	var rejected *RejectedError
	switch {
	case err == nil, errors.As(err, &rejected):
	case permanent(err):
		l.end(err)
		return l.Err()
	default:
		e.logger.Warn("a commit failed; retrying", "error", err)
		e.update(func(s *Status) { s.LastError = err })
	}
	return err
}

// renewed moves the deadline to where a lease that was sent then ends.
func (l *Leadership) renewed(sent time.Time) {
	c := l.elector.config
	l.mu.Lock()
	l.sent = sent
	l.deadline = sent.Add(c.lease.Duration() - c.stopMargin)
	l.mu.Unlock()
	now := time.Now()
	l.elector.update(func(s *Status) { s.LastRenewal, s.LastError = now, nil })
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
	l.mu.Lock()
	l.expiry.Stop()
	l.mu.Unlock()
	e.remember(l.token, cause)
	if errors.Is(cause, ErrResigned) {
		e.logger.Info("resigned", "token", l.token.String())
	} else {
		e.logger.Info("leadership lost", "token", l.token.String(), "cause", cause)
		e.update(func(s *Status) { s.LastError = cause })
	}
	if l.ownFollower {
		l.follower.Close()
	}
	close(l.over)
}

// remember notes a token that was lost while its lease may still be the newest.
func (e *Elector) remember(token FencingToken, cause error) {
	fenced, unanswered := errors.Is(cause, ErrFenced), errors.Is(cause, ErrUnanswered)
	if fenced || unanswered {
		e.memory.orphan = &orphan{token: token, lostAt: e.now(), atOnce: unanswered}
	}
}
