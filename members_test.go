package coordination_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// memberEnv makes a copy of the test binary a member instead.
const memberEnv = "COORDINATION_TEST_MEMBER"

// A memberConfig tells a member process what to do.
type memberConfig struct {
	Brokers     []string
	Replication int16
	Role        string
	ID          string
	Lease       time.Duration
	Reclaim     bool
	Topic       string // written to while leading, if not empty
	Writers     int    // goroutines that write
}

// An event is what a member process reports, one JSON object a line.
type event struct {
	Kind  string // standby, leading, lost, acked, refused, unknown
	Token string
	Fence int64
	Value string
	Error string
	Cause string // the sentinel
	At    time.Time
}

// beMember makes this process a member in a test of several processes, if it was
// started as one. It takes part until its standard input ends. The line "freeze"
// makes it stop itself, with SIGSTOP, once the next produce request is on its way:
// in the middle of a transaction.
func beMember() bool {
	text := os.Getenv(memberEnv)
	if text == "" {
		return false
	}
	if err := runMember(text); err != nil {
		fmt.Fprintln(os.Stderr, "member:", err)
		os.Exit(1)
	}
	return true
}

func runMember(text string) error {
	var config memberConfig
	if err := json.Unmarshal([]byte(text), &config); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	freeze := new(freezeHook)
	go func() {
		defer cancel()
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			if lines.Text() == "freeze" {
				freeze.armed.Store(true)
			}
		}
	}()
	var mu sync.Mutex
	report := func(e event) {
		mu.Lock()
		defer mu.Unlock()
		e.At = time.Now()
		_ = json.NewEncoder(os.Stdout).Encode(e)
	}
	transport, err := coordination.NewBrokerTransport(ctx, config.Brokers, coordination.WithReplication(config.Replication))
	if err != nil {
		return err
	}
	defer transport.Close()
	lease, err := coordination.LeaseConfigFor(config.Lease)
	if err != nil {
		return err
	}
	opts := []coordination.ElectorOption{
		coordination.WithLease(lease),
		coordination.WithProducerOptions(kgo.WithHooks(freeze)),
	}
	if config.Reclaim {
		opts = append(opts, coordination.WithRestartReclaim())
	}
	elector, err := coordination.NewElector(transport, coordination.MustRole(config.Role), coordination.MustMemberID(config.ID), opts...)
	if err != nil {
		return err
	}
	go func() {
		phase := coordination.PhaseStopped
		for ctx.Err() == nil {
			if now := elector.Status().Phase; now != phase && now == coordination.PhaseStandby {
				report(event{Kind: "standby"})
			}
			phase = elector.Status().Phase
			time.Sleep(2 * time.Millisecond)
		}
	}()
	return elector.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
		report(event{Kind: "leading", Token: l.Token().String(), Fence: l.FencingNumber()})
		var writers sync.WaitGroup
		for i := range config.Writers {
			writers.Go(func() { writeUntilOver(ctx, l, config.Topic, i, report) })
		}
		writers.Wait()
		<-ctx.Done()
		if l.Err() != nil {
			report(event{Kind: "lost", Token: l.Token().String(), Error: l.Err().Error(), Cause: sentinel(l.Err())})
		}
		return nil
	})
}

// writeUntilOver writes one value after the other and reports what became of each.
func writeUntilOver(ctx context.Context, l *coordination.Leadership, topic string, writer int, report func(event)) {
	for i := 0; ctx.Err() == nil; i++ {
		value := fmt.Sprintf("%s %d/%d", l.Token(), writer, i)
		err := l.Produce(context.Background(), &kgo.Record{Topic: topic, Value: []byte(value)})
		switch {
		case err == nil:
			report(event{Kind: "acked", Value: value})
		case errors.Is(err, coordination.ErrOutcomeUnknown):
			report(event{Kind: "unknown", Value: value, Error: err.Error()})
		default:
			report(event{Kind: "refused", Value: value, Error: err.Error(), Cause: sentinel(err)})
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// sentinel names the end of a leadership.
func sentinel(err error) string {
	for name, s := range map[string]error{
		"fenced": coordination.ErrFenced, "expired": coordination.ErrLeaseExpired, "resigned": coordination.ErrResigned,
		"closed": coordination.ErrClosed, "unanswered": coordination.ErrUnanswered,
	} {
		if errors.Is(err, s) {
			return name
		}
	}
	return "other"
}

// A freezeHook stops its own process once a produce request is written.
type freezeHook struct{ armed atomic.Bool }

func (h *freezeHook) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, _ error) {
	if key == int16(kmsg.Produce) && h.armed.CompareAndSwap(true, false) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	}
}

// A member is one process of the test's own.
type member struct {
	w      *world
	id     string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	mu     sync.Mutex // guards events
	events []event
	more   chan struct{} // a token whenever events grew
	ended  chan struct{}
}

// member starts a process, which ends with the test.
func (w *world) member(id string, change ...func(*memberConfig)) *member {
	w.Helper()
	config := memberConfig{
		Brokers: w.brokers, Replication: w.replication, Role: w.role.String(), ID: id, Lease: w.lease.Duration(),
	}
	for _, c := range change {
		c(&config)
	}
	text, err := json.Marshal(config)
	require.NoError(w, err)
	m := &member{w: w, id: id, cmd: exec.Command(os.Args[0]), more: make(chan struct{}, 1), ended: make(chan struct{})}
	m.cmd.Env = append(os.Environ(), memberEnv+"="+string(text))
	m.cmd.Stderr = w.Output()
	m.stdin, err = m.cmd.StdinPipe()
	require.NoError(w, err)
	out, err := m.cmd.StdoutPipe()
	require.NoError(w, err)
	require.NoError(w, m.cmd.Start())
	go m.read(out)
	w.Cleanup(m.kill)
	return m
}

func (m *member) read(out io.Reader) {
	defer close(m.ended)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		m.mu.Lock()
		m.events = append(m.events, e)
		m.mu.Unlock()
		select {
		case m.more <- struct{}{}:
		default:
		}
	}
}

// kill ends the process with SIGKILL, in whatever state it is.
func (m *member) kill() {
	_ = m.cmd.Process.Kill()
	<-m.ended
	_ = m.cmd.Wait()
}

func (m *member) signal(s syscall.Signal) { require.NoError(m.w, m.cmd.Process.Signal(s)) }

func (m *member) tell(line string) {
	_, err := io.WriteString(m.stdin, line+"\n")
	require.NoError(m.w, err)
}

// leave ends the process in an orderly way.
func (m *member) leave() {
	require.NoError(m.w, m.stdin.Close())
	<-m.ended
	require.NoError(m.w, m.cmd.Wait())
}

func (m *member) all(kind string) []event {
	m.mu.Lock()
	defer m.mu.Unlock()
	var found []event
	for _, e := range m.events {
		if e.Kind == kind {
			found = append(found, e)
		}
	}
	return found
}

// awaitPatience bounds the waiting of the integration tests; it says nothing about
// how long anything should take.
const awaitPatience = 90 * time.Second

// await waits for the n-th event of a kind.
func (m *member) await(kind string, n int) event {
	m.w.Helper()
	deadline := time.After(awaitPatience)
	for {
		if found := m.all(kind); len(found) >= n {
			return found[n-1]
		}
		select {
		case <-m.more:
		case <-deadline:
			m.mu.Lock()
			defer m.mu.Unlock()
			require.FailNow(m.w, "member "+m.id+" did not report "+kind, "%v", m.events[max(0, len(m.events)-10):])
		}
	}
}

// stopped waits until the process has stopped itself.
func (m *member) stopped() {
	m.w.Helper()
	for range int(awaitPatience / (5 * time.Millisecond)) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.cmd.Process.Pid))
		require.NoError(m.w, err)
		if _, rest, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(rest, "T") {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	require.FailNow(m.w, "the member did not stop")
}

// first waits until one of some members leads for the n-th time among them, and
// returns it and the others.
func first(w *world, members ...*member) (*member, []*member) {
	w.Helper()
	for range int(awaitPatience / time.Millisecond) {
		for i, m := range members {
			if len(m.all("leading")) > 0 {
				return m, slices.Delete(slices.Clone(members), i, i+1)
			}
		}
		time.Sleep(time.Millisecond)
	}
	require.FailNow(w, "nobody leads")
	return nil, nil
}

var _ testing.TB = (*world)(nil)
