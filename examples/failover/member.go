//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/twmb/franz-go/pkg/kgo"
)

// This file is the service: one process, one member. It is what a user of the
// library would write, but for its reports to the stage.

// member takes part in the elections of a role, and writes to the ledger while it
// leads.
func member(s settings) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go obey(stop)

	transport, err := coordination.NewBrokerTransport(ctx, s.brokers,
		coordination.WithReplication(s.replication),
		coordination.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	defer transport.Close()
	lease, err := coordination.LeaseConfigFor(s.lease)
	if err != nil {
		return err
	}
	role, err := coordination.NewRole(s.role)
	if err != nil {
		return err
	}
	id, err := coordination.NewMemberID(s.member)
	if err != nil {
		return err
	}
	elector, err := coordination.NewElector(transport, role, id,
		coordination.WithLease(lease),
		coordination.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	go reportStandby(ctx, elector)

	// Run leads whenever it can, until ctx ends; then it resigns.
	return elector.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
		report(event{Kind: leading, Token: l.Token(), Fence: l.FencingNumber()})
		write(ctx, s, l)
		if err := l.Err(); err != nil {
			report(event{Kind: lost, Token: l.Token(), Text: err.Error()})
			insist(s, l.Token())
		}
		return nil
	})
}

// write appends to the ledger until the leadership ends, or the process is told to
// go.
func write(ctx context.Context, s settings, l *coordination.Leadership) {
	for i := 0; ctx.Err() == nil; i++ {
		value := fmt.Sprintf("%s %s %d", l.Token(), l.Member(), i)
		err := l.Produce(ctx, &kgo.Record{Topic: s.topic, Value: []byte(value)})
		switch {
		case err == nil:
			report(event{Kind: acked, Token: l.Token(), Text: value})
		case errors.Is(err, coordination.ErrNotHeld):
			// The library's word: nothing of this was committed.
			report(event{Kind: refused, Token: l.Token(), Text: value})
			return
		}
		pause(ctx, 10*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// obey ends the member when its standard input ends, which also happens when the
// stage is gone.
func obey(stop context.CancelFunc) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
	}
	stop()
}

func reportStandby(ctx context.Context, elector *coordination.Elector) {
	last := coordination.PhaseStopped
	for ctx.Err() == nil {
		status := elector.Status()
		if status.Phase != last && status.Phase == coordination.PhaseStandby {
			report(event{Kind: standby})
		}
		last = status.Phase
		pause(ctx, 5*time.Millisecond)
	}
}

var reporting sync.Mutex

// report tells the stage, one JSON object a line.
func report(e event) {
	reporting.Lock()
	defer reporting.Unlock()
	_ = json.NewEncoder(os.Stdout).Encode(e)
}
