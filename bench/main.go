// Command bench prints the figures of an election on a Kafka cluster: how long a
// role stands empty after a crash and at a hand-over, how stable a short lease is,
// and what an idle standby costs. It changes nothing but the state topic and
// kills nothing but the members it started itself.
//
//	go run ./bench -brokers 127.0.0.1:19092 failover
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
)

// settings are the flags.
type settings struct {
	brokers     []string
	replication int
	lease       time.Duration
	rounds      int
	roles       int
	extent      time.Duration
	member      string
	role        string
	verbose     bool
}

// benchmarks are the subcommands.
var benchmarks = map[string]func(ctx context.Context, s settings) error{
	"failover": failover,
	"handover": handover,
	"startup":  startup,
	"stable":   stable,
	"idle":     idle,
	"writes":   writes,
	"load":     load,
}

func main() {
	log.SetFlags(0)
	var (
		s       settings
		brokers string
	)
	flag.StringVar(&brokers, "brokers", "127.0.0.1:19092", "bootstrap addresses, comma separated")
	flag.IntVar(&s.replication, "replication", 1, "replicas of the state topic, if it is created")
	flag.DurationVar(&s.lease, "lease", time.Second, "lease duration")
	flag.IntVar(&s.rounds, "rounds", 60, "failover, startup: kills; handover: hand-overs")
	flag.IntVar(&s.roles, "roles", 1000, "idle: the number of roles that is compared with one")
	flag.DurationVar(&s.extent, "for", time.Minute, "stable, idle, writes, load: how long")
	flag.BoolVar(&s.verbose, "v", false, "log what the members do")
	flag.StringVar(&s.member, "member", "", "be a member with this id (used by the command itself)")
	flag.StringVar(&s.role, "role", "", "the role of -member")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: bench [flags] failover|handover|startup|stable|idle|writes|load")
		flag.PrintDefaults()
	}
	flag.Parse()
	s.brokers = strings.Split(brokers, ",")

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if s.member != "" {
		if err := beMember(ctx, s); err != nil {
			log.Fatal(err)
		}
		return
	}
	run, ok := benchmarks[flag.Arg(0)]
	if !ok || flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(ctx, s); err != nil {
		log.Fatalf("%s: %v", flag.Arg(0), err)
	}
}

// logger logs to standard error, or nowhere.
func (s settings) logger() *slog.Logger {
	if s.verbose {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

func (s settings) transport(ctx context.Context, opts ...coordination.BrokerOption) (*coordination.BrokerTransport, error) {
	opts = append([]coordination.BrokerOption{
		coordination.WithReplication(int16(s.replication)),
		coordination.WithLogger(s.logger()),
	}, opts...)
	return coordination.NewBrokerTransport(ctx, s.brokers, opts...)
}

func (s settings) elector(t coordination.Transport, role coordination.Role, member string, lease time.Duration, opts ...coordination.ElectorOption) (*coordination.Elector, error) {
	id, err := coordination.NewMemberID(member)
	if err != nil {
		return nil, err
	}
	config, err := coordination.LeaseConfigFor(lease)
	if err != nil {
		return nil, err
	}
	opts = append(opts, coordination.WithLease(config), coordination.WithLogger(s.logger()))
	return coordination.NewElector(t, role, id, opts...)
}

// figures prints the distribution of some durations.
func figures(what string, values []time.Duration) {
	if len(values) == 0 {
		fmt.Printf("%s: nothing was measured\n", what)
		return
	}
	slices.Sort(values)
	at := func(q float64) time.Duration {
		return values[min(int(q*float64(len(values))), len(values)-1)].Round(10 * time.Microsecond)
	}
	fmt.Printf("%s: n=%d min=%s median=%s p95=%s p99=%s max=%s\n", what, len(values), at(0), at(0.5), at(0.95), at(0.99), at(1))
}
