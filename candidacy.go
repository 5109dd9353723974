package coordination

import (
	"fmt"
	"time"
)

// This file holds the rules of a candidate, beyond the frozen fold and
// Evaluate: how a state is moved onto the local clock, when a challenge may go
// out, whom a new leader prunes, and what a loss was. They are functions of
// their arguments alone.

const (
	// maxAhead bounds how many members can stand in front of another one, so
	// that forged or dead registrations cost that many staggers at worst.
	maxAhead = 16

	// defaultMaxExtent bounds how long a lease found in the log may last, so
	// that a forged or foolish one cannot hold a role for a year.
	defaultMaxExtent = 15 * time.Minute

	// pruneGrace is the least time by which a turn must have passed before
	// the member that let it pass is taken for dead.
	pruneGrace = 5 * time.Second

	// minCheckBudget and minAllowance are what a check and a mint get where the
	// stagger is next to nothing.
	minCheckBudget = 10 * time.Millisecond
	minAllowance   = 50 * time.Millisecond

	// maxPruned bounds the tombstones in the transaction of a first lease.
	maxPruned = 256
)

// localFacts is what a candidate knows that is not in the log. Its instants are
// local ones.
type localFacts struct {
	me     MemberID
	config LeaseConfig

	// freshAt is when the view was first fresh again after a gap (an outage,
	// a pause, a barrier that failed): turns count from there at the earliest,
	// or all of them would be past.
	freshAt time.Time

	// penalty delays the turn of a member that shares its id with another
	// process.
	penalty time.Duration

	// jitter, within one stagger, spreads the members beyond maxAhead.
	jitter time.Duration

	// maxExtent caps the extent of a lease.
	maxExtent time.Duration
}

// leaseExtent is how long a lease lasts by its own word, whatever clock wrote
// it, clamped so that no record can hold a role for ever.
func leaseExtent(lease Lease, maxExtent time.Duration, config LeaseConfig) time.Duration {
	extent := lease.Deadline.Sub(lease.GrantedAt) // Sub saturates
	return min(max(extent, 0), max(maxExtent, config.Duration()))
}

// appendedAt is the local instant at which a record was appended, as far as it
// is known: its arrival, which is never too early, or for a record older than
// the member's own registration the time between the two by the log's clock. A
// log's clock is one broker's: both must be LogAppendTime under one leader
// epoch.
func appendedAt(record RecordStamp, self *RecordStamp) time.Time {
	if self == nil || record.Offset > self.Offset ||
		!record.LogAppendTime || !self.LogAppendTime || record.LeaderEpoch != self.LeaderEpoch {
		return record.SeenAt
	}
	age := max(self.AppendedAt.Sub(record.AppendedAt), 0)
	byLog := self.SeenAt.Add(-age)
	if byLog.After(record.SeenAt) {
		return record.SeenAt
	}
	return byLog
}

// localise returns a copy of a view's state in which every instant that Evaluate
// compares with now is a local one. The copy carries the rules that the frozen
// Evaluate cannot:
//
//   - a registration counts from its read-back, never from what it says itself;
//   - a lease lasts its extent from its append, on the local clock;
//   - without a lease, turns count from when it was seen cleared;
//   - a lease that names this member but is not held by it belongs to nobody in
//     the roster, so that the member ranks by its registration;
//   - after a gap, turns count from when the view was fresh again;
//   - at most maxAhead members stand ahead.
func localise(view RoleView, facts localFacts) RoleState {
	delay := facts.penalty
	state := RoleState{Roster: view.State.Roster}

	if lease, anchor := localLease(view, facts); lease != nil {
		if lease.Member == facts.me {
			lease.Member = MemberID{}
		}
		lease.Deadline = anchor
		state.Lease = lease
	}

	var clipped bool
	state.Roster, clipped = clipAhead(state.Roster, facts.me, state.holder())
	if clipped {
		delay += facts.jitter
	}
	if state.Lease != nil {
		state.Lease.Deadline = later(state.Lease.Deadline, facts.freshAt).Add(delay)
		return state
	}
	anchor := facts.freshAt
	if view.Self != nil {
		anchor = later(anchor, view.Self.SeenAt)
	}
	if view.LeaseStamp != nil {
		anchor = later(anchor, appendedAt(*view.LeaseStamp, view.Self))
	}
	for i := range state.Roster {
		if state.Roster[i].Member == facts.me {
			state.Roster[i].RegisteredAt = anchor.Add(delay)
		}
	}
	return state
}

// localLease returns the lease a candidate has to respect, if any, and the local
// instant at which it ends: that of the state, a sign of life behind an open
// transaction, or one whose holder cannot be read.
func localLease(view RoleView, facts localFacts) (*Lease, time.Time) {
	var (
		lease  *Lease
		anchor time.Time
	)
	if view.State.Lease != nil && view.LeaseStamp != nil {
		copied := *view.State.Lease
		lease = &copied
		anchor = appendedAt(*view.LeaseStamp, view.Self).Add(leaseExtent(copied, facts.maxExtent, facts.config))
	}
	if sign := view.SignOfLife; sign != nil && lease != nil && sign.Lease.Token == lease.Token {
		end := appendedAt(sign.RecordStamp, view.Self).Add(leaseExtent(sign.Lease, facts.maxExtent, facts.config))
		anchor = later(anchor, end)
	}
	if unreadable := view.Unreadable; unreadable != nil {
		end := unreadable.SeenAt.Add(facts.config.Duration())
		if lease == nil || end.After(anchor) {
			lease, anchor = &Lease{Token: unreadable.Token}, end
		}
	}
	return lease, anchor
}

// clipAhead returns a copy of the roster in which at most maxAhead members, the
// latest ones, stand between the head and me, and whether it left any out.
func clipAhead(roster []RosterEntry, me, holder MemberID) ([]RosterEntry, bool) {
	ahead := 0
	for _, entry := range roster {
		if entry.Member == me {
			break
		}
		if entry.Member != holder {
			ahead++
		}
	}
	skip := max(ahead-maxAhead, 0)
	if _, ok := (RoleState{Roster: roster}).Entry(me); !ok {
		skip = 0
	}
	clipped := skip > 0
	kept := make([]RosterEntry, 0, len(roster)-skip)
	for _, entry := range roster {
		if skip > 0 && entry.Member != holder {
			skip--
			continue
		}
		kept = append(kept, entry)
	}
	return kept, clipped
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// An attempt is what a candidate found out at its turn, between a barrier and
// the mint.
type attempt struct {
	newest    FencingToken     // the newest token the log knows
	described FencingToken     // the coordinator's newest, zero if it has none or did not answer
	state     TransactionState // of the described token
	silent    bool             // the coordinator did not answer within the allowance
	mine      bool             // the described token is one this candidate minted and gave up
	waited    bool             // a whole wait was already granted to the described token
	reread    bool             // the log was already read again because of this state
}

// A verdict is what an attempt comes to.
type verdict int

const (
	// verdictMint: nobody is in the way.
	verdictMint verdict = iota
	// verdictReread: the newest epoch is just ending a transaction, whose
	// records will be readable in a moment. Read again.
	verdictReread
	// verdictYield: another member is taking over. Give it the allowance, in
	// order of rank, then check again.
	verdictYield
)

func (v verdict) String() string {
	return [...]string{"mint", "reread", "yield"}[v]
}

// judge decides whether a candidate whose turn has come may mint. Tokens are
// compared for difference and not for order: the epochs of a role may go on
// under another producer id, and under version 2 of the transaction protocol
// they drift upwards by themselves.
func judge(a attempt) verdict {
	if a.silent || a.described.IsZero() || a.mine {
		return verdictMint
	}
	ending := a.state == TransactionPrepareCommit || a.state == TransactionPrepareAbort
	if a.described == a.newest {
		// Ongoing says nothing by itself: a leader that crashed leaves its
		// transaction so.
		if ending && !a.reread {
			return verdictReread
		}
		return verdictMint
	}
	switch {
	case a.state == TransactionCompleteCommit && !a.reread:
		return verdictReread
	case a.state == TransactionEmpty, a.state == TransactionOngoing, ending, a.state == TransactionPrepareEpochFence:
		if !a.waited {
			return verdictYield
		}
	}
	return verdictMint
}

// checkBudget is how much time may pass between the start of a check and the
// mint before the check is stale. Checks that were stale before double it, so
// that a slow cluster gets its turn in the end.
func checkBudget(stagger time.Duration, staleBefore int) time.Duration {
	return saturatingDouble(max(stagger/4, minCheckBudget), staleBefore, time.Hour)
}

// allowance is how long a mint and a first commit may take: at least the stagger, or
// a moment where there is none, at least the slowest seen lately, doubled for each token in a row that showed
// no lease. Without it a slow coordinator makes candidates fence each other for
// ever.
func allowance(config LeaseConfig, slowest time.Duration, barren int, requestTimeout time.Duration) time.Duration {
	base := max(config.ChallengeStagger(), minAllowance, slowest)
	return saturatingDouble(base, barren, max(config.Duration(), requestTimeout))
}

// saturatingDouble returns d doubled n times, limit at most.
func saturatingDouble(d time.Duration, n int, limit time.Duration) time.Duration {
	for ; n > 0 && d > 0 && d < limit; n-- {
		if d > limit/2 {
			return limit
		}
		d *= 2
	}
	return min(d, limit)
}

// prunable lists the members that a new leader removes from the roster: the
// previous holder, if it has not registered since its last lease, and those ahead
// that let their turn pass. One that lives sees itself gone and registers again,
// at the tail.
func prunable(view RoleView, local RoleState, me MemberID, now time.Time, config LeaseConfig) []MemberID {
	var gone []MemberID
	if lease := view.State.Lease; lease != nil && view.LeaseStamp != nil && lease.Member != me {
		if entry, ok := view.State.Entry(lease.Member); ok && entry.Offset < view.LeaseStamp.Offset {
			gone = append(gone, lease.Member)
		}
	}
	grace := max(config.ChallengeStagger(), pruneGrace)
	anchor, ok := turnAnchor(local, me)
	if !ok {
		return gone
	}
	holder := local.holder()
	rank := 0
	for _, entry := range local.Roster {
		if entry.Member == me || len(gone) == maxPruned {
			break
		}
		if entry.Member == holder {
			continue
		}
		turn := anchor.Add(config.ChallengeDelay(rank))
		rank++
		if now.Sub(turn) > grace {
			gone = append(gone, entry.Member)
		}
	}
	return gone
}

// turnAnchor is the instant from which turns count in a localised state.
func turnAnchor(local RoleState, me MemberID) (time.Time, bool) {
	if local.Lease != nil {
		return local.Lease.Deadline, true
	}
	entry, ok := local.Entry(me)
	return entry.RegisteredAt, ok
}

// reclaimable reports whether a member whose process began with the registration
// at an offset, and finds its own lease older than that, may take it back: enough
// of it must be left that no standby can be about to challenge.
func reclaimable(view RoleView, me MemberID, began int64, now, end time.Time, allowance time.Duration) bool {
	lease := view.State.Lease
	return lease != nil && lease.Member == me && view.LeaseStamp != nil &&
		view.LeaseStamp.Offset < began && end.Sub(now) >= allowance
}

// classifyLoss says in words what fenced a token, from what the coordinator
// describes now.
func classifyLoss(token FencingToken, status LeadershipStatus) string {
	described, ok := status.Token()
	next := ok && described.ProducerID() == token.ProducerID() &&
		int32(described.ProducerEpoch()) == int32(token.ProducerEpoch())+1
	switch {
	case !ok:
		return "the coordinator no longer knows the role: its transactional id expired or was deleted"
	case described == token:
		return "the coordinator still shows this token as the newest one"
	case next && status.State == TransactionCompleteAbort:
		return fmt.Sprintf("the coordinator aborted a transaction and bumped the epoch to %s: a transaction ran into its time-out, or a challenger gave up after its mint", described)
	default:
		return fmt.Sprintf("another member took over with token %s", described)
	}
}

// authenticLease reports why a lease record cannot have been written by the
// holder of its token, or nil: its batch must be transactional, under the
// token's producer id, and under an epoch that is not older.
func authenticLease(lease Lease, batch FencingToken) error {
	switch {
	case batch.IsZero():
		return fmt.Errorf("lease of %s was written outside a transaction", lease.Token)
	case batch.ProducerID() != lease.Token.ProducerID():
		return fmt.Errorf("lease of %s was written by producer id %d", lease.Token, batch.ProducerID())
	case batch.ProducerEpoch() < lease.Token.ProducerEpoch():
		return fmt.Errorf("lease of %s was written under the older epoch %d", lease.Token, batch.ProducerEpoch())
	}
	return nil
}

// confirmsToken reports whether the coordinator's answer can be that of a role to
// which token was once issued: the same producer id, and an epoch that is not
// older. It is what tells a lease from one written under somebody else's
// transactional id.
func confirmsToken(status LeadershipStatus, token FencingToken) bool {
	described, ok := status.Token()
	return ok && described.ProducerID() == token.ProducerID() &&
		described.ProducerEpoch() >= token.ProducerEpoch()
}
