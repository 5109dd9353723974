package coordination

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A candidate is one campaign: the event loop between the registration and the
// first lease. One goroutine owns it.
type candidate struct {
	*Elector
	follower Follower
	shared   bool // the follower outlives the campaign and its leadership
	view     RoleView
	readAt   time.Time // of the last barrier
	offset   int64     // of the own registration, -1 before
	life     *incarnation
	term     Term // warmed, or nil
	warmed   sync.WaitGroup
	cool     context.CancelFunc // ends the warming

	gap     bool      // the view must prove itself fresh before turns count
	freshAt time.Time // when it last did
	penalty time.Duration
	jitter  time.Duration

	yieldUntil time.Time                  // until when a takeover is waited for
	yielded    map[FencingToken]time.Time // until when each token was or is waited for
	reread     map[ending]time.Time       // since when the log is read again for it
	stale      int                        // checks in a row that took too long
	barren     int                        // tokens in a row that showed no lease
	latest     FencingToken               // the last token described, to count the barren ones once

	lastRank int
	failures int // faults in a row
}

// An ending is a transaction whose records will be readable in a moment.
type ending struct {
	token FencingToken
	state TransactionState
}

// run registers, waits for its turn, checks, mints, and commits the first lease.
func (c *candidate) run(ctx context.Context) (*Leadership, error) {
	if c.follower == nil {
		err := c.retry(ctx, "follow the role", func() error {
			follower, err := c.transport.Follow(ctx, c.role, c.member)
			if err == nil {
				c.follower = follower
				c.contacted(follower)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if err := c.register(ctx); err != nil {
		return nil, c.leave(ctx, err)
	}
	for {
		l, err := c.step(ctx)
		if l != nil {
			return l, nil
		}
		if err != nil {
			return nil, c.leave(ctx, err)
		}
	}
}

// step looks at the state once, and acts or waits as it says.
func (c *candidate) step(ctx context.Context) (*Leadership, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	local := localise(c.view, c.facts())
	now := c.now()
	decision := Evaluate(local, c.member, now, c.config.lease)
	if decision.Action == ActionNotRegistered {
		return nil, c.rejoin(ctx)
	}
	c.showStandby(local)

	turn := now
	if decision.Action != ActionChallenge {
		turn = decision.Until
	}
	if own, ok := c.ownTurn(local, now); ok && own.Before(turn) {
		turn = own
	}
	turn = later(turn, c.yieldUntil)
	if !turn.After(now) {
		return c.challenge(ctx)
	}
	if c.view.Unstable {
		// Renewals behind an open transaction are not pushed, and count from
		// their first sight: look often enough to see when they stop.
		look := c.readAt.Add(max(c.config.lease.ChallengeStagger(), 10*time.Millisecond))
		if !look.After(now) {
			return nil, c.readBack(ctx)
		}
		if look.Before(turn) {
			turn = look
		}
	}
	return nil, c.await(ctx, turn)
}

func (c *candidate) facts() localFacts {
	return localFacts{
		me:        c.member,
		config:    c.config.lease,
		freshAt:   c.freshAt,
		penalty:   c.penalty,
		jitter:    c.jitter,
		maxExtent: c.config.maxExtent,
	}
}

func (c *candidate) allowance() time.Duration {
	var slowest time.Duration
	for _, d := range c.memory.slow {
		slowest = max(slowest, d)
	}
	return allowance(c.config.lease, slowest, c.barren, maxAllowance)
}

// ownTurn returns when a lease that this process lost, or that an earlier process
// of this member left behind, may be taken back ahead of its end.
func (c *candidate) ownTurn(local RoleState, now time.Time) (time.Time, bool) {
	lease := c.view.State.Lease
	if lease == nil || lease.Member != c.member {
		return time.Time{}, false
	}
	if lost := c.memory.orphan; lost != nil && lost.token == lease.Token {
		if lost.atOnce && lost.attempts == 0 {
			return lost.lostAt, true
		}
		return lost.lostAt.Add(saturatingDouble(c.allowance(), lost.attempts, c.config.lease.Duration())), true
	}
	if !c.config.restartReclaim || local.Lease == nil || c.life == nil || c.life.reclaimed.Load() {
		return time.Time{}, false
	}
	if reclaimable(c.view, c.member, c.life.began, now, local.Lease.Deadline, c.allowance()) {
		return now, true
	}
	return time.Time{}, false
}

// An incarnation is this process as a member of a role.
type incarnation struct {
	began     int64       // offset of its first registration
	reclaimed atomic.Bool // it has used its one restart reclaim
}

type incarnationKey struct {
	cluster string
	role    Role
	member  MemberID
}

// incarnations holds all of this process. It is global because what it remembers
// has to outlive electors and transports: what is older than the process is not
// told by them.
var incarnations sync.Map // of *incarnation by incarnationKey

// register appends a registration, at the tail, and reads it back.
func (c *candidate) register(ctx context.Context) error {
	err := c.retry(ctx, "register", func() (err error) {
		c.offset, err = c.transport.Register(ctx, c.role, Registration{Member: c.member, RegisteredAt: c.config.clock.Now()})
		return err
	})
	if err != nil {
		return err
	}
	c.logger.Debug("registered", "offset", c.offset)
	return c.readBack(ctx)
}

func (c *candidate) readBack(ctx context.Context) error {
	return c.retry(ctx, "read the role", func() error {
		view, err := c.barrier(ctx)
		if err != nil {
			return err
		}
		c.adopt(view)
		life, _ := incarnations.LoadOrStore(incarnationKey{view.ClusterID, c.role, c.member}, &incarnation{began: c.offset})
		c.life, _ = life.(*incarnation)
		return nil
	})
}

// rejoin registers again if the own entry is gone at a position that must contain
// it; until then it reads on.
func (c *candidate) rejoin(ctx context.Context) error {
	c.enter(PhaseJoining)
	if c.view.Position > c.offset {
		c.logger.Info("no longer in the roster; registering again")
		return c.register(ctx)
	}
	return c.readBack(ctx)
}

// barrier reads to the end of the log, within the allowance.
func (c *candidate) barrier(ctx context.Context) (RoleView, error) {
	ctx, cancel := context.WithTimeout(ctx, max(c.allowance(), time.Second))
	defer cancel()
	view, err := c.follower.Barrier(ctx)
	if err == nil {
		c.readAt = c.now()
	}
	return view, err
}

// adopt takes a view, with its instants moved to the local axis. An instant that
// is known of a record is kept, should the reader see it a second time.
func (c *candidate) adopt(view RoleView) {
	m := &c.memory
	if view.Self != nil {
		if view.Self.Offset != m.selfOffset {
			m.selfOffset, m.selfSeen = view.Self.Offset, c.local(view.Self.SeenAt)
		}
		view.Self.SeenAt = m.selfSeen
		if c.offset >= 0 && view.Self.Offset > c.offset {
			c.logger.Error("another process campaigns under the same member id; give each process its own",
				"offset", view.Self.Offset, "own_offset", c.offset)
			c.offset = view.Self.Offset
			c.penalty = c.config.lease.ChallengeStagger() / 2
		}
	}
	if view.LeaseStamp != nil {
		if view.LeaseStamp.Offset != m.leaseOffset || view.Newest != m.leaseToken {
			m.leaseOffset, m.leaseToken = view.LeaseStamp.Offset, view.Newest
			m.leaseSeen = c.local(view.LeaseStamp.SeenAt)
		}
		view.LeaseStamp.SeenAt = m.leaseSeen
	}
	if view.Unreadable != nil {
		view.Unreadable.SeenAt = c.local(view.Unreadable.SeenAt)
	}
	if view.SignOfLife != nil {
		view.SignOfLife.SeenAt = c.local(view.SignOfLife.SeenAt)
	}
	if view.State.Lease != nil && view.Newest != c.view.Newest {
		// A token that was waited for, or another one, did show a lease.
		c.barren, c.yieldUntil = 0, time.Time{}
		clear(c.yielded)
		clear(c.reread)
	}
	c.view = view
	c.update(func(s *Status) {
		s.Leader, s.Token = view.State.holder(), view.Newest
	})
}

// await waits until a turn, a new view, or the end of ctx. A turn that is near has
// the term warmed for it.
func (c *candidate) await(ctx context.Context, turn time.Time) error {
	wait := turn.Sub(c.now())
	lead := min(max(c.config.lease.Duration()/4, 50*time.Millisecond), 2*time.Second)
	if c.term == nil && wait > lead {
		wait -= lead
		turn = turn.Add(-lead)
	} else if c.term == nil {
		c.warm(ctx)
	}
	timer := time.NewTimer(max(wait, 0))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case view := <-c.follower.Views():
		if view.Err != nil {
			return view.Err
		}
		// A barrier may have overtaken what was pushed before it.
		if view.Position >= c.view.Position {
			c.adopt(view)
		}
	case <-timer.C:
	}
	if c.now().Sub(turn) > c.config.lease.ChallengeStagger() {
		// This process stood still, or the machine did.
		c.gap = true
	}
	return nil
}

// warm prepares the term, and its connections in the background.
func (c *candidate) warm(ctx context.Context) {
	if c.term != nil {
		return
	}
	lease := c.config.lease
	term, err := c.transport.NewTerm(c.role, TermConfig{
		TransactionTimeout: c.config.transactionTimeout,
		AttemptTimeout:     max(lease.RenewInterval(), time.Second),
		StallTimeout:       c.config.stallTimeout(),
		ProducerOptions:    c.config.producerOptions,
	})
	if err != nil {
		c.note("prepare a term", err)
		return
	}
	c.term = term
	ctx, cancel := context.WithTimeout(ctx, max(lease.Duration(), time.Second))
	c.cool = cancel
	c.warmed.Go(func() {
		defer cancel()
		_ = term.Warm(ctx)
	})
}

func (c *candidate) closeTerm() {
	if c.term != nil {
		c.term.Close()
		c.term = nil
	}
	if c.cool != nil {
		c.cool()
	}
	c.warmed.Wait()
}

// challenge makes the check at the turn, and mints if it allows.
func (c *candidate) challenge(ctx context.Context) (*Leadership, error) {
	began := c.now()
	c.warm(ctx)
	view, err := c.barrier(ctx)
	if err != nil {
		c.gap = true
		return nil, c.pause(ctx, "read the log before a challenge", err)
	}
	c.adopt(view)
	if c.gap {
		c.gap, c.freshAt = false, c.now()
		c.settled()
	}
	local := localise(c.view, c.facts())
	now := c.now()
	if Evaluate(local, c.member, now, c.config.lease).Action != ActionChallenge {
		own, ok := c.ownTurn(local, now)
		if !ok || own.After(now) {
			return nil, nil
		}
	}
	found := c.describe(ctx)
	switch verdict := judge(found); verdict {
	case verdictReread:
		c.logger.Debug("the newest epoch is ending a transaction; reading again", "token", found.described.String(), "state", found.state)
		return nil, sleep(ctx, 2*time.Millisecond)
	case verdictYield:
		rank := c.rank(local)
		wait := c.allowance() + c.config.lease.ChallengeDelay(rank)
		c.yieldUntil = c.now().Add(wait)
		c.yielded[found.described] = c.yieldUntil
		c.logger.Info("another member is taking over; waiting for its lease", "token", found.described.String(), "state", found.state, "wait", wait)
		return nil, nil
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if c.now().Sub(began) > checkBudget(c.config.lease.ChallengeStagger(), c.stale) {
		c.stale++
		return nil, nil
	}
	c.stale = 0
	return c.mint(ctx)
}

// describe asks the coordinator, retrying within the allowance.
func (c *candidate) describe(ctx context.Context) attempt {
	found := attempt{newest: c.view.Newest, silent: true}
	allowance := c.allowance()
	ctx, cancel := context.WithTimeout(ctx, allowance)
	defer cancel()
	for {
		status, err := c.transport.Describe(ctx, c.role)
		if err == nil {
			found.silent = false
			found.state = status.State
			found.described, _ = status.Token()
			break
		}
		if sleep(ctx, 10*time.Millisecond) != nil {
			return found
		}
	}
	token, now := found.described, c.now()
	if token.IsZero() {
		return found
	}
	if token != c.latest {
		c.latest = token
		if token != found.newest {
			c.barren++
		}
	}
	found.mine = slices.Contains(c.memory.minted, token)
	if until, ok := c.yielded[token]; ok {
		found.waited = !now.Before(until)
	}
	if since, again := c.reread[ending{token, found.state}]; !again {
		c.reread[ending{token, found.state}] = now
	} else {
		found.reread = found.state == TransactionCompleteCommit || now.Sub(since) > allowance
	}
	return found
}

// mint takes the role: a new epoch, the log read to its end once more, and the
// first lease under it, all within the allowance. What is begun is finished even
// if ctx ends: with a tombstone in place of the lease.
func (c *candidate) mint(ctx context.Context) (*Leadership, error) {
	if c.term == nil {
		return nil, sleep(ctx, 50*time.Millisecond)
	}
	term := c.term
	c.term = nil
	began := time.Now()
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.allowance())
	defer cancel()
	if lost := c.memory.orphan; lost != nil {
		lost.attempts++
	} else if c.view.State.holder() == c.member {
		c.life.reclaimed.Store(true)
	}

	token, err := c.mintUnlessOvertaken(bounded, term)
	if err != nil {
		term.Close()
		if errors.Is(err, errOvertaken) {
			c.logger.Info("another member led before the coordinator got to this one", "token", c.view.Newest.String())
			return nil, nil
		}
		return nil, c.pause(ctx, "mint an epoch", err)
	}
	c.memory.minted = append(c.memory.minted, token)
	if len(c.memory.minted) > 16 {
		c.memory.minted = c.memory.minted[1:]
	}
	l, err := c.assume(ctx, bounded, term, token)
	if l == nil {
		term.Close()
		c.barren++
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, c.pause(ctx, fmt.Sprintf("commit the first lease of token %s", token), err)
	}
	c.memory.slow = append(c.memory.slow, time.Since(began))
	if len(c.memory.slow) > 8 {
		c.memory.slow = c.memory.slow[1:]
	}
	c.memory.orphan = nil
	return l, nil
}

// errOvertaken ends a mint.
var errOvertaken = errors.New("another member leads")

// mintUnlessOvertaken mints for as long as nobody else leads. The coordinator puts a
// mint off while it ends a transaction (CONCURRENT_TRANSACTIONS), and one that is
// repeated may find, and depose, a leader that has come meanwhile.
func (c *candidate) mintUnlessOvertaken(ctx context.Context, term Term) (token FencingToken, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	minted := make(chan struct{})
	go func() {
		defer close(minted)
		token, err = term.Mint(ctx)
	}()
	newest, views := c.view.Newest, c.follower.Views()
	for {
		select {
		case <-minted:
			if err != nil && context.Cause(ctx) == errOvertaken {
				err = errOvertaken
			}
			return token, err
		case view := <-views:
			if view.Err != nil {
				views = nil // whoever reads to the end next will say so
				continue
			}
			if view.Position < c.view.Position {
				continue // the barrier has overtaken it
			}
			if c.adopt(view); c.view.Newest != newest && c.view.State.Lease != nil {
				cancel(errOvertaken)
			}
		}
	}
}

// assume commits the first lease under a token that was just minted.
func (c *candidate) assume(ctx, bounded context.Context, term Term, token FencingToken) (*Leadership, error) {
	view, err := c.follower.Barrier(bounded)
	if err != nil {
		return nil, err
	}
	c.adopt(view)
	if ctx.Err() != nil {
		_, err := term.Commit(bounded, Batch{Withdraw: []MemberID{c.member}, Lease: Tombstone{}})
		return nil, err
	}
	var gone []MemberID
	if c.config.pruning {
		gone = prunable(c.view, localise(c.view, c.facts()), c.member, c.now(), c.config.lease)
	}
	lease := c.config.lease.Grant(c.member, token, c.config.clock.Now())
	sent := time.Now()
	offset, err := term.Commit(bounded, Batch{Withdraw: gone, Lease: lease})
	if ended := term.Err(); err == nil && ended != nil {
		// It was committed in the moment in which time ran out.
		err = fmt.Errorf("%w: %w", ErrOutcomeUnknown, ended)
	}
	if err != nil {
		if errors.Is(err, ErrOutcomeUnknown) {
			c.memory.orphan = &orphan{token: token, lostAt: c.now(), atOnce: true}
		}
		return nil, err
	}
	if len(gone) > 0 {
		c.logger.Info("removed members that let their turn pass", "count", len(gone))
	}
	return newLeadership(c.Elector, term, c.follower, !c.shared, token, offset, sent), nil
}

// leave takes the member out of the roster, within reason, and returns why.
func (c *candidate) leave(ctx context.Context, why error) error {
	if c.offset < 0 || errors.Is(why, ErrTopicChanged) {
		return why
	}
	select {
	case <-c.transport.Closed():
		return why
	default:
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(c.config.lease.Duration(), time.Second))
	defer cancel()
	if err := c.transport.Withdraw(bounded, c.role, c.member); err != nil {
		c.logger.Debug("could not leave the roster", "error", err)
	}
	return why
}

func (c *candidate) rank(local RoleState) int {
	rank := 0
	for _, entry := range local.Roster {
		if entry.Member == c.member {
			break
		}
		if entry.Member != local.holder() {
			rank++
		}
	}
	return rank
}

func (c *candidate) showStandby(local RoleState) {
	c.enter(PhaseStandby)
	rank := c.rank(local)
	if rank == c.lastRank {
		return
	}
	c.lastRank = rank
	c.update(func(s *Status) { s.Rank = rank })
	c.logger.Debug("standby", "rank", rank, "leader", c.view.State.holder().String())
}

// permanent reports whether an error is one that retrying cannot cure.
func permanent(err error) bool {
	return errors.Is(err, ErrInvalidConfig) || errors.Is(err, ErrTopicChanged) || errors.Is(err, ErrClosed)
}

// retry repeats an action until it goes well, with backoff.
func (c *candidate) retry(ctx context.Context, what string, action func() error) error {
	for {
		err := action()
		if err == nil {
			c.settled()
			return nil
		}
		if err := c.pause(ctx, what, err); err != nil {
			return err
		}
	}
}

// pause notes a fault and waits before the next attempt. It returns an error if
// there is to be none.
func (c *candidate) pause(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if permanent(err) {
		return fmt.Errorf("%s: %w", what, err)
	}
	c.note(what, err)
	return sleep(ctx, saturatingDouble(20*time.Millisecond, c.failures-1, time.Second))
}

// note logs a fault, the first of a row as a warning, and shows it in Status.
func (c *candidate) note(what string, err error) {
	c.failures++
	if c.failures == 1 || c.failures%32 == 0 {
		c.logger.Warn("an election step failed; retrying", "step", what, "error", err, "failures", c.failures)
	}
	c.update(func(s *Status) { s.LastError = fmt.Errorf("%s: %w", what, err) })
}

func (c *candidate) settled() {
	c.failures = 0
	c.update(func(s *Status) { s.LastError = nil })
}
