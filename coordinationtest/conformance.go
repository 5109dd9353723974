package coordinationtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// patience bounds every step of the suite; a transport that needs it is broken,
// however slow the machine.
const patience = 20 * time.Second

// TestTransport runs the conformance suite against a [coordination.Transport]. It
// calls open for each of its tests, which returns a transport that open itself has
// arranged to close; transports that are opened may share one cluster, because
// every test uses roles of its own. They have to lead the same cluster: the suite
// opens two where it needs two members that share nothing.
func TestTransport(t *testing.T, open func(t *testing.T) coordination.Transport) {
	for _, test := range []struct {
		name string
		run  func(s suite, t *testing.T)
	}{
		{"a role nobody led has no token", suite.unledRole},
		{"registrations rank by offset", suite.registrationsRankByOffset},
		{"a registration counts again at the tail", suite.registerAgain},
		{"a withdrawal removes the member", suite.withdrawal},
		{"views are pushed and coalesced", suite.viewsArePushed},
		{"a first view follows without a change", suite.firstView},
		{"roles are listed, and new ones added", suite.roles},
		{"a commit writes all of its batch", suite.commitWritesBatch},
		{"the token lasts as long as the term", suite.tokenLasts},
		{"a mint fences the terms before it", suite.mintFences},
		{"a refused record ends nothing", suite.refusedRecord},
		{"records that come up later are part of the batch", suite.moreRecords},
		{"offsets are committed with their batch", suite.offsets},
		{"a closed term commits nothing", suite.closedTerm},
		{"an ended context ends a commit", suite.endedCommit},
		{"ended contexts are respected", suite.endedContexts},
		{"zero roles are refused", suite.zeroRoles},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			test.run(suite{
				ctx:  ctx,
				open: open,
				role: coordination.MustRole("conformance-" + rand.Text()),
			}, t)
		})
	}
}

// suite is what one test of the suite works with.
type suite struct {
	ctx  context.Context
	open func(t *testing.T) coordination.Transport
	role coordination.Role
}

var (
	memberA = coordination.MustMemberID("a")
	memberB = coordination.MustMemberID("b")
)

func (s suite) follow(t *testing.T, transport coordination.Transport, self coordination.MemberID) coordination.Follower {
	t.Helper()
	follower, err := transport.Follow(s.ctx, s.role, self)
	require.NoError(t, err)
	t.Cleanup(follower.Close)
	return follower
}

func (s suite) register(t *testing.T, transport coordination.Transport, member coordination.MemberID) int64 {
	t.Helper()
	offset, err := transport.Register(s.ctx, s.role, coordination.Registration{Member: member, RegisteredAt: time.Now()})
	require.NoError(t, err)
	return offset
}

func (s suite) barrier(t *testing.T, follower coordination.Follower) coordination.RoleView {
	t.Helper()
	view, err := follower.Barrier(s.ctx)
	require.NoError(t, err)
	require.Equal(t, s.role, view.Role)
	return view
}

// read returns a view that contains an offset. What is acknowledged may take a
// moment to become stable.
func (s suite) read(t *testing.T, follower coordination.Follower, offset int64) coordination.RoleView {
	t.Helper()
	for {
		view := s.barrier(t, follower)
		if !view.Unstable && view.Position > offset {
			return view
		}
	}
}

// term mints an epoch; the role must be followed on the transport.
func (s suite) term(t *testing.T, transport coordination.Transport) (coordination.Term, coordination.FencingToken) {
	t.Helper()
	term, err := transport.NewTerm(s.role, coordination.TermConfig{
		TransactionTimeout: 5 * time.Second,
		AttemptTimeout:     5 * time.Second,
	})
	require.NoError(t, err)
	t.Cleanup(term.Close)
	require.NoError(t, term.Warm(s.ctx))
	token, err := term.Mint(s.ctx)
	require.NoError(t, err)
	require.False(t, token.IsZero())
	return term, token
}

func lease(member coordination.MemberID, token coordination.FencingToken) coordination.Lease {
	return coordination.DefaultLeaseConfig().Grant(member, token, time.Now())
}

func (s suite) roles(t *testing.T) {
	transport := s.open(t)
	s.follow(t, transport, memberA) // which creates the topic
	s.register(t, transport, memberA)
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	lists, err := s.open(t).Roles(ctx)
	require.NoError(t, err)
	list := <-lists
	require.NoError(t, list.Err)
	require.Contains(t, list.Roles, s.role)

	another := coordination.MustRole("conformance-" + rand.Text())
	require.NotContains(t, list.Roles, another)
	_, err = transport.Register(s.ctx, another, coordination.Registration{Member: memberA, RegisteredAt: time.Now()})
	require.NoError(t, err)
	for !slices.Contains(list.Roles, another) {
		list = <-lists
		require.NoError(t, list.Err)
	}
	require.True(t, slices.IsSortedFunc(list.Roles, func(a, b coordination.Role) int { return strings.Compare(a.String(), b.String()) }))
}

func (s suite) unledRole(t *testing.T) {
	transport := s.open(t)
	status, err := transport.Describe(s.ctx, s.role)
	require.NoError(t, err)
	_, led := status.Token()
	require.False(t, led)

	view := s.barrier(t, s.follow(t, transport, memberA))
	require.Empty(t, view.State.Roster)
	require.Nil(t, view.State.Lease)
	require.True(t, view.Newest.IsZero())
	require.Nil(t, view.Self)
}

func (s suite) registrationsRankByOffset(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberB)
	first := s.register(t, transport, memberA)
	second := s.register(t, s.open(t), memberB)
	require.Greater(t, second, first)

	view := s.barrier(t, follower)
	require.Len(t, view.State.Roster, 2)
	require.Equal(t, memberA, view.State.Roster[0].Member)
	require.Equal(t, first, view.State.Roster[0].Offset)
	require.Equal(t, memberB, view.State.Roster[1].Member)
	require.NotNil(t, view.Self)
	require.Equal(t, second, view.Self.Offset)
	require.True(t, view.Self.Token.IsZero(), "a registration is written outside any transaction")
	require.Greater(t, view.Position, second)
	require.False(t, view.Unstable)
	require.False(t, view.Self.SeenAt.IsZero())
}

func (s suite) registerAgain(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	s.register(t, transport, memberA)
	s.register(t, transport, memberB)
	again := s.register(t, transport, memberA)
	view := s.barrier(t, follower)
	require.Len(t, view.State.Roster, 2)
	require.Equal(t, memberA, view.State.Roster[1].Member)
	require.Equal(t, again, view.Self.Offset)
}

func (s suite) withdrawal(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	s.register(t, transport, memberA)
	s.register(t, transport, memberB)
	require.NoError(t, transport.Withdraw(s.ctx, s.role, memberA))
	view := s.barrier(t, follower)
	require.Len(t, view.State.Roster, 1)
	require.Equal(t, memberB, view.State.Roster[0].Member)
	require.Nil(t, view.Self)
}

// await receives views until one satisfies the condition.
func (s suite) await(t *testing.T, follower coordination.Follower, what string, ok func(coordination.RoleView) bool) coordination.RoleView {
	t.Helper()
	for {
		select {
		case view := <-follower.Views():
			require.NoError(t, view.Err)
			if ok(view) {
				return view
			}
		case <-s.ctx.Done():
			require.FailNow(t, "no view came", what)
		}
	}
}

func (s suite) viewsArePushed(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	slow := s.follow(t, transport, memberA)
	for i := range 20 {
		s.register(t, transport, coordination.MustMemberID(fmt.Sprintf("m%d", i)))
	}
	last := s.register(t, transport, memberA)
	full := func(view coordination.RoleView) bool {
		return len(view.State.Roster) == 21 && view.Self != nil && view.Self.Offset == last
	}
	s.await(t, follower, "with all members", full)
	s.barrier(t, slow)
	view := <-slow.Views()
	require.True(t, full(view), "a receiver that was slow gets the newest view: %+v", view)
}

func (s suite) firstView(t *testing.T) {
	transport := s.open(t)
	offset := s.register(t, transport, memberA)
	for range 2 { // what one subscription caused to be read, the next one gets too
		follower := s.follow(t, transport, memberA)
		s.await(t, follower, "of the registration", func(view coordination.RoleView) bool {
			return view.Self != nil && view.Self.Offset == offset
		})
	}
}

func (s suite) commitWritesBatch(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	s.register(t, transport, memberA)
	s.register(t, transport, memberB)
	term, token := s.term(t, transport)

	granted := lease(memberA, token)
	offset, err := term.Commit(s.ctx, coordination.Batch{Withdraw: []coordination.MemberID{memberB}, Lease: granted})
	require.NoError(t, err)
	view := s.read(t, follower, offset)
	require.Len(t, view.State.Roster, 1)
	require.NotNil(t, view.State.Lease)
	require.Equal(t, granted, *view.State.Lease)
	require.Equal(t, token, view.Newest)
	require.Equal(t, offset, view.LeaseStamp.Offset)
	require.Equal(t, token, view.LeaseStamp.Token)

	renewed, err := term.Commit(s.ctx, coordination.Batch{Lease: lease(memberA, token)})
	require.NoError(t, err)
	require.Greater(t, renewed, offset)

	none, err := term.Commit(s.ctx, coordination.Batch{Withdraw: []coordination.MemberID{memberA}})
	require.NoError(t, err)
	require.EqualValues(t, -1, none)

	cleared, err := term.Commit(s.ctx, coordination.Batch{Lease: coordination.Tombstone{}})
	require.NoError(t, err)
	s.read(t, follower, cleared)
	view, err = transport.Read(s.ctx, s.role)
	require.NoError(t, err)
	require.Empty(t, view.State.Roster)
	require.Nil(t, view.State.Lease)
	require.Equal(t, token, view.Newest, "a tombstone still tells the newest token")
	require.Equal(t, cleared, view.LeaseStamp.Offset)
}

func (s suite) tokenLasts(t *testing.T) {
	transport := s.open(t)
	s.follow(t, transport, memberA)
	term, token := s.term(t, transport)
	for range 25 {
		_, err := term.Commit(s.ctx, coordination.Batch{Lease: lease(memberA, token)})
		require.NoError(t, err)
		status, err := transport.Describe(s.ctx, s.role)
		require.NoError(t, err)
		require.True(t, status.Authoritative(token), "%v", status)
	}
	require.NoError(t, term.Err())
}

func (s suite) mintFences(t *testing.T) {
	transport, other := s.open(t), s.open(t)
	follower := s.follow(t, transport, memberA)
	s.follow(t, other, memberB)
	old, oldToken := s.term(t, transport)
	_, err := old.Commit(s.ctx, coordination.Batch{Lease: lease(memberA, oldToken)})
	require.NoError(t, err)

	next, token := s.term(t, other)
	require.NotEqual(t, oldToken, token)
	_, err = old.Commit(s.ctx, coordination.Batch{Lease: lease(memberA, oldToken)})
	require.ErrorIs(t, err, coordination.ErrFenced)
	require.ErrorIs(t, err, coordination.ErrNotHeld)
	require.ErrorIs(t, old.Err(), coordination.ErrFenced)

	offset, err := next.Commit(s.ctx, coordination.Batch{Lease: lease(memberB, token)})
	require.NoError(t, err)
	view := s.read(t, follower, offset)
	require.Equal(t, token, view.State.Lease.Token)
	require.Equal(t, offset, view.LeaseStamp.Offset)
	status, err := transport.Describe(s.ctx, s.role)
	require.NoError(t, err)
	require.True(t, status.Authoritative(token))
	require.False(t, status.Authoritative(oldToken))
}

func (s suite) refusedRecord(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	term, token := s.term(t, transport)
	huge := &kgo.Record{Topic: coordination.StateTopic, Key: []byte("k"), Value: make([]byte, 4<<20)}
	_, err := term.Commit(s.ctx, coordination.Batch{Records: []*kgo.Record{huge}, Lease: lease(memberB, token)})
	var rejected *coordination.RejectedError
	require.ErrorAs(t, err, &rejected)
	require.Equal(t, 0, rejected.Index)
	require.Same(t, huge, rejected.Record)
	require.NotErrorIs(t, err, coordination.ErrNotHeld)
	require.NoError(t, term.Err())

	offset, err := term.Commit(s.ctx, coordination.Batch{Lease: lease(memberA, token)})
	require.NoError(t, err)
	view := s.read(t, follower, offset)
	require.Equal(t, memberA, view.State.Lease.Member, "nothing of the refused batch may be committed")
	status, err := transport.Describe(s.ctx, s.role)
	require.NoError(t, err)
	require.True(t, status.Authoritative(token))
}

func (s suite) moreRecords(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	term, token := s.term(t, transport)
	state := func(size int) *kgo.Record {
		return &kgo.Record{Topic: coordination.StateTopic, Key: []byte("k"), Value: make([]byte, size)}
	}
	first, later := state(10), state(10)
	// Whether the first records are still being written when Ready is looked at is
	// for the cluster to decide: until they are.
	commit := func(more ...*kgo.Record) (offset int64, err error) {
		for asked := false; !asked; {
			ready := make(chan struct{}, 1)
			ready <- struct{}{}
			offset, err = term.Commit(s.ctx, coordination.Batch{
				Records: []*kgo.Record{first},
				More:    func() []*kgo.Record { asked = true; return more },
				Ready:   ready,
				Lease:   lease(memberA, token),
			})
			if !asked {
				require.NoError(t, err)
			}
		}
		return offset, err
	}
	offset, err := commit(later)
	require.NoError(t, err)
	require.Greater(t, later.Offset, first.Offset)
	s.read(t, follower, offset)

	huge := state(4 << 20)
	_, err = commit(state(10), huge)
	var rejected *coordination.RejectedError
	require.ErrorAs(t, err, &rejected)
	require.Equal(t, 2, rejected.Index, "later records count after the first ones")
	require.Same(t, huge, rejected.Record)
	require.NoError(t, term.Err())
}

func (s suite) offsets(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	term, token := s.term(t, transport)
	group := s.role.String()
	none, err := transport.CommittedOffsets(s.ctx, group)
	require.NoError(t, err)
	_, found := none.Lookup(coordination.StateTopic, 0)
	require.False(t, found, "a group that has committed nothing is no error")

	read := make(kadm.Offsets)
	read.AddOffset(coordination.StateTopic, 0, 42, -1)
	offset, err := term.Commit(s.ctx, coordination.Batch{
		Offsets: []coordination.GroupOffsets{{Group: group, Offsets: read, Generation: -1}},
		Lease:   lease(memberA, token),
	})
	require.NoError(t, err)
	s.read(t, follower, offset)
	committed, err := transport.CommittedOffsets(s.ctx, group)
	require.NoError(t, err)
	at, found := committed.Lookup(coordination.StateTopic, 0)
	require.True(t, found)
	require.EqualValues(t, 42, at.At)
}

func (s suite) closedTerm(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	term, token := s.term(t, transport)
	term.Close()
	term.Close()
	require.Error(t, term.Err())
	_, err := term.Commit(s.ctx, coordination.Batch{Lease: lease(memberA, token)})
	require.ErrorIs(t, err, coordination.ErrNotHeld)
	require.Nil(t, s.barrier(t, follower).State.Lease)

	unminted, err := transport.NewTerm(s.role, coordination.TermConfig{TransactionTimeout: time.Second, AttemptTimeout: time.Second})
	require.NoError(t, err)
	unminted.Close()
	_, err = unminted.Mint(s.ctx)
	require.Error(t, err)
}

func (s suite) endedCommit(t *testing.T) {
	transport := s.open(t)
	s.follow(t, transport, memberA)
	term, token := s.term(t, transport)
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err := term.Commit(ctx, coordination.Batch{Lease: lease(memberA, token)})
	require.Error(t, err)
	require.Error(t, term.Err(), "the term is over when its context ends in a commit")
}

func (s suite) endedContexts(t *testing.T) {
	transport := s.open(t)
	follower := s.follow(t, transport, memberA)
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	for name, call := range map[string]func() error{
		"Read":     func() error { _, err := transport.Read(ctx, s.role); return err },
		"Describe": func() error { _, err := transport.Describe(ctx, s.role); return err },
		"Register": func() error {
			_, err := transport.Register(ctx, s.role, coordination.Registration{Member: memberA, RegisteredAt: time.Now()})
			return err
		},
		"Withdraw": func() error { return transport.Withdraw(ctx, s.role, memberA) },
		"Barrier":  func() error { _, err := follower.Barrier(ctx); return err },
	} {
		require.ErrorIs(t, call(), context.Canceled, name)
	}
}

func (s suite) zeroRoles(t *testing.T) {
	transport := s.open(t)
	_, err := transport.Follow(s.ctx, coordination.Role{}, memberA)
	require.ErrorIs(t, err, coordination.ErrInvalidConfig)
	_, err = transport.Read(s.ctx, coordination.Role{})
	require.ErrorIs(t, err, coordination.ErrInvalidConfig)
	_, err = transport.Describe(s.ctx, coordination.Role{})
	require.ErrorIs(t, err, coordination.ErrInvalidConfig)
	_, err = transport.NewTerm(coordination.Role{}, coordination.TermConfig{})
	require.ErrorIs(t, err, coordination.ErrInvalidConfig)
}
