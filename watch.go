package coordination

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"
)

// A View is what an observer sees of a role.
type View struct {
	Role Role

	// Leader is the member that the newest lease names, whether or not it is
	// live. It is zero when nobody led yet, when the last leader resigned, and
	// when the lease can be read only by a newer version of this library.
	Leader MemberID

	// Token is the newest token that the log knows: that of the lease, or of
	// the leader that resigned last.
	Token FencingToken

	// Live reports whether the lease has not run out. It is an observer's
	// guess and guards nothing: ask [DescribeLeadership] about a token.
	Live bool

	// Until is when the lease runs out unless it is renewed, zero without one.
	// It is an instant of this process, with a monotonic clock reading. A lease
	// that is older than the observer counts from when the observer first saw
	// it: it may seem to live for one extent more than it does.
	Until time.Time

	// Roster holds the registered members by rank, the leader among them.
	Roster []RosterEntry

	// Uncounted is how many registrations there are beyond those.
	Uncounted int

	// Problems lists records that were skipped, newest last; a few are kept.
	Problems []Problem
}

// Watch yields views of roles, or of all roles that have records where none is
// named: one of each at once, and a new one whenever something has changed, a lease
// has been renewed, or one has run out. A slow loop skips to the newest view of each
// role.
//
// The loop blocks between views. It ends when its body leaves it, or with an error as
// its last element: ctx's cause, [ErrClosed], [ErrTopicChanged], or what retrying
// cannot cure. Other faults are retried; while they last the leases run out. An
// observer is no member, never creates the state topic, and needs to read it and to
// describe the roles' transactional ids. Several loops may run at the same time.
func Watch(ctx context.Context, transport Transport, roles ...Role) iter.Seq2[View, error] {
	return func(yield func(View, error) bool) {
		if err := validTransport(transport); err != nil {
			yield(View{}, err)
			return
		}
		for _, role := range roles {
			if err := validRole(role); err != nil {
				yield(View{}, err)
				return
			}
		}
		ctx, cancel := context.WithCancelCause(ctx)
		w := &watch{transport: transport, cancel: cancel, following: make(map[Role]bool), ready: make(chan struct{}, 1)}
		defer w.wg.Wait()
		defer cancel(nil)
		if w.follow(ctx, roles...); len(roles) == 0 {
			w.wg.Go(func() { w.discover(ctx) })
		}
		for {
			select {
			case <-w.ready:
			case <-ctx.Done():
				yield(View{}, context.Cause(ctx))
				return
			}
			for _, view := range w.take() {
				if ctx.Err() == nil && !yield(view, nil) {
					return
				}
			}
		}
	}
}

// A watch is one loop over views.
type watch struct {
	transport Transport
	cancel    context.CancelCauseFunc // ends the loop with an error
	wg        sync.WaitGroup
	following map[Role]bool // of whoever calls follow
	ready     chan struct{} // a token while there may be something to take

	mu      sync.Mutex // guards pending
	pending []View     // the newest of each role that was not taken yet
}

// put replaces the view of a role that was not taken yet.
func (w *watch) put(view View) {
	w.mu.Lock()
	if i := slices.IndexFunc(w.pending, func(v View) bool { return v.Role == view.Role }); i >= 0 {
		w.pending[i] = view
	} else {
		w.pending = append(w.pending, view)
	}
	w.mu.Unlock()
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

func (w *watch) take() []View {
	w.mu.Lock()
	defer w.mu.Unlock()
	pending := w.pending
	w.pending = nil
	return pending
}

// follow starts to watch roles, each once.
func (w *watch) follow(ctx context.Context, roles ...Role) {
	for _, role := range roles {
		if !w.following[role] {
			w.following[role] = true
			w.wg.Go(func() { w.observe(ctx, role) })
		}
	}
}

// discover follows every role there is.
func (w *watch) discover(ctx context.Context) {
	var lists <-chan RoleList
	err := w.persist(ctx, func() (err error) {
		lists, err = w.transport.Roles(ctx)
		return err
	})
	for err == nil {
		select {
		case list := <-lists:
			err = list.Err
			w.follow(ctx, list.Roles...)
		case <-ctx.Done():
			return
		}
	}
	w.cancel(err)
}

// persist repeats an action until it goes well or retrying cannot help.
func (w *watch) persist(ctx context.Context, action func() error) error {
	for attempt := 1; ; attempt++ {
		err := action()
		if err == nil || permanent(err) {
			return err
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return fmt.Errorf("%w: %w", wait, err)
		}
	}
}

// observe puts the views of one role.
func (w *watch) observe(ctx context.Context, role Role) {
	if err := w.observeRole(ctx, role); err != nil {
		w.cancel(err)
	}
}

func (w *watch) observeRole(ctx context.Context, role Role) error {
	var follower Follower
	err := w.persist(ctx, func() (err error) {
		follower, err = w.transport.Follow(ctx, role, MemberID{})
		return err
	})
	if err != nil {
		return err
	}
	defer follower.Close()
	var last RoleView
	err = w.persist(ctx, func() (err error) {
		last, err = follower.Barrier(ctx)
		return err
	})
	if err != nil {
		return err
	}
	expiry := time.NewTimer(0)
	defer expiry.Stop()
	for {
		view := viewOf(last, time.Now())
		w.put(view)
		expiry.Stop()
		if view.Live {
			expiry.Reset(time.Until(view.Until))
		}
		select {
		case pushed := <-follower.Views():
			if pushed.Err != nil {
				return pushed.Err
			}
			if pushed.Position < last.Position {
				continue // a barrier has overtaken it
			}
			last = pushed
		case <-expiry.C:
			// A renewal may hide behind an open transaction of another role.
			if fresh, err := w.look(ctx, follower); err == nil {
				last = fresh
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// lookTimeout bounds how long the end of a lease waits for the cluster.
const lookTimeout = time.Second

func (w *watch) look(ctx context.Context, follower Follower) (RoleView, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return follower.Barrier(ctx)
}

// viewOf makes an observer's view of what a transport knows.
func viewOf(view RoleView, now time.Time) View {
	v := View{
		Role:      view.Role,
		Token:     view.Newest,
		Roster:    view.State.Roster,
		Uncounted: view.Uncounted,
		Problems:  view.Problems,
	}
	facts := localFacts{config: DefaultLeaseConfig(), maxExtent: defaultMaxExtent}
	if lease, until := localLease(view, facts); lease != nil {
		v.Leader, v.Token = lease.Member, cmp.Or(lease.Token, v.Token)
		v.Until, v.Live = until, now.Before(until)
	}
	return v
}
