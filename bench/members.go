package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"

	coordination "github.com/krabka-io/krabka-coordination-go"
)

// A process is a member in a process of its own.
type process struct {
	id    string
	cmd   *exec.Cmd
	stdin io.Closer
	once  sync.Once
}

// startMember starts a member. It ends when it is killed, or when this process
// does and closes its standard input.
func startMember(s settings, role coordination.Role, id string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{
		"-member", id, "-role", role.String(), "-brokers", strings.Join(s.brokers, ","),
		"-lease", s.lease.String(), fmt.Sprintf("-replication=%d", s.replication),
		fmt.Sprintf("-v=%t", s.verbose),
	}
	p := &process{id: id, cmd: exec.Command(self, args...)}
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
	// The member says when it is in the roster or leads.
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		p.kill()
		return nil, fmt.Errorf("member %s did not start: %w", id, err)
	}
	return p, nil
}

// kill ends the process without a word to anybody: SIGKILL.
func (p *process) kill() {
	p.once.Do(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
}

// beMember takes part in the elections of a role until standard input ends.
func beMember(ctx context.Context, s settings) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	role, err := coordination.NewRole(s.role)
	if err != nil {
		return err
	}
	transport, err := s.transport(ctx)
	if err != nil {
		return err
	}
	defer transport.Close()
	elector, err := s.elector(transport, role, s.member, s.lease)
	if err != nil {
		return err
	}
	go announce(ctx, elector)
	err = elector.Run(ctx, func(ctx context.Context, _ *coordination.Leadership) error {
		<-ctx.Done()
		return nil
	})
	if errors.Is(err, coordination.ErrClosed) {
		return nil
	}
	return err
}
