package coordination

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// Phase is what an elector is doing.
type Phase int

const (
	// PhaseStopped: no Campaign or Run is under way.
	PhaseStopped Phase = iota
	// PhaseJoining: registering, or without a fresh view of the role.
	PhaseJoining
	// PhaseStandby: registered, and waiting for the turn.
	PhaseStandby
	// PhaseLeading: holding the role.
	PhaseLeading
	// PhaseDraining: holding the role, or past it, while the function of Run
	// finishes.
	PhaseDraining
)

func (p Phase) String() string {
	if p < PhaseStopped || p > PhaseDraining {
		return fmt.Sprintf("Phase(%d)", int(p))
	}
	return [...]string{"stopped", "joining", "standby", "leading", "draining"}[p]
}

// MarshalText returns what String does.
func (p Phase) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Status is a snapshot of an elector, for health checks and people.
type Status struct {
	Role   Role
	Member MemberID
	Phase  Phase

	// Since is when the phase began.
	Since time.Time

	// Leader is the holder of the newest lease seen, zero if there is none,
	// and Token is its token.
	Leader MemberID
	Token  FencingToken

	// Rank is the number of members ahead in the order of succession, -1
	// while that is not known.
	Rank int

	// LastContact is when the cluster last answered, LastRenewal when this
	// member's lease was last committed; zero if never.
	LastContact time.Time
	LastRenewal time.Time

	// LastError is the newest fault, nil once an attempt went well after it.
	LastError error

	// Overdue says that the function of Run has not returned although its
	// drain timeout has passed since its context ended.
	Overdue bool
}

// An Elector makes one member take part in the elections of one role. It is safe
// for concurrent use; one Campaign or Run at a time is under way.
type Elector struct {
	transport Transport
	role      Role
	member    MemberID
	config    electorConfig
	logger    *slog.Logger
	born      time.Time // origin of the local time axis

	// memory outlives a campaign. It belongs to whoever holds the tenancy.
	memory memory

	mu       sync.Mutex // guards what follows
	status   Status
	tenancy  *tenancy
	follower Follower // the present or the last one; nil at first
}

// A tenancy is one Campaign, with the leadership it yields, or one Run.
type tenancy struct {
	winding bool // its user is done with it
	done    chan struct{}
}

// memory is what an elector remembers from one campaign to the next.
type memory struct {
	minted []FencingToken // the last tokens this elector was issued
	orphan *orphan
	slow   []time.Duration // the last few mints with their first commit

	selfOffset  int64 // the newest own registration, and when it was read back
	selfSeen    time.Time
	leaseOffset int64 // the newest lease record, and when it was first seen
	leaseToken  FencingToken
	leaseSeen   time.Time
}

// An orphan is an own token whose leadership ended while its lease was still the
// newest: the role would stand empty for the rest of that lease.
type orphan struct {
	token    FencingToken
	lostAt   time.Time // local
	atOnce   bool      // nobody fenced it, so nobody need be waited for
	attempts int
}

// maxAllowance caps the time that a mint and a first commit may take, if the lease
// is shorter: the default request timeout.
const maxAllowance = 30 * time.Second

// NewElector returns an elector for a member of a role. Member ids must be unique
// among the processes of a role; [NewUniqueMemberID] makes one that is. It does
// no I/O. Its error wraps [ErrInvalidConfig] and says what to change.
func NewElector(transport Transport, role Role, member MemberID, opts ...ElectorOption) (*Elector, error) {
	if err := validTransport(transport); err != nil {
		return nil, err
	}
	if err := validRole(role); err != nil {
		return nil, err
	}
	if err := validMember(member); err != nil {
		return nil, err
	}
	config := defaultElectorConfig()
	for i, opt := range opts {
		if opt == nil {
			return nil, invalidConfig("NewElector: option %d is nil", i)
		}
		opt.applyElector(&config)
	}
	config, err := config.resolve()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &Elector{
		transport: transport,
		role:      role,
		member:    member,
		config:    config,
		logger:    config.logger.With("role", role.String(), "member", member.String()),
		born:      now,
		memory:    memory{selfOffset: -1, leaseOffset: -1},
		status:    Status{Role: role, Member: member, Since: now, Rank: -1},
	}, nil
}

// local moves an instant onto the elector's time axis, which has no wall clock in
// it: a clock that is set cannot bend it.
func (e *Elector) local(t time.Time) time.Time {
	return time.Unix(1<<30, 0).UTC().Add(t.Sub(e.born))
}

func (e *Elector) now() time.Time { return e.local(time.Now()) }

// Status returns a snapshot. It never blocks.
func (e *Elector) Status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	status := e.status
	status.LastContact = status.LastRenewal
	if e.follower != nil {
		status.LastContact = later(status.LastContact, e.follower.LastContact())
	}
	return status
}

// contacted notes who can tell when the cluster last answered.
func (e *Elector) contacted(follower Follower) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.follower = follower
}

func (e *Elector) update(change func(*Status)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.status)
}

func (e *Elector) enter(phase Phase) {
	e.update(func(s *Status) {
		if s.Phase != phase {
			s.Phase, s.Since = phase, time.Now()
		}
	})
}

// occupy takes the elector for a Campaign or a Run. One that is only winding up
// is waited for.
func (e *Elector) occupy(ctx context.Context) (*tenancy, error) {
	if e.transport == nil {
		return nil, invalidConfig("the elector is the zero value: make one with NewElector")
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		e.mu.Lock()
		current := e.tenancy
		if current == nil {
			e.tenancy = &tenancy{done: make(chan struct{})}
			defer e.mu.Unlock()
			return e.tenancy, nil
		}
		winding := current.winding
		e.mu.Unlock()
		if !winding {
			return nil, fmt.Errorf("role %s: %w", e.role, ErrElectorBusy)
		}
		select {
		case <-current.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tenant returns the present tenancy.
func (e *Elector) tenant() *tenancy {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.tenancy
}

// wind marks a tenancy as over for its user.
func (e *Elector) wind(t *tenancy) {
	e.mu.Lock()
	defer e.mu.Unlock()
	t.winding = true
}

func (e *Elector) vacate(t *tenancy) {
	e.enter(PhaseStopped)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tenancy = nil
	close(t.done)
}

// Campaign blocks until this member leads the role, and returns the leadership
// once its first lease is committed. By then every transaction of a predecessor is
// settled: a read_committed reader that starts now sees all of it or never will.
//
// ctx bounds the campaign alone; the leadership outlives it. When ctx ends the
// member leaves the roster and Campaign returns ctx's cause. Faults of the cluster
// are retried, and visible in [Elector.Status] and the log. Campaign gives up with
// an error that wraps [ErrInvalidConfig] or [ErrTopicChanged] for what retrying
// cannot cure, [ErrClosed] when the transport is closed or shut down, and
// [ErrElectorBusy] while another Campaign, the leadership it returned, or a Run is
// under way.
func (e *Elector) Campaign(ctx context.Context) (*Leadership, error) {
	held, err := e.occupy(ctx)
	if err != nil {
		return nil, err
	}
	type outcome struct {
		leadership *Leadership
		err        error
	}
	result := make(chan outcome)
	abandoned := make(chan struct{})
	go func() {
		defer e.vacate(held)
		l, err := e.elect(ctx, nil)
		select {
		case result <- outcome{l, err}:
		case <-abandoned:
			if l != nil {
				l.abandon()
			}
		}
		if l != nil {
			l.lead()
		}
	}()
	select {
	case r := <-result:
		if r.err != nil {
			e.wind(held)
		}
		return r.leadership, r.err
	case <-ctx.Done():
		e.wind(held)
		close(abandoned)
		return nil, context.Cause(ctx)
	}
}

// Run leads the role again and again, and calls fn each time, until ctx ends, fn
// returns while the role is held, or retrying cannot help.
//
// fn runs on the caller's goroutine, once for each leadership. Its context ends
// when the leadership is lost and when ctx ends; the leadership's own context ends
// on a loss only, so that work can be flushed after ctx has ended, while renewals
// go on. fn must return soon after its context ends.
//
//   - fn returned after the leadership had ended: its error is logged, and Run
//     campaigns again.
//   - fn returned while the role was held: Run resigns and returns fn's error.
//   - ctx ended: fn drains, Run resigns and returns nil. After the drain timeout
//     renewals stop, an error is logged, and Status shows Overdue; Run still waits
//     for fn, while the lease runs out.
//   - the transport was shut down: as if ctx had ended, but the error is
//     [ErrClosed].
//
// The errors are those of [Elector.Campaign] besides.
func (e *Elector) Run(ctx context.Context, fn func(context.Context, *Leadership) error) error {
	if fn == nil {
		return invalidConfig("role %s: Run: the function is nil", e.role)
	}
	held, err := e.occupy(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer e.vacate(held)
	// One subscription for the whole run: what the reader learnt about the
	// role is kept from one campaign to the next.
	var follower Follower
	defer func() {
		if follower != nil {
			follower.Close()
		}
	}()
	for {
		l, err := e.elect(ctx, &follower)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if again, err := e.serve(ctx, l, fn); !again {
			return err
		}
	}
}

// serve calls fn under a leadership and ends that. It reports whether to campaign
// again.
func (e *Elector) serve(ctx context.Context, l *Leadership, fn func(context.Context, *Leadership) error) (again bool, err error) {
	var lead sync.WaitGroup
	lead.Go(l.lead)
	defer e.update(func(s *Status) { s.Overdue = false })
	defer lead.Wait()
	// A function that panics takes its leadership along.
	defer func() { l.end(fmt.Errorf("%w: the function of Run panicked", l.because(ErrNotHeld))) }()

	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(l.ctx, func() { cancel(l.Err()) })()
	returned := make(chan struct{})
	lead.Go(func() { e.supervise(ctx, l, cancel, returned) })

	err = func() error {
		defer close(returned)
		return fn(work, l)
	}()

	stopping := ctx.Err() != nil || e.draining()
	if lost := l.Err(); lost != nil {
		if err != nil && !errors.Is(err, context.Canceled) {
			e.logger.Warn("the function ended after its leadership", "error", err, "loss", lost)
		}
		switch {
		case ctx.Err() != nil:
			return false, nil
		case errors.Is(lost, ErrInvalidConfig), errors.Is(lost, ErrTopicChanged), errors.Is(lost, ErrClosed):
			return false, lost
		}
		return !stopping, nil
	}
	// The lease bounds how long a resignation may take.
	resigned := l.Resign(context.Background())
	switch {
	case resigned != nil:
		e.logger.Warn("the resignation failed; the lease runs out", "error", resigned)
	case stopping && err != nil && !errors.Is(err, context.Canceled):
		e.logger.Warn("the function failed while it drained", "error", err)
	}
	if ctx.Err() != nil {
		return false, nil
	}
	if stopping {
		return false, fmt.Errorf("role %s: %w", e.role, ErrClosed)
	}
	return false, err
}

// supervise ends fn's context when the transport drains, and stops the renewals of
// a function that does not return in time.
func (e *Elector) supervise(ctx context.Context, l *Leadership, cancel context.CancelCauseFunc, returned <-chan struct{}) {
	select {
	case <-returned:
		return
	case <-l.ctx.Done():
	case <-ctx.Done():
	case <-e.transport.Draining():
		cancel(ErrClosed)
	}
	e.enter(PhaseDraining)
	timeout := time.NewTimer(e.config.drainTimeout)
	defer timeout.Stop()
	select {
	case <-returned:
		return
	case <-timeout.C:
	}
	l.stopRenewing()
	e.update(func(s *Status) { s.Overdue = true })
	e.logger.Error("the function has not returned although its context ended; its lease is not renewed any more",
		"token", l.token.String(), "drain_timeout", e.config.drainTimeout)
}

func (e *Elector) draining() bool {
	select {
	case <-e.transport.Draining():
		return true
	case <-e.transport.Closed():
		return true
	default:
		return false
	}
}

// elect campaigns until this member has committed its first lease. A follower
// that is passed in is used, and set on first use; otherwise the campaign's own
// belongs to the leadership, or is closed.
func (e *Elector) elect(ctx context.Context, shared *Follower) (*Leadership, error) {
	e.enter(PhaseJoining)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	quit := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-e.transport.Draining():
			cancel(fmt.Errorf("role %s: %w", e.role, ErrClosed))
		case <-e.transport.Closed():
			cancel(fmt.Errorf("role %s: %w", e.role, ErrClosed))
		case <-quit:
		}
	})
	defer watch.Wait()
	defer close(quit)

	c := &candidate{
		Elector:  e,
		shared:   shared != nil,
		yielded:  make(map[FencingToken]time.Time),
		jitter:   rand.N(e.config.lease.ChallengeStagger() + 1),
		offset:   -1,
		reread:   make(map[ending]time.Time),
		lastRank: -1,
	}
	if shared != nil {
		c.follower = *shared
	}
	l, err := c.run(ctx)
	c.closeTerm()
	if shared != nil {
		*shared = c.follower
	} else if l == nil && c.follower != nil {
		c.follower.Close()
	}
	return l, err
}
