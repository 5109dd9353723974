package coordination

import (
	"math"
	"sync"
	"time"
)

// A Clock tells the wall-clock time that is written into records. Nothing in this
// library decides by it.
type Clock interface {
	// Now returns the current time. It must be safe for concurrent use.
	Now() time.Time
}

// SystemClock is the machine's wall clock.
type SystemClock struct{}

// Now returns [time.Now].
func (SystemClock) Now() time.Time { return time.Now() }

// ManualClock is a [Clock] for tests that stands still until it is moved. It is
// safe for concurrent use; the zero value stands at the zero time.
type ManualClock struct {
	mu  sync.Mutex // guards now
	now time.Time
}

// NewManualClock returns a clock that stands at an instant.
func NewManualClock(now time.Time) *ManualClock { return &ManualClock{now: now} }

// Now returns where the clock stands.
func (c *ManualClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Set moves the clock to an instant, forwards or back.
func (c *ManualClock) Set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = now
}

// Advance moves the clock by a duration, which may be negative.
func (c *ManualClock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// LeaseConfig is how long a lease lasts, how often it is renewed, and how far
// apart standbys challenge. It is immutable; the zero value is refused where one is
// asked for.
type LeaseConfig struct {
	duration time.Duration
	renew    time.Duration
	stagger  time.Duration
}

// NewLeaseConfig checks that a lease lasts at least a millisecond, the unit of the
// wire, that it is renewed before it ends, and that the stagger is not negative.
// Its error wraps [ErrInvalidConfig].
//
// A shorter lease makes a failover sooner and a short stall of the cluster a
// failover. A stagger is what a mint and a first commit usually take, with room:
// with less, standbys fence each other.
func NewLeaseConfig(duration, renew, stagger time.Duration) (LeaseConfig, error) {
	switch {
	case duration < time.Millisecond:
		return LeaseConfig{}, invalidConfig("lease duration %s: use at least 1ms", duration)
	case renew <= 0:
		return LeaseConfig{}, invalidConfig("renew interval %s: use a positive duration, such as a third of the lease", renew)
	case renew >= duration:
		return LeaseConfig{}, invalidConfig("renew interval %s: use less than the lease duration of %s", renew, duration)
	case stagger < 0:
		return LeaseConfig{}, invalidConfig("challenge stagger %s: use a positive duration, such as a sixth of the lease", stagger)
	}
	return LeaseConfig{duration, renew, stagger}, nil
}

// LeaseConfigFor returns a configuration in the usual proportions: a renewal each
// third of the lease, a stagger of a sixth. Its error is that of [NewLeaseConfig].
func LeaseConfigFor(duration time.Duration) (LeaseConfig, error) {
	return NewLeaseConfig(duration, duration/3, duration/6)
}

// DefaultLeaseConfig returns a lease of 30 s, renewed every 10 s, with a stagger
// of 5 s.
func DefaultLeaseConfig() LeaseConfig {
	return LeaseConfig{30 * time.Second, 10 * time.Second, 5 * time.Second}
}

// Duration is how long a lease lasts after its grant.
func (c LeaseConfig) Duration() time.Duration { return c.duration }

// RenewInterval is the time between two renewals.
func (c LeaseConfig) RenewInterval() time.Duration { return c.renew }

// ChallengeStagger is the time between the turns of two standbys.
func (c LeaseConfig) ChallengeStagger() time.Duration { return c.stagger }

// RenewsWithMargin reports whether a renewal that fails leaves time for another
// one before the lease ends.
func (c LeaseConfig) RenewsWithMargin() bool { return c.renew < c.duration-c.renew }

// ChallengeDelay is how long after the end of a lease the member of a rank may
// challenge: rank times the stagger. A negative rank counts as 0; a delay that
// does not fit is the longest duration.
func (c LeaseConfig) ChallengeDelay(rank int) time.Duration {
	if rank <= 0 || c.stagger <= 0 {
		return 0
	}
	if int64(rank) > math.MaxInt64/int64(c.stagger) {
		return math.MaxInt64
	}
	return time.Duration(rank) * c.stagger
}

// Grant returns the lease of a member from an instant on, in whole milliseconds.
func (c LeaseConfig) Grant(member MemberID, token FencingToken, now time.Time) Lease {
	granted := clampInstant(now.UTC().Truncate(time.Millisecond))
	return Lease{
		Member:    member,
		Token:     token,
		GrantedAt: granted,
		Deadline:  clampInstant(granted.Add(c.duration.Truncate(time.Millisecond))),
	}
}

// LeaseTiming is what follows from a lease under a configuration. Its instants are
// on the clock of whoever wrote the lease.
type LeaseTiming struct {
	// RenewAt is when the holder renews, Deadline when the lease ends unless it
	// does.
	RenewAt  time.Time
	Deadline time.Time

	stagger time.Duration
}

// Timing returns what follows from a lease.
func (c LeaseConfig) Timing(lease Lease) LeaseTiming {
	return LeaseTiming{
		RenewAt:  clampInstant(lease.GrantedAt.Add(c.renew)),
		Deadline: lease.Deadline,
		stagger:  c.stagger,
	}
}

// Live reports whether the lease has not ended at an instant: it ends at its
// deadline.
func (t LeaseTiming) Live(now time.Time) bool { return now.Before(t.Deadline) }

// Remaining is how long the lease still lasts, 0 once it has ended.
func (t LeaseTiming) Remaining(now time.Time) time.Duration { return max(t.Deadline.Sub(now), 0) }

// ChallengeAt is the turn of the standby of a rank.
func (t LeaseTiming) ChallengeAt(rank int) time.Time {
	return turnOf(t.Deadline, rank, t.stagger)
}

// turnOf is anchor plus rank times stagger, exactly, up to the last instant that
// the wire can carry.
func turnOf(anchor time.Time, rank int, stagger time.Duration) time.Time {
	turn := anchor
	for rank > 0 && stagger > 0 && turn.Before(lastInstant) {
		steps := min(int64(rank), math.MaxInt64/int64(stagger))
		turn = turn.Add(time.Duration(steps) * stagger)
		rank -= int(steps)
	}
	return clampInstant(turn)
}

// The instants that the wire can carry.
var (
	firstInstant = time.UnixMilli(math.MinInt64).UTC()
	lastInstant  = time.UnixMilli(math.MaxInt64).UTC()
)

// clampInstant keeps an instant within what the wire can carry.
func clampInstant(t time.Time) time.Time {
	switch {
	case t.After(lastInstant):
		return lastInstant
	case t.Before(firstInstant):
		return firstInstant
	}
	return t
}
