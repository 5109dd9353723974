package coordination

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	keptProblems      = 8    // problems kept of a role
	keptTokens        = 8    // tokens a role's fold remembers
	keptRegistrations = 4096 // registrations kept of a role; the rest is counted
)

// trust is how far the token of a lease record is believed.
type trust int

const (
	trustEvidence  trust = iota // by what its batch says; not checked yet
	trustAccepted               // by what its batch says; the coordinator could not be asked
	trustConfirmed              // the coordinator confirmed it
	trustRefuted                // the coordinator knows another producer id: forged
)

// A leaseSlot is the newest record under the lease key that one token wrote.
type leaseSlot struct {
	token FencingToken
	lease *Lease // nil: a tombstone
	stamp RecordStamp
	trust trust
}

// A roleFold is what the reader keeps of one role. The registrations are folded
// by the frozen rules. Of the lease it keeps the newest record of each of the last
// few tokens, so that one that turns out forged gives way to the authentic one
// before it.
type roleFold struct {
	role        Role
	touched     bool
	builder     *RoleStateBuilder
	slots       []leaseSlot // by offset
	unreadable  *RecordStamp
	sign        *LifeSign
	uncounted   int
	stamps      map[MemberID]*RecordStamp
	problems    []Problem
	subscribers []*subscription
	verifying   bool
}

// apply folds one record that is newer than all before it.
func (f *roleFold) apply(record *kgo.Record, key Key, seen time.Time) {
	f.touched = true
	stamp := stampOf(record, seen)
	value, err := DecodeValue(key.Kind, record.Value)
	if err != nil {
		f.problems = appendProblem(f.problems, record, err)
		if key.Kind == KindLease {
			f.applyUnreadable(stamp)
		}
		return
	}
	if key.Kind == KindLease {
		if err := f.applyLease(stamp, value); err != nil {
			f.problems = appendProblem(f.problems, record, err)
		}
		return
	}
	f.applyRegistration(stamp, key, value)
}

func (f *roleFold) applyRegistration(stamp RecordStamp, key Key, value Record) {
	if _, withdrawn := value.(Tombstone); withdrawn {
		delete(f.stamps, key.Member)
		f.builder.Apply(stamp.Offset, key, value)
		return
	}
	if f.builder.size() >= keptRegistrations && !f.follows(key.Member) {
		f.uncounted++
		return
	}
	if f.stamps == nil {
		f.stamps = make(map[MemberID]*RecordStamp)
	}
	f.stamps[key.Member] = &stamp
	f.builder.Apply(stamp.Offset, key, value)
}

func (f *roleFold) follows(member MemberID) bool {
	return slices.ContainsFunc(f.subscribers, func(s *subscription) bool { return s.self == member })
}

// applyLease folds a lease or its tombstone if its batch can be the holder's.
func (f *roleFold) applyLease(stamp RecordStamp, value Record) error {
	slot := leaseSlot{token: stamp.Token, stamp: stamp}
	switch value := value.(type) {
	case Lease:
		if err := authenticLease(value, stamp.Token); err != nil {
			return err
		}
		slot.token, slot.lease = value.Token, &value
	case Tombstone:
		if stamp.Token.IsZero() {
			return errors.New("a lease was cleared outside a transaction")
		}
	}
	if i := slices.IndexFunc(f.slots, func(s leaseSlot) bool { return s.token == slot.token }); i >= 0 {
		if f.slots[i].trust == trustRefuted {
			f.slots[i].stamp = stamp
			return fmt.Errorf("lease under token %s, which the role never had", slot.token)
		}
		slot.trust = f.slots[i].trust
		f.slots = slices.Delete(f.slots, i, i+1)
	}
	f.slots = append(f.slots, slot)
	f.forget()
	f.unreadable = nil
	return nil
}

// forget bounds the remembered tokens. What was refuted goes first, and what the
// coordinator confirmed last stays, however many forged tokens come after it.
func (f *roleFold) forget() {
	if len(f.slots) <= keptTokens {
		return
	}
	confirmed := -1
	for i := range f.slots {
		if f.slots[i].trust == trustConfirmed {
			confirmed = i
		}
	}
	victim := slices.IndexFunc(f.slots, func(s leaseSlot) bool { return s.trust == trustRefuted })
	if victim < 0 {
		victim = 0
		if confirmed == 0 {
			victim = 1
		}
	}
	f.slots = slices.Delete(f.slots, victim, victim+1)
}

// applyUnreadable notes a lease record that only a newer version can read, if the
// role's present leader wrote it: once for each token.
func (f *roleFold) applyUnreadable(stamp RecordStamp) {
	head := f.head()
	if head == nil || stamp.Token.IsZero() || stamp.Token.ProducerID() != head.token.ProducerID() {
		return
	}
	if f.unreadable != nil && f.unreadable.Token == stamp.Token {
		return
	}
	f.unreadable = &stamp
}

// head is the slot that counts: the newest one that was not refuted.
func (f *roleFold) head() *leaseSlot {
	for i := len(f.slots) - 1; i >= 0; i-- {
		if f.slots[i].trust != trustRefuted {
			return &f.slots[i]
		}
	}
	return nil
}

// settle notes the coordinator's word on a token.
func (f *roleFold) settle(token FencingToken, confirmed bool, partition int32) {
	for i := range f.slots {
		if f.slots[i].token != token {
			continue
		}
		if confirmed {
			f.slots[i].trust = trustConfirmed
			return
		}
		f.slots[i].trust = trustRefuted
		f.problems = trimProblems(append(f.problems, Problem{
			Partition: partition,
			Offset:    f.slots[i].stamp.Offset,
			Err:       fmt.Errorf("lease under token %s, which the role never had", token),
		}))
	}
}

// accept notes that the coordinator could not be asked about a token.
func (f *roleFold) accept(token FencingToken) {
	for i := range f.slots {
		if f.slots[i].token == token {
			f.slots[i].trust = trustAccepted
		}
	}
}

// view returns a copy of the fold for one subscriber.
func (f *roleFold) view(self MemberID) RoleView {
	view := RoleView{
		Role:      f.role,
		State:     f.builder.State(),
		Uncounted: f.uncounted,
		Self:      copyOf(f.stamps[self]),
	}
	if head := f.head(); head != nil {
		view.Newest = head.token
		view.LeaseStamp = copyOf(&head.stamp)
		view.State.Lease = copyOf(head.lease)
	}
	view.Unreadable = copyOf(f.unreadable)
	return view
}

// overlay adds to a view what stands behind an open transaction. Registrations
// outside a transaction are final once they are in the log. A lease record whose
// commit marker follows was committed: it shows that its leader lives, although no
// read_committed reader can see it yet.
func (f *roleFold) overlay(view *RoleView, tail rawTail, self MemberID, seen time.Time) {
	view.Unstable = true
	view.Position = tail.next
	builder := NewRoleStateBuilder(f.role)
	for _, entry := range view.State.Roster {
		builder.Apply(entry.Offset, RegistrationKey(f.role, entry.Member), Registration{Member: entry.Member, RegisteredAt: entry.RegisteredAt})
	}
	open := make(map[int64]*LifeSign) // by producer id
	for _, record := range tail.records {
		if record.Attrs.IsControl() {
			if sign := open[record.ProducerID]; sign != nil && isCommitMarker(record) {
				f.noteSign(*sign)
			}
			delete(open, record.ProducerID)
			continue
		}
		key, err := DecodeKey(record.Key)
		if err != nil || key.Role != f.role {
			continue
		}
		value, err := DecodeValue(key.Kind, record.Value)
		if err != nil {
			continue
		}
		stamp := stampOf(record, seen)
		switch {
		case key.Kind == KindRegistration && stamp.Token.IsZero():
			builder.Apply(record.Offset, key, value)
			if key.Member == self {
				view.Self = &stamp
				if _, withdrawn := value.(Tombstone); withdrawn {
					view.Self = nil
				}
			}
		case key.Kind == KindLease:
			if lease, ok := value.(Lease); ok && authenticLease(lease, stamp.Token) == nil {
				open[record.ProducerID] = &LifeSign{RecordStamp: stamp, Lease: lease}
			}
		}
	}
	lease := view.State.Lease
	view.State = builder.State()
	view.State.Lease = lease
	if f.sign != nil && (view.LeaseStamp == nil || f.sign.Offset > view.LeaseStamp.Offset) {
		view.SignOfLife = copyOf(f.sign)
	}
}

// noteSign keeps the newest sign of life, with the instant of its first sight.
func (f *roleFold) noteSign(sign LifeSign) {
	if f.sign == nil || sign.Offset > f.sign.Offset {
		f.sign = &sign
	}
}

func stampOf(record *kgo.Record, seen time.Time) RecordStamp {
	stamp := RecordStamp{
		Offset:        record.Offset,
		AppendedAt:    record.Timestamp.UTC(),
		LogAppendTime: record.Attrs.TimestampType() == 1,
		LeaderEpoch:   record.LeaderEpoch,
		SeenAt:        seen,
	}
	stamp.Token, _ = RecordToken(record)
	return stamp
}

func appendProblem(problems []Problem, record *kgo.Record, err error) []Problem {
	return trimProblems(append(problems, Problem{Partition: record.Partition, Offset: record.Offset, Err: err}))
}

func trimProblems(problems []Problem) []Problem {
	if len(problems) > keptProblems {
		problems = slices.Delete(problems, 0, len(problems)-keptProblems)
	}
	return problems
}

func copyOf[T any](p *T) *T {
	if p == nil {
		return nil
	}
	copied := *p
	return &copied
}
