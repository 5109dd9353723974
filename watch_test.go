package coordination_test

import (
	"context"
	"errors"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// An observer is a loop over views in the background.
type observer struct {
	*world
	views chan coordination.View
	end   chan error
}

func (w *world) observe(ctx context.Context, transport coordination.Transport, roles ...coordination.Role) *observer {
	o := &observer{w, make(chan coordination.View, 1000), make(chan error, 1)}
	go func() {
		for view, err := range coordination.Watch(ctx, transport, roles...) {
			if err != nil {
				o.end <- err
				continue
			}
			o.views <- view
		}
		close(o.views)
	}()
	return o
}

// see waits for a view.
func (o *observer) see(what string, ok func(coordination.View) bool) coordination.View {
	o.Helper()
	for view := range o.views {
		if ok(view) {
			return view
		}
	}
	require.FailNow(o, "the loop ended before", what)
	return coordination.View{}
}

func TestWatchFollowsTheLifeOfARole(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		ctx, stop := context.WithCancelCause(w.ctx)
		o := w.observe(ctx, w.machine().transport, w.role)
		time.Sleep(10 * time.Second) // the topic is for members to create

		a := w.machine()
		l := w.lead(a.elector("a"))
		live := o.see("a leader", func(v coordination.View) bool { return v.Live })
		require.Equal(w, "a", live.Leader.String())
		require.Equal(w, l.Token(), live.Token)
		require.Equal(w, w.role, live.Role)
		require.WithinDuration(w, time.Now().Add(w.lease.Duration()), live.Until, time.Second)
		renewed := o.see("a renewal", func(v coordination.View) bool { return v.Until.After(live.Until) })
		require.True(w, renewed.Live)

		b := w.machine()
		standby := w.standBy(b.elector("b"))
		roster := o.see("a standby", func(v coordination.View) bool { return len(v.Roster) == 2 }).Roster
		require.Equal(w, "a", roster[0].Member.String())
		require.Equal(w, "b", roster[1].Member.String())

		require.NoError(w, l.Resign(w.ctx))
		cleared := o.see("the resignation", func(v coordination.View) bool { return v.Leader == coordination.MemberID{} })
		require.False(w, cleared.Live)
		require.Equal(w, l.Token(), cleared.Token, "the last one there was")
		next := standby.won()
		o.see("the successor", func(v coordination.View) bool { return v.Live && v.Leader == next.Member() })

		// Nothing is written any more, and the observer still notices.
		until := o.see("its renewal", func(v coordination.View) bool { return v.Live }).Until
		b.network.cut()
		dead := o.see("the end of its lease", func(v coordination.View) bool { return !v.Live })
		require.Equal(w, next.Member(), dead.Leader)
		require.False(w, time.Now().Before(until))

		stop(errEndedByTest)
		require.ErrorIs(w, <-o.end, errEndedByTest)
	})
}

func TestWatchFindsEveryRole(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		lead := func(role string) *coordination.Leadership {
			w.role = coordination.MustRole(role)
			return w.lead(m.elector("a"))
		}
		first, second := lead("first"), lead("second")
		o := w.observe(w.ctx, w.machine().transport)
		for range 2 {
			v := o.see("a leader", func(v coordination.View) bool { return v.Live })
			require.Contains(w, []coordination.Role{first.Role(), second.Role()}, v.Role)
		}
		third := lead("third")
		o.see("a role that is new", func(v coordination.View) bool { return v.Role == third.Role() && v.Live })
		for _, l := range []*coordination.Leadership{first, second, third} {
			require.NoError(w, l.Resign(w.ctx))
			o.see("its end", func(v coordination.View) bool { return v.Role == l.Role() && !v.Live })
		}
	})
}

func TestWatchSeesALeaderBehindAnOpenTransaction(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		l := w.lead(w.machine().elector("a"))
		o := w.observe(w.ctx, w.machine().transport, w.role)
		o.see("the leader", func(v coordination.View) bool { return v.Live })
		partition, err := coordination.RolePartition(w.role, 16)
		require.NoError(w, err)
		client := w.client(
			kgo.TransactionalID("somebody else"), kgo.TransactionTimeout(10*time.Minute),
			kgo.RecordPartitioner(kgo.ManualPartitioner()),
		)
		require.NoError(w, client.BeginTransaction())
		record := &kgo.Record{Topic: coordination.StateTopic, Partition: partition, Key: []byte("noise")}
		require.NoError(w, client.ProduceSync(w.ctx, record).FirstErr())
		for time.Sleep(5 * w.lease.Duration()); len(o.views) > 0; {
			require.True(w, (<-o.views).Live)
		}
		require.NoError(w, client.EndTransaction(w.ctx, kgo.TryAbort))
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestWatchEndsWithAnError(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(w *world, m *machine)
		want error
	}{
		"closed": {func(_ *world, m *machine) { m.transport.Close() }, coordination.ErrClosed},
		"the topic is deleted": {func(w *world, _ *machine) {
			require.NoError(w, w.cluster.Fake().DeleteTopic(coordination.StateTopic))
		}, coordination.ErrTopicChanged},
	} {
		for _, all := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				inVirtualTime(t, func(w *world) {
					require.NoError(w, w.lead(w.machine().elector("a")).Resign(w.ctx))
					m := w.machine()
					roles := []coordination.Role{w.role}
					if all {
						roles = nil
					}
					o := w.observe(w.ctx, m.transport, roles...)
					<-o.views
					c.end(w, m)
					require.ErrorIs(w, <-o.end, c.want)
				})
			})
		}
	}
}

func TestWatchRefusesWhatIsNoRole(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		for _, err := range coordination.Watch(w.ctx, nil) {
			require.ErrorIs(w, err, coordination.ErrInvalidConfig)
		}
		for _, err := range coordination.Watch(w.ctx, w.machine().transport, coordination.Role{}) {
			require.ErrorIs(w, err, coordination.ErrInvalidConfig)
		}
		canceled, cancel := context.WithCancelCause(w.ctx)
		cancel(errEndedByTest)
		var errs []error
		for _, err := range coordination.Watch(canceled, w.machine().transport) {
			errs = append(errs, err)
		}
		require.Len(w, errs, 1)
		require.True(w, errors.Is(errs[0], errEndedByTest))
	})
}
