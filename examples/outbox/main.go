// Command outbox relays a database table to Kafka under failover, without loss and
// without a duplicate. A service writes what it has to say into an outbox table, in
// the same database transaction as its data; the one relay that leads moves the rows
// to a topic.
//
// The rule against duplicates: how far the relay has come is not noted in the database
// but committed to Kafka, as a consumer group's offset, in the transaction that writes
// the rows. So both happen or neither does, whatever dies when. A new leader reads
// that offset first; by then the transactions of its predecessor are settled. (A
// relay that marks rows in the database instead has a moment between the two
// commits, and consumers have to drop duplicates by row id.)
//
//	go run .                               an embedded cluster
//	go run . -brokers localhost:9092       a real Kafka
package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	_ "modernc.org/sqlite"
)

// A Relay moves the rows of the outbox to a topic while it leads.
type Relay struct {
	DB    *sql.DB
	Topic string
	Group string // whose offset is the id of the next row
}

// Run is the function for [coordination.Elector.Run].
func (r *Relay) Run(ctx context.Context, l *coordination.Leadership) error {
	next, err := r.position(ctx, l)
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		rows, err := r.read(ctx, next)
		if err != nil {
			return err
		}
		if len(rows) == 0 {
			wait(ctx, 10*time.Millisecond)
			continue
		}
		last := rows[len(rows)-1].id
		err = l.Transact(ctx, func(_ context.Context, tx *coordination.Tx) error {
			for _, row := range rows {
				if err := tx.Produce(&kgo.Record{Topic: r.Topic, Key: []byte(strconv.FormatInt(row.id, 10)), Value: []byte(row.text)}); err != nil {
					return err
				}
			}
			offsets := make(kadm.Offsets)
			offsets.AddOffset(r.Topic, 0, last+1, -1)
			return tx.CommitOffsets(r.Group, offsets)
		})
		if err != nil {
			// Not committed, or unknown: in both cases the offset in Kafka tells
			// who leads next where to go on.
			return err
		}
		next = last + 1
		// Housekeeping; that it comes too late or twice does not matter.
		if _, err := r.DB.ExecContext(ctx, `DELETE FROM outbox WHERE id < $1`, next); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// position is the id of the next row.
func (r *Relay) position(ctx context.Context, l *coordination.Leadership) (int64, error) {
	offsets, err := l.CommittedOffsets(ctx, r.Group)
	if err != nil {
		return 0, err
	}
	if at, ok := offsets.Lookup(r.Topic, 0); ok {
		return at.At, nil
	}
	return 0, nil
}

type row struct {
	id   int64
	text string
}

func (r *Relay) read(ctx context.Context, from int64) ([]row, error) {
	found, err := r.DB.QueryContext(ctx, `SELECT id, text FROM outbox WHERE id >= $1 ORDER BY id LIMIT 20`, from)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	var rows []row
	for found.Next() {
		var next row
		if err := found.Scan(&next.id, &next.text); err != nil {
			return nil, err
		}
		rows = append(rows, next)
	}
	return rows, found.Err()
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func main() {
	log.SetFlags(0)
	brokers := flag.String("brokers", "", "host:port,... of a real Kafka; an embedded cluster if empty")
	flag.Parse()
	if err := run(*brokers); err != nil {
		log.Fatal(err)
	}
}

// run writes rows while relays lead, die and take over, and then checks the topic.
func run(brokers string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	addresses := strings.Split(brokers, ",")
	if brokers == "" {
		cluster, err := coordinationtest.NewCluster()
		if err != nil {
			return err
		}
		defer cluster.Close()
		addresses = cluster.Brokers()
	}
	dir, err := os.MkdirTemp("", "outbox")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", filepath.Join(dir, "service.db")+"?_pragma=busy_timeout(5000)")
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	if _, err := db.Exec(`CREATE TABLE outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL)`); err != nil {
		return err
	}
	name := "outbox-" + strings.ToLower(rand.Text()[:8])
	client, err := kgo.NewClient(kgo.SeedBrokers(addresses...), kgo.ConsumeTopics(name),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return err
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(ctx, 1, 1, nil, name); err != nil {
		return err
	}

	const rows, crashes = 600, 3
	relays := newFleet(ctx, addresses, &Relay{DB: db, Topic: name, Group: name})
	defer relays.stop()
	for i := range crashes + 1 {
		if err := relays.start(fmt.Sprintf("relay-%d", i)); err != nil {
			return err
		}
	}
	go func() {
		for i := range rows {
			if _, err := db.ExecContext(ctx, `INSERT INTO outbox (text) VALUES ($1)`, fmt.Sprintf("event %d", i+1)); err != nil {
				return
			}
			wait(ctx, 5*time.Millisecond)
		}
	}()
	go func() {
		for range crashes {
			wait(ctx, 900*time.Millisecond)
			relays.crashLeader()
		}
	}()
	return check(ctx, client, rows)
}

// check reads the topic: every row is in it, once, in order.
func check(ctx context.Context, client *kgo.Client, rows int) error {
	want := 1
	for want <= rows {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("after %d rows: %w", want-1, err)
		}
		for _, r := range fetches.Records() {
			if got := string(r.Key); got != strconv.Itoa(want) {
				return fmt.Errorf("row %s comes where row %d should", got, want)
			}
			want++
		}
	}
	fmt.Printf("%d rows are in the topic, each once, in order\n", rows)
	return nil
}

// A fleet is relays, each with a transport of its own as in a process of its own.
type fleet struct {
	ctx     context.Context
	brokers []string
	relay   *Relay
	running sync.WaitGroup

	mu       sync.Mutex // guards what follows
	electors map[*coordination.Elector]*coordination.BrokerTransport
}

func newFleet(ctx context.Context, brokers []string, relay *Relay) *fleet {
	return &fleet{ctx: ctx, brokers: brokers, relay: relay, electors: make(map[*coordination.Elector]*coordination.BrokerTransport)}
}

func (f *fleet) start(name string) error {
	quiet := coordination.WithLogger(slog.New(slog.DiscardHandler))
	transport, err := coordination.NewBrokerTransport(f.ctx, f.brokers, quiet, coordination.WithReplication(1))
	if err != nil {
		return err
	}
	lease, err := coordination.LeaseConfigFor(600 * time.Millisecond)
	if err != nil {
		return err
	}
	elector, err := coordination.NewElector(transport, coordination.MustRole(f.relay.Topic), coordination.MustMemberID(name), quiet, coordination.WithLease(lease))
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.electors[elector] = transport
	f.mu.Unlock()
	f.running.Go(func() {
		err := elector.Run(f.ctx, func(ctx context.Context, l *coordination.Leadership) error {
			fmt.Printf("%s leads, fencing number %d\n", name, l.FencingNumber())
			err := f.relay.Run(ctx, l)
			if ctx.Err() != nil || errors.Is(err, coordination.ErrNotHeld) {
				return nil
			}
			return err
		})
		if err != nil && !errors.Is(err, coordination.ErrClosed) {
			fmt.Printf("%s: %v\n", name, err)
		}
	})
	return nil
}

// crashLeader closes the transport of the relay that leads, in the middle of whatever
// it does and without a word to anybody.
func (f *fleet) crashLeader() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for elector, transport := range f.electors {
		if status := elector.Status(); status.Phase == coordination.PhaseLeading {
			fmt.Printf("%s crashes\n", status.Member)
			transport.Close()
			delete(f.electors, elector)
			return
		}
	}
}

func (f *fleet) stop() {
	f.mu.Lock()
	for _, transport := range f.electors {
		transport.Close()
	}
	f.mu.Unlock()
	f.running.Wait()
}
