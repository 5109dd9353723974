//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
)

// This file starts the members, each in a process of its own, and listens to them.

// The kinds of event that a member reports.
const (
	standby  = "standby"  // it waits for its turn
	leading  = "leading"  // it leads
	acked    = "acked"    // a write was committed
	refused  = "refused"  // the library refused a write
	lost     = "lost"     // its leadership has ended
	insisted = "insisted" // it wrote past the library
)

type event struct {
	Kind    string
	Token   coordination.FencingToken
	Fence   int64  `json:",omitempty"`
	Text    string `json:",omitempty"`
	Refused bool   `json:",omitempty"`

	from *process
	at   time.Time
}

// A process is one member.
type process struct {
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	done  chan struct{}
}

// A stage is the members and what they reported.
type stage struct {
	settings
	began time.Time

	mu        sync.Mutex // guards what follows
	processes []*process
	events    []event
	changed   chan struct{} // closed and replaced at each event
}

func newStage(s settings) *stage {
	return &stage{settings: s, began: time.Now(), changed: make(chan struct{})}
}

// start starts a member.
func (s *stage) start(name string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{name: name, done: make(chan struct{}), cmd: exec.Command(self,
		"-member", name, "-role", s.role, "-topic", s.topic, "-lease", s.lease.String(),
		"-brokers", strings.Join(s.brokers, ","), fmt.Sprintf("-replication=%d", s.replication))}
	p.cmd.Stderr = os.Stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.processes = append(s.processes, p)
	s.mu.Unlock()
	go s.listen(p, out)
	return p, nil
}

func (s *stage) listen(p *process, out io.Reader) {
	defer close(p.done)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		e := event{from: p, at: time.Now()}
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		s.mu.Lock()
		s.events = append(s.events, e)
		close(s.changed)
		s.changed = make(chan struct{})
		s.mu.Unlock()
		s.show(e)
	}
}

// show prints what a spectator wants to know of an event.
func (s *stage) show(e event) {
	switch e.Kind {
	case standby:
		s.say("%s stands by", e.from.name)
	case leading:
		s.say("%s leads        token %s, fencing number %d", e.from.name, e.Token, e.Fence)
	case lost:
		s.say("%s is told     %s", e.from.name, e.Text)
	case insisted:
		s.say("%s insists     past the library, and is answered: %s", e.from.name, e.Text)
	}
}

func (s *stage) say(format string, args ...any) {
	fmt.Printf("  %6.2fs  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// patience bounds the wait for any event.
const patience = 20 * time.Second

// await returns the first event after a moment that satisfies a condition.
func (s *stage) await(what string, after time.Time, ok func(event) bool) (event, error) {
	timeout := time.After(patience)
	for {
		s.mu.Lock()
		for _, e := range s.events {
			if e.at.After(after) && ok(e) {
				s.mu.Unlock()
				return e, nil
			}
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-timeout:
			return event{}, errors.New("it never happened: " + what)
		}
	}
}

func (s *stage) all(kind string) []event {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []event
	for _, e := range s.events {
		if e.Kind == kind {
			found = append(found, e)
		}
	}
	return found
}

func (p *process) signal(sig syscall.Signal) error { return p.cmd.Process.Signal(sig) }

// leave lets a member go in order, as SIGTERM would.
func (p *process) leave() error { return p.stdin.Close() }

// clear ends every process that is left. It starts none and ends no other.
func (s *stage) clear() {
	s.mu.Lock()
	processes := s.processes
	s.mu.Unlock()
	for _, p := range processes {
		_ = p.cmd.Process.Kill()
	}
	for _, p := range processes {
		<-p.done
		_ = p.cmd.Wait()
	}
}
