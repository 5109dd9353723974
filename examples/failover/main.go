//go:build unix

// Command failover shows an election from the outside: three processes want one
// role, one leads and writes to a ledger. It is killed; its successor is paused and
// wakes as a zombie, whose write the broker refuses; the next one hands over in
// order. At the end the ledger is read back, and everything that was printed is
// checked.
//
//	go run ./examples/failover                              an embedded cluster
//	go run ./examples/failover -brokers localhost:9092      a real Kafka
package main

import (
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"log"
	"strings"
	"syscall"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type settings struct {
	brokers     []string
	replication int16
	lease       time.Duration
	role        string
	topic       string
	member      string
}

func main() {
	log.SetFlags(0)
	var (
		s           settings
		brokers     string
		replication int
	)
	flag.StringVar(&brokers, "brokers", "", "host:port,... of a real Kafka; an embedded cluster of three brokers if empty")
	flag.DurationVar(&s.lease, "lease", 2*time.Second, "how long a lease lasts")
	flag.StringVar(&s.member, "member", "", "be a member (the command starts itself so)")
	flag.StringVar(&s.role, "role", "", "the role of -member")
	flag.StringVar(&s.topic, "topic", "", "the ledger of -member")
	flag.IntVar(&replication, "replication", 0, "replicas of new topics; as many as there are brokers, up to 3, if 0")
	flag.Parse()
	if brokers != "" {
		s.brokers = strings.Split(brokers, ",")
	}
	s.replication = int16(replication)
	if s.member != "" {
		if err := member(s); err != nil {
			log.Fatalf("%s: %v", s.member, err)
		}
		return
	}
	if err := perform(s); err != nil {
		log.Fatalf("\nNOT as promised: %v", err)
	}
}

// perform sets the stage, runs the acts, and checks what they left behind.
func perform(s settings) error {
	if len(s.brokers) == 0 {
		cluster, err := coordinationtest.NewCluster()
		if err != nil {
			return err
		}
		defer cluster.Close()
		s.brokers = cluster.Brokers()
		fmt.Printf("An embedded cluster of three brokers is up at %s.\n", strings.Join(s.brokers, ", "))
	}
	run := strings.ToLower(rand.Text()[:6])
	s.role, s.topic = "ledger-writer-"+run, "ledger-"+run
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	if err != nil {
		return err
	}
	defer client.Close()
	if err := prepare(kadm.NewClient(client), &s); err != nil {
		return err
	}
	fmt.Printf("Three processes want the role %s, with a lease of %s. Who leads writes to the topic %s.\n\n", s.role, s.lease, s.topic)

	stage := newStage(s)
	defer stage.clear()
	rows, err := stage.acts()
	if err != nil {
		return err
	}
	stage.clear()
	facts, err := stage.audit()
	if err != nil {
		return err
	}
	fmt.Print("\nWhat happened                                     until the next write was committed\n")
	for _, row := range rows {
		fmt.Printf("  %-46s  %s\n", row.what, row.took.Round(time.Millisecond))
	}
	fmt.Println("\nChecked in the ledger, read back with read_committed:")
	for _, fact := range facts {
		fmt.Println("  " + fact)
	}
	return nil
}

// prepare creates the ledger.
func prepare(admin *kadm.Client, s *settings) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	brokers, err := admin.ListBrokers(ctx)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", strings.Join(s.brokers, ","), err)
	}
	if s.replication == 0 {
		s.replication = int16(min(len(brokers), 3))
	}
	_, err = admin.CreateTopic(ctx, 1, s.replication, nil, s.topic)
	return err
}

// A row is a line of the table at the end.
type row struct {
	what string
	took time.Duration
}

// acts runs the story.
func (s *stage) acts() ([]row, error) {
	var rows []row
	// change waits for the successor's first write, and that it is one.
	change := func(what string, since time.Time, old *process) (*process, error) {
		e, err := s.await(what, since, func(e event) bool { return e.Kind == acked && e.from != old })
		if err != nil {
			return nil, err
		}
		rows = append(rows, row{what, e.at.Sub(since)})
		return e.from, nil
	}

	fmt.Println("Three members start.")
	began := time.Now()
	for _, name := range []string{"alpha", "bravo", "carol"} {
		p, err := s.start(name)
		if err != nil {
			return nil, err
		}
		if _, err := s.await(name+" takes part", began, func(e event) bool {
			return e.from == p && (e.Kind == standby || e.Kind == leading)
		}); err != nil {
			return nil, err
		}
	}
	leader, err := change("first election", began, nil)
	if err != nil {
		return nil, err
	}
	time.Sleep(s.lease)

	fmt.Printf("\nThe leader dies without a word: kill -9 %s.\n", leader.name)
	killed := time.Now()
	if err := leader.signal(syscall.SIGKILL); err != nil {
		return nil, err
	}
	if leader, err = change("crash: what was left of the lease, and a moment", killed, leader); err != nil {
		return nil, err
	}
	time.Sleep(s.lease / 2)

	zombie := leader
	fmt.Printf("\nThe leader is paused, as by a virtual machine that moves: kill -STOP %s.\n", zombie.name)
	paused := time.Now()
	if err := zombie.signal(syscall.SIGSTOP); err != nil {
		return nil, err
	}
	if leader, err = change("pause: the same", paused, zombie); err != nil {
		return nil, err
	}
	time.Sleep(s.lease / 2)
	fmt.Printf("\nThe paused leader wakes, and does not know yet: kill -CONT %s.\n", zombie.name)
	woken := time.Now()
	if err := zombie.signal(syscall.SIGCONT); err != nil {
		return nil, err
	}
	answer, err := s.await("the zombie's write is answered", woken, func(e event) bool { return e.from == zombie && e.Kind == insisted })
	if err != nil {
		return nil, err
	}
	if !answer.Refused {
		return nil, fmt.Errorf("the zombie's write was not refused: %s", answer.Text)
	}
	if _, err := s.await("the zombie stands by again", woken, func(e event) bool { return e.from == zombie && e.Kind == standby }); err != nil {
		return nil, err
	}
	if after := s.leaderSince(woken); after != nil {
		return nil, fmt.Errorf("%s took the role because a zombie woke", after.name)
	}

	fmt.Printf("\nThe leader is asked to go, and hands over: %s resigns.\n", leader.name)
	asked := time.Now()
	if err := leader.leave(); err != nil {
		return nil, err
	}
	if leader, err = change("hand-over", asked, leader); err != nil {
		return nil, err
	}
	if err := leader.leave(); err != nil {
		return nil, err
	}
	select {
	case <-leader.done:
	case <-time.After(patience):
		return nil, fmt.Errorf("%s did not end", leader.name)
	}
	return rows, nil
}

// leaderSince is who began to lead after a moment, or nil.
func (s *stage) leaderSince(moment time.Time) *process {
	for _, e := range s.all(leading) {
		if e.at.After(moment) {
			return e.from
		}
	}
	return nil
}

// audit reads the ledger back and holds it against what the members were told.
func (s *stage) audit() ([]string, error) {
	values, err := readLedger(s.settings)
	if err != nil {
		return nil, err
	}
	terms := s.all(leading)
	count := make(map[string]int)
	order := make(map[coordination.FencingToken]int) // of the terms
	for i, term := range terms {
		order[term.Token] = i
		if i > 0 && term.Fence <= terms[i-1].Fence {
			return nil, fmt.Errorf("fencing number %d after %d", term.Fence, terms[i-1].Fence)
		}
	}
	newest := 0
	for _, value := range values {
		count[value]++
		if value == zombieValue {
			return nil, fmt.Errorf("the zombie's write is in the ledger")
		}
		text, _, _ := strings.Cut(value, " ")
		token, err := coordination.ParseFencingToken(text)
		if err != nil {
			return nil, err
		}
		if order[token] < newest {
			return nil, fmt.Errorf("a write of term %s comes after one of its successor", token)
		}
		newest = order[token]
	}
	for _, e := range s.all(acked) {
		if count[e.Text] != 1 {
			return nil, fmt.Errorf("write %q was acknowledged and is there %d times", e.Text, count[e.Text])
		}
	}
	for _, e := range s.all(refused) {
		if count[e.Text] != 0 {
			return nil, fmt.Errorf("write %q was refused and is there", e.Text)
		}
	}
	return []string{
		fmt.Sprintf("%d acknowledged writes: each is there, once", len(s.all(acked))),
		fmt.Sprintf("%d refused writes, and the zombie's: none is there", len(s.all(refused))),
		fmt.Sprintf("%d terms: no write of an old one follows a write of a newer one", len(terms)),
		fmt.Sprintf("fencing numbers: %s, each greater than the one before", fences(terms)),
	}, nil
}

func fences(terms []event) string {
	var numbers []string
	for _, term := range terms {
		numbers = append(numbers, fmt.Sprint(term.Fence))
	}
	return strings.Join(numbers, " < ")
}

// readLedger reads what is committed.
func readLedger(s settings) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	client, err := kgo.NewClient(
		kgo.SeedBrokers(s.brokers...),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{s.topic: {0: kgo.NewOffset().AtStart()}}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // the last record of the ledger is a commit marker
	)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	end, err := settledEnd(ctx, kadm.NewClient(client), s.topic)
	if err != nil {
		return nil, err
	}
	var values []string
	for next := int64(0); next < end; {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, err
		}
		fetches.EachRecord(func(r *kgo.Record) {
			next = r.Offset + 1
			if !r.Attrs.IsControl() {
				values = append(values, string(r.Value))
			}
		})
	}
	return values, nil
}

// settledEnd waits until no transaction is open in the ledger: those of the killed
// members are aborted by their successors.
func settledEnd(ctx context.Context, admin *kadm.Client, topic string) (int64, error) {
	for {
		stable, err := admin.ListCommittedOffsets(ctx, topic)
		if err != nil {
			return 0, err
		}
		end, err := admin.ListEndOffsets(ctx, topic)
		if err != nil {
			return 0, err
		}
		s, _ := stable.Lookup(topic, 0)
		e, _ := end.Lookup(topic, 0)
		if s.Offset == e.Offset {
			return e.Offset, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("a transaction stays open in %s: %w", topic, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
