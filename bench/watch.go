package main

import (
	"context"
	"fmt"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/twmb/franz-go/pkg/kgo"
)

// announce tells the parent process once the member stands by or leads.
func announce(ctx context.Context, elector *coordination.Elector) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if phase := elector.Status().Phase; phase == coordination.PhaseStandby || phase == coordination.PhaseLeading {
			fmt.Println(phase)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// A grant is a lease record as the log has it.
type grant struct {
	lease coordination.Lease
	at    time.Time // the broker's append time
	first bool      // of its token
}

// watchLeases reads the lease records of a role, independently of the library's
// reader, from now on.
func watchLeases(ctx context.Context, s settings, role coordination.Role) (<-chan grant, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(s.brokers...),
		kgo.ConsumeTopics(coordination.StateTopic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtEnd()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	if err != nil {
		return nil, err
	}
	grants := make(chan grant, 1024)
	go func() {
		defer client.Close()
		defer close(grants)
		var last coordination.FencingToken
		for ctx.Err() == nil {
			fetches := client.PollFetches(ctx)
			fetches.EachRecord(func(r *kgo.Record) {
				key, err := coordination.DecodeKey(r.Key)
				if err != nil || key.Role != role || key.Kind != coordination.KindLease {
					return
				}
				value, err := coordination.DecodeValue(key.Kind, r.Value)
				if err != nil {
					return
				}
				if lease, ok := value.(coordination.Lease); ok {
					grants <- grant{lease, r.Timestamp, lease.Token != last}
					last = lease.Token
				}
			})
		}
	}()
	return grants, nil
}
