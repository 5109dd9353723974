package coordination_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func TestFirstMemberLeadsAtOnce(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		began := time.Now()
		e := w.machine().elector("a")
		l := w.lead(e)
		require.Less(w, time.Since(began), time.Second, "nobody has to be waited for")
		require.NoError(w, l.Err())
		require.NoError(w, l.Check(w.ctx))
		require.False(w, l.Token().IsZero())
		require.WithinRange(w, l.Deadline(), time.Now(), time.Now().Add(w.lease.Duration()))

		view := w.view()
		holder, held := view.State.Holder()
		require.True(w, held)
		require.Equal(w, l.Member(), holder)
		require.Equal(w, l.Token(), view.State.Lease.Token)
		require.Equal(w, l.FencingNumber(), view.LeaseStamp.Offset)

		status := e.Status()
		require.Equal(w, coordination.PhaseLeading, status.Phase)
		require.Equal(w, l.Token(), status.Token)
		require.NoError(w, status.LastError)
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestLeaderRenewsUnderOneToken(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		l := w.lead(m.elector("a"))
		for range 200 {
			time.Sleep(w.lease.RenewInterval())
			require.NoError(w, l.Err())
			status, err := coordination.DescribeLeadership(w.ctx, m.transport, w.role)
			require.NoError(w, err)
			require.True(w, status.Authoritative(l.Token()))
		}
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestStandbyTakesOverWhenTheLeaderDies(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		a, b := w.machine(), w.machine()
		old := w.lead(a.elector("a"))
		standby := w.standBy(b.elector("b"))
		time.Sleep(5 * time.Second)
		require.False(w, standby.over())

		a.network.cut()
		<-old.Done()
		require.ErrorIs(w, old.Err(), coordination.ErrLeaseExpired)
		require.ErrorIs(w, old.Err(), coordination.ErrNotHeld)
		ended := time.Now()
		require.False(w, standby.over(), "the successor must not come before the old leader knows")

		l := standby.won()
		require.LessOrEqual(w, standby.at.Sub(ended), w.lease.Duration()/10+100*time.Millisecond,
			"a failover costs the rest of the lease and a moment")
		require.NotEqual(w, old.Token(), l.Token())
		require.Greater(w, l.FencingNumber(), old.FencingNumber())
		require.Len(w, w.view().State.Roster, 1, "the dead leader is pruned")

		a.network.heal()
		require.ErrorIs(w, old.Produce(w.ctx, &kgo.Record{Topic: "t"}), coordination.ErrNotHeld)
		require.NoError(w, old.Resign(w.ctx), "harmless after a loss")
		require.NoError(w, l.Check(w.ctx))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestHandOverIsImmediate(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		l := w.lead(w.machine().elector("a"))
		second := w.machine().elector("b")
		standby := w.standBy(second)
		require.Equal(w, l.Member(), second.Status().Leader)
		require.Equal(w, 0, second.Status().Rank)
		began := time.Now()
		require.NoError(w, l.Resign(w.ctx))
		require.ErrorIs(w, l.Err(), coordination.ErrResigned)
		next := standby.won()
		require.Less(w, standby.at.Sub(began), 100*time.Millisecond)
		require.Len(w, w.view().State.Roster, 1, "who resigned left the roster")
		require.NoError(w, next.Resign(w.ctx))
		require.NoError(w, next.Resign(w.ctx), "twice is harmless")
	})
}

func TestStandbysTakeTheirTurnsByRank(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		a, b, c := w.machine(), w.machine(), w.machine()
		old := w.lead(a.elector("a"))
		first := w.standBy(b.elector("b"))
		second := w.standBy(c.elector("c"))
		time.Sleep(w.lease.RenewInterval() / 2)
		a.network.cut()
		b.network.cut()
		<-old.Done()
		ended := time.Now()
		l := second.won()
		require.False(w, first.over())
		wait := second.at.Sub(ended)
		require.GreaterOrEqual(w, wait, w.lease.ChallengeStagger())
		require.Less(w, wait, w.lease.Duration()/10+w.lease.ChallengeStagger()+100*time.Millisecond)

		b.network.heal()
		time.Sleep(4 * w.lease.Duration())
		require.False(w, first.over(), "a recovered member does not preempt the holder")
		require.NoError(w, l.Check(w.ctx))
		require.NoError(w, l.Resign(w.ctx))
		require.NoError(w, first.won().Resign(w.ctx))
	})
}

func TestStartIntoADeadLeadersRoleWaitsForItsLease(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		a := w.machine()
		old := w.lead(a.elector("a"))
		a.network.cut()
		<-old.Done()
		began := time.Now()
		l := w.lead(w.machine().elector("b"))
		// Without LogAppendTime a lease counts from its first sight: the
		// whole lease, and not more.
		require.LessOrEqual(w, time.Since(began), w.lease.Duration()+200*time.Millisecond)
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestWallClocksDoNotMatter(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		a, b := w.machine(), w.machine()
		past := coordination.NewManualClock(time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC))
		future := coordination.NewManualClock(time.Date(2120, 1, 1, 0, 0, 0, 0, time.UTC))
		old := w.lead(a.elector("a", coordination.WithClock(past)))
		standby := w.standBy(b.elector("b", coordination.WithClock(future)))
		time.Sleep(10 * w.lease.Duration())
		require.False(w, standby.over())
		require.NoError(w, old.Check(w.ctx))
		a.network.cut()
		<-old.Done()
		ended := time.Now()
		next := standby.won()
		require.LessOrEqual(w, standby.at.Sub(ended), w.lease.Duration()/10+100*time.Millisecond)

		third := w.standBy(w.machine().elector("c", coordination.WithClock(past)))
		time.Sleep(10 * w.lease.Duration())
		require.False(w, third.over())
		require.NoError(w, next.Resign(w.ctx))
		require.NoError(w, third.won().Resign(w.ctx))
	})
}

func TestRunCampaignsAgainAfterALoss(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		e := m.elector("a")
		ctx, cancel := context.WithCancel(w.ctx)
		terms := make(chan *coordination.Leadership)
		done := make(chan error)
		go func() {
			done <- e.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
				terms <- l
				<-ctx.Done()
				return ctx.Err()
			})
		}()
		first := <-terms
		m.network.cut()
		<-first.Done()
		require.ErrorIs(w, first.Err(), coordination.ErrLeaseExpired)
		time.Sleep(time.Minute)
		require.Error(w, e.Status().LastError)
		require.Less(w, e.Status().LastContact, time.Now().Add(-30*time.Second))
		m.network.heal()
		second := <-terms
		require.NotEqual(w, first.Token(), second.Token())
		require.NoError(w, second.Err())

		cancel()
		require.NoError(w, <-done)
		require.ErrorIs(w, second.Err(), coordination.ErrResigned)
		require.Equal(w, coordination.PhaseStopped, e.Status().Phase)
		require.Empty(w, w.view().State.Roster)
		require.Nil(w, w.view().State.Lease)
	})
}

func TestRunReturnsWhatTheFunctionReturnsWhileLeading(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		e := w.machine().elector("a")
		failed := errors.New("the ledger is full")
		var l *coordination.Leadership
		err := e.Run(w.ctx, func(_ context.Context, held *coordination.Leadership) error {
			l = held
			return failed
		})
		require.ErrorIs(w, err, failed)
		require.ErrorIs(w, l.Err(), coordination.ErrResigned)
		require.Nil(w, w.view().State.Lease)
	})
}

func TestRunDrainsWhileItRenews(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		e := w.machine().elector("a", coordination.WithDrainTimeout(10*w.lease.Duration()))
		ctx, stop := context.WithCancel(w.ctx)
		err := e.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
			stop()
			<-ctx.Done()
			time.Sleep(5 * w.lease.Duration())
			require.NoError(w, l.Err(), "renewals go on while the function drains")
			require.Equal(w, coordination.PhaseDraining, e.Status().Phase)
			return nil
		})
		require.NoError(w, err)
		require.Nil(w, w.view().State.Lease)
	})
}

func TestFunctionThatIgnoresItsEndLosesTheLease(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		e := w.machine().elector("a")
		ctx, stop := context.WithCancel(w.ctx)
		var l *coordination.Leadership
		err := e.Run(ctx, func(_ context.Context, held *coordination.Leadership) error {
			l = held
			stop()
			<-l.Done()
			require.ErrorIs(w, l.Err(), coordination.ErrLeaseExpired)
			require.True(w, e.Status().Overdue)
			return nil
		})
		require.NoError(w, err)
		require.False(w, e.Status().Overdue)
		require.NotNil(w, w.view().State.Lease, "no tombstone: the lease ran out")
	})
}

func TestPanicEndsTheLeadership(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		e := w.machine().elector("a")
		var l *coordination.Leadership
		require.PanicsWithValue(w, "boom", func() {
			_ = e.Run(w.ctx, func(_ context.Context, held *coordination.Leadership) error {
				l = held
				panic("boom")
			})
		})
		require.ErrorIs(w, l.Err(), coordination.ErrNotHeld)
		require.Equal(w, coordination.PhaseStopped, e.Status().Phase)
	})
}

func TestOneCampaignAtATime(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		e := w.machine().elector("a")
		l := w.lead(e)
		_, err := e.Campaign(w.ctx)
		require.ErrorIs(w, err, coordination.ErrElectorBusy)
		require.ErrorIs(w, e.Run(w.ctx, func(context.Context, *coordination.Leadership) error { return nil }), coordination.ErrElectorBusy)
		for range 10 {
			require.NoError(w, l.Resign(w.ctx))
			<-l.Done()
			l = w.lead(e)
		}
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestCampaignsContextBoundsTheCampaignAlone(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		ctx, cancel := context.WithCancel(w.ctx)
		l, err := w.machine().elector("a").Campaign(ctx)
		require.NoError(w, err)
		cancel()

		why := errors.New("enough")
		waiting, stop := context.WithCancelCause(w.ctx)
		time.AfterFunc(time.Second, func() { stop(why) })
		_, err = w.machine().elector("b").Campaign(waiting)
		require.ErrorIs(w, err, why)
		w.await("withdrawal", func() bool { return len(w.view().State.Roster) == 1 })

		require.NoError(w, l.Check(w.ctx))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestClosedTransportEndsEverything(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		l := w.lead(m.elector("a"))
		standby := w.standBy(m.elector("b"))
		m.transport.Close()
		<-l.Done()
		require.ErrorIs(w, l.Err(), coordination.ErrClosed)
		<-standby.done
		require.ErrorIs(w, standby.err, coordination.ErrClosed)
		_, err := m.elector("c").Campaign(w.ctx)
		require.ErrorIs(w, err, coordination.ErrClosed)
	})
}

func TestShutdownResignsAllRoles(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		l := w.lead(m.elector("a"))
		standby := w.standBy(w.machine().elector("b"))
		drained := make(chan error)
		running := make(chan struct{})
		w.role = coordination.MustRole("refunds")
		e := m.elector("a")
		go func() {
			drained <- e.Run(w.ctx, func(ctx context.Context, _ *coordination.Leadership) error {
				close(running)
				<-ctx.Done()
				time.Sleep(w.lease.Duration() / 2)
				return nil
			})
		}()
		<-running
		require.NoError(w, m.transport.Shutdown(w.ctx))
		require.ErrorIs(w, l.Err(), coordination.ErrResigned)
		require.ErrorIs(w, <-drained, coordination.ErrClosed)
		require.Nil(w, w.view().State.Lease)
		require.NoError(w, standby.won().Resign(w.ctx))
	})
}

func TestRestartReclaim(t *testing.T) {
	for _, reclaim := range []bool{true, false} {
		t.Run(fmt.Sprint(reclaim), func(t *testing.T) {
			inVirtualTime(t, func(w *world) {
				// The lease of an earlier process of this member.
				term, token := w.machine().term("pod-0")
				_, err := term.Commit(w.ctx, coordination.Batch{Lease: w.lease.Grant(coordination.MustMemberID("pod-0"), token, time.Now())})
				require.NoError(w, err)
				term.Close()

				var opts []coordination.ElectorOption
				if reclaim {
					opts = append(opts, coordination.WithRestartReclaim())
				}
				began := time.Now()
				l := w.lead(w.machine().elector("pod-0", opts...))
				if reclaim {
					require.Less(w, time.Since(began), w.lease.ChallengeStagger())
				} else {
					require.GreaterOrEqual(w, time.Since(began), w.lease.Duration()-w.lease.ChallengeStagger())
				}
				require.NoError(w, l.Resign(w.ctx))
			})
		})
	}
}

func TestForgedRecordsTakeNothing(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		l := w.lead(w.machine().elector("a"))
		standby := w.standBy(w.machine().elector("b"))
		forever := time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)
		token, err := coordination.NewFencingToken(l.Token().ProducerID(), l.Token().ProducerEpoch()+1)
		require.NoError(w, err)
		w.raw(w.forge(coordination.LeaseKey(w.role), coordination.Lease{
			Member: coordination.MustMemberID("mallory"), Token: token, GrantedAt: time.Now(), Deadline: forever,
		}))
		w.raw(w.forge(coordination.LeaseKey(w.role), coordination.Tombstone{}))
		partition, key, _ := w.forge(coordination.LeaseKey(w.role), coordination.Tombstone{})
		w.raw(partition, key, []byte("not a lease"))
		w.raw(partition, []byte("not a key"), nil)
		time.Sleep(5 * w.lease.Duration())
		require.NoError(w, l.Check(w.ctx))
		require.False(w, standby.over())
		view := w.view()
		require.Equal(w, l.Member(), view.State.Lease.Member)
		require.NotEmpty(w, view.Problems)

		require.NoError(w, l.Resign(w.ctx))
		require.NoError(w, standby.won().Resign(w.ctx))
	})
}

func TestDeadRegistrationsCostSixteenStaggersAtMost(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		l := w.lead(w.machine().elector("a"))
		for i := range 100 {
			member := coordination.MustMemberID(fmt.Sprintf("ghost-%d", i))
			w.raw(w.forge(coordination.RegistrationKey(w.role, member), coordination.Registration{
				Member: member, RegisteredAt: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC),
			}))
		}
		standby := w.standBy(w.machine().elector("b"))
		began := time.Now()
		require.NoError(w, l.Resign(w.ctx))
		next := standby.won()
		require.Less(w, standby.at.Sub(began), 17*w.lease.ChallengeStagger()+time.Second)
		require.Less(w, len(w.view().State.Roster), 100, "those that let their turn pass are pruned")
		require.NoError(w, next.Resign(w.ctx))
	})
}

func TestTwoProcessesWithOneIDDoNotFight(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		l := w.lead(w.machine().elector("a"))
		first := w.standBy(w.machine().elector("twin"))
		second := w.standBy(w.machine().elector("twin"))
		before := w.view().Position
		time.Sleep(10 * w.lease.Duration())
		renewals := int64(10 * w.lease.Duration() / w.lease.RenewInterval())
		require.LessOrEqual(w, w.view().Position-before, 2*(renewals+2), "twins do not register over each other again and again")
		require.NoError(w, l.Resign(w.ctx))
		w.await("one of the twins", func() bool { return first.over() || second.over() })
		time.Sleep(5 * w.lease.Duration())
		require.False(w, first.over() && second.over(), "one leads, the other stands by")
	})
}

func TestUnansweredAttemptEndsTheTermAndTheMemberLeadsAgain(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		e := m.elector("a")
		terms := make(chan *coordination.Leadership, 8)
		ctx, stop := context.WithCancel(w.ctx)
		done := make(chan error)
		go func() {
			done <- e.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
				terms <- l
				<-ctx.Done()
				return nil
			})
		}()
		first := <-terms
		other := w.standBy(w.machine().elector("standby"))
		// The broker drops the connection instead of answering, once.
		w.cluster.Fake().ControlKey(int16(kmsg.EndTxn), func(kmsg.Request) (kmsg.Response, error, bool) {
			return nil, errors.New("the cable was pulled"), true
		})
		<-first.Done()
		require.ErrorIs(w, first.Err(), coordination.ErrUnanswered)
		lost := time.Now()
		second := <-terms
		require.Less(w, time.Since(lost), time.Second, "nobody has to be waited for")
		require.NotEqual(w, first.Token(), second.Token())
		require.False(w, other.over())
		stop()
		require.NoError(w, <-done)
		require.NoError(w, other.won().Resign(w.ctx))
	})
}

func TestOrphanEpochLeavesTheRoleEmptyForAMoment(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		terms := make(chan *coordination.Leadership, 8)
		ctx, stop := context.WithCancel(w.ctx)
		done := make(chan error)
		e := m.elector("a")
		go func() {
			done <- e.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
				terms <- l
				<-ctx.Done()
				return nil
			})
		}()
		first := <-terms
		// Somebody mints an epoch and is never heard of again.
		orphan, _ := m.term("orphan")
		orphan.Close()
		<-first.Done()
		require.ErrorIs(w, first.Err(), coordination.ErrFenced)
		lost := time.Now()
		second := <-terms
		require.Less(w, time.Since(lost), w.lease.Duration(), "the role does not stand empty for a whole lease")
		require.NoError(w, second.Check(w.ctx))
		stop()
		require.NoError(w, <-done)
	})
}

func TestLeadershipEndsAStopMarginBeforeItsLease(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		l := w.lead(m.elector("a", coordination.WithStopMargin(time.Second)))
		m.network.cut()
		<-l.Done()
		require.ErrorIs(w, l.Err(), coordination.ErrLeaseExpired)
		lease := w.view().State.Lease
		require.Equal(w, l.Token(), lease.Token)
		require.WithinDuration(w, lease.Deadline.Add(-time.Second), time.Now(), 50*time.Millisecond)
	})
}

func TestLeaseCountsFromBeforeItsRenewalIsSent(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		e := m.elector("a")
		l := w.lead(e)
		won := e.Status().LastRenewal
		var sent atomic.Pointer[time.Time]
		m.network.watch(func(key int16) bool {
			switch kmsg.Key(key) {
			case kmsg.AddPartitionsToTxn:
				now := time.Now()
				sent.Store(&now)
			case kmsg.EndTxn:
				time.Sleep(w.lease.Duration() / 6)
			}
			return true
		})
		w.await("a renewal", func() bool { return e.Status().LastRenewal.After(won) })
		latest := sent.Load().Add(w.lease.Duration() - w.lease.Duration()/10)
		require.False(w, l.Deadline().After(latest), "%s is after %s", l.Deadline(), latest)
		require.NoError(w, l.Resign(w.ctx))
	})
}

// A dozer is a transport of a process that stands still when its turn comes near.
type dozer struct {
	coordination.Transport
	doze func()
}

func (d dozer) NewTerm(role coordination.Role, config coordination.TermConfig) (coordination.Term, error) {
	d.doze()
	return d.Transport.NewTerm(role, config)
}

func TestMemberThatSleptThroughItsTurnWaitsForItOnceMore(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		a, b, c := w.machine(), w.machine(), w.machine()
		old := w.lead(a.elector("a"))
		first := w.standBy(b.elector("b"))
		var woke time.Time
		sleepy, err := coordination.NewElector(dozer{c.transport, func() {
			time.Sleep(2 * w.lease.Duration())
			woke = time.Now()
		}}, w.role, coordination.MustMemberID("c"), coordination.WithLease(w.lease))
		require.NoError(w, err)
		second := w.standBy(sleepy)
		a.network.cut()
		b.network.cut()
		<-old.Done()
		l := second.won()
		require.False(w, first.over())
		// It fell asleep a quarter of a lease before its turn, and waits for that too.
		require.GreaterOrEqual(w, second.at.Sub(woke), w.lease.Duration()/4+w.lease.ChallengeStagger(),
			"those ahead of it may just be waking up as well")
		require.NoError(w, l.Resign(w.ctx))
		b.network.heal()
		require.NoError(w, first.won().Resign(w.ctx))
	})
}

func TestCampaignThatIsEndedDuringItsMintLeadsForNoMoment(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		prior := w.lead(w.machine().elector("prior"))
		m := w.machine()
		standby := m.elector("a")
		ctx, cancel := context.WithCancelCause(w.ctx)
		done := make(chan error)
		go func() {
			_, err := standby.Campaign(ctx)
			done <- err
		}()
		w.await("standby", func() bool { return standby.Status().Phase == coordination.PhaseStandby })
		m.network.watch(func(key int16) bool {
			if key == int16(kmsg.InitProducerID) {
				cancel(errEndedByTest)
			}
			return true
		})
		before := len(w.grants())
		require.NoError(w, prior.Resign(w.ctx))
		require.ErrorIs(w, <-done, errEndedByTest)
		w.await("what was begun is finished", func() bool { return w.view().Newest != prior.Token() })
		view := w.view()
		require.Nil(w, view.State.Lease)
		require.Empty(w, view.State.Roster)
		require.Len(w, w.grants(), before, "there is no lease to wait for")
	})
}

func TestMemberWhoseRegistrationIsRemovedStandsAtTheEnd(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		l := w.lead(w.machine().elector("a"))
		removed, other := w.standBy(w.machine().elector("b")), w.standBy(w.machine().elector("c"))
		w.raw(w.forge(coordination.RegistrationKey(w.role, coordination.MustMemberID("b")), coordination.Tombstone{}))
		w.await("its return", func() bool {
			rank, _ := w.view().State.RankOf(coordination.MustMemberID("b"))
			return rank == 1
		})
		require.NoError(w, l.Resign(w.ctx))
		require.NoError(w, other.won().Resign(w.ctx))
		require.NoError(w, removed.won().Resign(w.ctx))
	})
}

func TestDeadMembersStayWithoutPruning(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		a, b := w.machine(), w.machine()
		old := w.lead(a.elector("a"))
		standby := w.standBy(b.elector("b", coordination.WithPruning(false)))
		a.network.cut()
		<-old.Done()
		l := standby.won()
		require.Len(w, w.view().State.Roster, 2)
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestMintThatIsPutOffDeposesNobody(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		prior := w.lead(w.machine().elector("prior"))
		slow := w.machine()
		campaign := w.standBy(slow.elector("slow"))
		// The first attempt is put off by the coordinator, the second one waits
		// in the network until somebody else leads.
		w.answer(kmsg.InitProducerID, func(r kmsg.Request) kmsg.Response {
			response := r.ResponseKind().(*kmsg.InitProducerIDResponse)
			response.ErrorCode = kerr.ConcurrentTransactions.Code
			return response
		})
		attempts, second, led := 0, make(chan struct{}), make(chan struct{})
		slow.network.watch(func(key int16) bool {
			if key == int16(kmsg.InitProducerID) {
				if attempts++; attempts == 2 {
					close(second)
					<-led
					time.Sleep(50 * time.Millisecond) // until it is known
				}
			}
			return true
		})
		require.NoError(w, prior.Resign(w.ctx))
		<-second
		term, token := w.machine().term("other")
		_, err := term.Commit(w.ctx, coordination.Batch{Lease: w.lease.Grant(coordination.MustMemberID("other"), token, time.Now())})
		require.NoError(w, err)
		close(led)
		time.Sleep(w.lease.Duration() / 2)
		status, err := coordination.DescribeLeadership(w.ctx, slow.transport, w.role)
		require.NoError(w, err)
		require.True(w, status.Authoritative(token))
		require.NoError(w, campaign.won().Resign(w.ctx), "it leads when that lease has run out")
	})
}

func TestOpenTransactionOfAnotherRoleChallengesNobody(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		partition, err := coordination.RolePartition(w.role, 16)
		require.NoError(w, err)
		a := w.machine()
		l := w.lead(a.elector("a"))
		standby := w.standBy(w.machine().elector("b"))

		// A transaction in the same partition stays open, and everything after
		// it is invisible to read_committed.
		client := w.client(
			kgo.TransactionalID("somebody else"), kgo.TransactionTimeout(10*time.Minute),
			kgo.RecordPartitioner(kgo.ManualPartitioner()),
		)
		require.NoError(w, client.BeginTransaction())
		record := &kgo.Record{Topic: coordination.StateTopic, Partition: partition, Key: []byte("noise")}
		require.NoError(w, client.ProduceSync(w.ctx, record).FirstErr())

		time.Sleep(5 * w.lease.Duration())
		require.NoError(w, l.Check(w.ctx), "a living leader is not challenged")
		require.False(w, standby.over())

		a.network.cut()
		<-l.Done()
		ended := time.Now()
		next := standby.won()
		require.Less(w, standby.at.Sub(ended), w.lease.Duration(), "a dead one is succeeded all the same")
		require.NoError(w, client.EndTransaction(w.ctx, kgo.TryAbort))
		require.NoError(w, next.Resign(w.ctx))
	})
}

func TestMovesOfLeaderAndCoordinatorAreNoLoss(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		partition, err := coordination.RolePartition(w.role, 16)
		require.NoError(w, err)
		l := w.lead(w.machine().elector("a"))
		standby := w.standBy(w.machine().elector("b"))
		for i := range 30 {
			require.NoError(w, w.cluster.Fake().MoveTopicPartition(coordination.StateTopic, partition, int32(i%3)))
			w.cluster.Fake().RehashCoordinators()
			time.Sleep(w.lease.RenewInterval())
			require.NoError(w, l.Err())
			require.False(w, standby.over())
		}
		began := time.Now()
		require.NoError(w, l.Resign(w.ctx))
		next := standby.won()
		require.Less(w, standby.at.Sub(began), w.lease.ChallengeStagger(), "the reader has followed")
		require.NoError(w, next.Resign(w.ctx))
	})
}

// slowWarm is a transport whose terms take for ever to warm up.
type slowWarm struct{ coordination.Transport }

type slowTerm struct{ coordination.Term }

func (s slowWarm) NewTerm(role coordination.Role, config coordination.TermConfig) (coordination.Term, error) {
	term, err := s.Transport.NewTerm(role, config)
	return slowTerm{term}, err
}

func (slowTerm) Warm(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestWinnerDoesNotWaitForItsWarmUp(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		elector, err := coordination.NewElector(slowWarm{w.machine().transport}, w.role, coordination.MustMemberID("a"), coordination.WithLease(w.lease))
		require.NoError(w, err)
		began := time.Now()
		l := w.lead(elector)
		require.Less(w, time.Since(began), w.lease.ChallengeStagger())
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestRunHeedsItsContextWhereProduceRequestsAreLost(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		registration := coordination.Registration{Member: coordination.MustMemberID("x"), RegisteredAt: time.Now()}
		_, err := m.transport.Register(w.ctx, w.role, registration)
		require.NoError(w, err)
		m.network.watch(func(key int16) bool { return key != int16(kmsg.Produce) })
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.ctx, 500*time.Millisecond)
		defer cancel()
		_, err = m.transport.Register(ctx, w.role, registration)
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.NoError(w, m.elector("a").Run(ctx, func(context.Context, *coordination.Leadership) error { return nil }))
		require.Less(w, time.Since(began), 5*time.Second)
		m.network.watch(nil)
	})
}

func TestTopicThatChangesEndsLeadershipAndCampaign(t *testing.T) {
	for name, change := range map[string]func(w *world){
		"recreated": func(w *world) {
			require.NoError(w, w.cluster.Fake().DeleteTopic(coordination.StateTopic))
			require.NoError(w, w.cluster.Fake().CreateTopic(coordination.StateTopic, 16, nil))
		},
		"deleted": func(w *world) {
			require.NoError(w, w.cluster.Fake().DeleteTopic(coordination.StateTopic))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(w *world) {
				l := w.lead(w.machine().elector("a"))
				standby := w.standBy(w.machine().elector("b"))
				change(w)
				<-l.Done()
				require.ErrorIs(w, l.Err(), coordination.ErrNotHeld)
				<-standby.done
				require.ErrorIs(w, standby.err, coordination.ErrTopicChanged)
				require.ErrorContains(w, standby.err, "restart the members")
			})
		})
	}
}

func TestProduceIsAtomic(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		require.NoError(w, w.cluster.Fake().CreateTopic("ledger", 1, nil))
		l := w.lead(w.machine().elector("a"))
		good := &kgo.Record{Topic: "ledger", Value: []byte("1")}
		require.NoError(w, l.Produce(w.ctx, good))
		require.EqualValues(w, 0, good.Offset)

		huge := &kgo.Record{Topic: "ledger", Value: make([]byte, 8<<20)}
		err := l.Produce(w.ctx, &kgo.Record{Topic: "ledger", Value: []byte("2")}, huge)
		var rejected *coordination.RejectedError
		require.ErrorAs(w, err, &rejected)
		require.Same(w, huge, rejected.Record)
		require.Equal(w, 1, rejected.Index)
		require.NoError(w, l.Err(), "one bad call costs nothing but itself")
		require.NoError(w, l.Produce(w.ctx, &kgo.Record{Topic: "ledger", Value: []byte("3")}))
		require.NoError(w, l.Produce(w.ctx))
		require.Error(w, l.Produce(w.ctx, nil))

		ended, cancel := context.WithCancel(w.ctx)
		cancel()
		require.ErrorIs(w, l.Produce(ended, &kgo.Record{Topic: "ledger"}), context.Canceled)
		require.NoError(w, l.Resign(w.ctx))
		require.ErrorIs(w, l.Produce(w.ctx, good), coordination.ErrResigned)
		require.Equal(w, []string{"1", "3"}, w.values("ledger", 2))
	})
}

// values reads the committed values of a topic.
func (w *world) values(topic string, n int) []string {
	w.Helper()
	client := w.client(
		kgo.ConsumeTopics(topic), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	var values []string
	for len(values) < n {
		fetches := client.PollFetches(w.ctx)
		require.NoError(w, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) { values = append(values, string(r.Value)) })
	}
	return values
}
