package coordination

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A logWriter makes records as the reader gets them.
type logWriter struct {
	t    *testing.T
	next int64
}

// record is one of a batch under a token; the zero token means no transaction.
func (w *logWriter) record(batch FencingToken, key, value []byte) *kgo.Record {
	r := &kgo.Record{Offset: w.next, Key: key, Value: value, Timestamp: t0, ProducerID: -1, ProducerEpoch: -1}
	w.next++
	if !batch.IsZero() {
		r.ProducerID, r.ProducerEpoch = batch.ProducerID(), batch.ProducerEpoch()
		r.Attrs = transactional
	}
	return r
}

var (
	transactional = kgo.NewRecordAttrs(kgo.RecordAttrsOpts{Transactional: true})
	control       = kgo.NewRecordAttrs(kgo.RecordAttrsOpts{Transactional: true, Control: true})
)

func (w *logWriter) lease(batch FencingToken, value Record) *kgo.Record {
	encodedKey, err := EncodeKey(LeaseKey(testRole))
	require.NoError(w.t, err)
	encodedValue, err := EncodeValue(value)
	require.NoError(w.t, err)
	return w.record(batch, encodedKey, encodedValue)
}

func (w *logWriter) registration(batch FencingToken, member MemberID, value Record) *kgo.Record {
	encodedKey, err := EncodeKey(RegistrationKey(testRole, member))
	require.NoError(w.t, err)
	encodedValue, err := EncodeValue(value)
	require.NoError(w.t, err)
	return w.record(batch, encodedKey, encodedValue)
}

// marker ends the transaction of a token.
func (w *logWriter) marker(batch FencingToken, commit bool) *kgo.Record {
	key := []byte{0, 0, 0, 0}
	if commit {
		key[3] = 1
	}
	r := w.record(batch, key, nil)
	r.Attrs = control
	return r
}

func newFold() *roleFold { return &roleFold{role: testRole, builder: NewRoleStateBuilder(testRole)} }

// feed applies records as the reader does.
func feed(t *testing.T, f *roleFold, records ...*kgo.Record) {
	t.Helper()
	for _, r := range records {
		key, err := DecodeKey(r.Key)
		require.NoError(t, err)
		f.apply(r, key, t0.Add(time.Duration(r.Offset)*time.Second))
	}
}

func grant(m MemberID, token FencingToken) Lease { return DefaultLeaseConfig().Grant(m, token, t0) }

func TestUnauthenticLeaseDisplacesNothing(t *testing.T) {
	w, f := &logWriter{t: t}, newFold()
	authentic := grant(memA, token(7, 1))
	feed(t, f,
		w.lease(token(7, 1), authentic),
		w.lease(FencingToken{}, grant(memB, token(7, 9))),
		w.lease(token(8, 0), grant(memB, token(7, 9))),
		w.lease(FencingToken{}, Tombstone{}),
	)
	view := f.view(memA)
	require.Equal(t, &authentic, view.State.Lease)
	require.EqualValues(t, 0, view.LeaseStamp.Offset)
	require.Equal(t, token(7, 1), view.Newest)
	require.Len(t, f.problems, 3)
	for i, p := range f.problems {
		require.EqualValues(t, i+1, p.Offset)
		require.Error(t, p.Err)
	}
}

func TestRefutedTokenGivesWayToTheOneBefore(t *testing.T) {
	w, f := &logWriter{t: t}, newFold()
	authentic := grant(memA, token(7, 1))
	feed(t, f, w.lease(token(7, 1), authentic))
	f.settle(token(7, 1), true, 0)
	require.Equal(t, trustConfirmed, f.head().trust)

	// A transaction under somebody's own transactional id looks right by itself.
	feed(t, f, w.lease(token(8, 0), grant(memB, token(8, 0))))
	require.Equal(t, memB, f.view(memA).State.Lease.Member, "until the coordinator was asked")
	f.settle(token(8, 0), false, 0)
	require.Equal(t, &authentic, f.view(memA).State.Lease)

	feed(t, f, w.lease(token(8, 0), grant(memB, token(8, 0))))
	require.Equal(t, &authentic, f.view(memA).State.Lease, "it stays refuted")

	feed(t, f, w.lease(token(7, 1), grant(memA, token(7, 1))))
	require.Equal(t, trustConfirmed, f.head().trust, "a renewal need not be asked about")
}

func TestTombstoneTellsTheNewestToken(t *testing.T) {
	w, f := &logWriter{t: t}, newFold()
	feed(t, f, w.lease(token(7, 1), grant(memA, token(7, 1))), w.lease(token(7, 1), Tombstone{}))
	view := f.view(memA)
	require.Nil(t, view.State.Lease)
	require.Equal(t, token(7, 1), view.Newest)
	require.EqualValues(t, 1, view.LeaseStamp.Offset)
	feed(t, f, w.lease(token(7, 2), Tombstone{}))
	require.Equal(t, token(7, 2), f.view(memA).Newest, "who gave up right after its mint says so")
}

func TestManyTokensAreForgottenButNotTheOneThatCounts(t *testing.T) {
	w, f := &logWriter{t: t}, newFold()
	authentic := grant(memA, token(7, 1))
	feed(t, f, w.lease(token(7, 1), authentic))
	for i := range int64(100) {
		forged := token(100+i, 0)
		feed(t, f, w.lease(forged, grant(memB, forged)))
		f.settle(forged, false, 0)
	}
	require.LessOrEqual(t, len(f.slots), keptTokens)
	require.Equal(t, &authentic, f.view(memA).State.Lease)
	require.LessOrEqual(t, len(f.problems), keptProblems)
}

func TestUnreadableLeaseCountsOncePerToken(t *testing.T) {
	w, f := &logWriter{t: t}, newFold()
	key, err := EncodeKey(LeaseKey(testRole))
	require.NoError(t, err)
	unreadable := func(batch FencingToken) *kgo.Record { return w.record(batch, key, []byte("a later version")) }

	feed(t, f, unreadable(token(7, 1)))
	require.Nil(t, f.view(memA).Unreadable, "nobody is known to lead")
	feed(t, f, w.lease(token(7, 1), grant(memA, token(7, 1))))
	feed(t, f, unreadable(FencingToken{}), unreadable(token(9, 1)))
	require.Nil(t, f.view(memA).Unreadable, "it is not the leader's")
	feed(t, f, unreadable(token(7, 2)))
	first := f.view(memA).Unreadable
	require.NotNil(t, first)
	require.Equal(t, token(7, 2), first.Token)
	feed(t, f, unreadable(token(7, 2)))
	require.Equal(t, first, f.view(memA).Unreadable, "a token has it once")
	feed(t, f, w.lease(token(7, 3), grant(memB, token(7, 3))))
	require.Nil(t, f.view(memA).Unreadable)
	require.NotNil(t, f.view(memA).State.Lease)
}

func TestCrowdIsCountedAndNotKept(t *testing.T) {
	w, f := &logWriter{t: t}, newFold()
	f.subscribers = []*subscription{{self: memA}}
	for i := range keptRegistrations + 10 {
		member := MustMemberID(fmt.Sprint(i))
		feed(t, f, w.registration(FencingToken{}, member, Registration{Member: member}))
	}
	feed(t, f, w.registration(FencingToken{}, memA, Registration{Member: memA}))
	view := f.view(memA)
	require.Len(t, view.State.Roster, keptRegistrations+1)
	require.Equal(t, 10, view.Uncounted)
	require.NotNil(t, view.Self, "the own registration is always kept")
	feed(t, f, w.registration(FencingToken{}, memA, Tombstone{}))
	require.Nil(t, f.view(memA).Self)
}

func TestTailBehindAnOpenTransaction(t *testing.T) {
	mine := token(7, 1)
	for name, c := range map[string]struct {
		tail func(w *logWriter) []*kgo.Record
		sign bool
		want []MemberID
		self bool
	}{
		"a committed renewal is a sign of life": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.lease(mine, grant(memB, mine)), w.marker(mine, true)}
		}, true, []MemberID{memB}, false},
		"one that stays open is not": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.lease(mine, grant(memB, mine))}
		}, false, []MemberID{memB}, false},
		"one that was aborted is not": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.lease(mine, grant(memB, mine)), w.marker(mine, false)}
		}, false, []MemberID{memB}, false},
		"nor does another's marker commit it": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.lease(mine, grant(memB, mine)), w.marker(token(8, 0), true)}
		}, false, []MemberID{memB}, false},
		"a forged one is not": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.lease(FencingToken{}, grant(memB, mine)), w.marker(mine, true)}
		}, false, []MemberID{memB}, false},
		"a registration outside a transaction is final": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.registration(FencingToken{}, memA, Registration{Member: memA})}
		}, false, []MemberID{memB, memA}, true},
		"one inside is not": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.registration(mine, memA, Registration{Member: memA})}
		}, false, []MemberID{memB}, false},
		"a withdrawal is final": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.registration(FencingToken{}, memB, Tombstone{})}
		}, false, nil, false},
		"what cannot be read is skipped": {func(w *logWriter) []*kgo.Record {
			return []*kgo.Record{w.record(mine, []byte("?"), nil), w.record(mine, nil, nil)}
		}, false, []MemberID{memB}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w, f := &logWriter{t: t}, newFold()
			feed(t, f,
				w.registration(FencingToken{}, memB, Registration{Member: memB}),
				w.lease(mine, grant(memB, mine)),
			)
			records := c.tail(w)
			view := f.view(memA)
			f.overlay(&view, rawTail{records: records, next: w.next}, memA, t0)
			require.True(t, view.Unstable)
			require.Equal(t, w.next, view.Position)
			require.Equal(t, c.sign, view.SignOfLife != nil)
			var members []MemberID
			for _, e := range view.State.Roster {
				members = append(members, e.Member)
			}
			require.Equal(t, c.want, members)
			require.Equal(t, c.self, view.Self != nil)
			require.NotNil(t, view.State.Lease)
			require.Equal(t, 1, f.builder.size(), "the fold itself is of what is stable")
		})
	}
}

func TestSignOfLifeKeepsItsFirstSight(t *testing.T) {
	mine := token(7, 1)
	w, f := &logWriter{t: t}, newFold()
	feed(t, f, w.lease(mine, grant(memB, mine)))
	tail := rawTail{records: []*kgo.Record{w.lease(mine, grant(memB, mine)), w.marker(mine, true)}, next: w.next}
	view := f.view(memA)
	f.overlay(&view, tail, memA, t0.Add(time.Minute))
	again := f.view(memA)
	f.overlay(&again, tail, memA, t0.Add(time.Hour))
	require.Equal(t, view.SignOfLife, again.SignOfLife)
}

var errExample = errors.New("example")

func TestProblemsAreBounded(t *testing.T) {
	var problems []Problem
	for i := range int64(50) {
		problems = appendProblem(problems, &kgo.Record{Offset: i}, errExample)
	}
	require.Len(t, problems, keptProblems)
	require.EqualValues(t, 49, problems[keptProblems-1].Offset, "the newest are kept")
}
