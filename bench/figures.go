package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func newRole(name string) coordination.Role {
	return coordination.MustRole("bench-" + name + "-" + rand.Text()[:8])
}

// touch makes sure that the state topic exists before anything reads it.
func touch(ctx context.Context, s settings) error {
	transport, err := s.transport(ctx)
	if err != nil {
		return err
	}
	defer transport.Close()
	follower, err := transport.Follow(ctx, newRole("touch"), coordination.MustMemberID("bench"))
	if err != nil {
		return err
	}
	follower.Close()
	return nil
}

// failover kills the leader, again and again, and measures how long after the end
// of its lease the standby of rank 0 has its first one in the log.
func failover(ctx context.Context, s settings) error {
	if err := touch(ctx, s); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	role := newRole("failover")
	grants, err := watchLeases(ctx, s, role)
	if err != nil {
		return err
	}
	members := map[string]*process{}
	defer func() {
		for _, p := range members {
			p.kill()
		}
	}()
	start := func(n int) error {
		p, err := startMember(s, role, fmt.Sprintf("member-%d", n))
		if err == nil {
			members[p.id] = p
		}
		return err
	}
	if err := cmp.Or(start(0), start(1)); err != nil {
		return err
	}
	var (
		gaps     []time.Duration
		last     grant
		killed   bool
		renewals int
	)
	for len(gaps) < s.rounds {
		var g grant
		select {
		case g = <-grants:
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10*s.lease + 10*time.Second):
			return errors.New("no lease was written for a long time")
		}
		if g.first && killed {
			gaps = append(gaps, g.at.Sub(last.at.Add(s.lease)))
			killed = false
			if err := start(len(gaps) + 1); err != nil {
				return err
			}
		} else if g.first && last.at != (time.Time{}) {
			return fmt.Errorf("leadership went to %s although nobody was killed", g.lease.Member)
		}
		if g.first {
			renewals = 0
		} else {
			renewals++
		}
		last = g
		// Vary the place within the renew interval at which the leader dies.
		if renewals == 2 && !killed {
			time.Sleep(time.Duration(len(gaps)%10) * s.lease / 40)
			name := g.lease.Member.String()
			members[name].kill()
			delete(members, name)
			killed = true
		}
	}
	figures("first lease of the successor after the end of the dead leader's lease", gaps)
	return nil
}

// handover passes a role back and forth, and measures from the call of Resign to
// the successor's first committed lease.
func handover(ctx context.Context, s settings) error {
	role := newRole("handover")
	var electors [2]*coordination.Elector
	for i := range electors {
		transport, err := s.transport(ctx)
		if err != nil {
			return err
		}
		defer transport.Close()
		if electors[i], err = s.elector(transport, role, fmt.Sprintf("member-%d", i), s.lease); err != nil {
			return err
		}
	}
	leader, err := electors[0].Campaign(ctx)
	if err != nil {
		return err
	}
	type result struct {
		l   *coordination.Leadership
		at  time.Time
		err error
	}
	var gaps []time.Duration
	for i := range s.rounds {
		successor := electors[(i+1)%2]
		took := make(chan result, 1)
		go func() {
			l, err := successor.Campaign(ctx)
			took <- result{l, time.Now(), err}
		}()
		for successor.Status().Phase != coordination.PhaseStandby {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(s.lease / 2)
		began := time.Now()
		if err := leader.Resign(ctx); err != nil {
			return err
		}
		r := <-took
		if r.err != nil {
			return r.err
		}
		gaps = append(gaps, r.at.Sub(began))
		leader = r.l
	}
	figures("from Resign to the successor's first committed lease", gaps)
	return leader.Resign(ctx)
}

// startup kills a leader that has no standby, starts a member right after, and
// compares its first lease with the end of the dead leader's.
func startup(ctx context.Context, s settings) error {
	if err := touch(ctx, s); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var rest, took []time.Duration
	for range s.rounds {
		role := newRole("startup")
		grants, err := watchLeases(ctx, s, role)
		if err != nil {
			return err
		}
		dead, err := startMember(s, role, "dead")
		if err != nil {
			return err
		}
		last := <-grants
		for range 2 { // two renewals, so that it dies in the middle of its life
			last = <-grants
		}
		time.Sleep(s.lease / 5)
		dead.kill()
		heir, err := startMember(s, role, "heir")
		if err != nil {
			return err
		}
		for g := range grants {
			if g.first {
				took = append(took, g.at.Sub(last.at))
				rest = append(rest, g.at.Sub(last.at.Add(s.lease)))
				break
			}
			last = g
		}
		heir.kill()
	}
	fmt.Printf("lease: %s\n", s.lease)
	figures("first lease of a member that starts into it, after the dead leader's last lease", took)
	figures("the same, after the end of that lease", rest)
	return nil
}

// stable watches three members of a role and counts changes of the leader.
func stable(ctx context.Context, s settings) error {
	if err := touch(ctx, s); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	role := newRole("stable")
	grants, err := watchLeases(ctx, s, role)
	if err != nil {
		return err
	}
	for i := range 3 {
		p, err := startMember(s, role, fmt.Sprintf("member-%d", i))
		if err != nil {
			return err
		}
		defer p.kill()
	}
	var (
		leaders, renewals int
		gaps              []time.Duration
		last              time.Time
	)
	end := time.After(s.extent)
	for {
		select {
		case g := <-grants:
			if g.first {
				leaders++
				fmt.Printf("%s leads under %s\n", g.lease.Member, g.lease.Token)
			} else {
				gaps = append(gaps, g.at.Sub(last))
			}
			last = g.at
			renewals++
		case <-end:
			fmt.Printf("lease %s, 3 members, %s: %d leases, %d changes of the leader\n", s.lease, s.extent, renewals, leaders-1)
			figures("between two leases", gaps)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// requestCounter counts the requests of a transport by type.
type requestCounter struct {
	mu     sync.Mutex
	counts map[string]int
}

func (c *requestCounter) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if err == nil {
		c.mu.Lock()
		c.counts[kmsg.NameForKey(key)]++
		c.mu.Unlock()
	}
}

func (c *requestCounter) reset() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	counts := c.counts
	c.counts = make(map[string]int)
	return counts
}

// idle counts the requests of a transport whose members all stand by, for one role
// and for many.
func idle(ctx context.Context, s settings) error {
	totals := make(map[int]int)
	for _, roles := range []int{1, s.roles} {
		counts, err := idleRequests(ctx, s, roles)
		if err != nil {
			return err
		}
		fmt.Printf("%d role(s), %s:", roles, s.extent)
		for _, name := range slices.Sorted(maps.Keys(counts)) {
			fmt.Printf(" %s=%d", name, counts[name])
			totals[roles] += counts[name]
		}
		fmt.Printf(" total=%d\n", totals[roles])
	}
	fmt.Printf("ratio: %.3f\n", float64(totals[s.roles])/float64(totals[1]))
	return nil
}

func idleRequests(ctx context.Context, s settings, roles int) (map[string]int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	counter := &requestCounter{counts: make(map[string]int)}
	leading, err := s.transport(ctx)
	if err != nil {
		return nil, err
	}
	defer leading.Close()
	standing, err := s.transport(ctx, coordination.WithClientOptions(kgo.WithHooks(counter)))
	if err != nil {
		return nil, err
	}
	defer standing.Close()

	var campaigns sync.WaitGroup
	defer campaigns.Wait()
	defer cancel()
	var electors []*coordination.Elector
	for i := range roles {
		role := newRole(fmt.Sprintf("idle-%d", i))
		// So long a lease that nothing is renewed meanwhile.
		const lease = 10 * time.Minute
		leader, err := s.elector(leading, role, "leader", lease)
		if err != nil {
			return nil, err
		}
		if _, err := leader.Campaign(ctx); err != nil {
			return nil, err
		}
		standby, err := s.elector(standing, role, "standby", lease)
		if err != nil {
			return nil, err
		}
		electors = append(electors, standby)
		campaigns.Go(func() { _, _ = standby.Campaign(ctx) })
	}
	for _, e := range electors {
		for e.Status().Phase != coordination.PhaseStandby {
			time.Sleep(5 * time.Millisecond)
		}
	}
	time.Sleep(2 * time.Second)
	counter.reset()
	time.Sleep(s.extent)
	return counter.reset(), ctx.Err()
}
