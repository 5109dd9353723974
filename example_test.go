package coordination_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"slices"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// quiet keeps the log lines of an example out of its output.
var quiet = coordination.WithLogger(slog.New(slog.DiscardHandler))

// embedded starts a cluster in this process; a service names its brokers instead.
func embedded() (cluster *coordinationtest.Cluster, transport *coordination.BrokerTransport) {
	cluster, err := coordinationtest.NewCluster()
	if err != nil {
		log.Fatal(err)
	}
	transport, err = coordination.NewBrokerTransport(context.Background(), cluster.Brokers(), quiet)
	if err != nil {
		log.Fatal(err)
	}
	return cluster, transport
}

// A service that must run once: it leads whenever it can, and stops when the role
// is lost or the process is told to go.
func ExampleElector_Run() {
	cluster, transport := embedded()
	defer cluster.Close()
	defer transport.Close()

	member, err := coordination.NewUniqueMemberID("scheduler")
	if err != nil {
		log.Fatal(err)
	}
	elector, err := coordination.NewElector(transport, coordination.MustRole("scheduler"), member, quiet)
	if err != nil {
		log.Fatal(err)
	}
	// In a service: signal.NotifyContext(context.Background(), syscall.SIGTERM).
	ctx, stop := context.WithCancel(context.Background())
	err = elector.Run(ctx, func(ctx context.Context, l *coordination.Leadership) error {
		fmt.Println("leading", l.Role())
		stop() // for the example, the signal comes at once
		<-ctx.Done()
		fmt.Println("still held while it drains:", l.Err() == nil)
		return nil
	})
	fmt.Println("resigned:", err)
	// Output:
	// leading scheduler
	// still held while it drains: true
	// resigned: <nil>
}

// To lead once, and to hand over in milliseconds.
func ExampleElector_Campaign() {
	cluster, transport := embedded()
	defer cluster.Close()
	defer transport.Close()
	role := coordination.MustRole("controller")

	first, err := coordination.NewElector(transport, role, coordination.MustMemberID("first"), quiet)
	if err != nil {
		log.Fatal(err)
	}
	second, err := coordination.NewElector(transport, role, coordination.MustMemberID("second"), quiet)
	if err != nil {
		log.Fatal(err)
	}
	l, err := first.Campaign(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(l.Member(), "leads")

	took := make(chan *coordination.Leadership)
	go func() {
		l, err := second.Campaign(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		took <- l
	}()
	if err := l.Resign(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Println("over:", errors.Is(l.Err(), coordination.ErrResigned))
	next := <-took
	fmt.Println(next.Member(), "leads")
	fmt.Println("fencing numbers grow:", next.FencingNumber() > l.FencingNumber())
	// Output:
	// first leads
	// over: true
	// second leads
	// fencing numbers grow: true
}

// A write under a leadership is in the log once, or not at all.
func ExampleLeadership_Produce() {
	cluster, transport := embedded()
	defer cluster.Close()
	defer transport.Close()
	if err := cluster.Fake().CreateTopic("ledger", 1, nil); err != nil {
		log.Fatal(err)
	}
	elector, err := coordination.NewElector(transport, coordination.MustRole("ledger-writer"), coordination.MustMemberID("a"), quiet)
	if err != nil {
		log.Fatal(err)
	}
	l, err := elector.Campaign(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	entry := &kgo.Record{Topic: "ledger", Value: []byte("+100")}
	fmt.Println(l.Produce(context.Background(), entry), "at offset", entry.Offset)
	if err := l.Resign(context.Background()); err != nil {
		log.Fatal(err)
	}
	err = l.Produce(context.Background(), entry)
	fmt.Println("nothing was committed:", errors.Is(err, coordination.ErrNotHeld))
	// Output:
	// <nil> at offset 0
	// nothing was committed: true
}

// Whether a token is still the newest one: a question to the coordinator, by
// anybody.
func ExampleDescribeLeadership() {
	cluster, transport := embedded()
	defer cluster.Close()
	defer transport.Close()
	role := coordination.MustRole("relay")
	status, err := coordination.DescribeLeadership(context.Background(), transport, role)
	if err != nil {
		log.Fatal(err)
	}
	_, led := status.Token()
	fmt.Println("somebody led it:", led)

	elector, err := coordination.NewElector(transport, role, coordination.MustMemberID("a"), quiet)
	if err != nil {
		log.Fatal(err)
	}
	l, err := elector.Campaign(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	if status, err = coordination.DescribeLeadership(context.Background(), transport, role); err != nil {
		log.Fatal(err)
	}
	fmt.Println("the leader is authoritative:", status.Authoritative(l.Token()))
	// Output:
	// somebody led it: false
	// the leader is authoritative: true
}

// A follower rebuilds its state from what leaders wrote, and knows who wrote it.
func ExampleRecordToken() {
	cluster, transport := embedded()
	defer cluster.Close()
	defer transport.Close()
	if err := cluster.Fake().CreateTopic("settings", 1, nil); err != nil {
		log.Fatal(err)
	}
	var terms []coordination.FencingToken
	for i, name := range []string{"first", "second"} {
		elector, err := coordination.NewElector(transport, coordination.MustRole("settings-writer"), coordination.MustMemberID(name), quiet)
		if err != nil {
			log.Fatal(err)
		}
		l, err := elector.Campaign(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		terms = append(terms, l.Token())
		r := &kgo.Record{Topic: "settings", Key: []byte("limit"), Value: []byte(fmt.Sprint(100 * (i + 1)))}
		if err := l.Produce(context.Background(), r); err != nil {
			log.Fatal(err)
		}
		if err := l.Resign(context.Background()); err != nil {
			log.Fatal(err)
		}
	}

	follower, err := kgo.NewClient(
		kgo.SeedBrokers(cluster.Brokers()...),
		kgo.ConsumeTopics("settings"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), // what was aborted is not state
	)
	if err != nil {
		log.Fatal(err)
	}
	defer follower.Close()
	state := make(map[string]string)
	for read := 0; read < 2; {
		follower.PollFetches(context.Background()).EachRecord(func(r *kgo.Record) {
			token, guarded := coordination.RecordToken(r)
			fmt.Println(string(r.Key), string(r.Value), "by term", slices.Index(terms, token)+1, guarded)
			state[string(r.Key)] = string(r.Value)
			read++
		})
	}
	fmt.Println(state)
	// Output:
	// limit 100 by term 1 true
	// limit 200 by term 2 true
	// map[limit:200]
}

// Offsets that a consumer group has read up to are committed with what was made of
// them, or not at all.
func ExampleLeadership_Transact() {
	cluster, transport := embedded()
	defer cluster.Close()
	defer transport.Close()
	if err := errors.Join(cluster.Fake().CreateTopic("orders", 1, nil), cluster.Fake().CreateTopic("ledger", 1, nil)); err != nil {
		log.Fatal(err)
	}
	elector, err := coordination.NewElector(transport, coordination.MustRole("ledger-writer"), coordination.MustMemberID("a"), quiet)
	if err != nil {
		log.Fatal(err)
	}
	l, err := elector.Campaign(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	err = l.Transact(context.Background(), func(_ context.Context, tx *coordination.Tx) error {
		read := make(kadm.Offsets)
		read.AddOffset("orders", 0, 42, -1)
		if err := tx.CommitOffsets("ledger-writer", read); err != nil {
			return err
		}
		return tx.Produce(&kgo.Record{Topic: "ledger", Value: []byte("+100")})
	})
	if err != nil {
		log.Fatal(err)
	}
	offsets, err := l.CommittedOffsets(context.Background(), "ledger-writer")
	if err != nil {
		log.Fatal(err)
	}
	at, _ := offsets.Lookup("orders", 0)
	fmt.Println("go on at", at.At)
	fmt.Println(l.Resign(context.Background()))
	// Output:
	// go on at 42
	// <nil>
}

// A service that remembers the greatest fencing number it has seen.
func ExampleGate() {
	var gate coordination.Gate
	fmt.Println(gate.Admit(12), gate.Admit(12), gate.Admit(40), gate.Admit(12))
	// Output: true true true false
}

// A member that is not the leader waits as the rule says.
func ExampleEvaluate() {
	role := coordination.MustRole("relay")
	a, b := coordination.MustMemberID("a"), coordination.MustMemberID("b")
	lease := coordination.DefaultLeaseConfig()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	token, err := coordination.ParseFencingToken("4242:7")
	if err != nil {
		log.Fatal(err)
	}

	log := coordination.NewRoleStateBuilder(role)
	log.Apply(0, coordination.RegistrationKey(role, a), coordination.Registration{Member: a, RegisteredAt: start})
	log.Apply(1, coordination.LeaseKey(role), lease.Grant(a, token, start))
	log.Apply(2, coordination.RegistrationKey(role, b), coordination.Registration{Member: b, RegisteredAt: start})

	fmt.Println(coordination.Evaluate(log.State(), a, start, lease).Action)
	decision := coordination.Evaluate(log.State(), b, start, lease)
	fmt.Println(decision.Action, "for", decision.Until.Sub(start))
	// Output:
	// hold
	// wait for 30s
}

// The keys of the state topic are readable by anybody.
func ExampleDecodeKey() {
	encoded, err := coordination.EncodeKey(coordination.LeaseKey(coordination.MustRole("relay")))
	if err != nil {
		log.Fatal(err)
	}
	key, err := coordination.DecodeKey(encoded)
	fmt.Println(key.Kind, key.Role, err)
	_, err = coordination.DecodeKey(encoded[:5])
	fmt.Println(err)
	// Output:
	// lease relay <nil>
	// coordination record: key: role is cut short
}
