package coordination

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// t0 is where the local axis of these tests starts.
var t0 = time.Unix(1<<30, 0).UTC()

var (
	testRole = MustRole("r")
	memA     = MustMemberID("a")
	memB     = MustMemberID("b")
	memC     = MustMemberID("c")
)

// facts are those of a, fresh since t0, with a lease of 30 s and a stagger of 5 s.
func facts() localFacts {
	return localFacts{me: memA, config: DefaultLeaseConfig(), freshAt: t0, maxExtent: defaultMaxExtent, jitter: time.Second}
}

func roster(members ...MemberID) []RosterEntry {
	var entries []RosterEntry
	for i, m := range members {
		// Nobody's own word about time counts.
		entries = append(entries, RosterEntry{Member: m, Offset: int64(i), RegisteredAt: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)})
	}
	return entries
}

// seen is a stamp of a record that arrived so long after t0.
func seen(offset int64, at time.Duration) *RecordStamp {
	return &RecordStamp{Offset: offset, SeenAt: t0.Add(at), LeaderEpoch: 3}
}

func TestLeaseExtentIsClamped(t *testing.T) {
	config := DefaultLeaseConfig()
	lease := func(extent time.Duration) Lease { return Lease{GrantedAt: t0, Deadline: t0.Add(extent)} }
	for _, c := range []struct{ says, max, want time.Duration }{
		{30 * time.Second, 15 * time.Minute, 30 * time.Second},
		{-time.Hour, 15 * time.Minute, 0},
		{time.Hour, 15 * time.Minute, 15 * time.Minute},
		{time.Hour, time.Second, 30 * time.Second}, // never below the own lease
	} {
		require.Equal(t, c.want, leaseExtent(lease(c.says), c.max, config), "%+v", c)
	}
	forever := Lease{GrantedAt: firstInstant, Deadline: lastInstant}
	require.Equal(t, 15*time.Minute, leaseExtent(forever, 15*time.Minute, config))
	never := Lease{GrantedAt: lastInstant, Deadline: firstInstant}
	require.Zero(t, leaseExtent(never, 15*time.Minute, config))
}

func TestRecordsAreAsOldAsTheLogSaysWhereItCanBeBelieved(t *testing.T) {
	broker := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC) // the broker's clock is no matter
	self := RecordStamp{Offset: 10, AppendedAt: broker, LogAppendTime: true, LeaderEpoch: 3, SeenAt: t0.Add(time.Minute)}
	older := RecordStamp{Offset: 5, AppendedAt: broker.Add(-20 * time.Second), LogAppendTime: true, LeaderEpoch: 3, SeenAt: t0.Add(time.Minute)}
	for name, c := range map[string]struct {
		change func(record, self *RecordStamp)
		want   time.Time
	}{
		"older than the own registration": {func(_, _ *RecordStamp) {}, t0.Add(40 * time.Second)},
		"younger":                         {func(r, _ *RecordStamp) { r.Offset = 11 }, t0.Add(time.Minute)},
		"writer's time":                   {func(r, _ *RecordStamp) { r.LogAppendTime = false }, t0.Add(time.Minute)},
		"writer's time in the own":        {func(_, s *RecordStamp) { s.LogAppendTime = false }, t0.Add(time.Minute)},
		"two brokers' clocks":             {func(r, _ *RecordStamp) { r.LeaderEpoch = 2 }, t0.Add(time.Minute)},
		"a clock that went back":          {func(r, _ *RecordStamp) { r.AppendedAt = broker.Add(time.Hour) }, t0.Add(time.Minute)},
		"seen before the log says":        {func(r, _ *RecordStamp) { r.SeenAt = t0.Add(time.Second) }, t0.Add(time.Second)},
	} {
		record, own := older, self
		c.change(&record, &own)
		require.Equal(t, c.want, appendedAt(record, &own), name)
	}
	require.Equal(t, older.SeenAt, appendedAt(older, nil), "without an own registration nothing is known")
}

func TestTurnsOnTheLocalAxis(t *testing.T) {
	lease := func(m MemberID) *Lease {
		l := DefaultLeaseConfig().Grant(m, token(1, 1), time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC))
		return &l
	}
	for name, c := range map[string]struct {
		view   RoleView
		change func(*localFacts)
		want   time.Duration // of a's turn, after t0
	}{
		"a lease lasts its extent from its arrival": {
			RoleView{State: RoleState{Roster: roster(memB, memA), Lease: lease(memB)}, LeaseStamp: seen(7, 4*time.Second), Self: seen(1, 0)},
			nil, 34 * time.Second,
		},
		"a stagger later for each member ahead": {
			RoleView{State: RoleState{Roster: roster(memC, memB, memA), Lease: lease(memB)}, LeaseStamp: seen(7, 4*time.Second), Self: seen(1, 0)},
			nil, 39 * time.Second,
		},
		"without a lease, from the own read-back": {
			RoleView{State: RoleState{Roster: roster(memA)}, Self: seen(0, 2*time.Second)},
			nil, 2 * time.Second,
		},
		"without a lease, from when it was cleared": {
			RoleView{State: RoleState{Roster: roster(memB, memA)}, Self: seen(1, 2*time.Second), LeaseStamp: seen(9, 8*time.Second)},
			nil, 13 * time.Second,
		},
		"after a gap, from when the view was fresh again": {
			RoleView{State: RoleState{Roster: roster(memB, memC, memA), Lease: lease(memB)}, LeaseStamp: seen(7, 0), Self: seen(1, 0)},
			func(f *localFacts) { f.freshAt = t0.Add(time.Hour) }, time.Hour + 5*time.Second,
		},
		"after a gap, without a lease": {
			RoleView{State: RoleState{Roster: roster(memB, memA)}, Self: seen(1, 0)},
			func(f *localFacts) { f.freshAt = t0.Add(time.Hour) }, time.Hour + 5*time.Second,
		},
		"an own lease that is not held is nobody's, and a ranks by its registration": {
			RoleView{State: RoleState{Roster: roster(memB, memA), Lease: lease(memA)}, LeaseStamp: seen(0, 0), Self: seen(1, 0)},
			nil, 35 * time.Second,
		},
		"a twin waits longer": {
			RoleView{State: RoleState{Roster: roster(memA), Lease: lease(memB)}, LeaseStamp: seen(7, 0), Self: seen(1, 0)},
			func(f *localFacts) { f.penalty = 2500 * time.Millisecond }, 32500 * time.Millisecond,
		},
		"a sign of life counts like a lease": {
			RoleView{
				State: RoleState{Roster: roster(memA), Lease: lease(memB)}, LeaseStamp: seen(7, 0), Self: seen(1, 0),
				SignOfLife: &LifeSign{RecordStamp: *seen(12, 20*time.Second), Lease: *lease(memB)},
			},
			nil, 50 * time.Second,
		},
		"a sign of life of another token does not": {
			RoleView{
				State: RoleState{Roster: roster(memA), Lease: lease(memB)}, LeaseStamp: seen(7, 0), Self: seen(1, 0),
				SignOfLife: &LifeSign{RecordStamp: *seen(12, 20*time.Second), Lease: Lease{Token: token(1, 0), Deadline: t0.Add(time.Hour)}},
			},
			nil, 30 * time.Second,
		},
		"a lease that cannot be read lasts one lease": {
			RoleView{State: RoleState{Roster: roster(memA), Lease: lease(memB)}, LeaseStamp: seen(7, 0), Self: seen(1, 0), Unreadable: seen(12, 10*time.Second)},
			nil, 40 * time.Second,
		},
		"also where there is no other": {
			RoleView{State: RoleState{Roster: roster(memA)}, Self: seen(1, 0), Unreadable: seen(12, 10*time.Second)},
			nil, 40 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts()
			if c.change != nil {
				c.change(&f)
			}
			before := c.view.State.Roster[0]
			local := localise(c.view, f)
			want := t0.Add(c.want)
			require.Equal(t, Decision{ActionWait, want}, Evaluate(local, memA, want.Add(-1), f.config))
			require.Equal(t, ActionChallenge, Evaluate(local, memA, want, f.config).Action)
			require.Equal(t, before, c.view.State.Roster[0], "the view is not changed")
		})
	}
}

func TestSixteenMembersCountAheadAtMost(t *testing.T) {
	var members []MemberID
	for i := range 40 {
		members = append(members, MustMemberID(fmt.Sprintf("m%02d", i)))
	}
	for _, c := range []struct{ ahead, want int }{{0, 0}, {15, 15}, {16, 16}, {17, 16}, {40, 16}} {
		for _, holder := range []MemberID{{}, members[0], members[39], memB} {
			kept, clipped := clipAhead(roster(append(append([]MemberID{}, members[:c.ahead]...), memA)...), memA, holder)
			state := RoleState{Roster: kept, Lease: &Lease{Member: holder}}
			rank, ok := state.RankOf(memA)
			require.True(t, ok)
			require.LessOrEqual(t, rank, c.want)
			require.Equal(t, clipped, c.ahead-len(kept)+1 > 0)
		}
	}
	whole := roster(members...)
	kept, clipped := clipAhead(whole, memA, MemberID{})
	require.Equal(t, whole, kept, "who is not in the roster has nobody ahead")
	require.False(t, clipped)

	view := RoleView{State: RoleState{Roster: roster(append(members, memA)...)}, Self: seen(40, 0)}
	f := facts()
	turn := t0.Add(16*f.config.ChallengeStagger() + f.jitter)
	require.Equal(t, Decision{ActionWait, turn}, Evaluate(localise(view, f), memA, t0, f.config))
}

func TestVerdictAtTheTurn(t *testing.T) {
	known, other := token(1, 5), token(1, 6)
	type c struct {
		described FencingToken
		state     TransactionState
		flags     string
	}
	for want, cases := range map[verdict][]c{
		verdictMint: {
			{FencingToken{}, TransactionEmpty, ""}, // nobody ever led
			{known, TransactionEmpty, ""},
			{known, TransactionOngoing, ""}, // a crashed leader leaves it so
			{known, TransactionCompleteCommit, ""},
			{known, TransactionCompleteAbort, ""},
			{known, TransactionPrepareCommit, "reread"},
			{known, TransactionPrepareAbort, "reread"},
			{other, TransactionCompleteAbort, ""}, // nobody
			{other, TransactionDead, ""},
			{other, TransactionCompleteCommit, "reread"},
			{other, TransactionEmpty, "waited"},
			{other, TransactionOngoing, "waited"},
			{other, TransactionPrepareCommit, "waited"},
			{other, TransactionPrepareEpochFence, "waited"},
			{other, TransactionEmpty, "mine"},
			{other, TransactionOngoing, "silent"},
		},
		verdictReread: {
			{known, TransactionPrepareCommit, ""},
			{known, TransactionPrepareAbort, ""},
			{other, TransactionCompleteCommit, ""},
			{other, TransactionCompleteCommit, "waited"},
		},
		verdictYield: {
			{other, TransactionEmpty, ""},
			{other, TransactionOngoing, ""},
			{other, TransactionPrepareCommit, ""},
			{other, TransactionPrepareAbort, ""},
			{other, TransactionPrepareEpochFence, ""},
			{token(2, 0), TransactionEmpty, ""}, // another producer id
			{token(1, 4), TransactionEmpty, ""}, // difference counts, not order
		},
	} {
		for _, c := range cases {
			got := judge(attempt{
				newest: known, described: c.described, state: c.state,
				waited: c.flags == "waited", reread: c.flags == "reread", mine: c.flags == "mine", silent: c.flags == "silent",
			})
			require.Equal(t, want.String(), got.String(), "%+v", c)
		}
	}
}

func TestBudgetsAndAllowances(t *testing.T) {
	require.Equal(t, 250*time.Millisecond, checkBudget(time.Second, 0))
	require.Equal(t, time.Second, checkBudget(time.Second, 2))
	require.Equal(t, time.Hour, checkBudget(time.Second, 1000))
	require.Equal(t, minCheckBudget, checkBudget(0, 0), "also without a stagger there is time to check")
	bare, err := NewLeaseConfig(time.Second, 300*time.Millisecond, 0)
	require.NoError(t, err)
	require.Equal(t, minAllowance, allowance(bare, 0, 0, time.Second))

	config := DefaultLeaseConfig()
	for _, c := range []struct {
		slowest time.Duration
		barren  int
		want    time.Duration
	}{
		{0, 0, 5 * time.Second},               // the stagger
		{7 * time.Second, 0, 7 * time.Second}, // the slowest lately
		{0, 2, 20 * time.Second},              // doubled for each token without a lease
		{0, 3, 30 * time.Second},              // up to the greater of lease and request timeout
		{0, math.MaxInt, 30 * time.Second},
		{time.Hour, 0, 30 * time.Second},
	} {
		require.Equal(t, c.want, allowance(config, c.slowest, c.barren, 10*time.Second), "%+v", c)
	}
	require.Equal(t, time.Minute, allowance(config, 0, 9, time.Minute))
	require.Equal(t, time.Duration(math.MaxInt64), saturatingDouble(1, 63, math.MaxInt64), "no overflow")
}

func TestNewLeaderPrunesTheDead(t *testing.T) {
	config := DefaultLeaseConfig()
	lease := Lease{Member: memB, Token: token(1, 1)}
	turnPassed := func(members ...MemberID) RoleState {
		return RoleState{Roster: roster(members...), Lease: &Lease{Member: memB, Deadline: t0}}
	}
	entries := []RosterEntry{{Member: memB, Offset: 1}, {Member: memC, Offset: 2}, {Member: memA, Offset: 3}}
	holderThere := RoleView{State: RoleState{Roster: entries, Lease: &lease}, LeaseStamp: seen(9, 0)}
	holderBack := RoleView{State: RoleState{Roster: entries, Lease: &lease}, LeaseStamp: seen(0, 0)}
	for name, c := range map[string]struct {
		view  RoleView
		local RoleState
		now   time.Duration
		want  []MemberID
	}{
		"the holder that has not registered since its lease": {holderThere, turnPassed(memB, memC, memA), time.Second, []MemberID{memB}},
		"not one that came back":                             {holderBack, turnPassed(memB, memC, memA), time.Second, nil},
		"who let the turn pass by the grace":                 {holderBack, turnPassed(memB, memC, memA), 6 * time.Second, []MemberID{memC}},
		"nobody within the grace":                            {holderBack, turnPassed(memB, memC, memA), 5 * time.Second, nil},
		"nobody behind":                                      {holderBack, turnPassed(memB, memA, memC), time.Hour, nil},
		"nobody where I am not in the roster":                {RoleView{}, RoleState{Roster: roster(memC)}, time.Hour, nil},
	} {
		require.Equal(t, c.want, prunable(c.view, c.local, memA, t0.Add(c.now), config), name)
	}

	var crowd []MemberID
	for i := range 1000 {
		crowd = append(crowd, MustMemberID(fmt.Sprint(i)))
	}
	gone := prunable(RoleView{}, turnPassed(append(crowd, memA)...), memA, t0.Add(1e6*time.Second), config)
	require.Len(t, gone, maxPruned, "one transaction stays small")
	require.NotContains(t, gone, memA)
}

func TestRestartReclaimNeedsAnOldLeaseWithRoomLeft(t *testing.T) {
	mine := &Lease{Member: memA}
	view := func(lease *Lease, stamp *RecordStamp) RoleView {
		return RoleView{State: RoleState{Lease: lease}, LeaseStamp: stamp}
	}
	end := t0.Add(10 * time.Second)
	require.True(t, reclaimable(view(mine, seen(4, 0)), memA, 5, t0, end, 10*time.Second))
	require.False(t, reclaimable(view(mine, seen(4, 0)), memA, 5, t0, end, 11*time.Second), "too little is left")
	require.False(t, reclaimable(view(mine, seen(6, 0)), memA, 5, t0, end, time.Second), "this process wrote it")
	require.False(t, reclaimable(view(&Lease{Member: memB}, seen(4, 0)), memA, 5, t0, end, time.Second), "another's")
	require.False(t, reclaimable(view(nil, seen(4, 0)), memA, 5, t0, end, time.Second), "none")
}

func TestLossIsPutInWords(t *testing.T) {
	for _, c := range []struct {
		described FencingToken
		state     TransactionState
		phrase    string
	}{
		{FencingToken{}, TransactionEmpty, "no longer knows the role"},
		{token(1, 5), TransactionOngoing, "still shows this token"},
		{token(1, 6), TransactionCompleteAbort, "time-out, or a challenger gave up"},
		{token(1, 6), TransactionEmpty, "another member took over with token 1:6"},
		{token(1, 6), TransactionOngoing, "another member took over"},
		{token(1, 7), TransactionCompleteAbort, "another member took over"},
		{token(2, 6), TransactionCompleteAbort, "another member took over with token 2:6"},
	} {
		require.Contains(t, classifyLoss(token(1, 5), NewLeadershipStatus(testRole, c.described, c.state)), c.phrase, "%+v", c)
	}
}

func TestLeaseIsAuthenticIfItsBatchIs(t *testing.T) {
	lease := Lease{Token: token(7, 3)}
	require.NoError(t, authenticLease(lease, token(7, 3)))
	require.NoError(t, authenticLease(lease, token(7, 4)), "version 2 of the protocol moves the epoch on")
	require.ErrorContains(t, authenticLease(lease, FencingToken{}), "outside a transaction")
	require.ErrorContains(t, authenticLease(lease, token(8, 3)), "producer id 8")
	require.ErrorContains(t, authenticLease(lease, token(7, 2)), "older epoch 2")
}

func TestCoordinatorConfirmsATokenOfItsOwn(t *testing.T) {
	status := NewLeadershipStatus(testRole, token(7, 3), TransactionEmpty)
	require.True(t, confirmsToken(status, token(7, 3)))
	require.True(t, confirmsToken(status, token(7, 2)), "an older leader's")
	require.False(t, confirmsToken(status, token(7, 4)), "one that was never minted")
	require.False(t, confirmsToken(status, token(8, 1)), "another role's")
	require.False(t, confirmsToken(NewLeadershipStatus(testRole, FencingToken{}, TransactionEmpty), token(7, 3)))
}
