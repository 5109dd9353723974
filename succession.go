package coordination

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// A RosterEntry is one registered member.
type RosterEntry struct {
	Member MemberID

	// Offset is that of the registration record: its place in the order of
	// succession.
	Offset int64

	RegisteredAt time.Time
}

// RoleState is what the log says about a role.
type RoleState struct {
	// Roster holds the registered members in the order of succession.
	Roster []RosterEntry

	// Lease is the newest lease, be it over or not; nil if there is none.
	Lease *Lease
}

// Holder returns the member that the lease names, and false if there is no lease.
func (s RoleState) Holder() (MemberID, bool) { return s.holder(), s.Lease != nil }

// holder is the lease's member, or the zero id.
func (s RoleState) holder() MemberID {
	if s.Lease == nil {
		return MemberID{}
	}
	return s.Lease.Member
}

// Entry returns a member's place in the roster, and false if it has none.
func (s RoleState) Entry(member MemberID) (RosterEntry, bool) {
	i := slices.IndexFunc(s.Roster, func(e RosterEntry) bool { return e.Member == member })
	if i < 0 {
		return RosterEntry{}, false
	}
	return s.Roster[i], true
}

// RankOf returns how many members stand between the holder and a member: its
// index in the roster without the holder, who has rank 0 itself. It returns false
// for a member that is not in the roster.
func (s RoleState) RankOf(member MemberID) (int, bool) {
	holder, held := s.Holder()
	rank := 0
	for _, entry := range s.Roster {
		switch {
		case entry.Member == member:
			if held && member == holder {
				rank = 0
			}
			return rank, true
		case !held || entry.Member != holder:
			rank++
		}
	}
	return 0, false
}

// A RoleStateBuilder folds the records of a role into its state: for each key the
// record with the highest offset counts, in whatever order they arrive. It is not
// safe for concurrent use.
type RoleStateBuilder struct {
	role    Role
	members map[MemberID]registrationSlot
	live    int // registrations that are not withdrawn
	lease   leaseState
}

// A registrationSlot is the newest record of a member. That of a withdrawn member
// is kept, so that an older record cannot revive it.
type registrationSlot struct {
	offset       int64
	registeredAt time.Time
	withdrawn    bool
}

// A leaseState is the newest record of the lease.
type leaseState struct {
	offset int64
	lease  *Lease
}

// NewRoleStateBuilder returns a builder for a role.
func NewRoleStateBuilder(role Role) *RoleStateBuilder {
	return &RoleStateBuilder{
		role:    role,
		members: make(map[MemberID]registrationSlot),
		lease:   leaseState{offset: -1},
	}
}

// Apply folds one record. Records of other roles, records whose value is not of
// their key's kind, and negative offsets are ignored.
func (b *RoleStateBuilder) Apply(offset int64, key Key, record Record) {
	if offset < 0 || key.Role != b.role || b.role == (Role{}) {
		return
	}
	switch key.Kind {
	case KindRegistration:
		b.applyRegistration(offset, key.Member, record)
	case KindLease:
		b.applyLease(offset, record)
	}
}

func (b *RoleStateBuilder) applyRegistration(offset int64, member MemberID, record Record) {
	slot := registrationSlot{offset: offset}
	switch record := record.(type) {
	case Registration:
		slot.registeredAt = record.RegisteredAt
	case Tombstone:
		slot.withdrawn = true
	default:
		return
	}
	before, known := b.members[member]
	if known && before.offset >= offset {
		return
	}
	if known && !before.withdrawn {
		b.live--
	}
	if !slot.withdrawn {
		b.live++
	}
	b.members[member] = slot
}

func (b *RoleStateBuilder) applyLease(offset int64, record Record) {
	if offset <= b.lease.offset {
		return
	}
	switch record := record.(type) {
	case Lease:
		b.lease = leaseState{offset, &record}
	case Tombstone:
		b.lease = leaseState{offset: offset}
	}
}

// State returns the state so far. It shares nothing with the builder.
func (b *RoleStateBuilder) State() RoleState {
	state := RoleState{Roster: make([]RosterEntry, 0, b.live)}
	for member, slot := range b.members {
		if !slot.withdrawn {
			state.Roster = append(state.Roster, RosterEntry{member, slot.offset, slot.registeredAt})
		}
	}
	slices.SortFunc(state.Roster, func(x, y RosterEntry) int {
		return cmp.Or(cmp.Compare(x.Offset, y.Offset), cmp.Compare(x.Member.name, y.Member.name))
	})
	if b.lease.lease != nil {
		lease := *b.lease.lease
		state.Lease = &lease
	}
	return state
}

// size is the number of registrations.
func (b *RoleStateBuilder) size() int { return b.live }

// compact forgets who withdrew. It is for readers to whom no older record can
// come.
func (b *RoleStateBuilder) compact() {
	if len(b.members) == b.live {
		return
	}
	for member, slot := range b.members {
		if slot.withdrawn {
			delete(b.members, member)
		}
	}
}

// Action is what a member does next.
type Action int

const (
	// ActionNotRegistered: the member is not in the roster.
	ActionNotRegistered Action = iota
	// ActionHold: the lease names the member and has not ended.
	ActionHold
	// ActionChallenge: it is the member's turn.
	ActionChallenge
	// ActionWait: it is not the member's turn before Until.
	ActionWait
)

// String returns the action's name.
func (a Action) String() string {
	switch a {
	case ActionNotRegistered:
		return "not-registered"
	case ActionHold:
		return "hold"
	case ActionChallenge:
		return "challenge"
	case ActionWait:
		return "wait"
	}
	return "action " + strconv.Itoa(int(a))
}

// A Decision is what [Evaluate] comes to.
type Decision struct {
	Action Action

	// Until is the member's turn for ActionWait, and zero otherwise.
	Until time.Time
}

// Evaluate is the rule of succession: what a member does at an instant, from what
// the log says. It is a pure function, the same in every implementation. The turn
// of a member is rank staggers after the end of the lease, or after its own
// registration where there is no lease.
func Evaluate(state RoleState, me MemberID, now time.Time, config LeaseConfig) Decision {
	entry, ok := state.Entry(me)
	if !ok {
		return Decision{Action: ActionNotRegistered}
	}
	anchor := entry.RegisteredAt
	if state.Lease != nil {
		anchor = state.Lease.Deadline
		if state.Lease.Member == me && now.Before(anchor) {
			return Decision{Action: ActionHold}
		}
	}
	rank, _ := state.RankOf(me)
	turn := turnOf(anchor, rank, config.stagger)
	if now.Before(turn) {
		return Decision{ActionWait, turn}
	}
	return Decision{Action: ActionChallenge}
}
